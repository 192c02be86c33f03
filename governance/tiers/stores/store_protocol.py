"""The interface of a byte store for a tier, with vLLM's terms for the same steps.

    into = store.prepare_store(name, size, until_us)    # None: it has no room
    ...                                         # seal into it
    store.start_store(name)                     # it may be written from now on, while the next is sealed
    store.complete_store(name)                  # from now on it is there; False: another's is, and stays
    store.start_load(name)                      # it may be read from now on, while the one before is opened
    data = store.prepare_load(name)             # None: it is not there
    ...                                         # open it
    store.complete_load(name)
    gone = store.delete(names)

1. A store keeps and returns bytes under 32-byte names. It is not trusted: whatever it returns is opened with what is
   known about the object, or not at all.
2. An object that was not completed does not exist. An object is replaced whole, or not at all.
3. Between `prepare_load` and `complete_load` the bytes stay where they are; a delete takes effect for look-ups at once.
4. A start ends with the call that waits for it, or with the abandon that cancels it. Up to `in_flight` starts may be
   open. A store that gains nothing from a start ignores it.
5. A store that fails raises `StoreError`; one that has no room returns None. Neither changes what it holds.
6. An abandoned or late put may still take effect. It is in no index then: `page` lists it, and a scan ends it.
7. In a shared store the first writer of a name wins. Each object has one owner, and only the owner deletes it before it
   is overdue. `page` lists this process's objects, and all overdue ones, whoever wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

NAME_BYTES = 32


class Locked(NamedTuple):
    """An object that the store keeps until `until_us` (UTC), whoever deletes it."""

    name: bytes
    until_us: int


class Deleted(NamedTuple):
    """The result of a delete, `size` in bytes. `absent` did not exist; `failed` may still exist and must be asked
    again.

    `locked` are there until their time, and are not worth asking for before. Of a store that keeps versions `versions`
    and `markers` say how many of each were ended: an object is gone with the last of both.
    """

    objects: int
    size: int
    absent: tuple[bytes, ...] = ()
    failed: tuple[bytes, ...] = ()
    versions: int = 0
    markers: int = 0
    locked: tuple[Locked, ...] = ()


class Listed(NamedTuple):
    """One object in a store's listing, and its size."""

    name: bytes
    size: int


class TierStore(Protocol):
    """One place. Called on one thread at a time."""

    @property
    def kind(self) -> str:
        """`host`, `nvme` or `remote`, the policy's names of tiers."""

    @property
    def ends_by(self) -> str:
        """What a delete proves of the bytes: `zeroed`, `unlinked`; `deleted` where only the store's listing shows it.

        `key-destroyed` where it does nothing that can be shown: then the end of a key is the only proof.
        """

    @property
    def outlives(self) -> bool:
        """Whether its objects outlive the process."""

    @property
    def is_shared(self) -> bool:
        """Whether other workers store into it, and may find this worker's objects."""

    @property
    def in_flight(self) -> int:
        """The useful number of concurrent starts."""

    @property
    def prepares_in_memory(self) -> bool:
        """Whether preparing needs no call that may hang, so that any thread may do it."""

    @property
    def capacity_bytes(self) -> int:
        """Its capacity; for a shared store, this process's quota."""

    @property
    def used_bytes(self) -> int:
        """The bytes in use by its own books."""

    def taken(self, size: int) -> int:
        """Return the capacity that an object of `size` bytes takes."""

    def prepare_store(self, name: bytes, size: int, until_us: int = 0) -> memoryview | None:
        """Lend memory to seal `size` bytes into; None without room.

        `until_us` (UTC): the store may let the object go by itself from then on; 0: never. It proves nothing.
        """

    def start_store(self, name: bytes) -> None:
        """What was prepared is whole: `complete_store` follows. Never raises `StoreError`."""

    def complete_store(self, name: bytes) -> bool:
        """What was prepared is there now, in place of what was; False: another worker's is, and stays."""

    def abandon_store(self, name: bytes) -> None:
        """What was prepared is not wanted; a start that has not begun is cancelled."""

    def start_load(self, name: bytes) -> None:
        """`prepare_load` or `abandon_load` follows. Never raises `StoreError`."""

    def abandon_load(self, name: bytes) -> None:
        """What was started is not wanted, if anything was."""

    def prepare_load(self, name: bytes) -> memoryview | None:
        """The object's bytes, to be read; None where it is not there."""

    def complete_load(self, name: bytes) -> None:
        """They were read."""

    def peek(self, name: bytes, size: int) -> bytes | None:
        """At most the first `size` bytes of an object; None where it is not there."""

    def delete(self, names: Iterable[bytes]) -> Deleted:
        """End these objects."""

    def page(self, after: bytes, limit: int) -> list[Listed]:
        """The next objects by name, behind `after`; fewer than `limit` where that is all."""

    def is_own(self, name: bytes) -> bool:
        """Whether this worker has custody of an object, as far as was read; it is known without asking."""

    def left_by(self, name: bytes) -> bytes:
        """The mark of a dead worker whose heir this one is, where it left the object; else nothing. Known as well."""

    def inherit(self, died: Callable[[bytes], bool]) -> dict[bytes, bytes]:
        """Take over what workers left that died: what each wrote of itself, by the mark of its objects.

        `died`: whether what one wrote says so.
        """

    def holder(self) -> bytes:
        """What whoever held this worker's objects wrote last (`tiers.heirs`); nothing in a new place."""

    def write_holder(self, written: bytes, mark: bytes | None = None) -> None:
        """Put down who holds this worker's objects, or those of a mark that it has taken over."""

    def close(self) -> None:
        """Let everything go. What does not outlive the process is zeroed."""


class OwnPlace:
    """What a store says of owners that no other worker uses, and that ends with its process."""

    prepares_in_memory = False

    def is_own(self, name: bytes) -> bool:
        """Everything in it."""
        return True

    def left_by(self, name: bytes) -> bytes:
        """Nobody left anything here."""
        return b""

    def inherit(self, died: Callable[[bytes], bool]) -> dict[bytes, bytes]:
        """There is nothing to take over."""
        return {}

    def holder(self) -> bytes:
        """It was never another process's."""
        return b""

    def write_holder(self, written: bytes, mark: bytes | None = None) -> None:
        """Nobody comes after this process."""
