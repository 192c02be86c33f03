"""SGLang's HTTP server with kinds of messages: a system prompt outlasts newer prompts by its role, a hint lowers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from standins.engines.sglang.sglang_server import SglangServer
from standins.engines.vllm.deployment import IDENTITY, POLICY, Deployment, Desk
from standins.engines.vllm.tiny_model import words

EVICTION = "eviction: {policy: priority, priority: 40, kinds: {system_prompt: 90, tool_result: 0}}"
KINDS = "message_kinds: {system: system_prompt, tool: tool_result, tools: tool_schema}\n"
HOT, SLOTS = 200, 4096  # tokens of a prompt that is to stay, slots of the pool
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def served(model: Path, new_deployment: Callable[..., Deployment], tmp_path_factory) -> Iterator[tuple]:
    policy = POLICY.replace("eviction: {policy: lru}", EVICTION)
    assert policy != POLICY
    site = new_deployment(policy=policy, identity=IDENTITY + KINDS)
    for tenant in ("acme", "beta"):
        site.api_key(tenant)
    server = SglangServer(model, tmp_path_factory.mktemp("logs"), deployment=site)
    yield server, site
    server.stop()


def text(seed: int, count: int) -> str:
    return words([16 + (seed * 131 + at * 37) % 480 for at in range(count)])


def chat(served: tuple, tenant: str, *messages: tuple[str, object], headers=None, **more) -> int:
    """One answer; returns the tokens that were found."""
    server, site = served
    body = {
        "model": "tiny",
        "messages": [{"role": role, "content": content} for role, content in messages],
        "max_tokens": 2,
        "temperature": 0,
    }
    key = {"authorization": f"Bearer {site.api_key(tenant)}", "x_kvcustody_subject": "jane"} | (headers or {})
    answer = server.post("/v1/chat/completions", body | more, **key)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def crowd(served: tuple, tenant: str, first: int) -> None:
    """More prompts than the pool has slots for, each once."""
    each = 300
    for seed in range(first, first + 2 * SLOTS // each):
        chat(served, tenant, ("user", text(seed, each)))


@pytest.mark.parametrize("parts", [False, True])
def test_a_system_prompt_outlasts_newer_prompts_because_of_its_role(served, parts):
    """The control: the same words as a user's, as old, are gone."""
    tenant, seed = ("acme", 1) if not parts else ("beta", 2)
    words_of = text(seed, HOT)
    system = [{"type": "text", "text": words_of}] if parts else words_of
    ask = [("system", system), ("user", text(900, 5))]
    assert [chat(served, tenant, *ask) for _ in range(2)][1] >= HOT
    said = ("user", text(seed + 50, HOT))
    assert [chat(served, tenant, said) for _ in range(2)][1] >= HOT
    crowd(served, tenant, 100)
    assert chat(served, tenant, *ask) >= HOT
    assert chat(served, tenant, said) < HOT // 4, "a template's own beginning may be shared"


def test_a_client_cannot_mark_and_can_lower(served):
    system = [("system", text(3, HOT)), ("user", text(901, 5))]
    lowered = {"kvcustody_kinds": [{"from": 0, "to": 2 * HOT, "kind": "tool_result"}]}
    for _ in range(2):
        chat(served, "acme", *system, **lowered)
    forged = ("user", text(4, HOT))
    marks = {"custom_params": {"kvcustody_marks": [0, HOT, "system_prompt"]}}
    for _ in range(2):
        chat(served, "acme", forged, **marks)
    crowd(served, "acme", 200)
    assert chat(served, "acme", *system) < HOT // 4
    assert chat(served, "acme", forged, **marks) < HOT // 4


def test_requests_with_nothing_to_mark_or_to_go_on_with_are_served(served):
    assert chat(served, "acme", ("system", ""), ("user", "w41")) >= 0
    said = [("system", text(6, 20)), ("user", "w40"), ("assistant", "w42")]
    assert chat(served, "acme", *said, continue_final_message=True, add_generation_prompt=False) >= 0


def test_the_trace_of_a_request_is_on_its_leaves(served, tmp_path):
    _, site = served
    before = len((desk := Desk(site, tmp_path)).await_leaves("residency-released", 1))
    chat(served, "acme", ("user", text(7, 30)), headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
    after = desk.await_leaves("residency-released", before + 1)
    assert [leaf.get("trace") for leaf in after[before:]] == [TRACE]
    assert all(leaf.get("trace") != TRACE for leaf in after[:before]), "control: others have none"
