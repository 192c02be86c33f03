"""Segments beside a stand-in engine with tiers: copied once in their own domain, brought back for whom they are."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from pathlib import Path

import pytest

from kvcustody.audit.kinds import (
    BlocksAssigned,
    BlocksReleased,
    CustodyEnded,
    ResidencyOpened,
    ResidencyReleased,
    Runs,
)
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.external import engine_port
from kvcustody.integrations.sglang.slot_tiers import SlotTiers, unit_pages
from kvcustody.testkit.conformance.policy import IDLE_US
from standins.integrations.segmented_engine import COVERED, POLICY, SHARED, SegmentedEngine
from standins.integrations.tiered_engine import prompt

TAIL = prompt(2, 41)


def ready(folder: Path, tiers: str, size: int, tokens: list[int] = SHARED) -> SegmentedEngine:
    """Alpha and beta have used the segment, and nothing of it is on the device any more."""
    engine = SegmentedEngine(folder, tiers, text=POLICY, page_tokens=size, pages=300 // size)
    engine.run("alpha", "ann", prompt(90, 40))  # its keys
    engine.share("alpha", "beta", tokens=tokens)
    covered = len(tokens) - 8
    for tenant in ("alpha", "beta", "alpha", "beta"):  # first uses are put on record, and computed
        engine.run(tenant, "s", [*tokens[:covered], *prompt(100, 30)])
    found = engine.run("beta", "other", [*tokens[:covered], *prompt(101, 30)])
    assert found == covered // size, "on the device"
    engine.crowd()
    return engine


def settled(engine: SegmentedEngine) -> None:
    engine.custody.step()
    assert engine.problems() == []


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("tiers", ["host", "nvme"])
def test_a_segment_comes_back_to_whom_it_is_for(tmp_path: Path, tiers: str, size: int) -> None:
    own = ready(tmp_path, tiers, size)
    shared, unit = COVERED // size, unit_pages(size)
    copies = own.copies_of_the_segment()
    assert copies == 1, "four readers, one copy of four units"
    assert own.run("gamma", "eve", [*SHARED[:COVERED], *TAIL]) == 0, "no rule is for it"
    own.crowd(1)
    asked = [*SHARED[:COVERED], *TAIL]
    assert own.run("beta", "ben", asked) == shared, "from the tier"
    settled(own)
    own.crowd(2)
    behind = (len(asked) - 1 - shared * size) // size // unit * unit
    assert own.run("beta", "ben", asked) == shared + behind, "and what is its own behind it"
    settled(own)
    own.crowd(3)
    assert own.run("beta", "bob", asked) == shared, "of the same tenant, and not its own"
    assert own.copies_of_the_segment() == copies
    settled(own)
    own.close()


def test_a_hit_that_ends_within_the_segment_goes_on_behind_it(tmp_path: Path) -> None:
    own = ready(tmp_path, "host", 1)
    asked = [*SHARED[:COVERED], *TAIL]
    own.run("beta", "ben", asked)
    own.crowd(1)
    own.custody.tiers.plan, plan = (lambda request, tokens, last: None), own.custody.tiers.plan
    rid = own.ask("alpha", "ann", asked)
    assert own.start(rid)
    own.chunk(rid, 10)  # ten tokens of the segment are on the device
    own.finish(rid)
    own.custody.tiers.plan = plan
    assert own.run("beta", "ben", asked) == COVERED + 32
    settled(own)
    own.close()


def test_a_segment_that_is_withdrawn_comes_back_to_nobody(tmp_path: Path) -> None:
    own = ready(tmp_path, "host", 1)
    asked = [*SHARED[:COVERED], *TAIL]
    own.run("beta", "ben", asked)
    own.crowd(1)
    own.share()
    for tenant in ("alpha", "beta", "gamma"):
        assert own.run(tenant, "ben", asked) == 0, tenant
    own.crowd(2)
    assert own.run("beta", "ben", asked) == 96, "what it computed since is its own, from its beginning"
    settled(own)
    own.share("beta", "gamma")
    own.crowd(3)
    own.run("gamma", "eve", asked)  # its first use
    own.crowd(4)
    assert own.run("gamma", "eve", prompt(7, 20)) == 0
    assert own.run("gamma", "eve", asked) >= COVERED, "control: it is for gamma by now"
    own.close()


@pytest.mark.parametrize("withdrawn", [False, True])
def test_what_was_found_is_asked_for_again_before_it_comes(tmp_path: Path, withdrawn: bool) -> None:
    own = ready(tmp_path, "host", 1)
    asked = array("q", [*SHARED[:COVERED], *TAIL])
    request = own.waiting[own.ask("beta", "ben", list(asked))].request
    own.custody.look_up(request, asked, len(asked) - 1)
    assert own.custody.restorable(request) == COVERED
    if withdrawn:
        own.share()
    assert own.custody.may_restore(request, asked, COVERED) is not withdrawn
    own.close()


def test_a_segment_of_another_length_is_another(tmp_path: Path) -> None:
    """The same name and beginning: what lies behind the longer one is nobody's hit behind the shorter one."""
    own = ready(tmp_path, "host", 1)
    asked = [*SHARED[:COVERED], *TAIL]
    own.run("beta", "ben", asked)
    own.crowd(1)
    own.share("alpha", "beta", tokens=SHARED[:53])
    for turn in range(2):  # a first use
        assert own.run("beta", "ben", asked) == 0
        own.crowd(2 + turn)
    assert own.run("beta", "ben", asked) == 45 + 48
    settled(own)
    own.close()


