"""A governed vLLM with LMCache's own server behind it, under the conformance kit.

    kvcustody conformance --engine kvcustody.testkit.lmcache.conformance:engine --record lmcache.json \
        --subject vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector:LMCacheMPConnector

The engine is that of `testkit.vllm.conformance`. In the cases of the tier, LMCache's connector runs beside ours; both
of its halves are vLLM's and LMCache's own code. A server of LMCache's runs on loopback with our module. It uses our
adapter (`engine`), or LMCache's own adapter for files with our serde (`engine_with_serde`).

1. Transfers, lookups and orders run in the machine's time, deadlines in the kit's. A step waits for an answer of
   LMCache's. A pause waits until the server has stored what it was given and has looked at what is due.
2. The name of a file in the tier is computed from what LMCache's connector is asked to store, and under which salt. A
   file with another name is recognised by that: no scope has announced it.
3. `check` looks for content in the tier as it is on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from lmcache.v1.distributed.api import ipc_key_to_object_keys
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from vllm.v1.request import RequestStatus

from kvcustody.errors import SealError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.domain_spec import DomainSpec
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.tiers.open_tiers import BlockShape
from kvcustody.governance.tiers.seal.sealer import read_facts
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.integrations.lmcache.chunk_keys import chunk_key, layout_of
from kvcustody.testkit.conformance.engine_protocol import RUNNING, RequestOutcome, Setup, TierObject
from kvcustody.testkit.lmcache.deployment import (
    CHUNK_TOKENS,
    Serve,
    ServerDeployment,
    sealed,
    serve,
    serve_files,
)
from kvcustody.testkit.lmcache.transfers import HeldTransfers
from kvcustody.testkit.vllm.conformance import VllmEngineUnderTest
from kvcustody.testkit.vllm.modelless_engine import BLOCK_TOKENS, ConnectorBeside

_ANSWER_SECONDS, _STORED_SECONDS = 5.0, 10.0
_LOOK_SECONDS, _SWEEP_SECONDS = 0.005, 0.3  # the server looks at what is due every 0.05
_PIECE_BYTES = 16  # what is looked for in files: K or V of one position
assert CHUNK_TOKENS == BLOCK_TOKENS, "the kit's blocks are LMCache's chunks"


class StoredBlock(NamedTuple):
    """A block that LMCache was told to store. `spec`, `sealed_name`: where our serde sealed it into LMCache's file."""

    event_key: bytes
    spec: DomainSpec | None = None
    sealed_name: bytes = b""

    def has_ended(self, keys: SealKeys, data: bytes) -> bool:
        """Return whether our serde sealed it under a destroyed key."""
        if self.spec is None:
            return False
        try:
            facts = read_facts(keys.catalogue(), self.sealed_name, memoryview(data))
        except SealError:
            return False  # whatever it is, it is not sealed
        try:
            keys.of(self.spec, facts.subject, facts.bucket)
        except SealError:
            return True
        return False


