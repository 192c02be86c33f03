"""Kinds of content: the priority of a prompt's tokens, what a caller's kinds can do, and to whom."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.decisions.segment_matcher import declare
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.request import KINDS_MAX, NO_HINTS, Hints
from kvcustody.policies.document.token_priorities import KindRange, token_priorities
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.testkit.conformance.deployment import keyring as keyring_in_memory
from kvcustody.testkit.conformance.deployment import table
from kvcustody.testkit.tiny_model import tiny_model
from standins import builders

MODEL = tiny_model()
BLOCK = 16
KINDS = "kinds: {system_prompt: 90, retrieved_document: 50, pasted_log: 10, failed_tool_branch: 0}"
RANGES = "ranges: [{from: 0, to: 32, priority: 60, for: 5m}]"
EVICTION = f"eviction: {{policy: priority, priority: 40, {RANGES}, {KINDS}}}"


def priorities(*kinds: KindRange, segment: bool = False) -> list[tuple[int, int | None, int]]:
    more = EVICTION
    if segment:
        more += (
            f"\nsegments: [{{id: s, owner: holder, tenants: [holder], digest: hmac:{'0' * 64}, tokens: 64, "
            "classification: low, kind: system_prompt}]"
        )
    policy = load_policy(builders.policy(more=more), name="p.yaml")
    rule = policy.segments[0] if segment else None
    return [each[:3] for each in token_priorities(policy.eviction, rule, kinds)]


def test_a_kind_lowers_and_never_raises() -> None:
    assert priorities() == [(0, 32, 60), (32, None, 40)]
    assert priorities(KindRange(48, 64, "pasted_log")) == [
        (0, 32, 60),
        (32, 48, 40),
        (48, 64, 10),
        (64, None, 40),
    ]
    assert priorities(KindRange(0, 9_999, "system_prompt")) == priorities(), "the control: it would raise"
    assert priorities(KindRange(0, 64, "retrieved_document")) == [(0, 32, 50), (32, None, 40)]
    assert priorities(KindRange(0, 64, "not_declared")) == priorities()
    both = (KindRange(0, 40, "failed_tool_branch"), KindRange(8, 64, "pasted_log"))
    assert priorities(*both) == priorities(*reversed(both)) == [(0, 40, 0), (40, 64, 10), (64, None, 40)]


def test_a_segments_kind_says_more_than_a_range_and_a_callers_kind_lowers_it() -> None:
    assert priorities(segment=True) == [(0, 64, 90), (64, None, 40)]
    assert priorities(KindRange(16, 32, "pasted_log"), segment=True) == [
        (0, 16, 90), (16, 32, 10), (32, 64, 90), (64, None, 40),
    ]  # fmt: skip


def test_what_the_door_marked_counts_as_the_policys_and_a_caller_can_still_only_lower_it() -> None:
    """More than a range, less than a segment's kind; two marks side by side, and one that is not declared."""
    system, log = KindRange(0, 48, "system_prompt", True), KindRange(48, 64, "pasted_log", True)
    assert priorities(system) == [(0, 48, 90), (48, None, 40)]
    assert priorities(log, system) == [(0, 48, 90), (48, 64, 10), (64, None, 40)]
    assert priorities(system, KindRange(40, 56, "pasted_log")) == [(0, 40, 90), (40, 56, 10), (56, None, 40)]
    assert priorities(log, KindRange(0, 64, "system_prompt")) == [
        (0, 32, 60),
        (32, 48, 40),
        (48, 64, 10),
        (64, None, 40),
    ]
    assert priorities(KindRange(0, 80, "pasted_log", True), segment=True) == [
        (0, 64, 90),
        (64, 80, 10),
        (80, None, 40),
    ]
    assert priorities(KindRange(0, 48, "not_declared", True)) == priorities()
    assert [priority for _, priority in kept(Hints(kinds=(KindRange(16, 64, "system_prompt", True),)))] == [
        60, 90, 90, 90, 40,
    ]  # fmt: skip


def principal(tenant: str = "holder") -> object:
    return identify(issuer="idp", tenant=tenant, verified={"subject": "u"})


def kept(hints: Hints, more: str = EVICTION) -> list[tuple[int, int]]:
    """(depth, priority) of each cached block of one request's own prompt, in each pool: the two agree."""
    tokens, decisions = list(range(5 * BLOCK + 1)), table(builders.policy(more=more))
    governor = builders.governor(decisions, VirtualClock())
    admitted = governor.admit(principal(), MODEL, tokens, request_id=1, hints=hints)  # type: ignore[arg-type]
    assert isinstance(admitted, Admission)
    governor.commit([admitted.request_id], [len(tokens)])
    governor.release(admitted.request_id)
    size = governor.block_tokens
    nodes = list(governor.managers[0].tree.nodes())
    own = [(depth * size, node.priority) for node in nodes for depth in range(node.depth, node.depth + node.length)]

    port = builders.port(decisions)
    residency = port.admit(principal(), MODEL, tokens, request_id=1, hints=hints)  # type: ignore[arg-type]
    keys = port.look_up(residency, lambda key: -1)  # type: ignore[arg-type]
    assert port.may_start(residency) is None and len(list(keys.keys)) == 5  # type: ignore[arg-type]
    port.handed_out(residency, [1, 2, 3, 4, 5, 6])  # type: ignore[arg-type]
    port.published(residency, [1, 2, 3, 4, 5])  # type: ignore[arg-type]
    port.release(residency)  # type: ignore[arg-type]
    ranking = port.pool.ranking
    assert ranking is not None
    blocks = np.arange(1, 6)
    external = list(zip((ranking.depth[blocks] * BLOCK).tolist(), ranking.priority[blocks].tolist(), strict=True))
    assert sorted(at for at in own if at[0] % BLOCK == 0) == external
    return external


