"""Workers without a model under vLLM's own engine: the kit's toy device replaces the forward pass.

1. A step is one piece of work on one stream: first what the connector of every shard is told (its scrubs), then every
   write of the step, then every read. What was submitted is done when somebody waits for it, or for a later step.
2. K/V of a position is a function of the request's canary and of every token up to it. An output token is a function of
   all K/V that was read through the block table (`conformance.toy_model`).
3. Where another connector runs beside ours, both are called as vLLM's model runner does: loads and saves are handed
   over behind the step's work.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvcustody.clock import Clock
from kvcustody.integrations.vllm.connector import GovernedConnector
from kvcustody.integrations.vllm.worker.worker_side import WorkerSide
from kvcustody.testkit.conformance.engines.toy_device import Call, Say, ToyDevice, Work, Write
from kvcustody.testkit.conformance.engines.toy_model import prefix_states


class WorkerRequest:
    """The workers' facts about one request."""

    def __init__(self, canary: int, tokens: list[int], table: list[int]) -> None:
        self.canary = canary
        self.tokens = tokens
        self.table = table
        self.states: list[int] = []

    def resume(self, tokens: list[int], table: list[int]) -> None:
        """Start again with these blocks, from the scheduler's facts about the request."""
        self.tokens, self.table, self.states = tokens, table, []


class SubmittedStep:
    """One submitted step, in the form of vLLM's future for its output."""

    def __init__(self, executor: BareExecutor, scheduled: Any) -> None:
        self.scheduled = scheduled
        self.outputs: list[ModelRunnerOutput] = []  # of each worker, once it is done
        self._executor = executor

    def result(self) -> Any:
        """Run everything up to this step and return all workers' output, aggregated as vLLM does."""
        while not self.outputs:
            self._executor.workers.retire()
        return self._executor.kv_output_aggregator.aggregate(self.outputs, 0)

    def done(self) -> bool:
        """Return whether the step was waited for."""
        return bool(self.outputs)