class LMCacheUnderTest(VllmEngineUnderTest):
    """`EngineUnderTest` over vLLM and, where there is a tier, LMCache's server. `serve` starts it."""

    def __init__(self, setup: Setup, serve: Serve, second_tier: str) -> None:
        self._deployment: ServerDeployment | None = None
        if setup.tier:
            setup = setup._replace(policy=sealed(setup.policy))
            self._deployment = ServerDeployment(setup.policy, setup.clock, serve)
        try:
            super().__init__(setup)
            if self._deployment is not None:
                self._watch_lmcache()
        except BaseException:
            self._close_deployment()
            raise
        lacks = {name: why for name, why in self.capabilities.lacks.items() if name != "tier"}
        self.capabilities = self.capabilities._replace(engine=f"vllm with LMCache's server, {second_tier}", lacks=lacks)

    def beside(self) -> ConnectorBeside | None:
        """Return LMCache's connector, where there is a tier."""
        made = self._deployment
        return None if made is None else ConnectorBeside(made.server.connector(), made.shared)

    def keyring(self) -> Keyring:
        """Return the deployment's keyring, where there is a deployment."""
        return super().keyring() if self._deployment is None else self._deployment.keyring

    # -- what LMCache's connector does --------------------------------------------------------------------------------

    def _watch_lmcache(self) -> None:
        self._hasher = TokenHasher(CHUNK_TOKENS)
        self._block_bytes = self._core.workers.device.memory.bytes_per_block
        self._layout = BlockShape(self._block_bytes, 1, CHUNK_TOKENS).layout
        self._stored: dict[str, StoredBlock] = {}  # by the name of its file
        [connector] = self._core.workers.connectors
        self._adapter = connector.sub_connectors[1].worker_adapter
        self._trackers = self._core.scheduler.connector.sub_connectors[1].request_trackers
        self._transfers = HeldTransfers(self._adapter.transfer_ctx, self._name_files, self._probe_loads)
        self._adapter.transfer_ctx = self._transfers

    def _name_files(self, key: Any) -> None:
        """Remember the names of a store's files, where its salt is a domain's (rule 2)."""
        assert self._deployment is not None
        label = self._deployment.salts.label_of(key.cache_salt)
        if label is None or label.spec is None:
            return
        first, last = key.start // CHUNK_TOKENS, key.end // CHUNK_TOKENS
        hashes = self._hasher.compute_chunk_hashes(_tokens_of(key), end=key.end)[first:last]
        [objects] = ipc_key_to_object_keys(key, [TokenHasher.hash_to_bytes(one) for one in hashes], [0])
        event_keys = self._requests[key.request_id].block_hashes[first:last]
        name_of = self._deployment.keys.name
        for one, event_key in zip(objects, map(bytes, event_keys), strict=True):
            chunk = chunk_key(one)
            of_tier = name_of(label.spec, chunk, shard=0, layout=self._layout)
            of_serde = name_of(label.spec, chunk, shard=0, layout=layout_of(one.model_name, self._block_bytes))
            self._stored[of_tier.hex()] = StoredBlock(event_key)
            self._stored[_object_key_to_filename(one)] = StoredBlock(event_key, label.spec, of_serde)

    def _probe_loads(self, request: str, blocks: Iterable[int]) -> None:
        device = self._core.workers.device
        for block in blocks:
            device.handed_out(block, request)
            device.first_write(block)

    @property
    def _is_moving(self) -> bool:
        """Whether a transfer runs and is not held."""
        return not self._transfers.is_held and bool(self._adapter.store_futures or self._adapter.retrieve_futures)

    # -- requests -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one turn of the engine's loop, or more while only an answer from LMCache is awaited (rule 1)."""
        if self._deployment is None:
            return super().step()
        self._deployment.tell_time()
        end = time.monotonic() + _ANSWER_SECONDS
        while True:
            is_live = super().step()
            looks_up = any(one.lookup_started_at for one in self._trackers.values())
            if (
                not is_live
                or self._core.model_executor.scheduled_tokens
                or not (looks_up or self._is_moving)
                or time.monotonic() > end
            ):
                return is_live
            time.sleep(_LOOK_SECONDS)

    def outcome(self, request: object) -> RequestOutcome:
        """Return the current facts; a request whose blocks LMCache loads has them already."""
        found = super().outcome(request)
        if self._requests[str(request)].status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return found
        return found._replace(state=RUNNING, blocks=tuple(self._manager.get_block_ids(str(request))[0]))

    # -- time and administration --------------------------------------------------------------------------------------

    def idle(self, microseconds: int) -> None:
        """Idle as the engine does, after the server has stored what it received; then let it look for what is due."""
        if self._deployment is not None:
            self._await_stores(self._deployment)
        super().idle(microseconds)
        if self._deployment is not None:
            self._deployment.tell_time()
            time.sleep(_SWEEP_SECONDS)

    def _await_stores(self, deployment: ServerDeployment) -> None:
        deployment.tell_time()
        end = time.monotonic() + _STORED_SECONDS
        while self._is_moving and time.monotonic() < end:
            self._core.turn(self._take)
            time.sleep(_LOOK_SECONDS)
        quiet = 0
        while quiet < 2 and time.monotonic() < end:  # what it has begins to be stored a moment later
            time.sleep(_SWEEP_SECONDS / 2)
            quiet = 0 if deployment.is_storing() else quiet + 1

    def erase(self, selector: Selector) -> None:
        """Erase by the engine's utility call and an order in the server's ledger."""
        super().erase(selector)
        if self._deployment is not None:
            self._deployment.tell_time()
            self._deployment.erase(selector)

    def check(self) -> list[str]:
        """Return the engine's problems, and those by rule 3."""
        problems = super().check()
        if self._deployment is not None:
            content = b"".join(self.read(range(self.capabilities.blocks + 1)))
            pieces = {content[at : at + _PIECE_BYTES] for at in range(0, len(content), _PIECE_BYTES)}
            pieces -= {bytes(_PIECE_BYTES)}
            for name, data in self._deployment.files().items():
                if any(piece in data for piece in pieces):
                    problems.append(f"content lies in clear in `{name}`")
        return problems

    def close(self) -> None:
        """Close the engine, then the server, however the engine ended."""
        try:
            super().close()
        finally:
            self._close_deployment()

    def _close_deployment(self) -> None:
        if self._deployment is not None:
            self._deployment.close()

    # -- the tier -----------------------------------------------------------------------------------------------------

    def hold_transfers(self, held: bool) -> None:
        """Hold transfers where the connector hands them over."""
        self._transfers.hold(held)

    def tier(self) -> list[TierObject]:
        """Return the server's files by the engine's keys of their blocks (rule 2), without those ended by their
        keys.
        """
        assert self._deployment is not None
        found = []
        for name, data in self._deployment.files().items():
            known = self._stored.get(name, StoredBlock(name.encode()))
            if not known.has_ended(self._deployment.keys, data):
                found.append(TierObject(known.event_key, data))
        return found

    def drop_index(self) -> None:
        """Drop every block from vLLM's index, as under pressure."""
        pool = self._manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})


def engine(setup: Setup) -> LMCacheUnderTest:
    """Return the kit's factory, where the server has our second tier."""
    return LMCacheUnderTest(setup, serve, "our second tier")


def engine_with_serde(setup: Setup) -> LMCacheUnderTest:
    """Return the kit's factory, where the server keeps LMCache's files with our serde."""
    return LMCacheUnderTest(setup, serve_files, "its files with our serde")


def _tokens_of(key: Any) -> list[int]:
    """Return the token ids in a key; they are packed from LMCache 0.5.7 on."""
    if hasattr(key, "token_ids"):
        return list(key.token_ids)
    from lmcache.v1.multiprocess.token_codec import unpack_token_ids

    tokens: list[int] = unpack_token_ids(key.token_bytes)
    return tokens
