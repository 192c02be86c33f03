"""A request's own earlier work is no reuse: after a preemption, in a fork, beside another's copy. Nothing is billed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from sqlalchemy import select

from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.audit.evidence.query.prefix_value import prefix_values
from kvcustody.audit.evidence.query.showback import Cost, ShowbackRow, showback
from kvcustody.audit.kinds import ResidencyOpened
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events, workers
from kvcustody.governance.admission_outcome import Admission, Deferred
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.observability import first_asked
from standins.governance.offload_world import MODEL, TOKENS, World, prompt, who
from standins.governance.port_by_hand import MODEL as PORT_MODEL
from standins.governance.port_by_hand import PROMPT, PortByHand

WHOLE = 6
ROOM = 10 * TOKENS  # with a prompt more than is left beside twelve blocks of another
FOREVER = (0, 1 << 61)


class OwnWork(World):
    """Requests of one tenant, and what the ledger and the counters make of them."""

    def begin(self, tokens: list[int], **how: object) -> Admission:
        made = self.worker.governor.admit(who("acme"), MODEL, tokens, **how)  # type: ignore[arg-type]
        assert isinstance(made, Admission)
        return made

    def compute(self, request: Admission, tokens: int) -> None:
        self.worker.governor.commit([request.request_id], [tokens])
        self.worker.governor.step()

    def end(self, request: Admission) -> None:
        self.worker.governor.release(request.request_id)
        self.worker.governor.step()

    def billed(self) -> ShowbackRow:
        assert self.worker.writer.flush()
        with open_store(f"sqlite:///{self.folder / 'ledger.db'}").connect() as connection:
            names = connection.scalars(select(workers.c.name))
            costs = dict.fromkeys(names, Cost(TOKENS, 0.001))
            (row,) = [one for one in showback(connection, *FOREVER, costs) if one.tenant == "acme"]
            values = prefix_values(connection, *FOREVER, costs)
            assert sum(one.attached_blocks for one in values) == row.own_hit_blocks
        return row

    def marked(self) -> list[int]:
        """How many blocks each opening says are the request's own earlier work."""
        with open_store(f"sqlite:///{self.folder / 'ledger.db'}").connect() as connection:
            query = select(events.c.leaf).where(events.c.kind == "residency-opened")
            return [orjson.loads(leaf).get("earlier_blocks", 0) for leaf in connection.scalars(query)]


@pytest.fixture
def world(tmp_path: Path) -> OwnWork:
    return OwnWork(tmp_path, "")


def preempted_after_its_first_token(world: OwnWork, tokens: list[int]) -> None:
    first = world.begin(tokens, request_id="one")
    world.compute(first, len(tokens))
    world.worker.governor.preempt(first.request_id)
    again = world.begin(tokens, request_id="one")
    assert again.hit_tokens == again.earlier_tokens == WHOLE * TOKENS
    world.compute(again, len(tokens))
    world.end(again)


def preempted_while_it_prefills(world: OwnWork, tokens: list[int]) -> None:
    first = world.begin(tokens, request_id="one")
    world.compute(first, 4 * TOKENS)
    world.worker.governor.preempt(("acme", "one"))
    again = world.begin(tokens, request_id="one")
    assert again.hit_tokens == again.earlier_tokens == 4 * TOKENS
    world.compute(again, len(tokens))
    world.end(again)


def forked(world: OwnWork, tokens: list[int]) -> None:
    last = world.begin(tokens)
    world.compute(last, len(tokens))
    for step in range(3):
        child = world.worker.governor.fork(last.request_id, f"beam-{step}")
        assert isinstance(child, Admission) and child.earlier_tokens == child.hit_tokens
        world.end(last)
        last = child
    world.end(last)


@pytest.mark.parametrize("is_displaced", [False, True])
def test_a_flood_of_waiting_requests_makes_no_hit_of_a_requests_own_work(
    world: OwnWork, monkeypatch: pytest.MonkeyPatch, *, is_displaced: bool
) -> None:
    """Control: where those that wait displace what a preempted one had, it is billed for its own work."""
    monkeypatch.setattr(first_asked, "WAITING_MAX", 4)
    tokens, governor = prompt(1, WHOLE), world.worker.governor
    first = world.begin(tokens, request_id="one")
    world.compute(first, len(tokens))
    governor.preempt(first.request_id)
    other = governor.admit(who("beta"), MODEL, prompt(2, 2 * WHOLE))
    assert isinstance(other, Admission)
    for number in range(6):
        waits = governor.admit(who("acme"), MODEL, tokens, request_id=number, lookahead_tokens=ROOM)
        assert isinstance(waits, Deferred), "void: nobody waits"
        if is_displaced:
            governor._asked._earlier.clear()
    again = world.begin(tokens, request_id="one")
    assert again.hit_tokens == WHOLE * TOKENS
    assert again.earlier_tokens == (0 if is_displaced else again.hit_tokens)
    for request in (again, other):
        world.end(request)
    world.worker.close()


