"""The worker of one LMCache server: policy, keys, ledger and sealed tier, all used by one thread.

    custody = CustodyThread(settings)
    custody.open_kept(chunk_tokens)                   # at start: as the last one was; nothing where there was none
    custody.open(chunk_bytes, chunk_tokens)           # with the first object, which says how large they are
    future = custody.run(call)                        # `call(chunks)` on the thread; it fails where that is closed
    custody.close()

1. The worker has no blocks of its own to hand out: what it has custody of are the copies in its tier. It is registered,
   scanned, erased from and stopped as any worker is.
2. It steps while nobody asks, so that what is due ends, and orders reach it.
3. A store that came from an engine is due when a block that was written then would be: LMCache's keys hold no time.
4. A restart takes up where the last one ended, before anybody asks: what it left is closed, what is overdue ends.
5. When the thread ends, in order, half open or by an error, every key that it had is wiped, and who asks is refused.
6. In a store that workers share, what another stored is found and loaded like a copy of its own, and ended by its owner
   alone. Of a prompt the store is asked no further than to the first chunk that nobody has.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.files import discard_drafts, write_file
from kvcustody.governance.decisions.access_plan import DomainLabel, owed_by
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.keys.keyring_watch import KeyringWatch
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.release.startup_policy import startup_policy_of_file
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.copies.index import PublishedRun
from kvcustody.governance.tiers.open_tiers import tier_names
from kvcustody.governance.tiers.scope_salts import ScopeDirectory
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.tier import Found, SealedTier
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.lmcache.chunk_keys import ObjectKey, chunk_key
from kvcustody.logger import get_logger

_STEP_SECONDS = 0.05
_END_SECONDS = 15.0
_BLOCKS = 256  # so that every partition of a policy gets one; none is ever handed out
_NO_KEY = bytes(32)
_log = get_logger(__name__)
T = TypeVar("T")


class NoBlocks(UnbackedMemory):
    """The memory of a worker that has only copies: it allocates and copies nothing."""

    def read(self, shard: int, blocks: Blocks, into: memoryview) -> None:
        """Raise: this is never called."""
        raise AssertionError("no block was handed out")

    def write(self, shard: int, blocks: Blocks, data: memoryview) -> None:
        """Raise: this is never called."""
        raise AssertionError("no block was handed out")

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Return nothing to undo: no device needs access."""
        return lambda: None


def open_without_blocks(settings: Settings, chunk_bytes: int) -> Worker:
    """Return a worker that has only copies.

    Raises:
        CustodyError: a part cannot be opened; the message names it.
    """
    plan = MemoryPlan(lambda blocks: NoBlocks(blocks, chunk_bytes), _BLOCKS, 1, chunk_bytes)
    return open_worker(settings, plan)


class _Place(NamedTuple):
    """The tier in which a domain's chunk was found, by its key."""

    tier: SealedTier
    label: DomainLabel
    last: bytes
    found: list[Found]


