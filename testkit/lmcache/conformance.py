"""A governed vLLM with LMCache's own server behind it, under the conformance kit.

`kvcustody conformance --engine kvcustody.testkit.lmcache.conformance:engine \
    --subject vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector:LMCacheMPConnector --record lmcache.json`

The engine is that of `testkit.vllm.conformance`. In the cases of the tier LMCache's connector runs beside ours, both
halves of it vLLM's and LMCache's own, and a server of LMCache's on loopback with our adapter and our module.

1. The kit's clock decides every deadline in the server too (`server.ToldClock`). Transfers, lookups and orders take the
   machine's time: a step waits for an answer of LMCache's, and a pause until the server has stored what it was given.
2. What LMCache calls an object is reckoned from what its connector was told to store, and so is our file's name. A file
   that has another name is nobody's, and is told by it.
3. The kit's policy, but copies must be sealed: the kit asks that nothing rests in clear, and `check` looks for it.
4. Transfers are held where the connector hands them over. A load writes when it is let go, behind the probe.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from lmcache.v1.distributed.api import ipc_key_to_object_keys
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from vllm.v1.request import RequestStatus

from kvcustody.audit.database.engine import open_store
from kvcustody.audit.erasure.requests_and_answers import status
from kvcustody.audit.writer.record_operator_act import recorder
from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError
from kvcustody.files import write_file
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.settings import load_settings
from kvcustody.governance.tiers.open_tiers import BlockShape
from kvcustody.governance.tiers.scope_salts import ScopeDirectory
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.worker.plugins import open_root_key
from kvcustody.integrations.lmcache.chunk_keys import chunk_key
from kvcustody.testkit.conformance.engine_protocol import (
    RUNNING,
    RequestOutcome,
    Setup,
    TierObject,
)
from kvcustody.testkit.lmcache.server import GOVERNED, LMCacheServer, ToldClock, our_adapter
from kvcustody.testkit.vllm.conformance import VllmEngineUnderTest
from kvcustody.testkit.vllm.modelless_engine import BLOCK_TOKENS, Beside

CHUNK_TOKENS = BLOCK_TOKENS  # so that the kit's blocks are LMCache's chunks
_CLEAR, _SEALED = "{tiers: [host], encrypt: none}", "{tiers: [nvme], encrypt: required}"
_ANSWER_SECONDS, _STORED_SECONDS, _ERASED_SECONDS = 5.0, 10.0, 30.0
_LOOK_SECONDS, _SWEEP_SECONDS = 0.005, 0.3  # the server looks at what is due every 0.05
_PIECE_BYTES = 16  # of one position: what is looked for in files


class Site:
    """The files and the server of one deployment, beside the kit's own ledger."""

    def __init__(self, policy: str, clock: VirtualClock, serve: Callable[..., LMCacheServer]) -> None:
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcustody-kit-")))
        self._clock = clock
        folder = self.folder
        self.shared = {
            "root_key_path": str(folder / "root.key"),
            "keyring_path": str(folder / "keyring.json"),
            "shred_keys_path": str(folder / "shred.keys"),
            "scope_salts_path": str(folder / "salts"),
        }
        self.tier = folder / "tier"
        self.ledger_url = f"sqlite:///{folder / 'ledger.db'}"
        named = self.shared | {
            "worker_name": "lmcache-0",
            "policy_path": str(folder / "policy.yaml"),
            "database_url": self.ledger_url,
            "subject_names": "clear",
            "spill_path": str(folder / "spill"),
            "nvme_tier_path": str(self.tier),
            "nvme_tier_bytes": str(64 << 20),
            "tier_timeout_ms": "5000",
        }
        write_file(folder / "policy.yaml", policy.encode())
        try:
            self._told = ToldClock(folder / "clock", writes=True)
            self.tell()
            settings = load_settings(**self.shared)
            root = open_root_key(settings)
            self.keyring = Keyring(FileKeyStore(settings.keyring_path), root, clock)
            shred = ShredKeys.open(settings.shred_keys_path, root, clock)
            self._stack.callback(shred.close)
            self.keys = SealKeys(self.keyring, shred)
            self._stack.callback(self.keys.close)
            self.directory = ScopeDirectory(folder / "salts", self.keys)
            self._stack.callback(self.directory.close)
            self.server = serve(
                folder, {f"KVCUSTODY_{name.upper()}": value for name, value in named.items()}
            )
            self._stack.callback(self.server.close)
        except BaseException:
            self._stack.close()
            raise

    def tell(self) -> None:
        """The server's time is the kit's now."""
        self._told.tell(self._clock)

    def files(self) -> list[Path]:
        """What is in the tier."""
        return [path for path in self.tier.rglob("*") if path.is_file() and len(path.name) == 64]

    def erase(self, selector: Selector) -> None:
        """As an administrator would: an order on the ledger; wait until every worker that owes an answer gave it."""
        erasure, store = uuid.uuid4().hex, open_store(self.ledger_url)
        now_us = self._clock.now_us()
        with recorder(store, self._clock, clear_names=True) as writer:
            writer.submit_durable(request_event(selector, erasure, "kit", now_us + 60_000_000, now_us))
        end = time.monotonic() + _ERASED_SECONDS
        with store.connect() as connection:
            while status(connection, erasure, self._clock.utc_us()).waiting:
                if time.monotonic() > end:
                    raise AssertionError("the server has not answered an erasure")
                connection.rollback()
                time.sleep(0.05)
        store.dispose()

    def close(self) -> None:
        """The server ends, then its files."""
        self._stack.close()


