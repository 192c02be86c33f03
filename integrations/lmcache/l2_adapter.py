"""LMCache's second tier in our sealed tiers: what leaves its memory is sealed, counted, and ended by policy.

    lmcache server … --l2-adapter '{"type": "plugin", "module_path": "kvcustody.integrations.lmcache.l2_adapter",
                                    "class_name": "CustodyL2Adapter", "adapter_params": {"chunk_tokens": 256}}'

Policy, keys, ledger and the tier are those of the settings (`KVCUSTODY_…`), with `scope_salts_path` as the governed
engine has it. With `remote_tier_url` servers of one deployment share what they keep.

1. An object is whose its salt says, as a governed engine told of it. Under any other salt nothing is kept or found.
2. Objects of one size are kept, of the first one that this tier's folder ever had; others, and what policy does not let
   be here, are misses. A start finds that size beside the files, and does not wait for an object to govern them.
3. LMCache's own locks hold nothing here: an object whose end comes between look-up and load is a miss.
4. Tasks are done one after the other on the custody thread (`custody_thread`); LMCache's threads only ask and poll.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from time import monotonic
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvcustody.errors import ConfigError
from kvcustody.governance.settings import load_settings
from kvcustody.integrations.lmcache.chunk_keys import chunk_key
from kvcustody.integrations.lmcache.custody_thread import Chunks, CustodyThread
from kvcustody.logger import get_logger

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, MemoryTags, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

_LOOK_SECONDS = 1.0  # between looks at what has ended
_log = get_logger(__name__)


class CustodyL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """The chunks of one server. Called from LMCache's two controller threads."""

    def __init__(self, params: Mapping[str, Any], **_: object) -> None:
        """Open the tiers. `chunk_tokens`: the server's `--chunk-size`.

        Raises:
            CustodyError: names what is wrong.
        """
        tokens = params.get("chunk_tokens")
        if type(tokens) is not int or tokens < 1:
            raise ConfigError(f"adapter_params: `chunk_tokens` is `{tokens}`; give the server's --chunk-size")
        super().__init__()
        self._tokens = tokens
        self.custody = CustodyThread(load_settings())
        self.custody.open_kept(tokens)
        self._notifiers = [create_event_notifier() for _ in range(3)]
        self._lock = threading.Lock()
        self._tasks = 0
        self._done: tuple[dict[int, L2StoreResult], dict[int, Bitmap], dict[int, Bitmap]] = ({}, {}, {})
        self._known: dict[bytes, tuple[ObjectKey, int]] = {}  # what was stored, and its bytes
        self._refused: Counter[str] = Counter()
        self._look_at = 0.0

    def get_store_event_fd(self) -> int:
        """See the interface."""
        return int(self._notifiers[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """See the interface."""
        return int(self._notifiers[1].fileno())

    def get_load_event_fd(self) -> int:
        """See the interface."""
        return int(self._notifiers[2].fileno())

    # -- tasks ----------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Seal these objects. An object that cannot or may not be stored counts as done, so that LMCache drops its own
        copy.
        """
        if objects:
            self.custody.open(int(objects[0].get_size()), self._tokens)

        def store(chunks: Chunks) -> L2StoreResult:
            kept: list[tuple[ObjectKey, int]] = []
            for key, one in zip(keys, objects, strict=True):
                if chunks.store(key, _bytes(one)):
                    kept.append((key, int(one.get_size())))
                else:
                    self._refuse(chunks, key, int(one.get_size()))
            self._notify_stored(chunks, kept)
            return L2StoreResult(True, sum(size for _, size in kept))

        return self._submit(0, store, L2StoreResult(True, 0))

    def _refuse(self, chunks: Chunks, key: ObjectKey, size: int) -> None:
        """Count why an object is not stored; an object with another size is logged once."""
        why = "store"
        if chunks.directory.label_of(key.cache_salt) is None:
            why = "unknown salt"
        elif size != chunks.chunk_bytes:
            why = "another size"
            if not self._refused[why]:
                _log.error(
                    "objects of another size are not stored: give another model a separate worker and folders",
                    bytes=size,
                    kept_bytes=chunks.chunk_bytes,
                )
        self._refused[why] += 1

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """See the interface."""
        with self._lock:
            done = dict(self._done[0])
            self._done[0].clear()
        return done

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look up which of these can be found."""
        sizes = {_layout_bytes(layout) for layout in group_layout_descs.values()}
        if len(sizes) == 1:
            self.custody.open(sizes.pop(), self._tokens)

        def look(chunks: Chunks) -> Bitmap:
            return _bitmap(chunks.has_each(keys))

        return self._submit(1, look, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """See the interface."""
        with self._lock:
            return self._done[1].pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: nothing was locked (rule 3)."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Open these objects into LMCache's memory."""

        def load(chunks: Chunks) -> Bitmap:
            found = chunks.load_each([(key, _bytes(one)) for key, one in zip(keys, objects, strict=True)])
            self._notify_keys_accessed([key for key, is_there in zip(keys, found, strict=True) if is_there])
            return _bitmap(found)

        return self._submit(2, load, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """See the interface."""
        with self._lock:
            return self._done[2].pop(task_id, None)

    def delete(self, keys: list[ObjectKey]) -> None:
        """End these copies."""

        def end(chunks: Chunks) -> None:
            for key in keys:
                chunks.forget(key)

        self.custody.run(end).add_done_callback(_said)

    def _submit(self, kind: int, call: Callable[[Chunks], Any], failed: Any) -> int:
        with self._lock:
            self._tasks += 1
            number = self._tasks

        def finish(future: Future[Any]) -> None:
            result = failed if future.exception() is not None else future.result()
            with self._lock:
                self._done[kind][number] = result
            self._notifiers[kind].notify()

        self.custody.run(call).add_done_callback(finish)
        return number

    def _notify_stored(self, chunks: Chunks, kept: list[tuple[ObjectKey, int]]) -> None:
        """Report stored bytes to LMCache: what began, and what has ended of it since."""
        self._notify_keys_stored([key for key, _ in kept], [size for _, size in kept])
        self._known |= {chunk_key(key) + key.cache_salt.encode(): (key, size) for key, size in kept}
        if monotonic() < self._look_at:
            return
        self._look_at = monotonic() + _LOOK_SECONDS
        ended = [(name, *one) for name, one in self._known.items() if not chunks.has(one[0], seeks=False)]
        if ended:
            self._notify_keys_deleted([key for _, key, _ in ended], [size for _, _, size in ended])
            for name, *_ in ended:
                del self._known[name]

    def get_memory_tags(self) -> MemoryTags:
        """Return where the bytes are, for LMCache 0.5.7 and later: on this host, unless others share a part of the
        storage.
        """
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags  # 0.5.6 has none

        is_shared = self.custody.is_shared
        return MemoryTags(MemorySegment.STORAGE, MemoryResidency.REMOTE if is_shared else MemoryResidency.LOCAL)

    # -- the rest -------------------------------------------------------------------------------------------------

    def report_status(self) -> dict[str, Any]:
        """Return the status that LMCache shows for its adapters."""
        return {
            "is_healthy": not self.custody.failure,
            "type": type(self).__name__,
            "failure": self.custody.failure,
            "refused": dict(self._refused),
            "objects": len(self._known),
        }

    def close(self) -> None:
        """Stop the worker in order."""
        self.custody.close()
        for notifier in self._notifiers:
            notifier.close()


def _bytes(one: MemoryObj) -> memoryview:
    return memoryview(one.byte_array).cast("B")


def _bitmap(found: list[bool]) -> Bitmap:
    made = Bitmap(len(found))
    for at, is_there in enumerate(found):
        if is_there:
            made.set(at)
    return made


def _layout_bytes(layout: MemoryLayoutDesc) -> int:
    total = 0
    for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
        total += int(shape.numel()) * int(dtype.itemsize)
    return total


def _said(future: Future[None]) -> None:
    if future.exception() is not None:
        _log.warning("copies not ended", error=repr(future.exception()))
