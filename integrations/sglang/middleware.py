"""The HTTP door: SGLang's server behind the identity module, with SGLang's paths.

1. What is not listed here, in the identity document, or open, is refused to tenants: administration, sessions, weights,
   profiling, and whatever a later version adds.
2. A token travels whole in `cache_salt`. A client's own `cache_salt` and `extra_key` can only narrow.
3. What a client says of its content, what roles say of it, and the request's trace travel in `custom_params`.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

from kvcustody.clock import SystemClock
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.settings import load_settings
from kvcustody.integrations.content.custom_params import CUSTOM_PARAMS, MARKS, put_custom
from kvcustody.integrations.content.message_spans import (
    TOOLS,
    Message,
    find_messages,
    has_something_to_mark,
    note_unmarked,
    token_spans,
)
from kvcustody.integrations.identity.from_settings import open_attempts, open_identity, open_request_gate
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.integrations.identity.refusal import Application
from kvcustody.integrations.identity.routes import Body, EngineServer, Room, Scoped
from kvcustody.integrations.sglang.check_engine import check_signatures

SERVER: Final = EngineServer(
    scoped={
        "/generate": Scoped(Body.SGLANG_GENERATE, Room.SAMPLING),
        "/v1/completions": Scoped(Body.COMPLETION, Room.CUSTOM),
        "/v1/chat/completions": Scoped(Body.CHAT, Room.CUSTOM),
    },
    whole_tokens=True,
    refused_fields=(
        *("session_params", "session_id", "lora_path", "input_embeds", "token_indices_to_pool"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank"),
        *("routed_dp_rank", "data_parallel_rank", "custom_logit_processor", "return_hidden_states"),
    ),
    id_fields=("rid",),
    prefix_requests=True,
)


class SglangScopeMiddleware(IdentityMiddleware):
    """The identity middleware with this process's settings. A wrong setting fails here, and nothing is served."""

    def __init__(self, app: Application) -> None:
        settings = load_settings()
        configure(settings.log_level, settings.log_format)
        attempts = open_attempts(settings, SystemClock())
        atexit.register(attempts.close)
        gate = open_request_gate(settings, server=SERVER)
        if gate.message_kinds:
            mark_messages(gate.message_kinds)
        super().__init__(app, gate, body_bytes_max=int(settings.request_bytes_max), refused=attempts.note)


def check_identity() -> None:
    """Raise `ConfigError` where the door could not open, because SGLang would then serve only errors."""
    open_identity(load_settings())


def guard(server: ModuleType) -> None:
    """Put the door in front of SGLang's application."""
    server.app.add_middleware(SglangScopeMiddleware)


# Marks chat prompts where SGLang renders them, so that messages' roles name kinds of content (`message_spans`).
#
#     mark_messages({"system": "system_prompt", "tools": "tool_schema"})      # in the HTTP server's process, once
#
# What cannot be located exactly is not marked: prompts with media, a continued last message, models that SGLang
# renders without a chat template, tokenizers without token offsets, and templates that change their input.

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
    """The arguments of SGLang's chat template, and the resulting token ids."""

    messages: Sequence[Message]
    given: Mapping[str, Any]
    token_ids: list[int]


_RENDERED: ContextVar[list[_Rendering] | None] = ContextVar("rendered", default=None)  # of this request


def mark_messages(kinds: Mapping[str, str]) -> None:
    """Mark every chat request of this process by the kinds of its messages' roles.

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
    """Put the marks where the engine reads them; on any error the request continues without them."""
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
        note_unmarked("no position of each token")
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
    """Return the result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        result: _Result = done.value
        return result
    work.close()
    raise RuntimeError("a chat template waited for something")