class _Held:
    """A transfer that has not begun, as the future that LMCache's connector asks."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin
        self._begun: Any = None

    def begin(self) -> None:
        """It is let go."""
        self._begun = self._begin()

    def query(self) -> bool:
        """Whether it is over."""
        return self._begun is not None and bool(self._begun.query())

    def result(self, timeout: float | None = None) -> Any:
        """What came of it."""
        assert self._begun is not None, "it is over"
        return self._begun.result(timeout=timeout)


class Transfers:
    """LMCache's transfers of one worker, which may be held; every other call is LMCache's own (rule 4)."""

    def __init__(
        self, theirs: Any, stores: Callable[[Any], None], writes: Callable[[str, Iterable[int]], None]
    ) -> None:
        """`stores` is told of each store's key; `writes` of blocks that a load is about to write."""
        self._theirs = theirs
        self._stores = stores
        self._writes = writes
        self._held: list[_Held] = []
        self.is_held = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def submit_store(self, request: str, key: Any, *more: Any) -> Any:
        """Hand over a store."""
        self._stores(key)
        return self._submit(lambda: self._theirs.submit_store(request, key, *more))

    def submit_retrieve(
        self, request: str, key: Any, caches: Any, blocks: list[list[int]], *more: Any, **named: Any
    ) -> Any:
        """Hand over a load."""

        def begin() -> Any:
            self._writes(request, blocks[0])
            return self._theirs.submit_retrieve(request, key, caches, blocks, *more, **named)

        return self._submit(begin)

    def hold(self, held: bool) -> None:
        """While held nothing begins; then everything does, in order."""
        self.is_held = held
        while self._held and not held:
            self._held.pop(0).begin()

    def _submit(self, begin: Callable[[], Any]) -> Any:
        made = _Held(begin)
        if self.is_held:
            self._held.append(made)
        else:
            made.begin()
        return made


class _Told(NamedTuple):
    """What a store was told: the salt, LMCache's object and the engine's key of the same block."""

    salt: str
    chunk: bytes
    key: bytes


def serve(folder: Path, settings: dict[str, str]) -> LMCacheServer:
    """LMCache's server as docs/start/lmcache.md starts it."""
    program = ("python", "-m", "kvcustody.testkit.lmcache.server", str(folder / "clock"))
    return LMCacheServer(
        folder / "lmcache",
        settings,
        our_adapter(CHUNK_TOKENS),
        *GOVERNED,
        chunk_tokens=CHUNK_TOKENS,
        program=program,
    )


