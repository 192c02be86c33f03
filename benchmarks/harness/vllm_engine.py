"""vLLM's EngineCore in one process, without a model: all that its thread does for a request but the forward pass.

V1 The EngineCore, scheduler, cache manager and block hasher are vLLM's own, built from the configuration that
   `vllm serve` would make. Only the executor is replaced: it "samples" a token
   for every request that reached its last known one.
V2 What the executor does is not counted, except pickling the step for the workers, which EngineCore does too. What
   the engine's thread does when the step has left and before it waits for the workers' answer is counted apart: in a
   served engine the workers compute then (`waiting_ns`).
V3 A governed engine differs by `--kv-transfer-config` alone. Each engine has a worker in a process of its own, as a
   served one has: it takes every step, does the scrubs for real on memory of its own, times them, and answers.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
from multiprocessing.connection import Connection
from time import thread_time_ns
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

BLOCK_TOKENS = 16
SCRUBBED_BYTES_PER_BLOCK = 64  # of the stand-in worker: more would push the engine's data out of the core's caches


class Step(NamedTuple):
    """Thread CPU time of one or more steps, and what happened in them.

    engine_ns: between a step's answer and the departure of the next. waiting_ns: while the workers compute.
    """

    engine_ns: int
    waiting_ns: int
    worker_ns: int
    scrubbed_blocks: int
    finished: int


def work(pipe: Connection, blocks: int) -> None:
    """The stand-in worker's process: takes steps; scrubs, where it has `blocks`."""
    worker = None
    if blocks:
        from kvcustody.integrations.vllm.worker.worker_side import WorkerSide

        worker = WorkerSide(0)
        size = SCRUBBED_BYTES_PER_BLOCK
        worker.register({"layer": torch.zeros((blocks, size), dtype=torch.uint8)}, blocks)
    while data := pipe.recv_bytes():
        scheduled = pickle.loads(data)
        receipt, scrubbed, start = None, 0, thread_time_ns()
        if worker is not None:
            order = scheduled.kv_connector_metadata
            worker.execute(order)
            receipt = worker.receipt()
            scrubbed = order.order.blocks if order.order is not None else 0
        pipe.send((receipt, scrubbed, thread_time_ns() - start))


class BareExecutor(Executor):
    """An executor whose worker has no model: it samples token 7 wherever one is due, and scrubs what it is told to."""

    uses_ray = False
    supports_pp = False

    def _init_executor(self) -> None:
        self.uncounted_ns = self.worker_ns = self.scrubbed = self.waiting_ns = 0
        self._called_ns = 0
        self._known: dict[str, int] = {}
        self._pipe: Connection
        self._process: Any = None

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [None]

    def check_health(self) -> None:
        """Its worker does not die."""

    def start_worker(self, blocks: int) -> None:
        """One worker; with `blocks`, for one shard of a governed pool."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, blocks), daemon=True)
        self._process.start()

    def expect(self, request_id: str, prompt_tokens: int) -> None:
        """How many tokens of a new request are known."""
        self._known[request_id] = prompt_tokens

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        called = thread_time_ns()
        data = pickle.dumps(scheduler_output, protocol=pickle.HIGHEST_PROTOCOL)
        start = thread_time_ns()
        self._pipe.send_bytes(data)
        end = thread_time_ns()
        self.uncounted_ns += end - start
        self._called_ns += end - called
        return _Answer(self, scheduler_output)

    def answered(self, scheduled: Any) -> ModelRunnerOutput:
        """Wait for the worker and sample."""
        start = thread_time_ns()
        receipt, scrubbed, worker_ns = self._pipe.recv()
        self.scrubbed += scrubbed
        self.worker_ns += worker_ns
        output = self._sample(scheduled, receipt)
        self.uncounted_ns += thread_time_ns() - start
        return output

    def count_waiting(self) -> None:
        """Count what was put around `execute_model`: it runs when the step has left."""
        call = self.execute_model

        def counted(*args: Any, **named: Any) -> Any:
            start, self._called_ns = thread_time_ns(), 0
            answer = call(*args, **named)
            self.waiting_ns += thread_time_ns() - start - self._called_ns
            return answer

        self.execute_model = counted

    def start(self) -> int:
        """Counters to zero; returns the clock."""
        self.uncounted_ns = self.worker_ns = self.scrubbed = self.waiting_ns = 0
        return thread_time_ns()

    def _sample(self, scheduled: Any, receipt: Any) -> ModelRunnerOutput:
        known = self._known
        computed = {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids = list(scheduled.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            reached = computed[request_id] + scheduled.num_scheduled_tokens[request_id] >= known[request_id]
            known[request_id] += reached
            sampled.append([7] if reached else [])
        for request_id in scheduled.finished_req_ids:
            known.pop(request_id, None)
        places = {request_id: place for place, request_id in enumerate(ids)}
        done = KVConnectorOutput(kv_connector_worker_meta=receipt) if receipt is not None else None
        return ModelRunnerOutput(ids, places, sampled, kv_connector_output=done)


class _Answer(NamedTuple):
    """A step that is with the worker."""

    executor: BareExecutor
    scheduled: Any

    def result(self) -> ModelRunnerOutput:
        """What the worker said."""
        return self.executor.answered(self.scheduled)


class BareEngine(EngineCore):
    """An EngineCore over a pool without memory. It has an input queue, as a served one has."""

    pool_blocks = 0

    def __init__(self, config: Any, pool_blocks: int) -> None:
        self.pool_blocks = pool_blocks
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self._number = 0
        super().__init__(config, BareExecutor, log_stats=False)
        self.executor: BareExecutor = self.model_executor
        self.executor.start_worker(pool_blocks if self.scheduler.connector is not None else 0)
        self.executor.count_waiting()

    def _initialize_kv_caches(self, vllm_config: Any) -> KVCacheConfig:
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        vllm_config.cache_config.block_size = BLOCK_TOKENS
        vllm_config.cache_config.num_gpu_blocks = self.pool_blocks
        return KVCacheConfig(self.pool_blocks, [], [KVCacheGroupSpec(["attention"], spec)])

    def arrive(self, tokens: list[int], salt: str, max_tokens: int) -> int:
        """Queue a request; returns its thread CPU time."""
        self._number += 1
        request = EngineCoreRequest(
            request_id=f"r{self._number}",
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self.executor.expect(request.request_id, len(tokens))
        start = thread_time_ns()
        self.add_request(*self.preprocess_add_request(request))
        return thread_time_ns() - start

    def advance(self, steps: int) -> Step:
        """So many steps."""
        executor = self.executor
        finished = 0
        start = executor.start()
        for _ in range(steps):
            outputs, executed = self.step_fn()
            self.post_step(executed)
            if outputs:
                for output in outputs[0].outputs:
                    if output.finish_reason is not None:
                        finished += 1
        spent = thread_time_ns() - start - executor.uncounted_ns
        waiting = executor.waiting_ns
        return Step(spent - waiting, waiting, executor.worker_ns, executor.scrubbed, finished)


def build(model: str, pool_blocks: int, *, governed: bool, max_seqs: int = 256) -> BareEngine:
    """An engine; the settings of a governed one come from the environment."""
    arguments = EngineArgs(
        model=model,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=8192,
        block_size=32,
        num_gpu_blocks_override=pool_blocks,
    )
    if governed:
        arguments.kv_transfer_config = KVTransferConfig(kv_connector="KVCustody", kv_role="kv_both")
    return BareEngine(arguments.create_engine_config(), pool_blocks)
