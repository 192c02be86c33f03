"""A module for LMCache's server: its first tier holds content only in transit, and zeroes what it frees.

    lmcache server … --l2-store-policy skip_l1 --server-module '{"module_path":
        "kvcustody.integrations.lmcache.server_module"}'

1. The first tier is host memory in clear that no deadline or erasure reaches. So content may only pass through it. The
   server starts only where two things hold:
   - an object handed to the second tier is deleted in the first (`skip_l1`);
   - the second tier is ours, or sealed with our serde.
2. No look-up is answered from it. A reader is given what the second tier brings for its request. Each time, policy,
   deadlines and erasures decide that, by the object or by its keys.
3. An object left in it ends when nobody reads or writes it at two looks in a row. LMCache deletes an object that was
   handed on, but not while somebody reads it. An object that was brought for a reader that went away stays locked for
   `--l1-read-ttl-seconds`, which may be a minute at most.
4. Memory of the first tier is zeroed before it is free again, and read back.
5. While the server lives, engines on this machine see that it seals (`seal_notice`).
6. The parts of LMCache that this depends on are checked at start. If one is not as expected, the server does not start.
7. LMCache 0.5.6 calls `build_server_modules`, 0.5.7 and later find the class and call its `create`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from lmcache.v1.distributed.storage_controllers.store_policy import StorePolicy

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, IsolationError
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.tiers.seal.seal_notice import SealNotice
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.guarding_thread import GuardingThread
from kvcustody.integrations.lmcache.l2_adapter import CustodyL2Adapter
from kvcustody.integrations.lmcache.sealed_serde import SealedProcessor
from kvcustody.logger import get_logger

try:
    from lmcache.v1.multiprocess.engine_module import DiscoverableModule
except ImportError:  # 0.5.6
    DiscoverableModule = object

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.memory_management import MemoryObj

_LOOK_SECONDS = 0.5
_READ_SECONDS_MAX = 60
_log = get_logger(__name__)


class FirstTierModule(DiscoverableModule):  # type: ignore[misc]
    """The blocks that this server's first tier has freed."""

    module_name = "kvcustody_first_tier"

    @classmethod
    def create(cls, build: Any) -> FirstTierModule:
        """Return the module; LMCache calls this from 0.5.7 on."""
        return cls(build.engine_context, int(build.mp_config.port))

    def __init__(self, context: Any, port: int) -> None:
        """Raises a `CustodyError` that says what has to be started differently (rules 1, 6)."""
        self.context = context
        self.freed = self.freed_bytes = self.left = 0
        self._unused: dict[tuple[int, ObjectKey], object] = {}  # at the last look
        self._ends = threading.Event()
        self._lock = threading.Lock()
        manager = context.storage_manager
        adapters = [adapter for _, adapter in manager.l2_adapters()]
        foreign = [type(adapter).__name__ for adapter in adapters if not _seals(adapter)]
        if not adapters or foreign:
            raise ConfigError(
                f"--l2-adapter: {foreign[0] if foreign else 'none'} stores data that no deadline or erasure "
                "reaches; use CustodyL2Adapter, or the serde `kvcustody`"
            )
        try:
            for controller in manager._store_controllers.values():
                [policy] = [one for one in vars(controller).values() if isinstance(one, StorePolicy)]
                probe: list[ObjectKey] = [object()]
                if policy.select_l1_deletions(probe) != probe:
                    raise ConfigError(
                        "--l2-store-policy: must be `skip_l1`, because LMCache's first tier is not encrypted"
                    )
            prefetch = manager._prefetch_controller
            if any(prefetch._policy.plan_l1_retention([object()], None, None)):
                raise ConfigError(
                    "--l2-prefetch-policy: must be `default`, because LMCache's first tier is not encrypted"
                )
            if not callable(prefetch._lock_l1_keys):
                raise AttributeError("_lock_l1_keys")
            prefetch._lock_l1_keys = lambda request: None
            self._first = list(manager._l1_managers_by_id.values())
            read_seconds = max(one._read_ttl_seconds for one in self._first)
            if read_seconds > _READ_SECONDS_MAX:
                raise ConfigError(
                    f"--l1-read-ttl-seconds: `{read_seconds}`; say at most {_READ_SECONDS_MAX}, for as long the first "
                    "tier keeps, in clear, what was brought for a reader that went away"
                )
            self._look()
            for one in self._first:
                memory = one._memory_manager
                memory.free = self._zeroing(memory.free)
        except (AttributeError, ValueError) as error:
            raise IsolationError(f"this LMCache differs from the releases that are governed: {error}") from error
        self._notice = _notice(load_settings(), port)
        self._thread = GuardingThread(self._end_what_is_left, name="kvcustody-first-tier")
        self._thread.start()
        _log.info("first tier governed", managers=len(self._first))

    def _end_what_is_left(self) -> None:
        while not self._ends.wait(_LOOK_SECONDS):
            try:
                self._look()
            except Exception as error:  # whatever it was: it is looked again
                _log.error("the first tier could not be checked", error=repr(error))

    def _look(self) -> None:
        """Delete what was unused at the last look and is unused now (rule 3)."""
        unused: dict[tuple[int, ObjectKey], object] = {}
        for at, manager in enumerate(self._first):
            with manager._lock:
                idle = {key: one for key, one in manager._objects.items() if not one.read_lock.is_locked()}
            left = [key for key, one in idle.items() if self._unused.get((at, key)) is one]
            if left:  # without the lock, which is taken once at a time: what is read by now stays until the next look
                self.left += len(left)
                manager.delete(left)
            unused |= {(at, key): one for key, one in idle.items()}
        self._unused = unused

    def _zeroing(self, free: Callable[[list[MemoryObj]], Any]) -> Callable[[list[MemoryObj]], Any]:
        def zero_and_free(objects: list[MemoryObj]) -> Any:
            for one in objects:
                content = np.frombuffer(one.byte_array, dtype=np.uint8)
                content[:] = 0
                if content.any():
                    raise IsolationError("memory of the first tier could not be zeroed; it stays allocated")
            with self._lock:
                self.freed += len(objects)
                self.freed_bytes += sum(int(one.get_size()) for one in objects)
            return free(objects)

        return zero_and_free

    def report_status(self) -> dict[str, Any]:
        """Return the status that LMCache shows for its modules."""
        counts = {"freed": self.freed, "zeroed_bytes": self.freed_bytes, "left": self.left}
        return {"kvcustody_first_tier": counts}

    def close(self) -> None:
        """Stop looking; engines learn that this server no longer seals."""
        self._ends.set()
        self._thread.join()
        self._notice.close()


def build_server_modules(build: Any) -> FirstTierModule:
    """Return the modules; LMCache 0.5.6 calls this."""
    return FirstTierModule(build.server_context, int(build.mp_config.port))


def _seals(adapter: object) -> bool:
    return type(adapter) is CustodyL2Adapter or isinstance(getattr(adapter, "_serde", None), SealedProcessor)


def _notice(settings: Settings, port: int) -> SealNotice:
    assert settings.scope_salts_path is not None, "the adapter has checked"
    shred = ShredKeys.open(settings.shred_keys_path, open_root_key(settings), SystemClock())
    try:
        return SealNotice(settings.scope_salts_path, shred, port)
    finally:
        shred.close()
