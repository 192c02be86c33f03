"""A module of LMCache's server: its first tier holds content only on its way, and zeros what it frees.

    lmcache server … --l2-store-policy skip_l1 --server-module '{"module_path":
        "kvcustody.integrations.lmcache.server_module"}'

1. The first tier is host memory in clear that no deadline or erasure reaches. So it may be a way only: the server does
   not start unless what was handed to the second tier is deleted there (`skip_l1`), and that tier is ours.
2. Memory of the first tier is zeroed before it is free again, and read back.
3. While the server lives, engines on this machine see that it seals (`seal_notice`).
4. What this rests on in LMCache is looked for at start; where it is not as expected, the server does not start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
from lmcache.v1.distributed.storage_controllers.store_policy import StorePolicy

from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, IsolationError
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.settings import Settings, load_settings
from kvcustody.governance.tiers.seal.seal_notice import SealNotice
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.integrations.lmcache.l2_adapter import CustodyL2Adapter

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.memory_management import MemoryObj

_log = structlog.get_logger(__name__)


class FirstTierModule:
    """What this server's first tier has freed."""

    def __init__(self, context: Any, port: int) -> None:
        """Raises a `CustodyError` that says what has to be started differently (rules 1, 4)."""
        self.context = context
        self.freed = self.freed_bytes = 0
        self._lock = threading.Lock()
        manager = context.storage_manager
        adapters = [adapter for _, adapter in manager.l2_adapters()]
        foreign = [type(adapter).__name__ for adapter in adapters if type(adapter) is not CustodyL2Adapter]
        if not adapters or foreign:
            raise ConfigError(
                f"--l2-adapter: {foreign[0] if foreign else 'none'} keeps what no deadline or erasure reaches; "
                "CustodyL2Adapter must be the only one"
            )
        self.adapters: list[CustodyL2Adapter] = adapters
        try:
            for controller in manager._store_controllers.values():
                [policy] = [one for one in vars(controller).values() if isinstance(one, StorePolicy)]
                probe: list[ObjectKey] = [object()]
                if policy.select_l1_deletions(probe) != probe:
                    raise ConfigError(
                        "--l2-store-policy: must be `skip_l1`; LMCache's first tier is in clear"
                    )
            for one in manager._l1_managers_by_id.values():
                memory = one._memory_manager
                memory.free = self._zeroing(memory.free)
        except (AttributeError, ValueError) as error:
            raise IsolationError(f"this LMCache is not as it was when it was governed: {error}") from error
        self._notice = _notice(load_settings(), port)
        _log.info("first tier governed", managers=len(manager._l1_managers_by_id))

    def _zeroing(self, free: Callable[[list[MemoryObj]], Any]) -> Callable[[list[MemoryObj]], Any]:
        def zero_and_free(objects: list[MemoryObj]) -> Any:
            for one in objects:
                content = np.frombuffer(one.byte_array, dtype=np.uint8)
                content[:] = 0
                if content.any():
                    raise IsolationError("memory of the first tier does not become zero; it stays taken")
            with self._lock:
                self.freed += len(objects)
                self.freed_bytes += sum(int(one.get_size()) for one in objects)
            return free(objects)

        return zero_and_free

    def report_status(self) -> dict[str, Any]:
        """What LMCache shows of its modules."""
        return {"kvcustody_first_tier": {"freed": self.freed, "zeroed_bytes": self.freed_bytes}}

    def close(self) -> None:
        """Engines are told no longer that this server seals."""
        self._notice.close()


def build_server_modules(build: Any) -> FirstTierModule:
    """What `--server-module` calls."""
    return FirstTierModule(build.server_context, int(build.mp_config.port))


def _notice(settings: Settings, port: int) -> SealNotice:
    assert settings.scope_salts_path is not None, "the adapter has checked"
    shred = ShredKeys.open(settings.shred_keys_path, open_root_key(settings), SystemClock())
    try:
        return SealNotice(settings.scope_salts_path, shred, port)
    finally:
        shred.close()
