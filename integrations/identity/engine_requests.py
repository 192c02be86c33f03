"""The number of engine requests that a body becomes, which a scope token must cover.

Exact for samples and lists of prompts. An upper bound where the engine decides as it goes: beam search (a request for
each beam and step), built-in tools (one for each turn), scoring (pairs or single texts, by the model). A request
beyond the count runs and reuses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvcustody.governance.credentials.scope_token import USES_MAX
from kvcustody.integrations.identity.refusal import malformed
from kvcustody.integrations.identity.routes import Body

TOOL_TURNS_MAX: Final = 32


def engine_requests(kind: Body, body: dict[str, Any], *, prefix_requests: bool = False) -> int:
    """Return the number of engine requests of `body`, 1 to 65,535.

    Raises:
        RequestRefused: `n` is no count, or there are more.

    prefix_requests: where a prompt is sampled more than once, one more goes ahead of its samples.
    """
    count = max(1, _COUNTERS[kind](body))
    if prefix_requests:
        samples = _sampled(body)
        count += count // samples if samples > 1 else 0
    if count > USES_MAX:
        raise malformed("n", f"asks for more than {USES_MAX} sequences at once")
    return count


def _completion(body: dict[str, Any]) -> int:
    prompts = _prompts(body.get("prompt")) + _prompts(body.get("prompt_embeds"))
    return max(1, prompts) * _samples(body) * _beam_steps(body, ("max_tokens",))


def _chat(body: dict[str, Any]) -> int:
    return _samples(body) * _beam_steps(body, ("max_completion_tokens", "max_tokens"))


def _chat_batch(body: dict[str, Any]) -> int:
    messages = body.get("messages")
    return _samples(body) * (len(messages) if isinstance(messages, list) else 1)


def _responses(body: dict[str, Any]) -> int:
    tools = body.get("tools")
    if not isinstance(tools, list) or all(isinstance(tool, dict) and tool.get("type") == "function" for tool in tools):
        return 1
    stated = body.get("max_tool_calls")
    return 1 + (min(stated, TOOL_TURNS_MAX) if type(stated) is int and stated >= 0 else TOOL_TURNS_MAX)


def _generate(body: dict[str, Any]) -> int:
    sampling = body.get("sampling_params")
    return _samples(sampling) if isinstance(sampling, dict) else 1


def _sglang_generate(body: dict[str, Any]) -> int:
    prompts = max(_prompts(body.get("text")), _prompts(body.get("input_ids")))
    return max(1, prompts) * _sampled(body)


def _sampled(body: dict[str, Any]) -> int:
    """Return the samples per prompt, wherever a body states them: itself, its sampling parameters, or each prompt's."""
    sampling = body.get("sampling_params")
    holders = sampling if isinstance(sampling, list) else [sampling]
    return max(_samples(holder) for holder in (body, *holders) if isinstance(holder, dict))


def _pooling(body: dict[str, Any]) -> int:
    return max(_prompts(body.get("input")), _conversations(body.get("messages")))


def _scoring(body: dict[str, Any]) -> int:
    fields = ("query", "queries", "data_1", "text_1", "documents", "items", "data_2", "text_2")
    return sum(len(body[field]) if isinstance(body.get(field), list) else field in body for field in fields)


_COUNTERS: Final[dict[Body, Callable[[dict[str, Any]], int]]] = {
    Body.COMPLETION: _completion,
    Body.CHAT: _chat,
    Body.CHAT_BATCH: _chat_batch,
    Body.RESPONSES: _responses,
    Body.MESSAGES: lambda body: 1,
    Body.GENERATE: _generate,
    Body.SGLANG_GENERATE: _sglang_generate,
    Body.POOLING: _pooling,
    Body.SCORING: _scoring,
}


def _samples(body: dict[str, Any]) -> int:
    count = body.get("n")
    if count is None:
        return 1
    if type(count) is not int or count < 1:
        raise malformed("n", "must be a positive integer")
    return count


def _prompts(value: object) -> int:
    """Return the prompts in a field that holds one (text, token ids, a conversation) or a list of them."""
    if value is None:
        return 0
    if not isinstance(value, list) or not value or type(value[0]) is int:
        return 1
    return _conversations(value) if isinstance(value[0], dict) and "role" in value[0] else len(value)


def _conversations(value: object) -> int:
    if not isinstance(value, list) or not value:
        return 0
    return 1 if isinstance(value[0], dict) else len(value)


def _beam_steps(body: dict[str, Any], limits: tuple[str, ...]) -> int:
    """Return the factor of beam search: one request per step. Without a stated limit only the first is covered."""
    if body.get("use_beam_search") in (None, False):
        return 1
    stated = [body[name] for name in limits if type(body.get(name)) is int and body[name] > 0]
    return stated[0] if stated else 1
