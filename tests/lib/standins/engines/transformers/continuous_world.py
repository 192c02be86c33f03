"""A tiny random model under continuous batching, governed or plain, driven step by step or by its own loop.

- The engine is the installed one, its weights are random, its cache is real memory, and nothing is a stand-in.
- Plain and governed engines are driven by the same code, so that what differs is governance.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.clock import Clock, VirtualClock
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.open_tiers import BlockShape, TierPlan, open_tiers
from kvcustody.governance.worker.worker import MemoryPlan
from kvcustody.integrations.transformers.batching.governed_batching import GovernedBatching
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.testkit.tiny_model import tiny_model

PAGE = 8
VOCABULARY = 97
IDLE_US = 20_000_000

IDENTITY = tiny_model(
    tokenizer_digest="none",
    chat_template="none",
    kv_dtype="float32",
    kv_layout="paged",
    block_tokens=PAGE,
    attention={"heads": 4},
)
TENANTS = """\
  a: {quota: {guaranteed: 25%, cap: 100%, borrow: true}}
  b: {quota: {guaranteed: 25%, cap: 100%, borrow: true}}"""
ANYBODY = "\n  default: {quota: {guaranteed: 0%, cap: 50%, borrow: true}}"
POLICY = """\
schema: kvcustody/policy@1
name: continuous
profile: shared
scope: subject
classifications: [low]
classify:
  - {{tenant: "*", as: low}}
tenants:
{tenants}
rules:
  - {{id: own, effect: permit, action: [reuse, export], when: {{reader: owner}}}}
retention:
  low: {{idle: 20s, absolute: 90s, active_max: 5m}}
scrub:
  default: {{within: 1s, verify: all}}
