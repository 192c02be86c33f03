"""vLLM's EngineCore in this process, governed, over workers without a model; small enough for one per case.

1. Configuration, scheduler, cache manager and connector are vLLM's and the adapter's own, put together as a served
   engine does it. What differs: the workers, the pool's size, and a heap that is not frozen.
2. It has an input queue, as a served engine has, and `serve` is its loop: a step for as long as the engine says that
   there is something to do. Nothing else steps an engine that is idle.
3. Another connector may run beside ours, as vLLM's `MultiConnector` has it; whether it may is not asked here, where it
   is found out.
"""

from __future__ import annotations

import copy
import inspect
import json
import queue
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.engine import core as engine_core
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvcustody.clock import Clock
from kvcustody.files import write_file
from kvcustody.integrations.vllm import open_custody as opening
from kvcustody.integrations.vllm import plugin
from kvcustody.integrations.vllm.engine_patch import EngineHandle
from kvcustody.integrations.vllm.scheduler import scheduler_side
from kvcustody.testkit.conformance.mutants.runner import replaced
from kvcustody.testkit.vllm.modelless_workers import BareExecutor, Workers

BLOCK_TOKENS = 8
CHUNK_TOKENS = 21  # prefilled in one step of one request: two steps leave a part of a block, too
CONTEXT_TOKENS = 512
VOCABULARY = 4096
_LAYOUT = "LBNHC"  # of the toy device: layers, blocks, tokens, heads, what a head holds
_TURNS_MAX = 10_000  # more than any engine needs to become idle
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": CONTEXT_TOKENS,
    "vocab_size": VOCABULARY,
    "torch_dtype": "bfloat16",
}


class EngineShape(NamedTuple):
    """The engine's size. `blocks` can be allocated; `asynchronous`: a step stays in flight while the next is
    scheduled.
    """

    blocks: int
    shards: int = 1
    asynchronous: bool = False


class ConnectorBeside(NamedTuple):
    """Another connector's entry among vLLM's connectors, and our settings beside it (rule 3)."""

    entry: Mapping[str, Any]
    settings: Mapping[str, Any]