class Workers:
    """Every shard of one engine: its memory, its half of the connector, and the shared stream."""

    def __init__(self, config: Any, cache: Any, block_tokens: int, shards: int, clock: Clock) -> None:
        self.block_tokens = block_tokens
        self.device = ToyDevice(cache.num_blocks, block_tokens, shards, clock)
        self.canaries: dict[str, int] = {}
        self.connectors: list[KVConnectorBase_V1] = []  # each shard's
        self.governed: list[GovernedConnector] = []  # ours of them
        for shard, tensor in enumerate(self.device.tensors):
            connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            ours = connector.sub_connectors[0] if isinstance(connector, MultiConnector) else connector
            assert isinstance(ours, GovernedConnector)
            ours.worker_side = WorkerSide(shard, clock)
            one_head = tensor.unsqueeze(3)  # [K and V, blocks, tokens, heads, head size], as vLLM has it
            connector.register_kv_caches({"layer": one_head})
            self.connectors.append(connector)
            self.governed.append(ours)
        self._stream: deque[SubmittedStep] = deque()
        self._sequences: dict[str, WorkerRequest] = {}
        self._said: dict[str, int] = {}

    def submit(self, step: SubmittedStep) -> None:
        """Put one step on the stream."""
        self._stream.append(step)

    def retire(self) -> None:
        """Run the oldest step on the stream."""
        step = self._stream.popleft()
        self._said = {}
        self.device.submit(
            [Call(partial(self.execute, step.scheduled.kv_connector_metadata)), *self._work(step.scheduled)]
        )
        self.device.retire()
        step.outputs = [self._output(step.scheduled, connector) for connector in self.connectors]

    def _output(self, scheduled: Any, connector: KVConnectorBase_V1) -> ModelRunnerOutput:
        names = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[self._said[name]] if name in self._said else [] for name in names],
            kv_connector_output=_transferred(scheduled, connector),
        )

    def execute(self, order: Any) -> None:
        """Do on each shard what the connector is told."""
        for connector in self.connectors:
            connector.handle_preemptions(order)

    def close(self) -> None:
        """Make connectors beside ours release what they hold; ours is closed with its engine."""
        for connector, ours in zip(self.connectors, self.governed, strict=True):
            for child in getattr(connector, "sub_connectors", ()):
                if child is not ours:
                    child.shutdown()

    # -- a step's writes and reads ------------------------------------------------------------------------------------

    def _work(self, scheduled: Any) -> list[Work]:
        starts = self._update(scheduled)
        writes: list[Work] = []
        says: list[Work] = []
        for name, count in scheduled.num_scheduled_tokens.items():
            one, first = self._sequences[name], starts[name]
            last = min(first + count, len(one.tokens))
            prefix_states(one.canary, one.tokens, one.states)
            table = tuple(one.table)
            writes.append(Write(table, first, tuple(one.states[first:last])))
            if last == len(one.tokens):
                says.append(Say(table, last, partial(self._say, name)))
        return writes + says

    def _say(self, name: str, token: int) -> None:
        self._sequences[name].tokens.append(token)
        self._said[name] = token

    def _update(self, scheduled: Any) -> dict[str, int]:
        """Update the sequences; return where each of the step begins."""
        for name in scheduled.finished_req_ids:
            self._sequences.pop(name, None)
        starts: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            name, start = new.req_id, new.num_computed_tokens
            table = list(new.block_ids[0])
            self._sequences[name] = WorkerRequest(self.canaries[name], list(new.prompt_token_ids), table)
            self._hand_out(name, table[start // self.block_tokens :])
            starts[name] = start
        cached = scheduled.scheduled_cached_reqs
        for name, groups, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            starts[name] = start
            blocks = list(groups[0]) if groups is not None else []
            one = self._sequences[name]
            if name in cached.resumed_req_ids:
                one.resume(list(cached.all_token_ids[name]), blocks)
                blocks = blocks[start // self.block_tokens :]
            else:
                one.table += blocks
            self._hand_out(name, blocks)
        return starts

    def _hand_out(self, name: str, blocks: list[int]) -> None:
        for block in blocks:
            self.device.handed_out(block, name)


def _transferred(scheduled: Any, connector: KVConnectorBase_V1) -> KVConnectorOutput:
    """Return what one shard's connector does after a step, in the model runner's order (rule 3)."""
    if not isinstance(connector, MultiConnector):
        return KVConnectorOutput(kv_connector_worker_meta=connector.build_connector_worker_meta())
    connector.bind_connector_metadata(scheduled.kv_connector_metadata)
    connector.start_load_kv(None)
    connector.wait_for_save()
    results = connector.get_transfer_results(scheduled.finished_req_ids)
    output = KVConnectorOutput(
        finished_sending=results.finished_sending,
        finished_recving=results.finished_recving,
        failed_recving=results.failed_recving,
        invalid_block_ids=connector.get_block_ids_with_load_errors(),
        kv_connector_worker_meta=connector.build_connector_worker_meta(),
    )
    connector.clear_connector_metadata()
    return output


class BareExecutor(Executor):  # type: ignore[misc]
    """vLLM's executor over `Workers`."""

    uses_ray = False
    supports_pp = False
    workers: Workers

    def _init_executor(self) -> None:
        self.cached: dict[str, int] = {}
        self.scheduled_tokens = 0  # of the last step
        self._latest: SubmittedStep | None = None

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Return nothing: no worker answers calls."""
        return [None]

    def check_health(self) -> None:
        """Do nothing: there is no process that could die."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Submit a step."""
        self.scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens
        more = scheduler_output.scheduled_cached_reqs
        for name, computed in zip(more.req_ids, more.num_computed_tokens, strict=True):
            if name in more.resumed_req_ids:
                self.cached[name] = computed
        self._latest = SubmittedStep(self, scheduler_output)
        self.workers.submit(self._latest)
        return self._latest if non_block else self._latest.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the answer of the step submitted last."""
        assert self._latest is not None, "a step was submitted before"
        return self._latest if non_block else self._latest.result()