def test_both_pools_keep_a_request_as_its_kinds_say() -> None:
    assert [priority for _, priority in kept(Hints())] == [60, 60, 40, 40, 40]
    lowered = Hints(kinds=(KindRange(48, 64, "pasted_log"), KindRange(0, 81, "system_prompt")))
    assert [priority for _, priority in kept(lowered)] == [60, 60, 40, 10, 40]


@pytest.mark.parametrize(
    "kinds",
    [
        (KindRange(4, 4, "pasted_log"),),
        (KindRange(-1, 4, "pasted_log"),),
        (KindRange(0, 4, 7),),  # type: ignore[arg-type]
        (KindRange(0, 4, "pasted_log"),) * (KINDS_MAX + 1),
        (KindRange(0, 4, "pasted_log", True),) * (KINDS_MAX + 1),
    ],
)
def test_kinds_that_are_none_are_refused_before_anything_is_held(kinds: tuple[KindRange, ...]) -> None:
    decisions = table(builders.policy(more=EVICTION))
    governor, port = builders.governor(decisions, VirtualClock()), builders.port(decisions)
    for admit in (governor.admit, port.admit):
        with pytest.raises(ConfigError, match="kinds"):
            admit(principal(), MODEL, [1, 2, 3], request_id=1, hints=Hints(kinds=kinds))  # type: ignore[operator]
    assert not port.running and governor.check() == []


def test_a_segments_blocks_are_of_its_kind_in_both_pools() -> None:
    """A prompt that begins with the segment; the control is the same segment without a kind."""
    clock = VirtualClock()
    tokens = list(range(8 * BLOCK))
    for kind, expected in ((", kind: system_prompt", 90), ("", 60)):
        ring = keyring_in_memory(clock)
        owner = tenant_owner("idp", "holder")
        ring.ensure([owner])
        made = declare(ring, owner, tokens[: 4 * BLOCK + 8], model=MODEL.digest, block_tokens=BLOCK)
        segment = (
            f"\nsegments: [{{id: s, owner: holder, tenants: [holder], digest: 'hmac:{made.digest}', "
            f"tokens: {made.tokens}, classification: low{kind}}}]"
        )
        port = builders.port(table(builders.policy(more=EVICTION + segment)), clock, keys=ring)
        residency = port.admit(principal(), MODEL, tokens, request_id=1)  # type: ignore[arg-type]
        port.look_up(residency, lambda key: -1)  # type: ignore[arg-type]
        assert residency.segment_blocks == 4, "it matched"  # type: ignore[union-attr]
        assert residency.priorities[0].priority == expected  # type: ignore[union-attr]


@pytest.mark.parametrize("base", [90, 40])
@pytest.mark.parametrize("policy", ["priority", "cost"])
def test_what_one_tenant_says_of_its_content_moves_none_of_anothers_blocks(policy: str, base: int) -> None:
    """Holder says that all of its content is worthless, that all is dear, or nothing: the same of reader's is left.

    So too where its messages' roles say it, which a tenant writes as it likes and the door believes.
    """
    decisions = table(
        builders.policy(more=f"eviction: {{policy: {policy}, ranges: [{{from: 0, priority: {base}}}], {KINDS}}}")
    )

    def left(kinds: tuple[KindRange, ...]) -> tuple[list[int], int]:
        governor = builders.governor(decisions, VirtualClock(), blocks=64)
        choose, size = Random(5), governor.block_tokens
        prompts = [list(range(1_000 * at, 1_000 * at + 3 * size + 1)) for at in range(40)]

        def ask(tenant: str, prompt: list[int], hints: Hints = NO_HINTS) -> int:
            admitted = governor.admit(principal(tenant), MODEL, prompt, request_id=1, hints=hints)  # type: ignore[arg-type]
            assert isinstance(admitted, Admission), admitted
            governor.commit([admitted.request_id], [len(prompt)])
            governor.release(admitted.request_id)
            governor.step()
            return admitted.hit_tokens

        for _ in range(150):
            ask("holder", choose.choice(prompts[:20]), Hints(kinds=kinds))
            ask("reader", choose.choice(prompts[20:26]))
        evicted = sum(manager.tree.evicted.get("pressure", 0) for manager in governor.managers)
        hits = [ask("reader", prompt) for prompt in prompts[20:26]]
        return hits, evicted

    said_nothing, evicted = left(())
    assert evicted > 100
    for kind in ("failed_tool_branch", "system_prompt"):
        for is_marked in (False, True):
            assert left((KindRange(0, 9_999, kind, is_marked),))[0] == said_nothing