offload: {{low: never}}
audit: {{on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}}}
eviction: {{policy: lru}}
"""


def policy(tenants: str = TENANTS) -> str:
    return POLICY.format(tenants=tenants)


def person(tenant: str = "a", subject: str = "ada") -> Principal:
    return identify(issuer="idp", tenant=tenant, verified={"subject": subject})


def model(kind: str = "llama") -> Any:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,  # large, so that what is said depends on all that was read
    }
    if kind in (
        "sliding",
        "windows",
        "wide",
        "narrow",
    ):  # one layer of two, all, one of four; less than a page
        layers = {"sliding": 1, "windows": 0, "wide": 3, "narrow": 1}[kind]
        window = 5 if kind == "narrow" else 16
        sizes |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": layers}
        sizes |= {"num_hidden_layers": 4} if kind == "wide" else {}
    config: Any = LlamaConfig(**sizes) if kind == "llama" else Qwen2Config(**sizes)
    config._attn_implementation = "sdpa"
    return (LlamaForCausalLM if kind == "llama" else Qwen2ForCausalLM)(config).eval()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCABULARY, tokens).tolist()


def batching(**values: Any) -> ContinuousBatchingConfig:
    chosen = {
        "page_size": PAGE,
        "num_blocks": 64,
        "max_batch_tokens": 64,
        "max_memory_percent": 0.9,
        "seed": 3,
    }
    return ContinuousBatchingConfig(**(chosen | values))


def generation(**values: Any) -> GenerationConfig:
    return GenerationConfig(**({"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1} | values))


@cache
def _keys() -> tempfile.TemporaryDirectory[str]:
    """Where this process keeps root keys; gone with it."""
    return tempfile.TemporaryDirectory(prefix="kvcustody-keys-")


def govern(
    text: str, clock: Any, *, tiers: dict[str, Any] | None = None, **options: Any
) -> Callable[[MemoryPlan], Governor]:
    """What `GovernedBatching` asks for: a Governor over the engine's memory, with a ledger that counts.

    `tiers`: what of a `TierPlan` is to be opened beside it.
    """

    def make(plan: MemoryPlan) -> Governor:
        folder = Path(tempfile.mkdtemp(dir=_keys().name))
        port = open_wrapping("generated", folder / "root.key")
        ring = Keyring(FileKeyStore(folder / "keys.json"), port, clock)
        chosen = PoolOptions(block_tokens=PAGE, **{"evict_ahead": 4, "scrub_batch": 4, **options})
        pools = Pools(plan.make, plan.blocks, chosen)
        table = compile_policy(load_policy(text, name="continuous.yaml"), revision=1)
        opened = None
        if tiers is not None:
            shape = BlockShape(plan.bytes_per_block, plan.shards, PAGE)
            tier_plan = TierPlan(folder / "shred.keys", object_blocks=4, timeout_seconds=10, **tiers)
            opened = partial(open_tiers, tier_plan, shape, ring, port, clock, ExitStack())
        return Governor(pools, table, ring, CountingLedger(), clock=clock, tiers=opened)

    return make


class Driver:
    """Runs an engine's manager on the calling thread: one `step` is one forward."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        if manager.batch_processor is None:
            manager.batch_processor = manager._create_batch_processor()
        self.processor = manager.batch_processor
        self.scheduler = self.processor.scheduler
        self.cache = self.processor.cache
        self.allocators = list(self.cache.cache_allocators.values())
        self.allocator = self.allocators[0]
        self.results: dict[str, Any] = {}
        self.reused: dict[str, int] = {}
        self.before_forward: Callable[[], None] = lambda: None

    def add(self, tokens: Sequence[int], **options: Any) -> str:
        return str(self.manager.add_request(list(tokens), **options))

    def step(self) -> bool:
        waiting = {
            **self.scheduler.waiting_requests,
            **{s.request_id: s for s in self.manager.input_queue.queue},
        }
        ready = self.processor.prepare_next_batch()
        if ready:
            for future in self.processor.inputs_and_outputs.requests_in_batch:
                state = future.state
                if state.request_id in waiting:  # its first step: the position has moved by what is in the batch
                    self.reused[state.request_id] = state.position_offset - future.query_length
            self.before_forward()
            self.processor._generation_step(self.manager.model)
            self.processor.update_batch()
        queue = self.manager.output_router.output_queue
        while not queue.empty():
            result = queue.get()
            if result.is_finished():
                self.results[result.request_id] = result
        return ready

    def run(self, limit: int = 400) -> int:
        """Steps until nothing is queued or running; returns how many had a forward."""
        steps = 0
        for _ in range(limit):
            ran = self.step()
            steps += ran
            if not ran and not self.processor.has_pending_requests():
                return steps
        raise AssertionError(f"still busy after {limit} steps: {self.processor}")

    def output(self, request_id: str) -> list[int]:
        result = self.results[request_id]
        assert result.error is None, result.error
        return list(result.generated_tokens)

    def tables(self, allocator: Any = None) -> dict[str, list[int]]:
        """By request, the blocks of an allocator that it writes; of a window those of its ring."""
        allocator = allocator or self.allocator
        window = getattr(allocator, "sliding_window", None)
        ring = None if window is None else -(-window // PAGE)
        return {name: table[:ring] for name, table in allocator.block_table.items()}

    def nonzero(self, blocks: Sequence[int], allocator: Any = None) -> int:
        """Bytes that are not zero in these blocks of the engine, read from its cache tensor."""
        rows = self.cache.cache_tensor.view(-1, (allocator or self.allocator).bytes_per_block)
        return int(torch.count_nonzero(rows[list(blocks)]))


class Governed(Driver):
    """A governed engine and its clock."""

    def __init__(self, batching_: GovernedBatching, clock: Any) -> None:
        super().__init__(batching_.manager)
        self.batching = batching_
        self.clock = clock
        self.custody = batching_.custody
        self.governor = batching_.custody.governor

    def submit(self, principal: Principal, tokens: Sequence[int], **options: Any) -> str:
        return self.batching.submit(principal, tokens, **options)

    def sound(self) -> None:
        """Every invariant and the orphan scan, and the engine's books against ours."""
        with self.custody.turn:
            assert self.governor.check() == []
            assert self.governor.scan() == []
            for allocator in self.allocators:
                assert set(allocator.block_table) == set(self.custody.records)
            for name, record in self.custody.records.items():
                if record.handle in self.governor.running:
                    first = self.custody.blocks.pool_first[record.manager.number]
                    rows = self.governor.blocks(record.handle) + first
                    for part, table in zip(self.custody.blocks.parts, record.tables, strict=True):
                        assert table is part.allocator.block_table[name]
                        assert table == (rows + part.first).tolist()


@contextmanager
def governed(
    kind: str = "llama",
    *,
    text: str | None = None,
    generate: GenerationConfig | None = None,
    config: ContinuousBatchingConfig | None = None,
    pool: dict[str, Any] | None = None,
    clock: Clock | None = None,
    tiers: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Governed]:
    clock = clock or VirtualClock()
    governed_batching = GovernedBatching(
        model(kind),
        govern(text or policy(), clock, tiers=tiers, **(pool or {})),
        IDENTITY,
        generation_config=generate or generation(),
        batching_config=config or batching(),
        clock=clock,
        **options,
    )
    try:
        engine = Governed(governed_batching, clock)
        yield engine
        engine.sound()
    finally:
        governed_batching.close()
        governed_batching.custody.governor.close()


@contextmanager
def plain(
    kind: str = "llama",
    *,
    generate: GenerationConfig | None = None,
    config: ContinuousBatchingConfig | None = None,
) -> Iterator[Driver]:
    manager = model(kind).init_continuous_batching(generate or generation(), config or batching())
    yield Driver(manager)
    manager.batch_processor = None


def settings(folder: Path) -> Settings:
    """Of a worker whose files lie in `folder`."""
    # Real time, on a machine that may be busy: the deadline is not what is shown here.
    text = policy(TENANTS).replace("within: 1s", "within: 60s")
    (folder / "policy.yaml").write_text(text, encoding="utf-8")
    return Settings(
        policy_path=folder / "policy.yaml",
        database_url=f"sqlite:///{folder / 'ledger.db'}",
        spill_path=folder / "spill",
        root_key_path=folder / "root.key",
        keyring_path=folder / "keys.json",
        block_tokens=PAGE,
    )
