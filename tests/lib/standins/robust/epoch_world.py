"""Doors, workers and a control plane that hear of each other late, twice, in another order or never.

1. The deciding parts are real: the doors before a router (`EdgeGate`), workers' own doors, their tokens, erase epochs,
   a Governor and an engine port over their pools. The network, the clock and the control plane's table are this
   world's.
2. Each interleaving has its own subject, whose prompt is always the same. It mixes erasures, queries and their answers,
   requests and their published blocks, and processes that stop, die or hear nothing.
3. A name that a door gives routers stands for one state of epochs, and is never given again with another.
4. A reuse is stale if its block was written under an older epoch than one of two: the epoch of the reader's token, and
   the one that the control plane had given out one lease ago.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import orjson

from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.credentials.scope_token import ScopeTokens, VerifiedToken
from kvcustody.governance.edge.custody_lease import ERASURES
from kvcustody.governance.edge.erase_epochs import (
    NO_EPOCHS,
    Epochs,
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import Hints
from kvcustody.integrations.door.edge_gate import EdgeGate, Forwarded
from kvcustody.integrations.identity.identity_document import load_identity
from kvcustody.integrations.identity.refusal import RequestRefused
from kvcustody.integrations.identity.request_body import OUR_TRANSFER_FIELD
from kvcustody.integrations.identity.request_gate import RequestGate
from kvcustody.integrations.identity.request_headers import RequestHeaders
from kvcustody.policies.document.model import Scope
from standins.builders import governor, keyring_in_memory, policy, port, table
from standins.integrations.door_world import Deployment, make_signers, secret
from standins.integrations.fleet_edge import COMPLETIONS, TRUSTS_DOORS, door_key
from standins.robust.custody_world import MODEL

LEASE_US = 6 * MICROSECONDS
TOKENS = list(range(1, 50))  # three blocks, and one token that is always computed
BLOCK = 16
TENANT = "acme"
BY_SUBJECT = NameScopes(Scope.SUBJECT)
BODY = b'{"prompt": "the same each time"}'
INTERLEAVINGS_A_WORLD = 40
POLICY = policy((TENANT,), scope="subject")


class Erasure(NamedTuple):
    """One that is on record: what it covers, when it was asked for, and its name."""

    selector: Selector
    at_us: int
    name: str


class Edge:
    """Files of two doors and of the workers behind them, for any number of worlds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients = Deployment(folder, make_signers())
        self.keys = [door_key(1), door_key(2)]
        (folder / "doors.vkeys").write_text("".join(f"{key.verifier}\n" for key in self.keys))
        (folder / "worker.yaml").write_text(TRUSTS_DOORS)
        self.at_doors, self.at_workers = (load_identity(folder / name) for name in ("identity.yaml", "worker.yaml"))


class Finishing:
    """The engine behind a port: it forgets what it is told to; nothing that it runs is aborted by itself."""

    def __init__(self) -> None:
        self.index: dict[bytes, int] = {}
        self.aborted: set[object] = set()

    def evict(self, blocks: Any) -> None:
        gone = {int(block) for block in blocks}
        self.index = {key: block for key, block in self.index.items() if block not in gone}

    def abort(self, request_ids: Any, cause: str) -> None:
        self.aborted.update(request_ids)

    def withhold(self, blocks: Any) -> None:
        pass

    def wake(self) -> None:
        pass


