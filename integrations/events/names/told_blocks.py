"""The blocks that were published to routers, by the names that doors write into requests.

    told = ToldBlocks(names)
    told.tell(events)          # the events of one step, each with its namespace, in the order to send
    told.take_epochs(known)    # what is removed because its name has ended

1. A block is reported under the name of the party that may use it: a tenant's block under the tenant's name, a
   subject's or a session's under theirs. Where the policy gives a tenant's requests one name (`affinity`), it is
   reported under the tenant's. What is lent, or narrowed by a client's salt, is told under none.
2. A tenant's or a segment's block is told under the names of requests that stand on it, too, from the chain's first
   block on: an index sees their chains whole. Those names are bounded, and the oldest are let go.
3. Under a further name a block has another hash, made of its key and the name: indexes keep one entry for a hash. With
   `fleet_hashes` a block has the hash that all workers give to its tokens under this name (`block_hash`). Blocks of two
   domains can have one then: it is removed with the last of them.
4. A name ends with its scope's epoch, or its days: what was told under it is removed at once. What is stored later is
   told under the new one.
5. A clear ends everything that was told.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from kvcustody.governance.edge.current_namespaces import CurrentNamespaces
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.edge.named_requester import NamedRequester
from kvcustody.integrations.events.block_event import (
    CLEARED,
    REMOVED,
    STORED,
    BlockEvent,
    EventScope,
    split_keys,
)

WIDE_BLOCKS_MAX: Final = 1 << 15
FURTHER_MAX: Final = 1 << 16
RENAMED: Final = "renamed"  # the cause of a removal under a name that ended
LET_GO: Final = "let-go"  # of one that made room (rule 2)
_PERSON: Final = b"kvc-told-name"


class _Of(NamedTuple):
    """The common facts of one event's blocks, which their removal repeats."""

    scope: EventScope
    residency: int
    medium: str
    group: int | None


class _Id(NamedTuple):
    """A block in one medium and layer group."""

    key: bytes
    medium: str
    group: int | None


class _Told(NamedTuple):
    """A block under one name, with the hash that an index uses for it."""

    of: _Of
    key: bytes


