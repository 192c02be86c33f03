"""Erase epochs: numbers that erasures raise, so that routers no longer find earlier blocks.

1. Fleet, tenant, subject and session each have an epoch; an erasure raises the one of the scope that it narrows. A
   tenant has one more, of the name that all its subjects share: erasures of single subjects raise it in batches.
2. The control plane gives out the numbers, one for each raise, in one order for the whole fleet. The epoch of a scope
   is the newest of its numbers, 0 where there is none. The newest number is the version of the whole.
3. Scopes travel as tags under a key of the control plane: a snapshot names nobody.
4. A raise is kept until neither a block nor a router's name from before it can still be there: what is at or below the
   `floor` is forgotten.
5. A snapshot has a digest over what it keeps. Who adds to a snapshot what came after it gets the same digest, or has
   lost something and asks for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvcustody.errors import ServiceError
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.governance.identity import tlv

TAG_BYTES: Final = 16
KEY_BYTES: Final = 32
_TAG = np.dtype([("high", ">u8"), ("low", ">u8")])


class Epochs(NamedTuple):
    """The epochs that apply to a request: of fleet and tenant, and of its private scope or the shared name."""

    fleet: int = 0
    tenant: int = 0
    private: int = 0


NO_EPOCHS: Final = Epochs()


class EpochScope(NamedTuple):
    """The scope of an epoch: the fleet where nothing is named; a tenant's shared name where `is_shared`."""

    issuer: str = ""
    tenant: str = ""
    subject: str | None = None
    session: str | None = None
    is_shared: bool = False


class EpochTags:
    """Tags of scopes under one key of the control plane."""

    def __init__(self, key: bytes) -> None:
        """`key`: 32 bytes."""
        self._state = hashlib.blake2b(key=key, digest_size=TAG_BYTES, person=b"erase-epochs")

    def of(self, scope: EpochScope) -> bytes:
        """The tag of a scope, `TAG_BYTES` long."""
        state = self._state.copy()
        fields: dict[int, tlv.Value] = {
            1: scope.issuer, 2: scope.tenant, 3: scope.subject, 4: scope.session, 5: int(scope.is_shared)
        }  # fmt: skip
        state.update(tlv.encode("kvcustody/erase-epoch", 1, fields))
        return state.digest()


class RaisedEpoch(NamedTuple):
    """One raise: its number and the tag of its scope."""

    number: int
    tag: bytes


