"""vLLM's real scheduler and cache manager over real CPU tensors, with a runner that checks what it reads and writes.

1. The runner stands in for the model: it writes each token's K/V (the token and its position) where the block table
   says, and reads a sequence's whole prefix back before it samples.
2. `residue` counts blocks that were not all zero when a request first wrote to them; `wrong` lists requests that read
   K/V of other tokens than their own. Both stay empty, or a test fails.
3. One process, one thread, a virtual clock. `depth` steps stay in flight, as with async scheduling.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.clock import VirtualClock
from kvcustody.governance.credentials.scope_token import ScopeTokens
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.integrations.vllm import installed, plugin
from kvcustody.integrations.vllm import open_custody as opening
from kvcustody.integrations.vllm.connector import GovernedConnector
from kvcustody.integrations.vllm.open_custody import OpenedCustody
from kvcustody.integrations.vllm.scheduler import block_hasher as hasher
from kvcustody.testkit.conformance.deployment import KeepingLedger, keyring, table

BLOCK_TOKENS = 16
LAYERS = 2
POLICY = """
schema: kvcustody/policy@1
name: rig
profile: shared
classifications: [internal]
classify: [{{tenant: "*", as: internal}}]
tenants:
  alpha: {{quota: {{guaranteed: {alpha}%, cap: {alpha_cap}%}}}}
  beta: {{quota: {{guaranteed: 0%, cap: 100%}}}}
rules:
  - {{id: own-scope, effect: permit, action: [reuse, export], when: {{reader: owner}}}}
retention:
  internal: {{idle: 60s, absolute: 1h, active_max: {active}}}
