"""`vllm serve` with kinds of messages: through the chat endpoint a system prompt outlasts newer ones by its role."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deployment import IDENTITY, POLICY
from http_server import HttpServer
from local_engine import BLOCK, BLOCKS
from tiny_model import words

EVICTION = "eviction: {policy: priority, priority: 40, kinds: {system_prompt: 90, tool_result: 0}}"
KINDS = "message_kinds: {system: system_prompt, tool: tool_result, tools: tool_schema}\n"
HOT = 4 * BLOCK


@pytest.fixture(scope="module")
def server(model, site, new_deployment, tmp_path_factory) -> Iterator[HttpServer]:
    made = new_deployment(
        policy=POLICY.replace("eviction: {policy: lru}", EVICTION), identity=IDENTITY + KINDS
    )
    found = HttpServer(model, site, tmp_path_factory.mktemp("server"), deployment=made)
    for tenant in ("alpha", "beta", "gamma"):
        made.api_key(tenant)
    try:
        yield found.wait()
    finally:
        found.close()


def text(seed: int, count: int) -> str:
    return words([16 + (seed * 131 + at * 37) % 480 for at in range(count)])


def chat(server: HttpServer, tenant: str, *messages: tuple[str, object], **more) -> int:
    """One answer; returns the tokens that were found."""
    body = {"messages": [{"role": role, "content": content} for role, content in messages]}
    reply = server.post(
        "/v1/chat/completions", body | {"max_tokens": 2, "temperature": 0} | more, tenant=tenant
    )
    assert reply.status == 200, reply.text
    return reply.cached_tokens


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
