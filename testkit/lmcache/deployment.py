"""One deployment for the kit: keys shared by the engine and LMCache's server, the server, its ledger and its tier.

1. The kit's policy, but a copy must be sealed wherever it rests (`sealed`).
2. The server is started as docs/reference/engines/lmcache.md starts it, by the kit's clock (`server.ToldClock`).
3. An erasure is an order on the server's ledger, as an administrator gives it.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kvcustody.audit.evidence.erasure.requests_and_answers import status
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.record_operator_act import recorder
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError
from kvcustody.files import write_file
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.settings import load_settings
from kvcustody.governance.tiers.scope_salts import ScopeDirectory
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.testkit.lmcache.server import GOVERNED, LMCacheServer, ToldClock, our_adapter

CHUNK_TOKENS = 8  # a block of the kit's vLLM
_CLEAR, _SEALED = "{tiers: [host], encrypt: none}", "{tiers: [nvme], encrypt: required}"
_HOUSEKEEPING = ("chunk-shape", "kvcustody-tier")  # ours, without content
_ERASED_SECONDS, _LOOK_SECONDS = 30.0, 0.05

Serve = Callable[[Path, Mapping[str, str]], LMCacheServer]


def sealed(policy: str) -> str:
    """Return the kit's policy with copies only sealed.

    Raises:
        ConfigError: the policy lets no copy leave.
    """
    if _CLEAR not in policy:
        raise ConfigError(f"the kit's policy for the tier does not say `{_CLEAR}`")
    return policy.replace(_CLEAR, _SEALED)


def serve(folder: Path, settings: Mapping[str, str]) -> LMCacheServer:
    """Start LMCache's server with our adapter and our module (rule 2). `folder`: the deployment's."""
    return _serve(folder, settings, our_adapter(CHUNK_TOKENS))


def serve_files(folder: Path, settings: Mapping[str, str]) -> LMCacheServer:
    """Start LMCache's server with its own adapter for files, our serde and our module (rule 2)."""
    serde = {"type": "kvcustody", "tier": "nvme"}
    named = {name: value for name, value in settings.items() if "NVME_TIER" not in name}
    return _serve(folder, named, {"type": "fs", "base_path": str(folder / "tier"), "serde": serde})


def _serve(folder: Path, settings: Mapping[str, str], adapter: Mapping[str, Any]) -> LMCacheServer:
    program = ("python", "-m", "kvcustody.testkit.lmcache.server", str(folder / "clock"))
    where = folder / "lmcache"
    return LMCacheServer(where, settings, adapter, *GOVERNED, chunk_tokens=CHUNK_TOKENS, program=program)


class ServerDeployment:
    """A deployment that is open until `close`, which ends the server and removes every file."""

    def __init__(self, policy: str, clock: Clock, serve: Serve) -> None:
        self._clock = clock
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcustody-kit-")))
            self.shared: dict[str, Any] = {  # settings of the engine, and of the server
                "root_key_path": str(folder / "root.key"),
                "keyring_path": str(folder / "keyring.json"),
                "shred_keys_path": str(folder / "shred.keys"),
                "scope_salts_path": str(folder / "salts"),
            }
            self._tier = folder / "tier"
            self._ledger_url = f"sqlite:///{folder / 'ledger.db'}"
            of_server = self.shared | {
                "worker_name": "lmcache-0",
                "policy_path": str(folder / "policy.yaml"),
                "database_url": self._ledger_url,
                "subject_names": "clear",
                "spill_path": str(folder / "spill"),
                "nvme_tier_path": str(self._tier),
                "nvme_tier_bytes": str(64 << 20),
                "tier_timeout_ms": "5000",
            }
            write_file(folder / "policy.yaml", policy.encode())
            self._told = ToldClock(folder / "clock", writes=True)
            self.tell_time()
            settings = load_settings(**self.shared)
            root = open_root_key(settings)
            self.keyring = Keyring(FileKeyStore(settings.keyring_path), root, clock)  # the engine closes it
            shred = ShredKeys.open(settings.shred_keys_path, root, clock)
            stack.callback(shred.close)
            self.keys = SealKeys(self.keyring, shred)
            stack.callback(self.keys.close)
            self.salts = ScopeDirectory(folder / "salts", self.keys)
            stack.callback(self.salts.close)
            named = {f"KVCUSTODY_{name.upper()}": value for name, value in of_server.items()}
            self.server = serve(folder, named)
            stack.callback(self.server.close)
            self._stack = stack.pop_all()

    def tell_time(self) -> None:
        """Set the server's clock to the kit's."""
        self._told.tell(self._clock)

    def files(self) -> dict[str, bytes]:
        """Return the tier's content by name, whoever wrote it."""
        found = {}
        for path in self._tier.rglob("*"):
            if path.is_file() and path.name not in _HOUSEKEEPING and not path.name.startswith("."):
                with suppress(FileNotFoundError):  # the server ends them when it will
                    found[path.name] = path.read_bytes()
        return found

    def is_storing(self) -> bool:
        """Return whether the server's first tier still has something to hand to the second."""
        stores = self.server.status()["storage_manager"]["store_controllers"].values()
        return any(one["pending_keys_count"] or one["in_flight_task_count"] for one in stores)

    def erase(self, selector: Selector) -> None:
        """Order an erasure and wait for the server's answer (rule 3).

        Raises:
            AssertionError: no answer comes.
        """
        erasure, store = uuid.uuid4().hex, open_store(self._ledger_url)
        now_us = self._clock.now_us()
        order = request_event(selector, erasure, "kit", now_us + int(_ERASED_SECONDS * MICROSECONDS), now_us)
        with recorder(store, self._clock, clear_names=True) as writer:
            writer.submit_durable(order)
        end = time.monotonic() + _ERASED_SECONDS
        while True:
            with store.connect() as connection:
                waiting = status(connection, erasure, self._clock.utc_us()).waiting
            if not waiting or time.monotonic() > end:
                break
            time.sleep(_LOOK_SECONDS)
        store.dispose()
        if waiting:
            raise AssertionError(f"no answer to an erasure from `{waiting}`")

    def close(self) -> None:
        """Close the server first."""
        self._stack.close()
