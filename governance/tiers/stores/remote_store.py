"""Sealed objects in a remote store that several workers share: the part that is equal for every store.

    store = RemoteStore(client, worker="gpu-1", capacity_bytes=quota, object_bytes_max=largest)
    guarded = GuardedStore(store, seconds=1.0, clock=clock)      # deadlines, a breaker, and `in_flight` lanes

1. What lies in the store is 24 bytes (owner 16, due 8) and the sealed object. The 24 bytes say who ends it; a store
   that changes them has bytes deleted sooner or later, and nothing opened.
2. The first writer of a name wins. A put that finds the name taken reads who took it: where that is this very put,
   whose answer was lost, it is kept; else it is another's.
3. `page` lists what this owner has, and what is overdue by `OVERDUE_US` by whoever stored it: whoever finds that may
   end it. Whose an object is is read once for each name.
4. A request that fails is made once more, as long as no more than a tenth of the last ones were. A put or a delete that
   is made twice does what it did.
5. In memory are at most `in_flight` objects that are being stored, and twice as many that are being loaded. Memory of
   `_SPARES` times `in_flight` of them is kept: what is fetched into fresh memory waits for its pages.
6. The quota counts what this owner has, by its own books; the store's own room is the store's.
7. What stands for a worker in its objects is its *mark*, until another worker says beside the objects that it is its
   heir: the first that says so is. From then on that mark's objects are the heir's, and those of its own heir after it;
   who comes back under the dead worker's name begins with another mark. An heir is told of a death by its caller.

Safe for threads; with more than one lane calls overlap.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

from kvcustody.errors import StoreError
from kvcustody.governance.tiers.seal.object_layout import HEADER_BYTES
from kvcustody.governance.tiers.stores.store_protocol import Deleted, Listed

OWNER_BYTES = 16
OVERDUE_US = 3_600_000_000
_ENVELOPE = struct.Struct(f"<{OWNER_BYTES}sQ")
ENVELOPE_BYTES = _ENVELOPE.size
_PAGES_MAX = 100_000  # of a listing, in which nothing is this owner's
_OTHERS_MAX = 100_000  # names of other owners whose owner is not read again
_AGAIN_SHARE, _AGAIN_MAX = 0.1, 10.0
_HEIR, _MARKS = "-heir", "-marks"  # notes beside a mark's own: who took its objects over, and whose it has
_LIVES_MAX, _MARKS_MAX = 256, 255
_SPARES = 2
Answer = TypeVar("Answer")


class ObjectClient(Protocol):
    """The client of one kind of store. Thread-safe; each call is one request or a few, and ends by itself.

    Raises `StoreError`, which never has a secret in it.
    """

    @property
    def place(self) -> str:
        """The store's name in messages."""

    @property
    def ends_by(self) -> str:
        """What its delete proves, as in `TierStore`."""

    @property
    def deletes_max(self) -> int:
        """The number of names that it deletes well within a deadline."""

    def put(self, name: bytes, data: memoryview, lives_us: int) -> bool:
        """Store where the name is free; returns whether it was. `lives_us`: when the object may expire; 0: never."""

    def get(self, name: bytes, size_max: int, room: Callable[[int], memoryview]) -> memoryview | None:
        """Return the object, or the first `size_max` bytes of a longer one; None without one.

        It may be received into `room(size)`, which is at least as long.
        """

    def peek(self, name: bytes, size: int) -> bytes | None:
        """Return at most the first `size` bytes; None without an object."""

    def delete(self, names: Sequence[bytes]) -> Deleted:
        """Delete these with everything that the store keeps of them."""

    def page(self, after: bytes, limit: int) -> list[Listed]:
        """Return the next names with their sizes, in the store's order; none at the end."""

    def read_note(self, name: str) -> bytes:
        """Return a note beside the objects; empty without one."""

    def write_note(self, name: str, data: bytes) -> None:
        """Write a note, and replace the one before."""

    def write_first_note(self, name: str, data: bytes) -> bool:
        """Write a note where there is none; returns whether it was written."""

    def close(self) -> None:
        """Close connections."""


