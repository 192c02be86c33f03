"""The scheduler's half of hand-overs: a ticket for a request prefilled here, and a fetch for one that carries a ticket.

    params = handover.offer(request, governed)           # of a request that ended: what its answer carries
    handover.must_wait(request, governed, computed)      # of one that waits: whether its fetch is not over

1. A request that says `do_remote_decode` and names a peer (`kvcustody_peer`) is prefilled for it. Its blocks are stored
   in the first tier whatever that is expected to cost, and its answer carries a ticket (`kvcustody_ticket`).
2. A request that comes with a ticket waits for the fetch, once and no longer than `_WAIT_US`. Whatever came is in the
   tier then, and is looked up, decided and loaded as everything in it is.
3. The ticket has to be of this request's own blocks: of its domain, by its own keys. Otherwise nobody is asked.
4. Each offer, each fetch, and each that was answered here is on record in the tenant's log. While an offer may be
   fetched, an idle engine takes a step now and then to hear of it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.audit.kinds import BlocksHandedOver
from kvcustody.clock import MICROSECONDS
from kvcustody.errors import ConfigError, KeyringError, NoKeyError
from kvcustody.governance.decisions.access_plan import label_of
from kvcustody.governance.external.block_keys import LazyKeys
from kvcustody.governance.handover.exchange import AnsweredFetch
from kvcustody.governance.handover.offers import OFFERS_MAX, Offer, OfferedPart
from kvcustody.governance.handover.peers import PeerKey, watch_peers
from kvcustody.governance.handover.ticket import RefusedTicket, Ticket, chain_digest, issue, read_ticket
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.integrations.vllm.tiers.copy_plans import Fetching
from kvcustody.integrations.vllm.tiers.tier_messages import (
    CopyJob,
    CopyRule,
    FetchCopies,
    FetchedCopies,
    OfferCopies,
)
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvcustody.allocator.external.residency import ExternalResidency
    from kvcustody.governance.external.engine_port import EnginePort
    from kvcustody.governance.settings import Settings
    from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest

PEER: Final = "kvcustody_peer"
TICKET: Final = "kvcustody_ticket"
_WAIT_US = 3 * MICROSECONDS
_LOOK_US = 500_000
_NONCE_BYTES = 16
_log = get_logger(__name__)


class _Span(NamedTuple):
    """Blocks of a chain in one domain."""

    domain: Domain
    first: int
    last: int


class _Fetch(NamedTuple):
    """A running fetch for a request of `tenant`. `pair`: tenant and classification of its copies."""

    fetching: Fetching
    ticket: Ticket
    tenant: str
    pair: tuple[str, str]


class SchedulerHandover:
    """The hand-overs of one engine, over its first tier. Called on the engine's thread."""

    def __init__(
        self,
        settings: Settings,
        tier: str,
        life: str,
        port: EnginePort,
        keys: SealKeys,
        send: Callable[[CopyJob], int],
        rule: Callable[[str, str, str], CopyRule],
        *,
        block_tokens: int,
    ) -> None:
        """Prepare hand-overs. `rule`: what the policy permits a tenant's blocks of a classification in a tier.

        Raises a `CustodyError` where the key or the peers cannot be read.
        """
        assert settings.handover_peers_path is not None
        self._worker, self._tier, self._life = settings.worker_name, tier, life
        self._gives, self._lease_ms = bool(settings.handover_address), 1000 * settings.handover_lease_seconds
        self._key = PeerKey.open(settings.handover_key_file, settings.worker_name)
        self._peers = watch_peers(settings.handover_peers_path, port.clock)
        own = self._peers().keys.get(self._worker)
        if own is None or own != self._key.verifier:
            raise ConfigError(
                f"setting `handover_peers_path`: has a different key for `{self._worker}`, or none; add "
                f"`{self._key.verifier}`",
                path=settings.handover_peers_path,
            )
        self._port, self._keys, self._send, self._block_tokens = port, keys, send, block_tokens
        self._rule = rule
        self._offered: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # by nonce: of which tenant, blocks
        self._awaited: dict[bytes, int] = {}  # offers that nobody has fetched, with their deadlines (boot time)
        self._looked_us = 0
        self._fetched: dict[int, _Fetch] = {}  # by job

    # -- what is prefilled here ---------------------------------------------------------------------------------------

    def peer_of(self, given: object, wants_remote_decode: object) -> str:
        """Return the worker for which a request is prefilled; empty: none that may fetch."""
        if given is None or not wants_remote_decode or not self._gives:
            return ""
        if not isinstance(given, str) or given not in self._peers().keys or given == self._worker:
            _log.warning("no hand-over", reason="the peer is not in `handover_peers_path`")
            return ""
        return given

    def offer(self, request: Request, governed: GovernedRequest) -> dict[str, Any] | None:
        """Return what an ended request's answer carries; None where nothing is handed over."""
        residency, keys = governed.residency, request.block_hashes
        if not governed.hands_to or residency is None or residency.monitored is not None:
            return None
        if type(keys) is LazyKeys:
            keys = request.block_hashes = keys.complete()
        blocks = min(len(keys), (request.num_prompt_tokens - 1) // self._block_tokens)
        computed = request.num_computed_tokens // self._block_tokens
        blocks = min(blocks, computed)
        if blocks <= 0 or not self._port.may_publish(residency) or residency.granted_blocks:
            return None
        chain = b"".join(keys[:blocks])
        now_ms = self._port.clock.utc_us() // 1000
        try:
            domain = self._domain(residency)
        except NoKeyError:
            return None
        ticket = Ticket(
            self._worker,
            self._life,
            governed.hands_to,
            os.urandom(_NONCE_BYTES),
            domain,
            chain_digest(chain),
            blocks,
            now_ms,
            now_ms + self._lease_ms,
        )
        size = len(chain) // blocks
        parts = tuple(
            OfferedPart(label_of(span.domain), span.first, chain[: span.last * size])
            for span in _spans(residency, blocks)
        )
        self._send(OfferCopies(0, self._tier, Offer(ticket.nonce, parts, ticket.deadline_ms)))
        self._offered[ticket.nonce] = (residency.tenant, blocks)
        self._awaited[ticket.nonce] = self._port.clock.now_us() + 1000 * self._lease_ms
        if len(self._offered) > OFFERS_MAX:
            self._offered.popitem(last=False)
        self._record("offered", residency.tenant, ticket.peer, "", ticket.nonce, blocks)
        return {TICKET: issue(ticket, self._key.verifier.key_id, self._key.sign)}

    def next_look_us(self) -> int | None:
        """Return when an idle engine must check whether an offer was fetched (rule 4); None: there is none."""
        now_us = self._port.clock.now_us()
        self._awaited = {nonce: until_us for nonce, until_us in self._awaited.items() if until_us > now_us}
        return self._looked_us + _LOOK_US if self._awaited else None

    def looked(self) -> None:
        """Take note that a step leaves, whose answers report fetches."""
        self._looked_us = self._port.clock.now_us()

    def given(self, given: AnsweredFetch) -> None:
        """Take note that a fetch was answered here."""
        self._awaited.pop(given.nonce, None)
        tenant, blocks = self._offered.get(given.nonce, ("", 0))
        if not tenant:
            _log.warning("hand-over refused", peer=given.peer, reason=given.reason)
            return
        step = "refused" if given.reason else "given"
        self._record(
            step,
            tenant,
            given.peer,
            given.peer_life,
            given.nonce,
            blocks,
            given.objects,
            given.size,
            given.reason,
        )

    # -- what was prefilled elsewhere ---------------------------------------------------------------------------------

    def must_wait(self, request: Request, governed: GovernedRequest, computed_tokens: int) -> bool:
        """Return whether the request's fetch is running (rule 2); begins it."""
        fetching = governed.fetching
        if fetching is None:
            return False
        if fetching.jobs is None:
            self._begin(request, governed, fetching, computed_tokens)
        if fetching.jobs and self._port.clock.now_us() < fetching.until_us:
            return True
        governed.fetching = None
        return False

    def _begin(self, request: Request, governed: GovernedRequest, fetching: Fetching, computed_tokens: int) -> None:
        fetching.jobs = set()
        residency = governed.residency
        if residency is None or residency.monitored is not None:
            return
        ticket = read_ticket(fetching.text, self._peers().keys, self._port.clock)
        if isinstance(ticket, RefusedTicket):
            self._record("refused", residency.tenant, "", "", b"", 0, reason=ticket.reason)
            return
        if computed_tokens >= ticket.blocks * self._block_tokens:
            return
        keys = request.block_hashes
        if type(keys) is LazyKeys:
            keys = request.block_hashes = keys.complete()
        chain, reason = b"".join(keys[: ticket.blocks]), ""
        try:
            if ticket.peer != self._worker:
                reason = "other-peer"
            elif ticket.blocks > len(keys) or (chain_digest(chain), self._domain(residency)) != (
                ticket.chain,
                ticket.domain,
            ):
                reason = "other-blocks"
        except NoKeyError:
            reason = "other-blocks"
        if reason:
            self._record(
                "refused",
                residency.tenant,
                ticket.worker,
                ticket.life,
                ticket.nonce,
                ticket.blocks,
                reason=reason,
            )
            return
        size = len(chain) // ticket.blocks
        fetching.until_us = self._port.clock.now_us() + _WAIT_US
        for span in _spans(residency, ticket.blocks):
            if self._port.may_restore(residency, span.domain):
                label = label_of(span.domain)
                rule = self._rule(self._tier, label.tenant, label.classification)
                job = FetchCopies(0, self._tier, ticket, fetching.text, label, chain[: span.last * size], rule)
                number = self._send(job)
                fetching.jobs.add(number)
                self._fetched[number] = _Fetch(fetching, ticket, residency.tenant, (label.tenant, label.classification))

    def fetched(self, number: int, result: FetchedCopies) -> None:
        """Take one worker's answer to a fetch."""
        if number in self._fetched:
            _, ticket, tenant, _ = self._fetched[number]
            step = "received" if result.blocks else "refused"
            whose = (tenant, ticket.worker, ticket.life, ticket.nonce)
            self._record(step, *whose, result.blocks, size=result.size, reason=result.reason[:128])

    def is_over(self, number: int) -> None:
        """Take note that every worker has answered."""
        found = self._fetched.pop(number, None)
        if found is not None and found.fetching.jobs is not None:
            found.fetching.jobs.discard(number)

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """The tenants and classifications of running fetches, whose rules workers need after a change of policy."""
        return {one.pair for one in self._fetched.values()}

    def _domain(self, residency: ExternalResidency) -> bytes:
        spec = label_of(residency.domain).spec
        if spec is None:
            raise KeyringError("the request has no domain of its own")
        return self._keys.domain(spec)

    def _record(
        self,
        step: str,
        tenant: str,
        peer: str,
        peer_life: str,
        nonce: bytes,
        blocks: int,
        objects: int = 0,
        size: int = 0,
        reason: str = "",
    ) -> None:
        at_us = self._port.clock.now_us()
        event = BlocksHandedOver(at_us, tenant, step, peer, peer_life, nonce.hex(), blocks, objects, size, reason)
        self._port.record_copies([event])


def _spans(residency: ExternalResidency, blocks: int) -> list[_Span]:
    """Return the owners of a request's first `blocks` blocks: a segment's, then its own."""
    shared = min(residency.segment_blocks, blocks)
    spans = []
    if shared and residency.segment_domain is not None:
        spans.append(_Span(residency.segment_domain, 0, shared))
    if shared < blocks:
        spans.append(_Span(residency.domain, shared, blocks))
    return spans