class PortWorker:
    """A worker whose engine allocates by itself."""

    def __init__(self, world: EpochWorld) -> None:
        self.engine = Finishing()
        self.facade: EnginePort = port(
            world.table, world.clock, engine=self.engine, keys=world.keys, pool=4096, block_tokens=BLOCK
        )
        self.world = world
        self._next = 1
        self.waiting: list[tuple[ExternalResidency, Principal, Epochs]] = []
        self.running: list[tuple[ExternalResidency, list[int], list[bytes]]] = []
        self.writer_of: dict[int, Epochs] = {}

    def arrive(self, principal: Principal, hints: Hints, number: int) -> None:
        found = self.facade.admit(principal, MODEL, TOKENS, request_id=number, hints=hints)
        assert isinstance(found, ExternalResidency)
        self.waiting.append((found, principal, hints.epochs or NO_EPOCHS))
        if self.world.chance.random() < 0.7:
            self.attach()

    def attach(self) -> None:
        """The engine schedules its oldest request: look-up, perhaps a pause, attach."""
        if not self.waiting:
            return
        residency, principal, epochs = self.waiting.pop(0)
        if residency.request_id in self.engine.aborted:
            self.facade.release(residency, "aborted")
            return
        keys = self.facade.look_up(residency, lambda key: self.engine.index.get(key, -1))
        self.world.pause()
        cached = [self.engine.index[key] for key in list(keys.keys)[: keys.readable] if key in self.engine.index]
        cached = cached[: self.facade.attachable(residency, cached)]
        self.world.reused(principal, [self.writer_of[block] for block in cached], epochs)
        self.facade.attached(residency, cached)
        new = list(range(self._next, self._next + 4 - len(cached)))
        self._next += len(new)
        self.facade.handed_out(residency, new)
        self.writer_of |= dict.fromkeys(new, epochs)
        self.running.append((residency, cached + new, list(keys.keys)))

    def publish(self) -> None:
        """Its oldest running request is computed, published and ends."""
        if not self.running:
            return
        residency, blocks, keys = self.running.pop(0)
        if residency.request_id not in self.engine.aborted and self.facade.may_publish(residency):
            for place, key in enumerate(keys[: len(blocks)]):
                if key not in self.engine.index:
                    self.engine.index[key] = blocks[place]
                    self.facade.published(residency, [blocks[place]], blocks[place - 1] if place else -1)
        self.facade.release(residency)


class GovernorWorker:
    """A worker whose blocks are ours."""

    def __init__(self, world: EpochWorld) -> None:
        self.facade: Governor = governor(world.table, world.clock, keys=world.keys, blocks=1024)
        self.world = world
        self.waiting: list[tuple[Principal, Hints, int]] = []
        self.running: list[object] = []
        self.writer_of: dict[int, Epochs] = {}

    def arrive(self, principal: Principal, hints: Hints, number: int) -> None:
        self.waiting.append((principal, hints, number))
        if self.world.chance.random() < 0.7:
            self.attach()

    def attach(self) -> None:
        if not self.waiting:
            return
        principal, hints, number = self.waiting.pop(0)
        outcome = self.facade.admit(principal, MODEL, TOKENS, request_id=number, hints=hints)
        assert isinstance(outcome, Admission), outcome
        blocks = [int(block) for block in self.facade.blocks(outcome.request_id)]
        hits = outcome.hit_tokens // BLOCK
        epochs = hints.epochs or NO_EPOCHS
        self.world.reused(principal, [self.writer_of[block] for block in blocks[:hits]], epochs)
        self.writer_of |= dict.fromkeys(blocks[hits:], epochs)
        self.running.append(outcome.request_id)
        if self.world.chance.random() < 0.2:
            self.fork(outcome.request_id, epochs)

    def fork(self, parent: object, epochs: Epochs) -> None:
        """A second request on what the first one reads."""
        self.world.pause()
        self.facade.step()
        if parent not in self.facade.running:
            return
        child = self.facade.fork(parent, ("fork", parent))  # type: ignore[arg-type]
        if isinstance(child, Admission):
            self.running.append(child.request_id)

    def publish(self) -> None:
        if not self.running:
            return
        request = self.running.pop(0)
        if request in self.facade.running:
            self.facade.commit([request], [len(TOKENS)])  # type: ignore[list-item]
            self.facade.release(request)  # type: ignore[arg-type]