class LMCacheUnderTest(VllmEngineUnderTest):
    """`EngineUnderTest` over `BareEngine` and, where there is a tier, LMCache's server."""

    def __init__(self, setup: Setup, serve: Callable[..., LMCacheServer] = serve) -> None:
        policy = setup.policy.replace(_CLEAR, _SEALED)
        if setup.tier and policy == setup.policy:
            raise ConfigError("the kit's policy does not say that copies may rest in clear; see `_CLEAR`")
        self._site = Site(policy, setup.clock, serve) if setup.tier else None
        self._names: dict[str, _Told] = {}  # by what the file is called
        try:
            super().__init__(setup._replace(policy=policy))
            self._govern_transfers()
        except BaseException:
            if self._site is not None:
                self._site.close()
            raise
        lacks = {name: why for name, why in self.capabilities.lacks.items() if name != "tier"}
        self.capabilities = self.capabilities._replace(engine="vllm with LMCache's server", lacks=lacks)

    def _govern_transfers(self) -> None:
        if self._site is None:
            return
        self._hasher = TokenHasher(CHUNK_TOKENS)
        self._layout = BlockShape(self._core.workers.device.memory.bytes_per_block, 1, CHUNK_TOKENS).layout
        [connector] = self._core.workers.connectors
        self._worker = connector.sub_connectors[1].worker_adapter
        self._scheduler = self._core.scheduler.connector.sub_connectors[1]
        self._transfers = self._worker.transfer_ctx = Transfers(
            self._worker.transfer_ctx, self._stored, self._loads
        )

    def beside(self) -> Beside | None:
        """LMCache's connector, where there is a tier."""
        return None if self._site is None else Beside(self._site.server.connector(), self._site.shared)

    def keyring(self) -> Keyring:
        """That of the deployment, where there is one."""
        return super().keyring() if self._site is None else self._site.keyring

    # -- what LMCache is told -----------------------------------------------------------------------------------------

    def _stored(self, key: Any) -> None:
        """What the objects and files of a store will be called (rule 2)."""
        assert self._site is not None
        hashes = [
            TokenHasher.hash_to_bytes(one)
            for one in self._hasher.compute_chunk_hashes(list(key.token_ids), end=key.end)
        ]
        first, last = key.start // CHUNK_TOKENS, key.end // CHUNK_TOKENS
        [objects] = ipc_key_to_object_keys(key, hashes[first:last], [0])
        keys = self._requests[key.request_id].block_hashes[first:last]
        label = self._site.directory.label_of(key.cache_salt)
        if label is None or label.spec is None:
            return
        for one, block in zip(objects, keys, strict=True):
            chunk = chunk_key(one)
            name = self._site.keys.name(label.spec, chunk, shard=0, layout=self._layout)
            self._names[name.hex()] = _Told(key.cache_salt, chunk, bytes(block))

    def _loads(self, request: str, blocks: Iterable[int]) -> None:
        device = self._core.workers.device
        for block in blocks:
            device.handed_out(block, request)
            device.first_write(block)

    # -- requests -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn of the engine's loop; more where only an answer of LMCache's is awaited (rule 1)."""
        if self._site is None:
            return super().step()
        self._site.tell()
        end = time.monotonic() + _ANSWER_SECONDS
        while True:
            is_live = super().step()
            is_waiting = is_live and not self._core.model_executor.scheduled_tokens and self._awaits_answer()
            if not is_waiting or time.monotonic() > end:
                return is_live
            time.sleep(_LOOK_SECONDS)

    def _awaits_answer(self) -> bool:
        looked_up = any(one.lookup_started_at for one in self._scheduler.request_trackers.values())
        return looked_up or (not self._transfers.is_held and self._is_moving)

    @property
    def _is_moving(self) -> bool:
        return bool(self._worker.store_futures or self._worker.retrieve_futures)

    def outcome(self, request: object) -> RequestOutcome:
        """A request that LMCache brings blocks for has them already."""
        found = super().outcome(request)
        one = self._requests[str(request)]
        if one.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return found
        return found._replace(state=RUNNING, blocks=tuple(self._manager.get_block_ids(str(request))[0]))

    # -- time and administration --------------------------------------------------------------------------------------

    def idle(self, microseconds: int) -> None:
        """The engine's; the server has stored what it was given before, and swept what is due behind it."""
        if self._site is None:
            super().idle(microseconds)
            return
        self._settle()
        super().idle(microseconds)
        self._site.tell()
        time.sleep(_SWEEP_SECONDS)

    def _settle(self) -> None:
        """Everything that was handed over is stored, or will not be."""
        assert self._site is not None
        self._site.tell()
        end = time.monotonic() + _STORED_SECONDS
        while self._is_moving and not self._transfers.is_held and time.monotonic() < end:
            self._core.turn(self._take)
            time.sleep(_LOOK_SECONDS)
        while time.monotonic() < end and not {path.name for path in self._site.files()} >= set(self._names):
            time.sleep(_LOOK_SECONDS)

    def erase(self, selector: Selector) -> None:
        """The engine's utility call, and an order on the server's ledger."""
        super().erase(selector)
        if self._site is not None:
            self._site.tell()
            self._site.erase(selector)

    def check(self) -> list[str]:
        """The engine's, and that no content lies in a file as it is on the device (rule 3)."""
        found = super().check()
        if self._site is not None:
            content = b"".join(self.read(range(self.capabilities.blocks + 1)))
            pieces = {content[at : at + _PIECE_BYTES] for at in range(0, len(content), _PIECE_BYTES)}
            pieces = {piece for piece in pieces if len(set(piece)) > _PIECE_BYTES // 2}
            for path in self._site.files():
                data = path.read_bytes()
                if any(piece in data for piece in pieces):
                    found.append(f"content lies in clear in `{path.name}`")
        return found

    def close(self) -> None:
        """The engine first, then the server."""
        super().close()
        if self._site is not None:
            self._site.close()

    # -- the tier -----------------------------------------------------------------------------------------------------

    def hold_transfers(self, held: bool) -> None:
        """At the worker's half of LMCache's connector."""
        self._transfers.hold(held)

    def tier(self) -> list[TierObject]:
        """The files of the server's tier, by the engine's keys of their blocks (rule 2)."""
        assert self._site is not None
        found = []
        for path in self._site.files():
            told = self._names.get(path.name)
            found.append(TierObject(path.name.encode() if told is None else told.key, path.read_bytes()))
        return found

    def drop_index(self) -> None:
        """Every block leaves vLLM's index, as under pressure."""
        blocks = self._manager.block_pool.blocks
        self._manager.block_pool.evict_blocks(
            {block.block_id for block in blocks if block.block_hash is not None}
        )


def engine(setup: Setup) -> LMCacheUnderTest:
    """The factory for the kit."""
    return LMCacheUnderTest(setup)