class EraseEpochs:
    """The kept raises, immutable. 36 bytes each; a look-up is two binary searches."""

    def __init__(self, raised: Sequence[RaisedEpoch] = (), *, version: int = 0, floor: int = 0) -> None:
        """`raised` in the order of their numbers, all above `floor` and none above `version`.

        Raises `ServiceError` where they are not.
        """
        numbers = np.array([one.number for one in raised], np.int64)
        joined = b"".join(one.tag for one in raised)
        if len(joined) != TAG_BYTES * len(raised):
            raise ServiceError(f"erase epochs: a tag must have {TAG_BYTES} bytes")
        self._take(numbers, np.frombuffer(joined, _TAG), version, floor)

    def _take(self, numbers: npt.NDArray[np.int64], tags: npt.NDArray[np.void], version: int, floor: int) -> None:
        bounded = np.concatenate(([floor], numbers))
        if floor > version or bounded[-1] > version or bool((np.diff(bounded) <= 0).any()):
            raise ServiceError(
                f"erase epochs: numbers must rise from above {floor} to at most {version}",
                floor=floor,
                version=version,
            )
        self.version, self.floor = version, floor
        self._numbers = numbers
        self._tags = tags.astype(_TAG, copy=False)  # joined arrays have another byte order
        high = tags["high"].astype(np.uint64)
        order = np.lexsort((numbers, high))
        self._high, self._places = high[order], order.astype(np.int32)

    @cached_property
    def digest(self) -> str:
        """The digest of version, floor and every kept raise (rule 5)."""
        hasher = hashlib.blake2b(digest_size=32, person=b"epoch-snapshot")
        hasher.update(self.version.to_bytes(8, "big") + self.floor.to_bytes(8, "big"))
        hasher.update(self._numbers.astype(">i8").tobytes())
        hasher.update(self._tags.tobytes())
        return hasher.hexdigest()

    def __len__(self) -> int:
        return len(self._numbers)

    def epoch(self, tag: bytes) -> int:
        """The epoch of the scope with this tag."""
        high, low = int.from_bytes(tag[:8], "big"), int.from_bytes(tag[8:], "big")
        start, end = (int(self._high.searchsorted(np.uint64(high), side)) for side in ("left", "right"))
        for place in self._places[start:end][::-1]:  # the newest first
            if self._tags[place]["low"] == low:
                return int(self._numbers[place])
        return 0

    def after(self, version: int, limit: int) -> tuple[RaisedEpoch, ...]:
        """Return at most `limit` raises with a number above `version`, the lowest first."""
        first = int(self._numbers.searchsorted(version, "right"))
        numbers, tags = self._numbers[first : first + limit], self._tags[first : first + limit]
        return tuple(RaisedEpoch(int(number), tag.tobytes()) for number, tag in zip(numbers, tags, strict=True))

    def raised_after(self, version: int) -> frozenset[bytes]:
        """Return the tags of kept scopes that were raised after `version`."""
        return frozenset(tag.tobytes() for tag in self._tags[self._numbers > version])

    def contains(self, other: EraseEpochs) -> bool:
        """Whether every raise of `other` is kept or has ended here."""
        kept = other._numbers > self.floor
        numbers, tags = other._numbers[kept], other._tags[kept]
        if other.version > self.version:
            return False
        places = self._numbers.searchsorted(numbers)
        if len(places) and int(places[-1]) >= len(self._numbers):
            return False
        return bool((self._numbers[places] == numbers).all() and (self._tags[places] == tags).all())

    def extended(self, raised: Sequence[RaisedEpoch], *, version: int, floor: int) -> Self:
        """Return these raises and later ones, without those at or below `floor`; raises `ServiceError` as `__init__`
        does.
        """
        if version < self.version or floor < self.floor:
            raise ServiceError(
                f"erase epochs: version {version} and floor {floor} are older than {self.version} and {self.floor}",
                version=version,
                floor=floor,
            )
        if (version, floor) == (self.version, self.floor) and not raised:
            return self
        more = type(self)(raised, version=version, floor=self.version)
        kept = self._numbers > floor
        later = more._numbers > floor
        snapshot = type(self)(version=version, floor=floor)
        snapshot._take(
            np.concatenate((self._numbers[kept], more._numbers[later])),
            np.concatenate((self._tags[kept], more._tags[later])),
            version,
            floor,
        )
        return snapshot


class KnownEpochs(NamedTuple):
    """A snapshot with the tags of its key: it answers the epochs of any requester.

    `namespace_days`: after how many days names end, as long as the control plane keeps a raise; None: it did not say.
    `scopes`: whose names requests go by.
    `shortest_ceiling_us`: the shortest that any block may exist under the policies in effect; None: it was not said.
    """

    epochs: EraseEpochs
    tags: EpochTags
    namespace_days: int | None = None
    scopes: NameScopes = NameScopes()
    shortest_ceiling_us: int | None = None

    def follows(self, before: KnownEpochs) -> bool:
        """Whether no name that `before` ended would be valid again.

        Either each of its raises is here, or the fleet was raised above all that it knew: that ends every name.
        """
        if not before.epochs.version or self.epochs.epoch(self.tags.of(EpochScope())) > before.epochs.version:
            return True
        return self.has_key_of(before) and self.epochs.contains(before.epochs)

    def has_key_of(self, other: KnownEpochs) -> bool:
        """Whether both tag scopes with the same key."""
        return self.tags is other.tags or self.tags.of(EpochScope()) == other.tags.of(EpochScope())

    def of(self, issuer: str, tenant: str, subject: str | None = None, session: str | None = None) -> Epochs:
        """Return the epochs of a request of this subject, or this session, or of nobody within the tenant."""
        return Epochs(*map(self.epochs.epoch, self.tags_of(issuer, tenant, subject, session)))

    def tags_of(
        self, issuer: str, tenant: str, subject: str | None = None, session: str | None = None
    ) -> tuple[bytes, ...]:
        """Return the tags of the scopes whose epochs `of` returns, in the same order."""
        if subject is not None:
            private = EpochScope(issuer, tenant, subject)
        elif session is not None:
            private = EpochScope(issuer, tenant, session=session)
        else:
            private = EpochScope(issuer, tenant, is_shared=True)
        return tuple(map(self.tags.of, (EpochScope(), EpochScope(issuer, tenant), private)))
