"""An engine adapter's public events about governed blocks: stored, removed or cleared, always with a scope.

1. An event is a tuple and its keys are one `bytes`: making one costs the engine's thread no work per block.
2. Every event carries a scope, removals and clears included; an event without one is refused, never published.
3. What leaves of a scope names a tenant and a domain, never a subject, a session or a key. Token ids and a caller's
   salt travel beside it and leave the process only where the setting `kv_events_tokens` says `published`.

An adapter collects the events of one engine step in a list and hands it over at once:

    publisher.publish([stored(scope, keys, residency=7, parent=before, block_tokens=16), removed(scope, gone)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from kvcustody.allocator.pool.accounting import Domain
from kvcustody.allocator.prefix.node import KEY_BYTES
from kvcustody.errors import IsolationError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind

STORED, REMOVED, CLEARED = "stored", "removed", "cleared"
KINDS = (STORED, REMOVED, CLEARED)
EVERY_TENANT = "*"
WORKER = "worker"
_OF_EPOCHS: Final = "epoch-"  # how salts begin that erase epochs make


class EventPlaces(NamedTuple):
    """The names under which a domain's blocks are published; they stay in this process.

    `owner`: of every request that may use them; None where fewer may, or others. `wide`: the tenant where requests of
    more than one subject may have these blocks before their own. `asker`: of requests whose own domain it is.
    """

    owner: NamedRequester | None = None
    wide: NamedRequester | None = None
    asker: NamedRequester | None = None


class EventScope(NamedTuple):
    """The owner of blocks and their policy; make one per domain and keep it.

    `scope` is a `ScopeKind` value, or `request` for a domain that serves one request alone, or `worker` for events
    about the whole pool (`tenant` is `*` then). `domain` is the allocator's domain tag, unique in one incarnation.
    `owner`, `wide` and `asker` are those of `EventPlaces`.
    """

    tenant: str
    scope: str
    classification: str
    domain: int
    revision: int
    owner: NamedRequester | None = None
    wide: NamedRequester | None = None
    asker: NamedRequester | None = None


class BlockEvent(NamedTuple):
    """One change to one run of blocks of one chain, or the end of all blocks of a scope.

    `keys`: the full 32-byte block keys, concatenated in chain order; empty only when cleared. `parent`: the key
    before the first one (b"" at the start of a chain). `residency`: the residency that stored or gave up the blocks
    (0: none in particular, as in an eviction). `tokens`: the token ids of exactly these blocks, or nothing.
    `salt`: the caller's own narrowing salt, never a scope token: whoever holds a scope token is its tenant.
    `cause`: why blocks were removed or cleared, as in the ledger. `requester`: whose request stored them; it stays in
    this process. `namespace`: what routers know these blocks by, and `place`, which stays in this process, whose name
    it is: set by `names.told_blocks` alone.
    """

    kind: str
    scope: EventScope
    keys: bytes = b""
    residency: int = 0
    parent: bytes = b""
    block_tokens: int = 0
    tokens: Sequence[int] | Any = ()
    salt: str | None = None
    medium: str = "GPU"
    group: int | None = None
    lora_name: str | None = None
    cause: str = ""
    requester: NamedRequester | None = None
    namespace: str = ""
    place: NamedRequester | None = None


def scope_of(domain: Domain, revision: int, by_tenant: Callable[[str], bool] = lambda _tenant: False) -> EventScope:
    """Return the scope of a governed domain's events.

    Raises:
        IsolationError: the domain has no label.

    `by_tenant`: whether the policy has all requests of a tenant named as one.
    """
    label = domain.label
    if not isinstance(label, DomainLabel):
        raise IsolationError(f"domain `{domain.tag}` has no label, so its events have no scope", tag=domain.tag)
    whose = (label.tenant, label.scope, label.classification)
    return EventScope(*whose, domain.tag, revision, *places_of(label.spec, by_tenant=by_tenant(label.tenant)))


def places_of(spec: DomainSpec | None, *, by_tenant: bool = False) -> EventPlaces:
    """Return the names for a domain's blocks. `by_tenant`: all the tenant's requests share one name (`affinity`)."""
    if spec is None or spec.issuer is None or spec.tenant is None:
        return EventPlaces()
    tenant = NamedRequester(spec.issuer, spec.tenant)
    if spec.scope is ScopeKind.SEGMENT:
        return EventPlaces(wide=tenant)
    named = tenant if by_tenant else NamedRequester(*tenant[:2], spec.subject, spec.session)
    if spec.salt is not None and not spec.salt.startswith(_OF_EPOCHS):
        return EventPlaces(asker=named)
    return EventPlaces(named, tenant if spec.scope is ScopeKind.TENANT else None, named)


def worker_scope(revision: int) -> EventScope:
    """Return the scope of events about every block of the pool."""
    return EventScope(EVERY_TENANT, WORKER, "", 0, revision)


def stored(
    scope: EventScope,
    keys: bytes,
    *,
    residency: int,
    parent: bytes = b"",
    block_tokens: int,
    tokens: Sequence[int] | Any = (),
    salt: str | None = None,
    medium: str = "GPU",
    group: int | None = None,
    lora_name: str | None = None,
    requester: NamedRequester | None = None,
) -> BlockEvent:
    """Return the event that blocks were published and may be reused from now on by whoever the scope names."""
    return BlockEvent(
        *(STORED, scope, keys, residency, parent, block_tokens, tokens, salt, medium, group, lora_name),
        requester=requester,
    )


def removed(
    scope: EventScope,
    keys: bytes,
    *,
    cause: str,
    residency: int = 0,
    medium: str = "GPU",
    group: int | None = None,
) -> BlockEvent:
    """Return the event that blocks left the index: expired, evicted, erased or at their ceiling."""
    return BlockEvent(REMOVED, scope, keys, residency, medium=medium, group=group, cause=cause)


def cleared(revision: int, cause: str) -> BlockEvent:
    """Return the event that every block of the pool left the index.

    Foreign consumers know no narrower clear, so the end of one domain is told as `removed`.
    """
    return BlockEvent(CLEARED, worker_scope(revision), cause=cause)


def check_event(event: BlockEvent) -> None:
    """Refuse an event that must not be published.

    Raises:
        IsolationError: it has no scope, cut keys, or other blocks' tokens.
    """
    scope = event.scope
    if scope.__class__ is not EventScope or not scope.tenant or not scope.scope:
        raise IsolationError(f"a `{event.kind}` event without a scope is not published", kind=event.kind)
    if event.kind not in KINDS:
        raise IsolationError(f"`{event.kind}` is no kind of block event", kind=event.kind)
    size = len(event.keys)
    if size % KEY_BYTES or len(event.parent) not in (0, KEY_BYTES) or (size == 0) != (event.kind == CLEARED):
        raise IsolationError(
            f"a `{event.kind}` event needs whole block keys of `{KEY_BYTES}` bytes, not `{size}` bytes",
            kind=event.kind,
            bytes=size,
        )
    if len(event.tokens) not in (0, size // KEY_BYTES * event.block_tokens):
        raise IsolationError(
            f"`{len(event.tokens)}` token ids are not those of `{size // KEY_BYTES}` whole blocks",
            tokens=len(event.tokens),
        )
    if event.kind == CLEARED and scope.scope != WORKER:
        raise IsolationError(
            f"a clear of `{scope.scope}` scope would clear every tenant's blocks at consumers; send removals",
            scope=scope.scope,
        )


def split_keys(keys: bytes) -> list[bytes]:
    """Return the block keys as a list."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
