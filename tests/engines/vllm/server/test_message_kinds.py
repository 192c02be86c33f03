"""`vllm serve` with kinds of messages: through the chat endpoint a system prompt outlasts newer ones by its role."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcustody.errors import ConfigError
from kvcustody.integrations.vllm.middleware import mark_messages
from standins.engines.vllm.deployment import IDENTITY, POLICY
from standins.engines.vllm.http_server import HttpServer
from standins.engines.vllm.local_engine import BLOCK, BLOCKS
from standins.engines.vllm.tiny_model import words

EVICTION = "eviction: {policy: priority, priority: 40, kinds: {system_prompt: 90, tool_result: 0}}"
KINDS = "message_kinds: {system: system_prompt, tool: tool_result, tools: tool_schema}\n"
HOT = 4 * BLOCK


@pytest.fixture(scope="module")
def server(model, site, new_deployment, tmp_path_factory) -> Iterator[HttpServer]:
    made = new_deployment(policy=POLICY.replace("eviction: {policy: lru}", EVICTION), identity=IDENTITY + KINDS)
    started = HttpServer(model, site, tmp_path_factory.mktemp("server"), deployment=made)
    for tenant in ("alpha", "beta", "gamma"):
        made.api_key(tenant)
    try:
        yield started.wait()
    finally:
        started.close()


def text(seed: int, count: int) -> str:
    return words([16 + (seed * 131 + at * 37) % 480 for at in range(count)])


def chat(server: HttpServer, tenant: str, *messages: tuple[str, object], **more) -> int:
    """One answer; returns the tokens that were found."""
    body = {"messages": [{"role": role, "content": content} for role, content in messages]}
    reply = server.post("/v1/chat/completions", body | {"max_tokens": 2, "temperature": 0} | more, tenant=tenant)
    assert reply.status == 200, reply.text
    return reply.cached_tokens


def respond(server: HttpServer, tenant: str, items: list[dict[str, object]], **more) -> int:
    """One answer of `/v1/responses`; returns the tokens that were found."""
    body = {"model": "tiny", "input": items, "max_output_tokens": 2, "temperature": 0, "store": False}
    reply = server.post("/v1/responses", body | more, tenant=tenant)
    assert reply.status == 200, reply.text
    return reply.json["usage"]["input_tokens_details"]["cached_tokens"]


def crowd(server: HttpServer, tenant: str, first: int) -> None:
    """More prompts than the pool has blocks for, each once."""
    each = 10 * BLOCK
    for seed in range(first, first + 2 * BLOCKS * BLOCK // each):
        chat(server, tenant, ("user", text(seed, each)))


@pytest.mark.parametrize("parts", [False, True])
def test_a_system_prompt_outlasts_newer_prompts_because_of_its_role(server: HttpServer, parts: bool) -> None:
    """The control: the same words as a user's, as old, are gone."""
    tenant, seed = ("alpha", 1) if not parts else ("beta", 2)
    words_of = text(seed, HOT + 1)
    system = [{"type": "text", "text": words_of}] if parts else words_of
    ask = [("system", system), ("user", text(900, 5))]
    assert [chat(server, tenant, *ask) for _ in range(2)][1] >= HOT - BLOCK
    said = ("user", text(seed + 50, HOT + 1))
    assert [chat(server, tenant, said) for _ in range(2)][1] >= HOT - BLOCK
    crowd(server, tenant, 100)
    assert chat(server, tenant, *ask) >= HOT - BLOCK
    assert chat(server, tenant, said) == 0


def test_a_client_cannot_mark_and_can_lower(server: HttpServer) -> None:
    system = [("system", text(3, HOT + 1)), ("user", text(901, 5))]
    lowered = {"kvcustody_kinds": [{"from": 0, "to": HOT, "kind": "tool_result"}]}
    for _ in range(2):
        chat(server, "gamma", *system, **lowered)
    crowd(server, "gamma", 200)
    assert chat(server, "gamma", *system) == 0
    forged = server.post(
        "/v1/completions",
        {
            "prompt": text(4, HOT),
            "max_tokens": 2,
            "kv_transfer_params": {"kvcustody_marks": [[0, 9, "system_prompt"]]},
        },
        tenant="gamma",
    )
    assert forged.status == 200, "what is ours is taken out, and nothing else is in it"


