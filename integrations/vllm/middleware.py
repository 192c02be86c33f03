"""The class for vLLM's command line: `--middleware kvcustody.integrations.vllm.middleware.ScopeMiddleware`."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from kvcustody.clock import SystemClock
from kvcustody.governance.observability.attempts import REASONS
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.settings import load_settings
from kvcustody.integrations.content.message_spans import (
    TOOLS,
    Message,
    find_messages,
    has_something_to_mark,
    note_unmarked,
    token_spans,
)
from kvcustody.integrations.identity.from_settings import open_attempts, open_request_gate
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.integrations.identity.refusal import Application
from kvcustody.integrations.identity.request_body import OUR_MARKS_FIELD
from kvcustody.integrations.vllm.versions import check_leading


class ScopeMiddleware(IdentityMiddleware):
    """The identity middleware with this process's settings. A wrong setting fails here, and nothing is served."""

    def __init__(self, app: Application) -> None:
        settings = load_settings()
        configure(settings.log_level, settings.log_format)
        attempts = open_attempts(settings, SystemClock())
        atexit.register(attempts.close)
        gate = open_request_gate(settings)
        if gate.message_kinds:
            mark_messages(gate.message_kinds)
        super().__init__(app, gate, body_bytes_max=int(settings.request_bytes_max), refused=counted(attempts.note))


# Marks chat prompts where vLLM renders them, so that messages' roles name kinds of content (`message_spans`).
#
# vLLM renders chat completions, `/v1/responses` and `/v1/messages` in one place. There an item of a response is a
# message already, its instructions are a system message, and a function's output is a `tool` message.
#
#     mark_messages({"system": "system_prompt", "tools": "tool_schema"})      # in the API server, once
#
# What cannot be located exactly is not marked: prompts with media, cut prompts, tokenizers without token offsets, and
# templates that change their input.

_RENDERED: ContextVar[list[Any] | None] = ContextVar("rendered", default=None)  # chat parameters of this request


_SIGNATURES = {  # of 0.32; earlier releases may render elsewhere, and are refused with `message_kinds`
    "vllm.renderers.online_renderer:OnlineRenderer.preprocess_chat": ("request", "messages"),
    "vllm.renderers.base:BaseRenderer.render_chat_async": ("conversations", "chat_params", "tok_params"),
    "vllm.renderers.base:BaseRenderer.render_messages_async": ("messages", "params"),
}


def mark_messages(kinds: Mapping[str, str]) -> None:
    """Mark every chat request of this process by the kinds of its messages' roles.

    Raises `ConfigError` for a vLLM that renders chats in another way.
    """
    for place, names in _SIGNATURES.items():
        check_leading(place, names)
    from vllm.renderers.base import BaseRenderer
    from vllm.renderers.online_renderer import OnlineRenderer

    preprocess, render_chat = OnlineRenderer.preprocess_chat, BaseRenderer.render_chat_async

    @functools.wraps(render_chat)
    async def render_chat_async(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **named: Any
    ) -> Any:
        rendered = _RENDERED.get()
        if rendered is not None and tok_params is not None and tok_params.truncate_prompt_tokens is None:
            rendered.append(chat_params)
            tok_params = replace(tok_params, return_token_offsets=True)
        return await render_chat(self, conversations, chat_params, tok_params, **named)

    @functools.wraps(preprocess)
    async def preprocess_chat(self: Any, request: Any, messages: Any, *args: Any, **named: Any) -> Any:
        rendered: list[Any] = []
        token = _RENDERED.set(rendered)
        try:
            answer = await preprocess(self, request, messages, *args, **named)
        finally:
            _RENDERED.reset(token)
        if not hasattr(request, "kv_transfer_params"):
            return answer  # it reaches no engine, or its body has no room
        if len(rendered) == 1:
            await _mark(self.renderer, request, messages, rendered[0], answer[1], kinds)
        elif has_something_to_mark(messages, kinds, has_tools=True):
            note_unmarked("cut or not rendered")
        return answer

    BaseRenderer.render_chat_async = render_chat_async
    OnlineRenderer.preprocess_chat = preprocess_chat


async def _mark(
    renderer: Any, request: Any, messages: Any, chat_params: Any, prompts: Any, kinds: Mapping[str, str]
) -> None:
    """Put the marks where the engine reads them; on any error the request continues without them (rule 3)."""

    async def render(some: Sequence[Message], with_tools: bool) -> str | None:
        params = chat_params
        if not with_tools:
            params = replace(params, chat_template_kwargs=params.chat_template_kwargs | {"tools": None})
        _, rendered = await renderer.render_messages_async(list(some), params)
        text = rendered.get("prompt")
        return text if isinstance(text, str) else None

    try:
        (prompt,) = prompts
        asked = getattr(request, "return_token_offsets", False)
        offsets = prompt.get("prompt_token_offsets") if asked else prompt.pop("prompt_token_offsets", None)
        text = prompt.get("prompt")
        has_tools = TOOLS in kinds and bool(chat_params.chat_template_kwargs.get("tools"))
        if not has_something_to_mark(messages, kinds, has_tools=has_tools):
            return
        marks: list[list[Any]] = []
        if isinstance(text, str) and offsets is not None and len(offsets) == len(prompt["prompt_token_ids"]):
            marks = token_spans(await find_messages(text, messages, kinds, render, has_tools=has_tools), offsets)
    except Exception as error:
        note_unmarked(type(error).__name__)
        return
    if marks:
        request.kv_transfer_params = {**(request.kv_transfer_params or {}), OUR_MARKS_FIELD: marks}
    else:
        note_unmarked("no position of each token" if offsets is None else "not found exactly")


# The door's refusals by reason for vLLM's own `/metrics`: `kvcustody_door_refused_total`.
#
# vLLM's API server serves what its processes have registered with `prometheus_client`. The few reasons describe the
# request and never the client.


def counted(note: Callable[[str, str], None], registry: CollectorRegistry = REGISTRY) -> Callable[[str, str], None]:
    """Return `note` with a counter; every reason exists from the start, at zero."""
    by_reason = {reason: _counter(registry).labels(reason) for reason in sorted(REASONS)}

    def refused(reason: str, source: str) -> None:
        note(reason, source)
        by_reason[reason].inc()

    return refused


@cache
def _counter(registry: CollectorRegistry) -> Counter:
    return Counter(
        "kvcustody_door_refused", "Requests that the door refused, by reason.", ("reason",), registry=registry
    )
