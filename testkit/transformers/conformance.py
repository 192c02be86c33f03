"""Continuous batching under the conformance kit: a real engine with a tiny random model, one forward a step.

`kvcustody conformance --engine kvcustody.testkit.transformers.conformance:engine`

1. Block tables, bytes and outputs are read from the engine; the kit's clock decides every deadline, no thread runs.
2. A block is looked at for its first write between preparation and forward: after every scrub that was ordered for
   it, before any write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.audit.kinds import Event
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import Hints
from kvcustody.governance.worker.worker import MemoryPlan
from kvcustody.integrations.events.block_event import BlockEvent, split_keys
from kvcustody.integrations.transformers.batching.custody import BatchCustody
from kvcustody.integrations.transformers.batching.governed_batching import GovernedBatching
from kvcustody.integrations.transformers.batching.request_claims import RequestClaim, RequestRecord
from kvcustody.testkit.conformance.deployment import (
    KeepingLedger,
    KeepingPublisher,
    keyring,
    table,
    toy_model,
)
from kvcustody.testkit.conformance.engine_protocol import (
    ABORTED,
    FINISHED,
    REFUSED,
    RUNNING,
    WAITING,
    Capabilities,
    FirstWrite,
    RequestOutcome,
    RequestSpec,
    Setup,
)

BLOCK_TOKENS = 8
TIMER_US = 100_000  # the idle loop's own wake-up
_LACKS = {
    "epochs": "identity travels by request id: no door before a router reaches it",
    "tokens": "identity travels by request id, and is proved by whoever submits",
    "forks": "the engine forks only while it prefills, for `num_return_sequences`",
    "async": "the CPU has no steps in flight",
    "tier": "the engine's host memory tier is refused",
    "shards": "tensor parallelism is refused",
}


class TransformersEngineUnderTest:
    """`EngineUnderTest` over `GovernedBatching`. Requests are named by the order of submission."""

    def __init__(self, setup: Setup) -> None:
        self._clock = setup.clock
        self._ledger = KeepingLedger()
        self._told = KeepingPublisher()
        self._revision = 1
        batching = ContinuousBatchingConfig(
            page_size=BLOCK_TOKENS,
            num_blocks=setup.blocks,
            max_batch_tokens=5 * BLOCK_TOKENS,  # so that a long prompt takes two steps
            max_memory_percent=0.95,
            seed=1,
        )
        generation: Any = GenerationConfig
        generation = generation(max_new_tokens=1, do_sample=False, eos_token_id=-1)
        self._batching = GovernedBatching(
            tiny_model(),
            partial(self._open, setup),
            toy_model(BLOCK_TOKENS),
            generation_config=generation,
            batching_config=batching,
            publisher=self._told,
            clock=setup.clock,
            tick_seconds=None,
        )
        self._custody = self._batching.custody
        self._governor = self._custody.governor
        self._manager = cast(Any, self._batching.manager)
        self._processor = self._manager.batch_processor
        self._scheduler = self._processor.scheduler
        self._asked: list[str] = []
        self._results: dict[str, Any] = {}
        self._aborted: dict[str, tuple[int, ...]] = {}
        self._writes = FirstWrites(self._custody)
        self.capabilities = Capabilities(
            "transformers continuous batching",
            BLOCK_TOKENS,
            self._custody.blocks.blocks,
            vocabulary=VOCABULARY,
            lacks=_LACKS,
        )

    def _open(self, setup: Setup, plan: MemoryPlan) -> Governor:
        options = PoolOptions(block_tokens=BLOCK_TOKENS, evict_ahead=1, scrub_batch=4)
        pools = Pools(plan.make, plan.blocks, options)
        return Governor(pools, table(setup.policy), keyring(setup.clock), self._ledger, clock=setup.clock)

    # -- requests -----------------------------------------------------------------------------------------------------

    def mint(self, principal: Principal, valid_us: int) -> str:
        """Return nothing: there are no tokens, so this is not called."""
        raise NotImplementedError

    def submit(self, ask: RequestSpec) -> object:
        """Queue a request; without a principal it stays unclaimed."""
        name = f"request-{len(self._asked)}"
        self._asked.append(name)
        if isinstance(ask.identity, Principal):
            claim = RequestClaim(ask.identity, ask.route, Hints(salt=ask.salt))
            self._batching.claims.file(name, claim)
        self._manager.add_request(list(ask.tokens), name, max_new_tokens=ask.max_tokens)
        return name

    def step(self) -> bool:
        """Run one turn of the engine's loop."""
        if self._processor.prepare_next_batch():
            self._writes.before_forward(self._processor.inputs_and_outputs.requests_in_batch)
            self._processor._generation_step(self._manager.model)
            self._processor.update_batch()
        self._collect()
        return bool(self._processor.has_pending_requests())

    def _collect(self) -> None:
        queue = self._manager.output_router.output_queue
        while not queue.empty():
            result = queue.get()
            if result.is_finished():
                self._results[result.request_id] = result

    def outcome(self, request: object) -> RequestOutcome:
        """Return the facts from the engine's own states and results."""
        name = str(request)
        cached = self._writes.cached.get(name, 0)
        if name in self._aborted:
            return RequestOutcome(ABORTED, cached, self._aborted[name], "", ())
        result = self._results.get(name)
        if result is not None:
            output = tuple(result.generated_tokens)
            if result.error is None:
                return RequestOutcome(FINISHED, cached, output, "", ())
            state = ABORTED if name in self._writes.cached else REFUSED
            return RequestOutcome(state, cached, output, result.error, (), result.error)
        record = self._custody.records.get(name)
        if name not in self._scheduler.active_requests or record is None:
            return RequestOutcome(WAITING, cached, self._generated(name), "", ())
        blocks = tuple(block - self._custody.blocks.parts[0].first for block in record.tables[0])
        return RequestOutcome(RUNNING, record.hit_tokens, self._generated(name), "", blocks)

    def _generated(self, name: str) -> tuple[int, ...]:
        state = self._scheduler.active_requests.get(name) or self._scheduler.waiting_requests.get(name)
        return () if state is None else tuple(state.to_generation_output().generated_tokens)

    def abort(self, request: object) -> None:
        """Cancel a request and let the engine notice it."""
        name = str(request)
        if name in self._results or name in self._aborted:
            return
        self._aborted[name] = self._generated(name)
        self._manager.cancel_request(name)
        self._processor._update_tp_group_state()
        self._scheduler.clear_cancelled_requests()

    disconnect = abort

    def preempt(self, request: object) -> None:
        """Preempt a request as when its tenant is out of room."""
        state = self._scheduler.active_requests.get(str(request))
        if state is not None:
            self._scheduler._preempt(state)

    def fork(self, request: object) -> object:
        """Do nothing: see `_LACKS`."""
        raise NotImplementedError

    # -- time and administration --------------------------------------------------------------------------------------

    def idle(self, microseconds: int) -> None:
        """Run only the loop's wake-up."""
        while microseconds > 0:
            stride = min(TIMER_US, microseconds)
            self._clock.advance(stride)
            microseconds -= stride
            self._batching.tick()

    def activate(self, policy: str) -> None:
        """Activate a new policy revision."""
        self._revision += 1
        self._governor.activate(table(policy, self._revision), actor="conformance")

    def erase(self, selector: Selector) -> None:
        """Request an erasure as another thread would; the loop's next turn carries it out."""
        done = self._governor.call(lambda governor: governor.erase(selector))
        self._scheduler.clear_cancelled_requests()
        done.result(0)
        self._collect()

    def take_epochs(self, known: KnownEpochs) -> None:
        """Do nothing: see `_LACKS`."""
        raise NotImplementedError

    def scan(self) -> list[str]:
        """Return the findings of the Governor's orphan scan."""
        return [str(finding) for finding in self._governor.scan()]

    def check(self) -> list[str]:
        """Return the Governor's violated invariants, and differences between the engine's block tables and ours."""
        problems = self._governor.check()
        (allocator,) = self._processor.cache.cache_allocators.values()
        for name, engine_table in allocator.block_table.items():
            record = self._custody.records.get(name)
            ours: list[int] = []
            if record is not None:
                ours = (self._governor.blocks(record.handle) + self._custody.blocks.parts[0].first).tolist()
            if ours != engine_table:
                problems.append(f"request `{name}`: the engine's table is `{engine_table}`, ours `{ours}`")
        if allocator.ledger.hash_to_block:
            problems.append("the engine has written its own index")
        return problems

    def close(self) -> None:
        """Stop, end all custody, and hand over the evidence."""
        self._batching.close()
        self._governor.close()

    # -- evidence -----------------------------------------------------------------------------------------------------

    def watch(self, probe: Callable[[FirstWrite], None]) -> None:
        """Probe between preparation and forward, when every scrub is done."""
        self._writes.probe = probe

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        """Return rows of the engine's cache tensor."""
        size = self._custody.blocks.bytes_per_block
        rows = self._processor.cache.cache_tensor.view(-1, size)[self._custody.blocks.parts[0].first :]
        return [rows[block].numpy().tobytes() for block in blocks]

    def free_blocks(self) -> tuple[int, ...]:
        """Return the clean ring."""
        blocks: list[int] = []
        for partition in self._governor.managers[0].pool.partitions:
            places = range(partition.clean_head, partition.clean_head + partition.clean_count)
            blocks += [int(partition.clean_ring[at % partition.size]) for at in places]
        return tuple(blocks)

    def indexed(self) -> frozenset[bytes]:
        """Return the keys in the Governor's prefix trees; the engine's own index stays empty (`check`)."""
        nodes = (node for manager in self._governor.managers for node in manager.tree.nodes())
        return frozenset(key for node in nodes for key in split_keys(node.keys))

    def events(self) -> list[BlockEvent]:
        """Return the published events; the last step's are fetched as the loop's next turn would."""
        self._custody.publish_events()
        taken, self._told.events = self._told.events, []
        return taken

    def ledger(self) -> list[Event]:
        """Return every event handed to the ledger."""
        return list(self._ledger.events)

    # -- faults -------------------------------------------------------------------------------------------------------

    def stick(self, block: int) -> None:
        """Use the memory's own fault injection."""
        self._custody.blocks.memories[0].stuck.add((0, block))

    def hold_transfers(self, held: bool) -> None:
        """Do nothing: there is no tier."""

    def tier(self) -> list[Any]:
        """Return nothing: there is no tier."""
        return []

    def drop_index(self) -> None:
        """Do nothing: there is no tier."""