scrub: {{default: {{within: 1s, verify: all}}}}
offload: {{internal: never}}
audit: {{on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}}}
eviction: {eviction}
integrity: {{default: {{verify: {verify}}}}}
"""


class Device:
    """The cache's tensors and the stand-in for the model."""

    def __init__(self, blocks: int, groups: int) -> None:
        shape = (blocks, 2, BLOCK_TOKENS, 1, 4)
        layers = [torch.randint(1, 99, shape, dtype=torch.int32) for _ in range(LAYERS)]
        self.caches = {f"layer.{layer}.{group}": layers[layer] for group in range(groups) for layer in range(LAYERS)}
        self.layers = layers
        self.residue: list[int] = []
        self.wrong: list[str] = []
        self.tables: dict[str, list[list[int]]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._windows: list[int | None] = [None] * groups

    def window(self, group: int, tokens: int) -> None:
        """This group only reads its last `tokens`."""
        self._windows[group] = tokens

    def run(self, output: Any) -> ModelRunnerOutput:
        """One device step."""
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self._tokens[new.req_id] = list(new.prompt_token_ids)
        cached = output.scheduled_cached_reqs
        for one, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if one in cached.resumed_req_ids:
                self.tables[one] = [list(group) for group in ids]
            elif ids is not None:
                for blocks, more in zip(self.tables[one], ids, strict=True):
                    blocks.extend(more)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: list[list[int]] = []
        order = list(output.num_scheduled_tokens)
        for one in order:
            sampled.append(self._sequence(one, starts[one], output.num_scheduled_tokens[one]))
        return ModelRunnerOutput(
            req_ids=order,
            req_id_to_index={one: at for at, one in enumerate(order)},
            sampled_token_ids=sampled,
        )

    def _sequence(self, request_id: str, start: int, count: int) -> list[int]:
        tokens = self._tokens[request_id]
        for group, blocks in enumerate(self.tables[request_id]):
            for position in range(start, min(start + count, len(tokens))):
                block, at = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                if at == 0 and any(bool(layer[block].any()) for layer in self.layers):
                    self.residue.append(block)
                for layer in self.layers:
                    layer[block, 0, at], layer[block, 1, at] = tokens[position] + 1, position + 1
            first = 0
            if self._windows[group] is not None:
                first = max(0, start + 1 - self._windows[group])
            self._read_back(request_id, blocks, first, min(start + count, len(tokens)))
        if start + count < len(tokens):
            return []
        tokens.append((sum(tokens) * 31 + len(tokens)) % 500 + 2)
        return [tokens[-1]]

    def _read_back(self, one: str, blocks: list[int], first: int, last: int) -> None:
        for position in range(first, last):
            block, at = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            if int(self.layers[0][block, 0, at, 0, 0]) != self._tokens[one][position] + 1:
                self.wrong.append(one)
                return


class Rig:
    """A scheduler under governance, or (`governed=False`) as it is."""

    def __init__(
        self,
        model: Path,
        monkeypatch: Any,
        *,
        blocks: int = 40,
        windows: bool = False,
        asynchronous: bool = False,
        caching: bool = True,
        governed: bool = True,
        batched_tokens: int = 64,
        alpha: int = 0,
        alpha_cap: int = 100,
        active: str = "10m",
        eviction: str = "{policy: lru}",
        verify: str = "none",
        connectors: list[dict[str, Any]] | None = None,
        defers: bool = False,
    ) -> None:
        self.defers = defers  # as an engine does while its workers compute
        self.clock = VirtualClock()
        self.ledger = KeepingLedger()
        self.tokens = ScopeTokens(KeyBuffer.random(KEY_BYTES), self.clock)
        self.numbers = 0
        self.depth = 1 if asynchronous else 0
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.policy = POLICY.format(alpha=alpha, alpha_cap=alpha_cap, active=active, eviction=eviction, verify=verify)
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, Any] = {}
        plugin.register()
        assert installed.is_installed
        monkeypatch.setattr(opening, "open_custody", self._open)
        self.config = self._vllm_config(model, asynchronous, caching, governed, batched_tokens, connectors)
        cache = self._cache_config(blocks + 1, windows)
        groups = len(cache.kv_cache_groups)
        self.device = Device(blocks + 1, groups)
        if windows:
            self.device.window(1, 2 * BLOCK_TOKENS)
        self.config.cache_config.num_gpu_blocks = blocks + 1
        kind = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        init_none_hash(sha256)
        self._own_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.worker: GovernedConnector | None = None
        if governed:
            self.side = self.scheduler.connector.scheduler_side
            self.port: EnginePort = self.side.port
            self.worker = GovernedConnector(self.config, KVConnectorRole.WORKER, cache)
            self.worker.register_kv_caches(self.device.caches)
            self.step()  # the boot order

    def _vllm_config(
        self,
        model: Path,
        asynchronous: bool,
        caching: bool,
        governed: bool,
        batched_tokens: int,
        connectors: list[dict[str, Any]] | None,
    ) -> VllmConfig:
        model_config = ModelConfig(model=str(model), dtype="float16", seed=0, max_model_len=512)
        cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=caching)
        transfer = None
        if connectors is not None:
            transfer = KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"connectors": connectors},
            )
        elif governed:
            transfer = KVTransferConfig(kv_connector="KVCustody", kv_role="kv_both")
        config = VllmConfig(
            model_config=model_config,
            cache_config=cache,
            kv_transfer_config=transfer,
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=batched_tokens,
                max_model_len=512,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
        )
        config.scheduler_config.async_scheduling = asynchronous
        return config

    def _cache_config(self, blocks: int, windows: bool) -> KVCacheConfig:
        facts = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
        specs = [FullAttentionSpec(**facts)]
        if windows:
            specs.append(SlidingWindowSpec(**facts, sliding_window=2 * BLOCK_TOKENS))
        groups = [
            KVCacheGroupSpec([f"layer.{layer}.{number}" for layer in range(LAYERS)], spec)
            for number, spec in enumerate(specs)
        ]
        page = specs[0].page_size_bytes
        names = [name for group in groups for name in group.layer_names]
        tensors = [KVCacheTensor(LAYERS * page * blocks, names, page * blocks, page)]
        return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)

    def _open(self, settings: Any, plan: Any, control: Any) -> OpenedCustody:
        pool = ExternalPool(plan.blocks, bytes_per_block=plan.bytes_per_block, reserved=plan.reserved)
        port = EnginePort(
            pool,
            control,
            table(self.policy),
            keyring(self.clock),
            self.ledger,
            clock=self.clock,
            block_tokens=plan.block_tokens,
            can_sum=plan.can_sum,
        )
        return OpenedCustody(port, self.tokens, self.clock)

    # -- requests -----------------------------------------------------------------------------------------------------

    def token(self, tenant: str, subject: str = "u") -> str:
        """A fresh token of one request."""
        return self.tokens.issue(Principal("idp", tenant, subject=subject))

    def add(
        self,
        prompt: list[int],
        tenant: str | None = "alpha",
        *,
        n: int = 4,
        salt: str | None = None,
        start: bool = True,
        kinds: list[list[Any]] | None = None,
        marks: list[list[Any]] | None = None,
        **named: Any,
    ) -> Request:
        """Queue a request of `tenant`, or one that presents `salt` as its token. `start` False: make it alone."""
        carried = {"kvcustody_kinds": kinds, "kvcustody_marks": marks}
        carried = {field: given for field, given in carried.items() if given is not None}
        self.numbers += 1
        name = f"r{self.numbers}"
        request = Request(
            name,
            prompt,
            SamplingParams(
                max_tokens=n,
                ignore_eos=True,
                extra_args={"kv_transfer_params": carried} if carried else None,
            ),
            None,
            cache_salt=self.token(tenant) if tenant is not None else salt,
            block_hasher=hasher.no_block_hashes if self.worker is not None else self._own_hasher,
            **named,
        )
        self.outputs[name] = []
        if start:
            self.scheduler.add_request(request)
        return request

    def ask(self, prompt: list[int], tenant: str | None = "alpha", **named: Any) -> int:
        """Run one request to its end; returns the prompt tokens that it did not compute."""
        request = self.add(prompt, tenant, **named)
        hits = self.run({request.request_id})
        return hits.get(request.request_id, 0)

    def run(self, wanted: set[str] | None = None, steps: int = 2000) -> dict[str, int]:
        """Step until the wanted requests (default: all) are over; returns cached tokens by request."""
        hits: dict[str, int] = {}
        for _ in range(steps):
            live = set(self.scheduler.requests)
            if not (live & wanted if wanted is not None else live) and not self._in_flight:
                return hits
            hits |= self.step()
        raise AssertionError(f"still running after {steps} steps: {sorted(self.scheduler.requests)}")

    def step(self) -> dict[str, int]:
        """One engine step; returns the cached tokens of requests that started in it."""
        output = self.scheduler.schedule()
        self.carry_out(output)
        return {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}

    def carry_out(self, output: Any) -> None:
        """What follows the scheduling of a step."""
        done = KVConnectorOutput()
        if self.worker is not None:
            self.worker.handle_preemptions(output.kv_connector_metadata)
        ran = self.device.run(output)
        if self.worker is not None and self.defers:
            self.side.run_deferred_work()
        if self.worker is not None:
            done.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
            ran.kv_connector_output = done
        self._in_flight.append((output, ran))
        while len(self._in_flight) > (self.depth if output.total_num_scheduled_tokens else 0):
            self._retire(*self._in_flight.popleft())

    def _retire(self, output: Any, ran: ModelRunnerOutput) -> None:
        produced = self.scheduler.update_from_output(output, ran)
        if self.worker is not None:
            produced = self.side.control.deliver(produced)
        for theirs in (produced or {}).values():
            for one in theirs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = (one.finish_reason, one.stop_reason)

    # -- checks -------------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Nothing read that was not its own, nothing left behind, all books agree."""
        assert self.device.wrong == []
        assert self.device.residue == []
        self.side.state.deferred.flush_unchecked()
        assert self.port.check() == []
        assert self.port.scan() == []
        assert self.side.control.view().allocated == self.port.pool.next_generation - 1

    def nonzero_blocks(self) -> int:
        """Blocks of the pool, less the null block, with any byte that is not zero."""
        return sum(
            any(bool(layer[block].any()) for layer in self.device.layers)
            for block in range(1, len(self.device.layers[0]))
        )


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that no other seed shares a block of."""
    return [(seed * 7919 + at * 31) % 480 + 4 for at in range(length)]
