"""A prefill and a decode worker on one machine, over host tiers, and what goes between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.clock import VirtualClock
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.handover.exchange import AnsweredFetch, Fetched, HandoverServer, fetch_objects
from kvcustody.governance.handover.offers import Offer, OfferedPart, OfferTable
from kvcustody.governance.handover.peers import PeerKey, Peers
from kvcustody.governance.handover.ticket import Ticket, chain_digest, issue, read_ticket
from kvcustody.governance.handover.tls import HandoverTls
from kvcustody.governance.tiers.stores.host_arena import HostArena
from kvcustody.governance.tiers.tier import GivenObjects, SealedObject, SealedTier
from standins.governance.sealed_objects import World
from standins.governance.tier_place import STEP, Place, keys_of

LIFE, PEER_LIFE = "ab" * 16, "cd" * 16
BLOCKS = 2 * STEP


class HandedPlace(Place):
    """A host tier of which others get copies."""

    def open(self) -> None:
        super().open()
        self.tier.close()
        terms = self.tier._index.terms._replace(encloses=True)
        self.store = HostArena(self.capacity)
        self.tier = SealedTier(self.store, self.world.keys, self.world.shred, self.staging, self.world.clock, terms)


class Pair:
    """A prefill and a decode worker, and what goes between them."""

    def __init__(self, folder: Path, tls: HandoverTls | None = None) -> None:
        self.clock, self.tls = VirtualClock(), tls
        (folder / "p").mkdir()
        (folder / "d").mkdir()
        world = World(folder)
        self.prefill, self.decode = (HandedPlace(folder / name, "host", world=world) for name in ("p", "d"))
        self.keys = {
            name: PeerKey(create_signing_key(folder / f"{name}.key", name)) for name in ("prefill", "decode", "other")
        }
        self.given: list[AnsweredFetch] = []
        self._nonces = itertools.count(1)
        self.offers = OfferTable(self.give, self.clock)
        self.tampers: Callable[[list[SealedObject]], list[SealedObject]] = lambda objects: objects
        self.peers = Peers({name: key.verifier for name, key in self.keys.items()}, {})
        self.server = HandoverServer(
            ("127.0.0.1", 0), self.offers, self.keys["prefill"], lambda: self.peers,
            worker="prefill", life=LIFE, clock=self.clock, on_given=self.given.append,
            tls=None if tls is None else tls.server,
        )  # fmt: skip
        self.peers.addresses["prefill"] = self.server.address

    def give(self, part: OfferedPart) -> GivenObjects:
        found = self.prefill.tier.give(part.label, part.keys, part.first)
        return found._replace(objects=tuple(self.tampers(list(found.objects))), is_whole=True)

    def ticket(self, label: DomainLabel, prompt: str, *, blocks: int = BLOCKS, **changed: object) -> str:
        """A ticket for what the prefill worker has of a prompt, and the offer behind it."""
        keys, now_ms = keys_of(prompt, blocks), self.clock.utc_us() // 1000
        assert label.spec is not None
        domain = self.prefill.world.keys.domain(label.spec)
        ticket = Ticket(
            "prefill", LIFE, "decode", next(self._nonces).to_bytes(16), domain, chain_digest(keys), blocks, now_ms,
            now_ms + 30_000,
        )._replace(**changed)  # type: ignore[arg-type]  # fmt: skip
        self.offers.put(Offer(ticket.nonce, (OfferedPart(label, 0, keys),), ticket.deadline_ms))
        key = self.keys["prefill"]
        return issue(ticket, key.verifier.key_id, key.sign)

    def read(self, text: str) -> Ticket:
        ticket = read_ticket(text, self.peers.keys, self.clock)
        assert isinstance(ticket, Ticket), ticket
        return ticket

    def fetch(self, text: str, *, worker: str = "decode", signer: str = "", seconds: float = 1.0) -> Fetched:
        return fetch_objects(
            self.read(text), text, self.keys[signer or worker], self.peers,
            worker=worker, life=PEER_LIFE, clock=self.clock, bytes_max=1 << 20, seconds=seconds,
            tls=None if self.tls is None else self.tls.client,
        )  # fmt: skip

    def close(self) -> None:
        self.server.close()