class EpochWorld:
    """Two doors, two workers and a control plane."""

    def __init__(self, seed: int, edge: Edge) -> None:
        self.chance = Random(seed)
        self.clock = edge.clients.clock = VirtualClock()
        self.edge = edge
        self.table = table(POLICY)
        self.keys = keyring_in_memory(self.clock)
        self.tags = EpochTags(bytes(32))
        self.gates = [self._gate(place) for place in range(2)]
        self.tokens = ScopeTokens(secret(), self.clock)
        self.worker_doors = [RequestGate(edge.at_workers, edge.folder, secret(), self.clock) for _ in range(2)]
        self.named: dict[str, Epochs] = {}  # what a name of a router stood for when it was given
        self.epochs = EraseEpochs()
        self.erasures: list[Erasure] = []
        self.history: list[tuple[int, EraseEpochs]] = [(0, self.epochs)]
        self.doors: list[tuple[EraseEpochs, int]] = [(self.epochs, self.clock.now_us() + LEASE_US)] * 2
        self.workers: list[Any] = [self._worker(0), self._worker(1)]
        self.taken: list[set[str]] = [set(), set()]
        self.stopped = [False, False]
        self.cut_off = [False, False]
        self.flight: list[tuple[int, Callable[[], None]]] = []  # the worker that hears it, -1: a door; and what
        self.number = 0
        self.requests = self.reuses = self.stale = self.renamed = 0
        self._be("nobody")

    def _be(self, name: str) -> None:
        """From now on it is about this subject, who shows a token."""
        token = self.edge.clients.token(org=TENANT, sub=name)
        self.headers = RequestHeaders([(b"authorization", f"Bearer {token}".encode())])
        self.subject = self.gates[0].authenticate("POST", COMPLETIONS, self.headers).principal

    def _gate(self, place: int) -> EdgeGate:
        def known() -> KnownEpochs | None:
            epochs, until_us = self.doors[place]
            return KnownEpochs(epochs, self.tags) if self.clock.now_us() < until_us else None

        edge = self.edge
        key = edge.keys[place]
        return EdgeGate(
            edge.at_doors,
            edge.folder,
            lambda: key,
            secret(),
            self.clock,
            retries=7,
            epochs=known,
            scopes=lambda: BY_SUBJECT,
        )

    def _worker(self, place: int) -> Any:
        made: Any = PortWorker(self) if place == 0 else GovernorWorker(self)
        made.facade.custody.require(ERASURES)
        made.facade.epochs.are_awaited = True
        return made

    # -- one interleaving ---------------------------------------------------------------------------------------------

    def interleave(self, acts: int) -> None:
        """Acts in any order, about a subject that nobody knew before."""
        self.number += 1
        self._be(f"person-{self.number}")
        self.named.clear()
        self.flight.clear()
        for place in range(2):
            self.stopped[place] = self.cut_off[place] = False
            self.ask_worker(place)
            self.ask_door(place)
        for _ in range(8):
            self.deliver(0)
        for act in self.chance.choices(*_ACTS, k=acts):
            act(self)

    def pause(self) -> None:
        """Between a decision and what is done by it: time may pass, and an engine may step."""
        if self.chance.random() < 0.3:
            self.clock.advance(self.chance.choice((0, LEASE_US // 2, LEASE_US + 1)))

    def route(self) -> None:
        """A door makes a name and a token by what it knows; past its lease it knows what it knew last."""
        gate = self.chance.choice(self.gates)
        admitted = gate.authenticate("POST", COMPLETIONS, self.headers)
        forwarded = gate.scope(admitted, BODY)
        assert forwarded.body is not None
        place = self.chance.randrange(2)
        self.flight.append((place, lambda: self._arrive(place, forwarded)))

    def _arrive(self, place: int, forwarded: Forwarded) -> None:
        """At the worker's own door; a router changes nothing of it."""
        given = RequestHeaders((name.encode(), value.encode()) for name, value in forwarded.headers.items())
        door = self.worker_doors[place]
        assert forwarded.body is not None
        try:
            admitted = door.authenticate("POST", COMPLETIONS, given)
            body = orjson.loads(door.scope(admitted, forwarded.body))
        except RequestRefused:
            return  # it is over by now, or was presented too often
        assert admitted.token is not None
        claims = admitted.token.claims
        self.renamed += self.named.setdefault(claims.namespace, claims.epochs) != claims.epochs
        verified = self.tokens.verify(
            body["cache_salt"], (body.get("kv_transfer_params") or {}).get(OUR_TRANSFER_FIELD)
        )
        assert isinstance(verified, VerifiedToken), verified
        self.requests += 1
        self.workers[place].arrive(verified.principal, verified.hints, self.requests)

    def erase(self) -> None:
        """The raise comes first; the erasure is on record after, and may be heard long after."""
        who = self.subject
        is_tenants = self.chance.random() < 0.1
        scope = EpochScope(who.issuer, who.tenant, None if is_tenants else who.subject)
        number = self.epochs.version + 1
        self.epochs = self.epochs.extended([RaisedEpoch(number, self.tags.of(scope))], version=number, floor=0)
        self.history.append((self.clock.now_us(), self.epochs))
        selector = Selector(tenant=TENANT, subject=None if is_tenants else who.subject)
        self.erasures.append(Erasure(selector, self.clock.now_us(), f"e-{number}"))

    def ask_worker(self, place: int) -> None:
        """A worker asks for epochs and for erasures; the answers travel apart."""
        if self.stopped[place] or self.cut_off[place]:
            return
        facade, taken, sent_us = self.workers[place].facade, self.taken[place], self.clock.now_us()
        known, owed = KnownEpochs(self.epochs, self.tags), list(self.erasures)

        def hear_epochs() -> None:
            facade.call(lambda owner: owner.take_epochs(known, sent_us + LEASE_US))

        def hear_erasures() -> None:
            for one in owed:
                if one.name not in taken:
                    taken.add(one.name)
                    facade.call(lambda owner, one=one: owner.erase(one.selector, **_order(one)))
            facade.call(lambda owner: owner.renew_custody(ERASURES, sent_us + LEASE_US))

        self.flight += [(place, hear_epochs), (place, hear_erasures)]

    def ask_door(self, place: int) -> None:
        """A door asks for epochs."""
        epochs, until_us = self.epochs, self.clock.now_us() + LEASE_US

        def hear() -> None:
            if epochs.version >= self.doors[place][0].version:
                self.doors[place] = epochs, until_us

        self.flight.append((-1, hear))

    def ask_somebody(self) -> None:
        """Whoever it is."""
        self.chance.choice((self.ask_worker, self.ask_door))(self.chance.randrange(2))

    def deliver(self, place: int | None = None) -> None:
        """Any message arrives, perhaps not for the last time; a stopped process hears it when it goes on."""
        if not self.flight:
            return
        at = self.chance.randrange(len(self.flight)) if place is None else place
        whom, act = self.flight[at]
        if whom >= 0 and self.stopped[whom]:
            return
        if self.chance.random() < 0.85:
            del self.flight[at]
        act()
        if whom >= 0:
            self.workers[whom].facade.step()

    def lose(self) -> None:
        """A message is lost."""
        if self.flight:
            del self.flight[self.chance.randrange(len(self.flight))]

    def work(self) -> None:
        """A worker that runs schedules a request, or ends one."""
        place = self.chance.randrange(2)
        if not self.stopped[place]:
            worker = self.workers[place]
            self.chance.choice((worker.attach, worker.publish, worker.publish))()
            worker.facade.step()

    def stop_or_go_on(self) -> None:
        """As SIGSTOP and SIGCONT do: time passes for all others."""
        place = self.chance.randrange(2)
        self.stopped[place] = not self.stopped[place]
        self.clock.advance(self.chance.choice((LEASE_US // 3, LEASE_US + 1)))

    def cut_off_or_not(self) -> None:
        """A worker's questions reach nobody."""
        place = self.chance.randrange(2)
        self.cut_off[place] = not self.cut_off[place]

    def die(self) -> None:
        """A worker begins anew: what was in its memory is gone."""
        place = self.chance.randrange(2)
        self.workers[place], self.taken[place] = self._worker(place), set()
        self.flight = [(whom, act) for whom, act in self.flight if whom != place]

    def wait(self) -> None:
        """Time passes."""
        self.clock.advance(self.chance.randrange(LEASE_US))

    # -- what is held against it --------------------------------------------------------------------------------------

    def reused(self, who: Principal, writers: list[Epochs], reader: Epochs) -> None:
        """A request attached blocks of these writers, perhaps one of an earlier interleaving."""
        since_us = self.clock.now_us() - LEASE_US
        confirmed = self._of(
            who, next(epochs for at_us, epochs in reversed(self.history) if at_us < since_us or not at_us)
        )
        self.reuses += bool(writers)
        self.stale += any(
            now > then
            for written in writers
            for needed in (reader, confirmed)
            for now, then in zip(needed, written, strict=True)
        )

    def _of(self, who: Principal, epochs: EraseEpochs) -> Epochs:
        return KnownEpochs(epochs, self.tags).of(who.issuer, who.tenant, who.subject)


_WEIGHTS: dict[Callable[[EpochWorld], None], int] = {
    EpochWorld.route: 8,
    EpochWorld.deliver: 18,
    EpochWorld.work: 11,
    EpochWorld.erase: 2,
    EpochWorld.ask_somebody: 5,
    EpochWorld.lose: 1,
    EpochWorld.stop_or_go_on: 1,
    EpochWorld.cut_off_or_not: 1,
    EpochWorld.die: 1,
    EpochWorld.wait: 1,
}
_ACTS = (list(_WEIGHTS), list(_WEIGHTS.values()))


def _order(one: Erasure) -> dict[str, Any]:
    return {
        "erasure": one.name,
        "actor": "dpo",
        "deadline_us": one.at_us + 3600 * MICROSECONDS,
        "before_us": one.at_us,
        "on_record": True,
    }