@pytest.mark.parametrize("computed", [2 * TOKENS, 3 * TOKENS - 5, 3 * TOKENS + 1])
def test_a_fork_has_what_its_parent_has_computed_and_no_more(world: OwnWork, computed: int) -> None:
    """Its last block may not be full, nor all of its prompt computed: what the child is told needs no prefill."""
    tokens = [*prompt(1, 3), 7]
    parent = world.begin(tokens)
    world.compute(parent, computed)
    child = world.worker.governor.fork(parent.request_id, "beam")
    assert isinstance(child, Admission)
    assert child.hit_tokens == child.earlier_tokens == computed < len(child.blocks) * TOKENS
    for one in (parent, child):
        world.end(one)
    world.worker.close()


def computed_twice_at_once(world: OwnWork, tokens: list[int]) -> None:
    """The second joins the first's copy when it has computed its own: that saved it nothing."""
    first, second = world.begin(tokens), world.begin(tokens)
    for one in (first, second):
        world.compute(one, len(tokens))
    for one in (first, second):
        world.end(one)


@pytest.mark.parametrize(
    "happens",
    [
        preempted_after_its_first_token,
        preempted_while_it_prefills,
        forked,
        computed_twice_at_once,
    ],
)
def test_nothing_is_billed_where_nobody_repeats_a_prompt(
    world: OwnWork, happens: Callable[[OwnWork, list[int]], None]
) -> None:
    tokens = prompt(1, WHOLE)
    happens(world, tokens)
    row = world.billed()
    assert (row.own_hit_blocks, row.saved_seconds) == (0, 0.0)
    (counters,) = [one for name, one in world.worker.governor.stats().tenants.items() if name == "acme"]
    requests = 2 if happens is computed_twice_at_once else 1
    assert (counters.requests, counters.hit_blocks, counters.hit_requests) == (requests, 0, 0)
    assert counters.prompt_tokens == requests * len(tokens)
    assert any(world.marked()) is (happens is not computed_twice_at_once)
    world.worker.close()


def test_the_control_who_repeats_a_prompt_is_billed(world: OwnWork) -> None:
    tokens = prompt(1, WHOLE)
    for _ in range(2):
        one = world.begin(tokens)
        world.compute(one, len(tokens))
        world.end(one)
    row = world.billed()
    assert row.own_hit_blocks == WHOLE and row.saved_seconds == pytest.approx(WHOLE * TOKENS * 0.001)
    assert world.marked() == [0, 0]
    world.worker.close()


def test_what_it_found_before_it_was_preempted_is_billed_once(world: OwnWork) -> None:
    tokens = prompt(1, WHOLE)
    one = world.begin(tokens)
    world.compute(one, len(tokens))
    world.end(one)
    preempted = world.begin(tokens, request_id="one")
    world.compute(preempted, len(tokens))
    world.worker.governor.preempt(("acme", "one"))
    again = world.begin(tokens, request_id="one")
    world.end(again)
    assert world.billed().own_hit_blocks == WHOLE
    world.worker.close()


@pytest.mark.parametrize("by", ["itself, preempted", "another"])
def test_where_the_engine_has_the_pool(by: str) -> None:
    """A preempted request finds its own block again; the control is another request that finds the same block."""
    engine = PortByHand()
    principal = identify(issuer="idp", tenant="holder")
    first = engine.port.admit(principal, PORT_MODEL, PROMPT, request_id=1)
    assert isinstance(first, ExternalResidency)
    engine.port.look_up(first, lambda key: -1)
    engine.port.handed_out(first, [1, 2])
    engine.port.published(first, [1])
    engine.port.step()
    engine.port.release(first, "preempted")
    if by == "another":
        again = engine.port.admit(principal, PORT_MODEL, PROMPT, request_id=2)
    else:
        again = engine.port.resume(first, PROMPT)
    assert isinstance(again, ExternalResidency)
    engine.port.look_up(again, lambda key: 1)
    engine.port.attached(again, [1])
    engine.port.handed_out(again, [3])
    engine.port.step()
    opened = [event for event in engine.ledger.events if isinstance(event, ResidencyOpened)]
    counters = engine.port.stats().tenants["holder"]
    own = by != "another"
    assert [event.earlier_blocks for event in opened] == [0, int(own)]
    assert (counters.requests, counters.hit_blocks) == ((1, 0) if own else (2, 1))
    assert counters.prompt_tokens == len(PROMPT) * (1 if own else 2)