class KitTimer:
    """A stand-in for `WakeTimer`: the adapter arms it, and `idle` fires it."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        self.on_due = on_due
        self.due_us: int | None = None

    def arm(self, due_us: int | None) -> None:
        """Arm the timer as `WakeTimer` does."""
        self.due_us = due_us

    def fire(self, now_us: int) -> bool:
        """Call what is due; return False where nothing is."""
        if self.due_us is None or self.due_us > now_us:
            return False
        self.due_us = None
        self.on_due()
        return True

    def close(self) -> None:
        """Ensure that nothing fires afterwards."""
        self.due_us = None


class BareEngine(engine_core.EngineCore):  # type: ignore[misc]
    """One governed engine."""

    kvcustody: EngineHandle

    def __init__(
        self,
        shape: EngineShape,
        open_custody: opening.Opener,
        clock: Clock,
        beside: ConnectorBeside | None = None,
    ) -> None:
        plugin.register()
        self._shape, self._clock, self._beside = shape, clock, beside
        self.input_queue: queue.Queue[Any] = queue.Queue()
        with ExitStack() as stack:
            stack.enter_context(replaced(opening, "open_custody", lambda _: open_custody))
            stack.enter_context(replaced(engine_core, "freeze_gc_heap", lambda _: lambda: None))
            stack.enter_context(replaced(scheduler_side, "refuse_foreign_connectors", lambda _: _allow))
            super().__init__(_configuration(shape, beside), BareExecutor, log_stats=False)
        self.workers: Workers = self.model_executor.workers
        self.scheduler.get_request_counts = _in_company(self.scheduler.get_request_counts)

    def _initialize_kv_caches(self, vllm_config: Any) -> KVCacheConfig:
        shape = self._shape
        blocks = shape.blocks + 1  # vLLM's null block
        vllm_config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=4, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        one_shard = shape._replace(shards=1)  # a worker here is in no group of processes
        alone = _configuration(one_shard, self._beside)
        self.model_executor.workers = Workers(alone, cache, BLOCK_TOKENS, shape.shards, self._clock)
        return cache

    def turn(self, take: Callable[[Any], None]) -> None:
        """Run one engine step; `take` receives every output of a request."""
        outputs, executed = self.step_fn()
        for theirs in (outputs or {}).values():
            for output in theirs.outputs:
                take(output)
        self.post_step(executed)

    @property
    def has_live_requests(self) -> bool:
        """Whether a request waits or runs, or one of its steps is in flight."""
        return bool(self.scheduler.has_unfinished_requests() or self.batch_queue)

    def serve(self, take: Callable[[Any], None]) -> None:
        """Run the loop of a served engine until it would wait for its input queue (rule 2)."""
        while not self.input_queue.empty():
            self.input_queue.get_nowait()
        for _ in range(_TURNS_MAX):
            if not (self.scheduler.has_requests() or self.batch_queue):
                return
            self.turn(take)
        raise AssertionError(f"the engine is not idle after `{_TURNS_MAX}` steps")

    def free_queue(self) -> list[int]:
        """Return vLLM's free queue from head to tail; a circular queue is cut."""
        queue, numbers = self.scheduler.kv_cache_manager.block_pool.free_block_queue, list[int]()
        block = queue.fake_free_list_head.next_free_block
        while block is not queue.fake_free_list_tail and len(numbers) <= 2 * self._shape.blocks:
            numbers.append(block.block_id)
            block = block.next_free_block
        return numbers

    def disagreements(self, withheld: Iterable[int]) -> list[str]:
        """Return differences between vLLM's references, its block tables and its free queue; `withheld` blocks have one
        reference without an owner.
        """
        manager = self.scheduler.kv_cache_manager
        tables = manager.coordinator.single_type_managers[0].req_to_blocks.values()
        wanted = Counter(block.block_id for blocks in tables for block in blocks)
        wanted.update(withheld)
        free = Counter(self.free_queue())
        problems = []
        for block in manager.block_pool.blocks[1:]:
            named, times = wanted[block.block_id], free[block.block_id]
            if block.ref_cnt != named or times != (not named):
                problems.append(
                    f"block {block.block_id} has {block.ref_cnt} references, {named} tables name it, and it is "
                    f"{times} times in the free queue"
                )
        return problems

    def close(self) -> None:
        """Close as `shutdown` does without ending a process: custody first, while the workers live."""
        self.kvcustody.close()
        self.structured_output_manager.clear_backend()
        self.scheduler.shutdown()
        self.workers.close()


def preempt(scheduler: Any, request: Request) -> None:
    """Take a running request's blocks, as vLLM does when it resets its cache under running requests."""
    take = scheduler._preempt_request
    drops = "drop_stale_output" in inspect.signature(take).parameters
    scheduler.running.remove(request)
    take(request, time.monotonic(), **({"drop_stale_output": True} if drops else {}))
    if not drops:  # releases before 0.32
        request.num_output_placeholders, request.discard_latest_async_tokens = 0, True
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _in_company(counts: Callable[[], tuple[int, int]]) -> Callable[[], tuple[int, int]]:
    """Prevent vLLM (from 0.32 on) from prefilling a lone request at once: other requests must not change its steps."""

    def counted() -> tuple[int, int]:
        running, waiting = counts()
        return running, waiting + 1 if running + waiting else 0

    return counted


def _allow(config: VllmConfig, allowed: str) -> None:
    """Accept the connector beside ours, which is what is tested (rule 3)."""


def _configuration(shape: EngineShape, beside: ConnectorBeside | None) -> VllmConfig:
    """Return a separate configuration for this engine, because vLLM writes into its cache's part."""
    config = copy.copy(_common(shape.asynchronous))
    config.cache_config = copy.copy(config.cache_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.world_size = shape.shards
    if beside is not None:
        ours = {
            "kv_connector": plugin.NAME,
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(beside.settings),
        }
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": [ours, dict(beside.entry)]},
        )
        config.cache_config.kv_cache_layout = _LAYOUT  # which vLLM asks its workers for
    return config


@lru_cache(maxsize=2)
def _common(asynchronous: bool) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        write_file(Path(folder, "config.json"), json.dumps(_MODEL).encode())
        model = ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            max_model_len=CONTEXT_TOKENS,
        )
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(kv_connector=plugin.NAME, kv_role="kv_both"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=CONTEXT_TOKENS,
                max_model_len=CONTEXT_TOKENS,
                long_prefill_token_threshold=CHUNK_TOKENS,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
        )
    config.scheduler_config.async_scheduling = asynchronous
    return config