def test_requests_that_ask_for_offsets_or_have_none_to_mark_are_served(server: HttpServer) -> None:
    assert chat(server, "alpha", ("user", text(5, 20)), return_token_offsets=True) == 0
    assert chat(server, "alpha", ("system", text(6, 20)), ("user", "w40"), truncate_prompt_tokens=8) == 0
    assert chat(server, "alpha", ("system", ""), ("user", "w41")) == 0


def test_instructions_and_results_of_tools_are_marked_in_responses(server: HttpServer) -> None:
    """Instructions are a system prompt and outlast newer prompts; what a function gave leaves before older prompts.

    The control: the same words as a user's item, as old, are gone; and as a user's item, as new, are kept.
    """
    message = {"role": "user", "content": [{"type": "input_text", "text": text(910, 5)}]}
    ruled = {"instructions": text(11, HOT + 1)}
    assert [respond(server, "alpha", [message], **ruled) for _ in range(2)][1] >= HOT - BLOCK
    item = {"role": "system", "content": [{"type": "input_text", "text": text(12, HOT + 1)}]}
    assert [respond(server, "alpha", [item, message]) for _ in range(2)][1] >= HOT - BLOCK
    plain = {"role": "user", "content": text(13, HOT + 1)}
    assert [respond(server, "alpha", [plain]) for _ in range(2)][1] >= HOT - BLOCK
    crowd(server, "alpha", 300)
    assert respond(server, "alpha", [message], **ruled) >= HOT - BLOCK
    assert respond(server, "alpha", [item, message]) >= HOT - BLOCK
    assert respond(server, "alpha", [plain]) == 0


def leaves_first(server: HttpServer, tenant: str, items: list[dict[str, object]], first: int) -> bool:
    """Whether what is used again after every new prompt goes before the prompts that were used once."""
    whole = [respond(server, tenant, items) for _ in range(2)][1]
    assert whole >= 7 * BLOCK
    for seed in range(first, first + BLOCKS):
        respond(server, tenant, [{"role": "user", "content": text(seed, 2 * BLOCK)}])
        if respond(server, tenant, items) < whole:
            return True
    return False


def test_what_a_function_gave_leaves_first(server: HttpServer) -> None:
    """The control: the same words as a user's item stay."""
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    gave = {"type": "function_call_output", "call_id": "c1", "output": text(21, 6 * BLOCK)}
    asks = {"role": "user", "content": text(22, 2 * BLOCK)}
    said = {"role": "user", "content": text(23, 6 * BLOCK)}
    assert leaves_first(server, "beta", [asks, call, gave], 400)
    assert not leaves_first(server, "gamma", [asks, said], 600)


def test_messages_of_the_other_api_are_marked_too(server: HttpServer) -> None:
    def ask(tenant: str, system: str | None, user: str) -> int:
        body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": user}]}
        reply = server.post("/v1/messages", body | ({"system": system} if system else {}), tenant=tenant)
        assert reply.status == 200, reply.text
        return reply.json["usage"].get("cache_read_input_tokens") or 0

    system, user = text(31, HOT + 1), text(32, HOT + 1)
    ask("gamma", system, "w40")
    ask("gamma", None, user)
    crowd(server, "gamma", 500)
    chat(server, "gamma", ("user", "w41"))
    assert chat(server, "gamma", ("system", system), ("user", "w40")) >= HOT - BLOCK
    assert chat(server, "gamma", ("user", user)) == 0, "the control"


def test_a_release_that_renders_elsewhere_is_refused_with_kinds_of_messages(monkeypatch) -> None:
    """Nothing is marked by guess: as before 0.32, where there is no such renderer, or with other arguments."""
    from vllm.renderers.online_renderer import OnlineRenderer

    before = OnlineRenderer.preprocess_chat

    async def preprocess_chat(self, messages, request):
        """Arguments in another order."""

    monkeypatch.setattr(OnlineRenderer, "preprocess_chat", preprocess_chat)
    with pytest.raises(ConfigError, match="preprocess_chat"):
        mark_messages({"system": "system_prompt"})
    assert OnlineRenderer.preprocess_chat is preprocess_chat
    monkeypatch.delattr(OnlineRenderer, "preprocess_chat")
    with pytest.raises(ConfigError, match="preprocess_chat"):
        mark_messages({"system": "system_prompt"})
    assert before is not None