def engine(setup: Setup) -> TransformersEngineUnderTest:
    """Return the kit's factory."""
    return TransformersEngineUnderTest(setup)


class FirstWrites:
    """Follows the engine's block tables. `cached`: each request's hit tokens at its last start."""

    def __init__(self, custody: BatchCustody) -> None:
        self._custody = custody
        self._known: dict[str, tuple[RequestRecord, int]] = {}
        self._fresh: dict[int, tuple[str, int]] = {}
        self._hand_outs = 0
        self.cached: dict[str, int] = {}
        self.probe: Callable[[FirstWrite], None] | None = None

    def before_forward(self, batch: Sequence[Any]) -> None:
        """Report the first writes of the batch that the engine has prepared; positions already count this step's
        tokens.
        """
        page, first = self._custody.page, self._custody.blocks.parts[0].first
        self._take_in(page, first)
        (memory,) = self._custody.blocks.memories
        for future in batch:
            end = future.state.position_offset
            places = range((end - future.query_length) // page, -(-end // page))
            table = self._custody.records[future.state.request_id].tables[0]
            for block in (table[at] - first for at in places):
                fresh = self._fresh.pop(block, None)
                if fresh is not None and self.probe is not None:
                    nonzero = memory.nonzero_bytes(np.array([block], dtype=np.int64))
                    self.probe(FirstWrite(fresh[0], block, nonzero, fresh[1]))

    def _take_in(self, page: int, first: int) -> None:
        """Take note of newly allocated blocks: those that are new in a table since the last step."""
        for name, record in self._custody.records.items():
            self.cached[name] = record.hit_tokens
            known, count = self._known.get(name, (None, 0))
            if known is not record:
                count = record.hit_tokens // page
            for block in record.tables[0][count:]:
                self._hand_outs += 1
                self._fresh[block - first] = (name, self._hand_outs)
            self._known[name] = (record, len(record.tables[0]))


VOCABULARY = 256


def tiny_model() -> Any:
    """Return a random Llama of two layers, the same every time."""
    torch.manual_seed(11)
    config: Any = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.4,  # large, so that what is said depends on all that was read
    )
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config)
    return model.eval()