def test_an_erasure_of_its_owner_ends_its_copies(tmp_path: Path) -> None:
    own = ready(tmp_path, "host", 1)
    assert own.copies_of_the_segment()
    own.port.erase(Selector(tenant="alpha"))
    own.custody.step()
    assert not own.copies_of_the_segment()
    assert own.run("beta", "ben", [*SHARED[:COVERED], *TAIL]) == 0
    settled(own)
    own.close()


def test_its_deadline_passes_in_the_tier(tmp_path: Path) -> None:
    own = ready(tmp_path, "host", 1)
    own.clock.advance(2 * IDLE_US)
    own.custody.step()
    assert not own.copies_of_the_segment()
    assert own.run("beta", "ben", [*SHARED[:COVERED], *TAIL]) == 0
    settled(own)
    own.close()


def test_what_narrows_a_request_narrows_segments_too(tmp_path: Path) -> None:
    own = ready(tmp_path, "host", 1)
    asked = [*SHARED[:COVERED], *TAIL]
    own.run("beta", "ben", asked)
    own.crowd(1)
    assert own.run("beta", "ben", asked, "mine") == 0
    own.crowd(2)
    assert own.run("beta", "ben", asked, "mine") == COVERED + 32
    own.close()


def test_a_segments_key_for_everybody_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control of the 0 of a tenant that no rule names: named by what is in it alone, it is found."""
    own = ready(tmp_path, "host", 1, prompt(1, 72))  # whole units: others' chains end where these do
    label = next(
        one.label for one in own.tiers[0]._index.owners if one.label is not None and one.label.grant_or_segment
    )
    name = own.port.keyring.domains.state(label.spec).digest().hex()
    keys = SlotTiers._keys
    monkeypatch.setattr("kvcustody.integrations.sglang.slot_tiers.label_of", lambda domain: label)
    monkeypatch.setattr(
        SlotTiers,
        "_keys",
        lambda self, _, place, *given: keys(self, label, place._replace(name=name), *given),
    )
    with pytest.raises(AssertionError, match="what came"):
        own.run("gamma", "eve", [*prompt(1, 64), *TAIL])


@pytest.mark.parametrize("seed", range(6))
def test_drawn_work_with_segments_keeps_every_book(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice((1, 4, 16))
    own = ready(tmp_path, draw.choice(("host", "nvme", "host nvme")), size)
    for _ in range(80):
        own.clock.advance(1000)
        act = draw.random()
        if act < 0.6:
            head = SHARED[: draw.choice((20, 48, COVERED, COVERED, COVERED))]
            tokens = [*head, *prompt(draw.randrange(40, 44), draw.randrange(1, 60))]
            rid = own.ask(draw.choice(("alpha", "beta", "gamma")), draw.choice(("x", "y")), tokens)
            if own.start(rid):
                own.chunk(rid, draw.randrange(1, 150))
                own.finish(rid, draw.choice(("finished", "finished", "aborted", "preempted")))
            if rid in own.waiting:
                own.custody.release(own.waiting.pop(rid).request, "aborted")
        elif act < 0.85:
            own.custody.make_room(draw.randrange(1, 120 // size + 2))
        elif act < 0.9:
            own.clock.advance(draw.randrange(IDLE_US // 4))
            own.custody.step()
        elif act < 0.93:
            own.port.erase(Selector(tenant=draw.choice(("alpha", "beta")), subject=draw.choice(("x", "y"))))
        elif act < 0.96:
            own.share(*draw.choice(((), ("alpha", "beta"), ("beta",))))
        assert own.problems() == []
    own.custody.step()
    assert sum(use.restored_blocks for use in own.transfers.uses()) > 0
    own.close()


@pytest.mark.parametrize("is_assigned", [True, False], ids=["on record", "control"])
def test_a_segments_blocks_are_held_by_its_owner(
    tmp_path: Path, is_assigned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By leaves as by the pool's charges, though requests are handed their blocks chunk by chunk."""
    if not is_assigned:
        monkeypatch.setattr(engine_port, "assigned", lambda *given: [])
    own = SegmentedEngine(tmp_path, "", text=POLICY, page_tokens=1, pages=300)
    own.run("alpha", "ann", prompt(90, 40))
    own.share("alpha", "beta")
    for turn in range(2):  # the first use is put on record, and computed
        rid = own.ask("beta", "ben", [*SHARED[:COVERED], *prompt(100 + turn, 30)])
        assert own.start(rid)
        for _ in range(20):
            own.chunk(rid, 10)
        own.finish(rid)
    settled(own)
    held: Counter[str] = Counter()
    for event in own.ledger.events:
        if isinstance(event, ResidencyOpened | ResidencyReleased):
            held[event.tenant] += blocks_of(event.written)
        elif isinstance(event, BlocksReleased) and event.own:
            held[event.tenant] += blocks_of(event.runs)
        elif isinstance(event, BlocksAssigned):
            held[event.owner] += blocks_of(event.runs)
            held[event.tenant] -= blocks_of(event.runs)
        elif isinstance(event, CustodyEnded):
            held[event.tenant] -= blocks_of(event.runs)
    charged = {name: one.used_blocks for name, one in own.port.pool.accounts.items() if one.used_blocks}
    assert charged["alpha"] > 40, "void: nothing of the segment is charged to its owner"
    assert ({name: blocks for name, blocks in held.items() if blocks} == charged) is is_assigned
    own.close()


def blocks_of(runs: Runs) -> int:
    return sum(len(run.blocks) for run in runs)