class ToldBlocks:
    """The blocks that one publisher has published. Used on one thread."""

    def __init__(
        self,
        names: CurrentNamespaces,
        *,
        fleet_hashes: bool = False,
        wide_blocks_max: int = WIDE_BLOCKS_MAX,
        further_max: int = FURTHER_MAX,
    ) -> None:
        """Prepare the book. `wide_blocks_max`: blocks of tenants and segments that can be published again;
        `further_max`: see rule 2.

        `fleet_hashes`: see rule 3.
        """
        self._names = names
        self._fleet_hashes = fleet_hashes
        self._wide_blocks_max = wide_blocks_max
        self._further_max = further_max
        self._known: KnownEpochs | None = None
        self._forget()

    def _forget(self) -> None:
        self._name_of: dict[NamedRequester, str] = {}  # of every place under whose name something is told
        self._first: dict[NamedRequester, dict[_Id, _Told]] = {}  # under the name of who owns the block
        self._further: OrderedDict[tuple[NamedRequester, _Id], _Told] = OrderedDict()
        self._further_of: dict[NamedRequester, dict[_Id, None]] = {}
        self._places: dict[_Id, dict[NamedRequester, None]] = {}  # of `_further`
        self._wide: OrderedDict[_Id, BlockEvent] = OrderedDict()  # one block each
        self._first_blocks = 0
        self._times: dict[_Id, int] = {}  # how many blocks have one hash; only of fleet hashes

    def __len__(self) -> int:
        """Return the number of published blocks, counted once per name. Any thread."""
        return self._first_blocks + len(self._further)

    def take_epochs(self, known: KnownEpochs | None) -> list[BlockEvent]:
        """Name by these epochs from now on; return the removals of blocks under names that they end."""
        if known is self._known:
            return []
        self._known = known
        return [event for place in list(self._name_of) for event in self._renew(place)]

    def tell(self, events: Iterable[BlockEvent]) -> list[BlockEvent]:
        """Return the events in the form for routers: with their namespaces, and under further names."""
        named_events: list[BlockEvent] = []
        for event in events:
            if event.kind == CLEARED:
                self._forget()
                named_events.append(event)
            elif event.kind == STORED:
                named_events += self._stored(event)
            else:
                named_events += self._removed(event)
        return named_events

    # -- stores -------------------------------------------------------------------------------------------------------

    def _stored(self, event: BlockEvent) -> list[BlockEvent]:
        scope, events = event.scope, list[BlockEvent]()
        if scope.wide is not None:
            self._keep_wide(event)
        if scope.owner is None:
            events.append(event)
        else:
            events += self._renew(scope.owner)
            events += self._whole_chain(scope.owner, event)
            named = self._named(scope.owner, event)
            held, of = self._first.setdefault(scope.owner, {}), _of(event)
            for one, key in zip(_ids(event), split_keys(named.keys), strict=True):
                if one not in held:
                    self._count(one, key)
                    held[one] = _Told(of, key)
                    self._first_blocks += 1
            events.append(named)
        asker = event.requester
        if asker is not None and asker != scope.owner and scope.wide == asker.whole_tenant:
            events += self._renew(asker)
            events += self._whole_chain(asker, event)
            events += self._tell_further(asker, event)
        return events

    def _keep_wide(self, event: BlockEvent) -> None:
        parent, size = event.parent, event.block_tokens
        for at, one in enumerate(_ids(event)):
            tokens = array("q", event.tokens[at * size : (at + 1) * size]) if len(event.tokens) else ()
            self._wide[one] = event._replace(keys=one.key, parent=parent, tokens=tokens, requester=None)
            self._wide.move_to_end(one)
            parent = one.key
        while len(self._wide) > self._wide_blocks_max:
            self._wide.popitem(last=False)

    def _whole_chain(self, place: NamedRequester, event: BlockEvent) -> list[BlockEvent]:
        """Return what an index lacks of the chain before an event under this name; nothing where the chain is not known
        completely.
        """
        lacking: list[BlockEvent] = []
        before = _Id(event.parent, event.medium, event.group)
        while before.key and self._told_key(place, before) is None:
            block = self._wide.get(before)
            assert len(lacking) < len(self._wide) + 1, "a chain of keys is no circle"
            if block is None or block.scope.wide != place.whole_tenant:
                return []
            lacking.append(block)
            before = before._replace(key=block.parent)
        return [told for block in reversed(lacking) for told in self._tell_further(place, block)]

    def _tell_further(self, place: NamedRequester, event: BlockEvent) -> list[BlockEvent]:
        """Return a wide event under another place's name, unless it was published so."""
        ids = _ids(event)
        if all((place, one) in self._further for one in ids):
            return []
        named, of = self._named(place, event, further=True), _of(event)
        for one, key in zip(ids, split_keys(named.keys), strict=True):
            if (place, one) not in self._further:
                self._count(one, key)
                self._further[place, one] = _Told(of, key)
            self._further_of.setdefault(place, {})[one] = None
            self._places.setdefault(one, {})[place] = None
        return [named, *self._let_go()]

    def _named(self, place: NamedRequester, event: BlockEvent, *, further: bool = False) -> BlockEvent:
        """Return a stored event under a place's name, with an index's hashes of its blocks and of the block before
        them.
        """
        name = self._name(place)
        parent = self._told_key(place, _Id(event.parent, event.medium, event.group)) or event.parent
        keys, before, size = list[bytes](), parent, event.block_tokens
        for at, one in enumerate(_ids(event)):
            key, tokens = self._told_key(place, one), event.tokens[at * size : (at + 1) * size]
            if key is None and self._fleet_hashes and len(tokens):
                key = self._names.block_hash(name, before, tokens, event.lora_name)
            elif key is None:
                key = hash_under(one.key, name) if further else one.key
            keys.append(key)
            before = key
        return event._replace(keys=b"".join(keys), parent=parent, namespace=name, place=place)

    def _told_key(self, place: NamedRequester, one: _Id) -> bytes | None:
        """Return an index's hash of a block under a place's name; None where it was not published."""
        told = self._further.get((place, one)) or self._first.get(place, {}).get(one)
        return None if told is None else told.key

    def _count(self, one: _Id, key: bytes) -> None:
        """Count one more block under a hash."""
        if self._fleet_hashes:
            hashed = one._replace(key=key)
            self._times[hashed] = self._times.get(hashed, 0) + 1

    def _is_last(self, one: _Id, key: bytes) -> bool:
        """Return whether nothing else has this hash after a block under it ended."""
        if not self._fleet_hashes:
            return True
        hashed = one._replace(key=key)
        left = self._times.pop(hashed) - 1
        if left:
            self._times[hashed] = left
        return not left

    def _name(self, place: NamedRequester) -> str:
        """Return the name under which a place's blocks are published, or its current name."""
        name = self._name_of.get(place)
        if name is None:
            name = self._name_of[place] = self._names.of(*place, known=self._known)
        return name

    def _let_go(self) -> list[BlockEvent]:
        made: list[BlockEvent] = []
        while len(self._further) > self._further_max:
            place, one = next(iter(self._further))
            made += self._end_further(place, one, LET_GO)
        return made

    # -- removals -----------------------------------------------------------------------------------------------------

    def _removed(self, event: BlockEvent) -> list[BlockEvent]:
        events, ids = list[BlockEvent](), _ids(event)
        for one in ids:
            self._wide.pop(one, None)
        owner = event.scope.owner
        if owner is None:
            events.append(event)
        else:
            held = self._first.get(owner, {})
            ended = [(one, told.key) for one in ids if (told := held.pop(one, None)) is not None]
            self._first_blocks -= len(ended)
            keys = b"".join(key for one, key in ended if self._is_last(one, key))
            if keys:
                events.append(event._replace(keys=keys, namespace=self._name(owner), place=owner))
            self._forget_unused(owner)
        for one in ids:
            for place in list(self._places.get(one, ())):
                events += self._end_further(place, one, event.cause)
        return events

    def _end_further(self, place: NamedRequester, block_id: _Id, cause: str) -> list[BlockEvent]:
        (of, key), name = self._further.pop((place, block_id)), self._name_of[place]
        del self._further_of[place][block_id]
        places = self._places[block_id]
        del places[place]
        if not places:
            del self._places[block_id]
        self._forget_unused(place)
        return [_removal(of, [key], name, cause, place)] if self._is_last(block_id, key) else []

    def _forget_unused(self, place: NamedRequester) -> None:
        """Forget the name of a place with no published blocks left."""
        if not self._first.get(place) and not self._further_of.get(place):
            for held in (self._first, self._further_of, self._name_of):
                held.pop(place, None)

    def _renew(self, place: NamedRequester) -> list[BlockEvent]:
        """Give a place its current name; return the removals of blocks under its former one (rule 4)."""
        name, before = self._names.of(*place, known=self._known), self._name_of.get(place)
        if before is None or before == name:
            self._name_of[place] = name
            return []
        events: list[BlockEvent] = []
        ended = self._first.pop(place, {})
        self._first_blocks -= len(ended)
        for of, run in groupby(ended.items(), key=lambda each: each[1].of):
            if keys := [told.key for one, told in run if self._is_last(one, told.key)]:
                events.append(_removal(of, keys, before, RENAMED, place))
        for one in list(self._further_of.get(place, ())):
            events += self._end_further(place, one, RENAMED)
        self._name_of[place] = name
        return events


def takes_fleet_hashes(form: str) -> bool:
    """Return whether readers of this form assume that equal blocks have one hash at every worker."""
    return form == "dynamo"


def hash_under(key: bytes, name: str) -> bytes:
    """Return a block's hash under a further name."""
    return hashlib.blake2b(key + name.encode("ascii"), digest_size=len(key), person=_PERSON).digest()


def _ids(event: BlockEvent) -> list[_Id]:
    return [_Id(key, event.medium, event.group) for key in split_keys(event.keys)]


def _of(event: BlockEvent) -> _Of:
    return _Of(event.scope, event.residency, event.medium, event.group)


def _removal(of: _Of, keys: Sequence[bytes], name: str, cause: str, place: NamedRequester) -> BlockEvent:
    return BlockEvent(
        REMOVED,
        of.scope,
        b"".join(keys),
        of.residency,
        medium=of.medium,
        group=of.group,
        cause=cause,
        namespace=name,
        place=place,
    )