class Chunks:
    """The sealed tier of one worker, by LMCache's keys. Used only on the custody thread."""

    def __init__(
        self,
        worker: Worker,
        directory: ScopeDirectory,
        chunk_bytes: int,
        keys: SealKeys,
        shred: ShredKeys,
        watch: KeyringWatch,
    ) -> None:
        self.worker = worker
        self.watch = watch
        self.directory = directory
        self.keys = keys
        self.shred = shred
        self.chunk_bytes = chunk_bytes
        offload = worker.governor.offload
        assert offload is not None, "the settings were checked"
        self.tiers: list[SealedTier] = offload.tiers

    @property
    def governor(self) -> Governor:
        """The worker's Governor."""
        return self.worker.governor

    def store(self, key: ObjectKey, content: memoryview) -> bool:
        """Return whether a copy exists now; in a shared store another worker may have stored it."""
        label = self.directory.label_of(key.cache_salt)
        if label is None or len(content) != self.chunk_bytes:
            return False
        now_us = self.governor.clock.now_us()
        owed = owed_by(self.governor.table, label.tenant, label.level)
        ceiling_us = now_us + owed.absolute_us
        last = chunk_key(key)
        run = PublishedRun(label, last, _NO_KEY, 0, now_us, ceiling_us, min(ceiling_us, now_us + owed.idle_us))

        def read(first: int, count: int, into: memoryview) -> None:
            into[:] = content

        return any(
            tier.has(label, last)
            or tier.store(run, read) == 1
            or (tier.is_shared and bool(tier.lookup(label, last, 0)))
            for tier in self.tiers
        )

    def has(self, key: ObjectKey, *, seeks: bool = True) -> bool:
        """Return whether a copy can be found now. `seeks`: whether a shared store is searched for others' copies."""
        label = self.directory.label_of(key.cache_salt)
        return label is not None and any(tier.lookup(label, chunk_key(key), 0, seeks=seeks) for tier in self.tiers)

    def has_each(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return which of these can be found; those of one model part are in the prompt's order (rule 6)."""
        ended = set[tuple[str, str, int, int]]()
        present = []
        for key in keys:
            part = (key.cache_salt, key.model_name, key.kv_rank, key.object_group_id)
            present.append(self.has(key, seeks=part not in ended))
            if not present[-1]:
                ended.add(part)
        return present

    def load(self, key: ObjectKey, into: memoryview) -> bool:
        """Return whether the copy was loaded into memory of a chunk's size; a copy that does not open leaves zeros."""
        return self.load_each([(key, into)])[0]

    def load_each(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[bool]:
        """Load several; a store with lanes fetches the next ones while one is opened."""
        places = [self._place(key) if len(into) == self.chunk_bytes else None for key, into in wanted]
        came, expected = list[bool](), 0
        lanes = max((tier.in_flight for tier in self.tiers), default=1)
        try:
            for at, (key, into) in enumerate(wanted):
                for place in places[expected : at + lanes] if lanes > 1 else ():
                    expected += 1
                    if place is not None:
                        place.tier.expect(place.found)
                came.append(self._load(key, places[at], into))
        finally:
            for place in places[:expected]:
                if place is not None:
                    place.tier.abandon(place.found)
        return came

    def _place(self, key: ObjectKey, behind: SealedTier | None = None) -> _Place | None:
        """Return where the chunk can be found: in the first tier, or in the first one behind another."""
        label, last = self.directory.label_of(key.cache_salt), chunk_key(key)
        if label is None:
            return None
        for tier in self.tiers if behind is None else self.tiers[self.tiers.index(behind) + 1 :]:
            if found := tier.lookup(label, last, 0):
                return _Place(tier, label, last, found)
        return None

    def _load(self, key: ObjectKey, place: _Place | None, into: memoryview) -> bool:
        def write(depth: int, count: int, skip: int, data: memoryview) -> None:
            into[:] = data

        while place is not None:
            if place.tier.load(place.label, place.last, 0, place.found, write):
                return True
            place = self._place(key, place.tier)
        return False

    def forget(self, key: ObjectKey) -> bool:
        """End a copy and return whether there was one. Another worker's copy is searched again on the next look-up."""
        label = self.directory.label_of(key.cache_salt)
        if label is None:
            return False
        ended = 0
        for tier in self.tiers:
            for found in tier.lookup(label, chunk_key(key), 0, seeks=False):
                copy = tier.copy(found.name)
                is_own = copy is not None and copy.number > 0
                ended += tier.destroy([found.name]) if is_own else tier.forget([found.name])
        return ended > 0


class CustodyThread:
    """The custody thread of one LMCache server."""

    def __init__(self, settings: Settings) -> None:
        """Raises `ConfigError` that names a setting that is missing."""
        if settings.scope_salts_path is None:
            raise ConfigError("setting `scope_salts_path`: name the file to which governed engines write their salts")
        if not tier_names(settings):
            raise ConfigError(
                "setting `nvme_tier_path`: LMCache's second tier needs a tier: a folder, `host_tier_bytes` or "
                "`remote_tier_url`"
            )
        self._settings = settings
        self._path: Path = settings.scope_salts_path
        self._jobs: SimpleQueue[tuple[Callable[[Chunks], object], Future[object]] | None] = SimpleQueue()
        self._shape: ChunkShape | None = None
        self._lock = threading.Lock()
        self._thread: GuardingThread | None = None
        self._begun = threading.Event()  # it is open, or why it is not is known
        self._is_closed = False
        self.failure: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether copies go to a store that other workers share."""
        return bool(self._settings.remote_tier_url)

    @property
    def is_open(self) -> bool:
        """Whether the size of objects is known, so that there is a worker."""
        return self._thread is not None

    def open_kept(self, chunk_tokens: int) -> None:
        """Open as at the last start, if there was one; wait until its end is recorded and overdue copies have ended.

        Raises a `CustodyError` that says what does not fit or cannot be opened.
        """
        shape = kept_shape(self._settings)
        if shape is None:
            # Nothing is opened before an object is seen; a wrong policy is told now all the same.
            if not self._settings.policy_release:
                startup_policy_of_file(self._settings, SystemClock())
            return
        if shape.chunk_tokens != chunk_tokens:
            raise ConfigError(
                f"the last start used {shape.chunk_tokens} tokens a chunk, not {chunk_tokens}: use the same "
                "value, or another worker name with separate folders"
            )
        self.open(shape.chunk_bytes, chunk_tokens)
        self._begun.wait()
        if self.failure:
            self.close()
            raise CustodyError(self.failure)

    def open(self, chunk_bytes: int, chunk_tokens: int) -> None:
        """Open for objects of this size; a second call does nothing."""
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._shape = ChunkShape(chunk_bytes=chunk_bytes, chunk_tokens=chunk_tokens)
                self._thread = GuardingThread(self._run, name="kvcustody-lmcache")
                self._thread.start()

    def run(self, call: Callable[[Chunks], T]) -> Future[T]:
        """Run a call after the earlier ones; the future has a `CustodyError` where nothing is open."""
        future: Future[T] = Future()
        with self._lock:
            if self._thread is None or self._is_closed:
                future.set_exception(CustodyError("it is closed" if self._is_closed else "no object was stored yet"))
            else:
                self._jobs.put((call, future))  # type: ignore[arg-type]  # of one type each
        return future

    def close(self) -> None:
        """Stop the worker in order; a second call does nothing."""
        with self._lock:
            thread, is_first = self._thread, not self._is_closed
            self._is_closed = True
            if thread is not None and is_first:
                self._jobs.put(None)
        if thread is not None:
            thread.join(_END_SECONDS)

    def _run(self) -> None:
        is_over = False
        try:
            with ExitStack() as stack:
                chunks = self._opened(stack)
                self._begun.set()
                self._serve(chunks)
                is_over = True
        except Exception as error:  # whatever it was: who asks is told, and waits for nobody
            self.failure = error.message if isinstance(error, CustodyError) else repr(error)
            _log.error("the tier is closed", error=self.failure)
        self._begun.set()
        while not is_over and (job := self._jobs.get()) is not None:
            job[1].set_exception(CustodyError(self.failure))

    def _serve(self, chunks: Chunks) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_STEP_SECONDS)
                if job is None:
                    return
                call, future = job
                try:
                    chunks.watch.look()
                    future.set_result(call(chunks))
                except Exception as error:  # whatever it was: a miss, and the server goes on
                    _log.error("copy job failed", error=repr(error))
                    future.set_exception(error)
            except Empty:
                pass
            self.step_worker(chunks)

    def step_worker(self, chunks: Chunks) -> None:
        """Run deadlines, orders and evidence, after every call and while idle."""
        chunks.governor.step()

    def _opened(self, stack: ExitStack) -> Chunks:
        """Return the opened worker; from then on `stack` closes whatever is open (rule 5)."""
        shape = self._shape
        assert shape is not None
        named = {"block_tokens": shape.chunk_tokens, "tier_object_blocks": 1, "tier_transfers": "always"}
        settings = self._settings.model_copy(update=named)
        worker = open_without_blocks(settings, shape.chunk_bytes)
        stack.callback(worker.close)
        keep_shape(settings, shape)
        shred = ShredKeys.open(settings.shred_keys_path, open_root_key(settings), SystemClock())
        stack.callback(shred.close)
        keys = SealKeys(worker.governor.keyring, shred)
        stack.callback(keys.close)
        watch = KeyringWatch(worker.governor.keyring, settings.keyring_path)
        directory = ScopeDirectory(self._path, keys, watch.look)
        stack.callback(directory.close)
        return Chunks(worker, directory, shape.chunk_bytes, keys, shred, watch)


# The size of objects in a worker's tier, stored beside its files, so that the next start need not wait for an object.
#
#     keep_shape(settings, ChunkShape(chunk_bytes, chunk_tokens))      # before the first object is stored
#     shape = kept_shape(settings)                                     # at the next start; None: nothing was begun
#
# Rules of this section:
# 1. The file is in the folder of the `nvme` tier. Without one it is in the spill's folder, for a start that closes
#    what the last one left and finds its objects in a shared store.
# 2. Only its owner can access it. It is written completely or not at all, and believed only where its values are
#    possible.
# 3. A folder with objects but no shape is refused: their ends would wait for the next store.

FILE = "chunk-shape"
_BYTES_MAX = 4096
_OBJECT = re.compile("[0-9a-f]{64}")
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]


class ChunkShape(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="schema", tag="kvcustody/chunk-shape@1"
):
    """The bytes and tokens of every object."""

    chunk_bytes: _Count
    chunk_tokens: _Count


def kept_shape(settings: Settings) -> ChunkShape | None:
    """Return the last start's shape.

    Raises:
        ConfigError: it is not trustworthy, or does not fit the tiers.
    """
    path = _path(settings)
    content = _content(path)
    if content is None:
        folder = settings.nvme_tier_path
        if folder is not None and _has_objects(folder):
            raise ConfigError(
                f"nvme tier `{folder}`: has objects but no `{FILE}`, which states their size; give an empty "
                "folder, or this worker's former one",
                path=folder,
            )
        return None
    try:
        shape = msgspec.json.decode(content, type=ChunkShape)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"`{path}`: is no shape of chunks ({error}); {_REMEDY}", path=path) from None
    room = max(settings.host_tier_bytes, settings.nvme_tier_bytes, settings.remote_tier_bytes)
    if shape.chunk_bytes > room:
        raise ConfigError(
            f"`{path}`: says {shape.chunk_bytes} bytes a chunk, and the largest tier has {room}; give it more, or "
            "another folder",
            path=path,
        )
    return shape


def keep_shape(settings: Settings, shape: ChunkShape) -> None:
    """Store the shape for the next start.

    Raises:
        ConfigError: the folder is not writable.
    """
    path = _path(settings)
    content = msgspec.json.encode(shape)
    try:
        if _content(path) != content:
            discard_drafts(path)
            write_file(path, content)
    except OSError as error:
        raise ConfigError(f"`{path}`: cannot be written ({error.strerror})", path=path) from None


_REMEDY = "give an empty folder, or restore the file"


def _path(settings: Settings) -> Path:
    return (settings.nvme_tier_path or settings.spill_path) / FILE


def _content(path: Path) -> bytes | None:
    """Return the file's bytes; None where there is none.

    Raises:
        ConfigError: others can access the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"`{path}`: cannot be opened ({error.strerror}); {_REMEDY}", path=path) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise ConfigError(f"`{path}`: must be accessible only to its owner (0600)", path=path)
        return os.read(descriptor, _BYTES_MAX)
    finally:
        os.close(descriptor)


def _has_objects(folder: Path) -> bool:
    return any(_OBJECT.fullmatch(path.name) for path in folder.glob("[0-9a-f][0-9a-f]/*"))
