"""Chat prompts marked where SGLang renders them, so that the roles of messages say kinds of content (`message_spans`).

    mark_messages({"system": "system_prompt", "tools": "tool_schema"})      # in the HTTP server's process, once

What cannot be found exactly is not marked: prompts with media, a last message that is gone on with, models that SGLang
renders without a chat template, tokenizers that do not say where a token is, templates that change what they are given.
"""

from __future__ import annotations

import functools
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from kvcustody.integrations.content.custom_params import CUSTOM_PARAMS, MARKS, put_custom
from kvcustody.integrations.content.message_spans import (
    TOOLS,
    Message,
    find_messages,
    has_something_to_mark,
    note_unmarked,
    token_spans,
)
from kvcustody.integrations.sglang.check_engine import check_signatures

_CHAT = "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat"
_SIGNATURES = {
    f"{_CHAT}._process_messages": ("request", "is_multimodal"),
    f"{_CHAT}._render_and_encode_chat_template": (
        "messages",
        "tools",
        "template_kwargs",
        "encode_kwargs",
        "use_cache",
        "add_generation_prompt",
    ),
}
_Result = TypeVar("_Result")


class _Rendering(NamedTuple):
    """What SGLang gave its chat template, and the token ids that came of it."""

    messages: Sequence[Message]
    given: Mapping[str, Any]
    token_ids: list[int]


_RENDERED: ContextVar[list[_Rendering] | None] = ContextVar("rendered", default=None)  # of this request


def mark_messages(kinds: Mapping[str, str]) -> None:
    """Have every chat request of this process marked, by the kinds of its messages' roles.

    Raises `ConfigError` for an SGLang that renders chats in another way.
    """
    check_signatures(_SIGNATURES)
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    render, process = OpenAIServingChat._render_and_encode_chat_template, OpenAIServingChat._process_messages

    @functools.wraps(render)
    def render_and_encode(self: Any, messages: Any, **given: Any) -> Any:
        answer = render(self, messages, **given)
        rendered = _RENDERED.get()
        if rendered is not None:
            rendered.append(_Rendering(messages, given, list(answer[0])))
        return answer

    @functools.wraps(process)
    def process_messages(self: Any, request: Any, is_multimodal: bool, **named: Any) -> Any:
        rendered: list[_Rendering] = []
        token = _RENDERED.set(rendered)
        try:
            answer = process(self, request, is_multimodal, **named)
        finally:
            _RENDERED.reset(token)
        roles = [{"role": each.role} for each in request.messages]
        if has_something_to_mark(roles, kinds, has_tools=bool(request.tools)):
            is_whole = len(rendered) == 1 and list(answer.prompt_ids) == rendered[0].token_ids
            if is_whole and not is_multimodal:
                _mark(self.tokenizer_manager.tokenizer, request, rendered[0], kinds)
            else:
                note_unmarked("not rendered in one piece")
        return answer

    OpenAIServingChat._render_and_encode_chat_template = render_and_encode
    OpenAIServingChat._process_messages = process_messages


def _mark(tokenizer: Any, request: Any, rendering: _Rendering, kinds: Mapping[str, str]) -> None:
    """Put the marks where the engine will look; whatever goes wrong, the request goes on without them."""
    messages, given, token_ids = rendering

    async def render(some: Sequence[Message], with_tools: bool) -> str | None:
        text = tokenizer.apply_chat_template(
            list(some),
            tokenize=False,
            add_generation_prompt=given["add_generation_prompt"],
            tools=given["tools"] if with_tools else None,
            return_dict=False,
            **given["template_kwargs"],
        )
        return text if isinstance(text, str) else None

    async def find() -> list[list[Any]]:
        text = await render(messages, True)
        if text is None:
            return []
        encoded = tokenizer(text, return_offsets_mapping=True, **given["encode_kwargs"])
        if list(encoded["input_ids"]) != token_ids:
            return []
        has_tools = TOOLS in kinds and bool(given["tools"])
        return token_spans(
            await find_messages(text, messages, kinds, render, has_tools=has_tools), encoded["offset_mapping"]
        )

    try:
        marks = _at_once(find())
    except NotImplementedError:
        note_unmarked("no place of each token")
        return
    except Exception as error:
        note_unmarked(type(error).__name__)
        return
    if marks:
        holder = {CUSTOM_PARAMS: request.custom_params}
        put_custom(holder, MARKS, marks)
        request.custom_params = holder[CUSTOM_PARAMS]
    else:
        note_unmarked("not found exactly")


def _at_once(work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of work that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: _Result = done.value
        return result
    work.close()
    raise RuntimeError("a chat template waited for something")