def owner_of(*parts: str) -> bytes:
    """Return a worker's mark in its objects; without a guess of the name it reveals nothing."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=OWNER_BYTES, person=b"kvc owner").digest()


def _lives(worker: str) -> Iterator[bytes]:
    """The marks of a worker of this name, one behind the other: each follows one that an heir took over."""
    yield owner_of(worker)
    yield from (owner_of(worker, str(life)) for life in range(1, _LIVES_MAX))


class _Prepared(NamedTuple):
    """Memory for one object, its envelope included."""

    memory: bytearray
    size: int
    until_us: int


class RemoteStore:
    """`capacity_bytes` of objects of one owner, behind `client`."""

    kind, outlives, is_shared = "remote", True, True
    prepares_in_memory = True

    def __init__(
        self,
        client: ObjectClient,
        *,
        worker: str,
        capacity_bytes: int,
        object_bytes_max: int,
        in_flight: int = 8,
        heir_of: Sequence[str] = (),
        utc_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """`object_bytes_max`: no sealed object is longer; `utc_us`: what is overdue is by this clock.

        `heir_of`: workers whose objects this one takes over where they died (`inherit`).
        """
        self._worker, self._heir_of = worker, tuple(heir_of)
        self._own_marks: list[bytes] = []  # this owner's own first; none before the store was asked
        self._left: dict[bytes, bytes] = {}  # of what is this owner's, whose mark is another's
        self.capacity_bytes, self.in_flight = capacity_bytes, in_flight
        self._client, self._utc_us, self.ends_by = client, utc_us, client.ends_by
        self._object_bytes_max = object_bytes_max
        self._lock = threading.Lock()
        self._sizes: dict[bytes, int] = {}  # of what this owner has there
        self._used = self._preparing = 0
        self._others: OrderedDict[bytes, int] = OrderedDict()  # when an object of another owner is due
        self._prepared: dict[bytes, _Prepared] = {}
        self._spares: list[bytearray] = []
        self._loading: dict[bytes, list[bytearray | None]] = {}  # what each was received into
        self._again = _AGAIN_MAX  # requests that may be made once more
        self._readers = ThreadPoolExecutor(in_flight, thread_name_prefix="kvcustody-owners")

    @property
    def used_bytes(self) -> int:
        """The bytes of this owner's stored objects, and of those in flight."""
        return self._used + self._preparing

    def taken(self, size: int) -> int:
        """The object's own bytes."""
        return size

    # -- in -------------------------------------------------------------------------------------------------------

    def prepare_store(self, name: bytes, size: int, until_us: int = 0) -> memoryview | None:
        """Lend memory to seal into, which is sent as it is."""
        self.abandon_store(name)
        with self._lock:
            if self._used + self._preparing + size > self.capacity_bytes:
                return None
            self._preparing += size
        whole = ENVELOPE_BYTES + size
        memory = self._memory(whole)
        self._prepared[name] = _Prepared(memory, size, until_us)
        return memoryview(memory)[ENVELOPE_BYTES:whole]

    def _memory(self, size: int) -> bytearray:
        """Memory for an object and its envelope, used before where there is any."""
        with self._lock:
            for at, spare in enumerate(self._spares):
                if len(spare) >= size:
                    return self._spares.pop(at)
        return bytearray(size)

    def start_store(self, name: bytes) -> None:
        """Do nothing: `GuardedStore` has the lanes."""

    def complete_store(self, name: bytes) -> bool:
        """Send it where the name is free (rule 2)."""
        prepared = self._prepared.pop(name, None)
        if prepared is None:
            raise StoreError(f"{self._client.place}: object `{name.hex()[:16]}` was not prepared")
        memory, size, until_us = prepared
        view = memoryview(memory)[: ENVELOPE_BYTES + size]
        lives_us = max(1000, until_us - self._utc_us()) if until_us else 0
        try:
            _ENVELOPE.pack_into(memory, 0, self._marks()[0], until_us)
            is_kept = self._ask(lambda: self._client.put(name, view, lives_us)) or self._is_this(name, view)
        finally:
            view.release()
            self._spare(prepared)
        if is_kept:
            self._note_own(name, size)
        return is_kept

    def _is_this(self, name: bytes, view: memoryview) -> bool:
        """Whether what has the name began as this object does: a seal's nonce is never drawn twice."""
        begins = ENVELOPE_BYTES + HEADER_BYTES
        there = self._ask(lambda: self._client.peek(name, begins))
        if there is not None:
            self._note_owner(name, there)
        return there is not None and there == view[:begins]

    def abandon_store(self, name: bytes) -> None:
        """Give the memory back: nothing was sent. A scan ends the result of a send in flight."""
        prepared = self._prepared.pop(name, None)
        if prepared is not None:
            self._spare(prepared)

    def _spare(self, prepared: _Prepared) -> None:
        with self._lock:
            self._preparing -= prepared.size
            self._give_back(prepared.memory)

    def _give_back(self, memory: bytearray) -> None:
        """Keep it for the next; of more than may be kept the longest."""
        self._spares.append(memory)
        if len(self._spares) > _SPARES * self.in_flight:
            del self._spares[min(range(len(self._spares)), key=lambda at: len(self._spares[at]))]

    # -- back -----------------------------------------------------------------------------------------------------

    def start_load(self, name: bytes) -> None:
        """Do nothing."""

    def abandon_load(self, name: bytes) -> None:
        """Do nothing: no load was started."""

    def prepare_load(self, name: bytes) -> memoryview | None:
        """Return the object's bytes, in memory until `complete_load`; of one that grew only as much as shows it."""
        most = ENVELOPE_BYTES + self._sizes.get(name, self._object_bytes_max) + 1
        memory: bytearray | None = None

        def room(size: int) -> memoryview:
            nonlocal memory
            memory = self._memory(size)
            return memoryview(memory)

        found = self._ask(lambda: self._client.get(name, most, room))
        if found is None:
            return None
        with self._lock:
            self._loading.setdefault(name, []).append(memory)
        return found[ENVELOPE_BYTES:].toreadonly()

    def complete_load(self, name: bytes) -> None:
        """Release the memory. An object loaded twice at a time is not reused: its owner is ambiguous."""
        with self._lock:
            loading = self._loading[name]
            memory = loading.pop()
            if loading:
                loading[:] = [None] * len(loading)
                return
            del self._loading[name]
            if memory is not None:
                self._give_back(memory)

    def peek(self, name: bytes, size: int) -> bytes | None:
        """Return its beginning after the envelope, which names the owner."""
        found = self._ask(lambda: self._client.peek(name, ENVELOPE_BYTES + size))
        if found is None:
            return None
        self._note_owner(name, found)
        return found[ENVELOPE_BYTES:]

    # -- ends -----------------------------------------------------------------------------------------------------

    def delete(self, names: Iterable[bytes]) -> Deleted:
        """Delete these; beyond `deletes_max` the rest count as failed, to be asked again."""
        listed, most = list(names), self._client.deletes_max
        now, later = listed[:most], tuple(listed[most:])
        gone = self._ask(lambda: self._client.delete(now)) if now else Deleted(0, 0)
        stays = {*gone.failed, *(one.name for one in gone.locked)}
        size = gone.size - ENVELOPE_BYTES * gone.objects
        for name in now:
            if name not in stays:
                with self._lock:
                    self._used -= self._sizes.pop(name, 0)
                self._others.pop(name, None)
                self._left.pop(name, None)
        return gone._replace(size=max(0, size), failed=gone.failed + later)

    def page(self, after: bytes, limit: int) -> list[Listed]:
        """Return the next objects that are this owner's or overdue (rule 3); more may follow a short page."""
        for _ in range(_PAGES_MAX):
            listed = self._ask(lambda: self._client.page(after, limit))  # noqa: B023 - it is called here
            if not listed:
                return []
            if listed[-1].name <= after:
                break
            unknown = [one.name for one in listed if one.name not in self._sizes and one.name not in self._others]
            for name, begins in zip(unknown, self._readers.map(self._envelope, unknown), strict=True):
                if begins is not None:
                    self._note_owner(name, begins)
            overdue_us = self._utc_us() - OVERDUE_US
            entries = []
            for one in listed:
                size = max(0, one.size - ENVELOPE_BYTES)
                due_us = self._others.get(one.name)
                if due_us is None:
                    self._note_own(one.name, size)
                if due_us is None or 0 < due_us < overdue_us:
                    entries.append(Listed(one.name, size))
            if entries:
                return entries
            after = listed[-1].name
        raise StoreError(f"{self._client.place}: its listing does not end")

    def _envelope(self, name: bytes) -> bytes | None:
        return self._ask(lambda: self._client.peek(name, ENVELOPE_BYTES))

    def _note_owner(self, name: bytes, begins: bytes) -> None:
        """Whose it is by its envelope. What has none is nobody's: this owner ends it."""
        if len(begins) < ENVELOPE_BYTES:
            return
        mark, due_us = _ENVELOPE.unpack_from(begins)
        own, *inherited = self._marks()
        if mark in inherited:
            self._left[name] = mark
        if mark == own or mark in inherited:
            return
        with self._lock:
            self._others[name] = due_us
            if len(self._others) > _OTHERS_MAX:
                self._others.popitem(last=False)

    def is_own(self, name: bytes) -> bool:
        """Whether this owner has custody of the object, as far as it was read."""
        return name not in self._others

    def left_by(self, name: bytes) -> bytes:
        """Return the mark of an inherited object's worker; empty for other objects."""
        return self._left.get(name, b"")

    def _note_own(self, name: bytes, size: int) -> None:
        with self._lock:
            self._used += size - self._sizes.get(name, 0)
            self._sizes[name] = size

    # -- the owner ------------------------------------------------------------------------------------------------

    def _marks(self) -> list[bytes]:
        """This owner's mark, and those of workers whose heir it is (rule 7); the store is asked once."""
        if not self._own_marks:
            own = next((mark for mark in _lives(self._worker) if not self._note(mark, _HEIR)), None)
            if own is None:
                raise StoreError(f"{self._client.place}: says that this worker has died too often")
            self._own_marks = [own, *self._inherited(own)]
        return self._own_marks

    def _note(self, mark: bytes, kind: str = "") -> bytes:
        return self._ask(lambda: self._client.read_note(mark.hex() + kind))

    def _inherited(self, mark: bytes) -> list[bytes]:
        """The marks whose objects belong to this one."""
        marks = self._note(mark, _MARKS)
        return [marks[at : at + OWNER_BYTES] for at in range(0, len(marks) - OWNER_BYTES + 1, OWNER_BYTES)]

    def holder(self, mark: bytes | None = None) -> bytes:
        """Return the last note of this owner, or of this mark (`tiers.heirs`)."""
        return self._note(self._marks()[0] if mark is None else mark)

    def write_holder(self, written: bytes, mark: bytes | None = None) -> None:
        """Write the holder of this owner's objects, or of another mark that it took over."""
        self._client.write_note((self._marks()[0] if mark is None else mark).hex(), written)

    def inherit(self, died: Callable[[bytes], bool]) -> dict[bytes, bytes]:
        """Take over the objects of dead workers; returns each one's note by its mark (rule 7).

        `died`: whether what one wrote says so. A mark that was taken over before is given again until `write_holder`
        has put another end to it.
        """
        own, left = self._marks()[0], dict[bytes, bytes]()
        for worker in self._heir_of:
            for mark in _lives(worker):
                written, heir = self._note(mark), self._note(mark, _HEIR)
                is_newest = not heir
                if is_newest and written and died(written):
                    heir = self._claimed(mark)
                if heir == own:
                    marks = [mark, *self._inherited(mark)]
                    self._take(marks)
                    if written and died(written):
                        left |= dict.fromkeys(marks, written)
                if is_newest:
                    break
        return left

    def _claimed(self, mark: bytes) -> bytes:
        """Whose a dead worker's objects are: this owner's, where nobody said so before."""
        own = self._marks()[0]
        is_first = self._ask(lambda: self._client.write_first_note(mark.hex() + _HEIR, own))
        return own if is_first else self._note(mark, _HEIR)

    def _take(self, marks: Iterable[bytes]) -> None:
        """Have these marks too, and say so to the next process and to the next heir."""
        own, *inherited = self._marks()
        inherited = list(dict.fromkeys([*inherited, *marks]))
        if len(inherited) > _MARKS_MAX:
            raise StoreError(f"{self._client.place}: this worker has taken over from too many others")
        self._client.write_note(own.hex() + _MARKS, b"".join(inherited))
        self._own_marks = [own, *inherited]

    def close(self) -> None:
        """Close the store; its objects stay."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        """What it answers, the second time where the first failed and that may be (rule 4)."""
        try:
            answer = request()
        except StoreError:
            with self._lock:
                may_again = self._again >= 1
                self._again -= may_again
            if not may_again:
                raise
            return request()
        with self._lock:
            self._again = min(_AGAIN_MAX, self._again + _AGAIN_SHARE)
        return answer
