"""A worker for classic caches, real from settings to ledger, and tiny random models; only the clock may be virtual."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    Cache,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    QuantizedCache,
    StaticCache,
)

from kvcustody.audit.evidence.coverage.conservation import conservation
from kvcustody.audit.evidence.coverage.summary import CoverageSummary, coverage
from kvcustody.audit.store.database.engine import open_store
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import Worker, open_worker
from kvcustody.integrations.transformers.classic.custodian import Custodian, SlabMemory
from kvcustody.integrations.transformers.classic.governed_cache import GovernedCache, governed_cache
from kvcustody.testkit.tiny_model import tiny_model

MAX_TOKENS = 96
BLOCK_BYTES = 4096
POLICY = """\
schema: kvcustody/policy@1
name: caches
profile: shared
classifications: [low, high, sealed, banned]
classify:
  - {tenant: "*", as: low}
  - {tenant: lab, as: high}
  - {tenant: vault, as: sealed}
tenants:
  org:   {quota: {guaranteed: 40%, cap: 60%}}
  lab:   {quota: {guaranteed: 20%, cap: 40%}}
  vault: {quota: {guaranteed: 20%, cap: 40%}}
rules:
  - {id: own, effect: permit, action: reuse, when: {reader: owner}}
  - {id: no-banned, effect: forbid, action: admit, when: {classification: banned}}
retention:
  low:    {idle: 60s, absolute: 20m, active_max: 10m}
  high:   {idle: 60s, absolute: 5m, active_max: 10m}
  sealed: {idle: 0s, absolute: 0s, active_max: 10m}
  banned: {idle: 0s, absolute: 0s, active_max: 1m}
scrub:
  default: {within: 1s, verify: 1/4}
  high:    {within: 250ms, verify: all}
offload:
  low: {tiers: [host], encrypt: none}
  high: {tiers: [host], encrypt: required}
  sealed: never
  banned: never
audit:
  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}
eviction: {policy: lru}
"""
MODEL = tiny_model(
    weights_digest="sha256:w",
    tokenizer_digest="sha256:t",
    chat_template="none",
    kv_dtype="fp32",
    kv_layout="bhtd",
    attention={"heads": 2},
)


@cache
def llama() -> Any:
    """Three full layers, grouped heads."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


@cache
def gemma() -> Any:
    """Full and sliding layers in turns, a window of eight tokens."""
    torch.manual_seed(2)
    config = Gemma2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        max_position_embeddings=512,
    )
    return Gemma2ForCausalLM(config).eval()


def plain_cache(kind: str, config: Any) -> Cache:
    """The class that a governed cache of `kind` stands for; transformers' own offloading needs a GPU."""
    if kind == "static":
        return StaticCache(config, max_cache_len=MAX_TOKENS)
    if kind == "quantized":
        return QuantizedCache("fp8", config)
    return DynamicCache(config=config)


class World(NamedTuple):
    """One open worker and its custodian."""

    worker: Worker
    custodian: Custodian
    clock: VirtualClock | SystemClock
    folder: Path

    @property
    def memory(self) -> SlabMemory:
        memory = self.worker.governor.managers[0].pool.memory
        assert isinstance(memory, SlabMemory)
        return memory

    def open(
        self, kind: str = "dynamic", who: Principal | None = None, model: Any = None, **options: Any
    ) -> GovernedCache:
        """A cache of `kind` for ada of org, unless said otherwise."""
        config = (model or llama()).config
        options = {"max_tokens": MAX_TOKENS} | options
        return governed_cache(self.custodian, who or person(), MODEL, config=config, kind=kind, **options)

    def evidence(self) -> tuple[CoverageSummary, list[str]]:
        """Coverage, and the conservation identities that do not hold, after everything has reached the ledger."""
        counts = self.worker.governor.counts()
        assert self.worker.writer.flush()
        engine = open_store(self.folder / "ledger.db", read_only=True)
        with engine.connect() as connection:
            found = coverage(connection)
            identities = conservation(connection, self.worker.writer.incarnation, counts)
        engine.dispose()
        return found, [identity.name for identity in identities if identity.difference]


@contextmanager
def open_world(folder: Path, *, is_virtual: bool = True, megabytes: int = 4) -> Iterator[World]:
    """A world in `folder`. With a virtual clock there is no timer: tests call `custodian.step`."""
    policy = folder / "policy.yaml"
    policy.write_text(POLICY, encoding="utf-8")
    settings = Settings(
        policy_path=policy,
        database_url=f"sqlite:///{folder / 'ledger.db'}",
        spill_path=folder / "spill",
        root_key_path=folder / "root.key",
        keyring_path=folder / "keys.json",
    )
    clock = VirtualClock() if is_virtual else SystemClock()
    plan = SlabMemory.plan(megabytes << 20, bytes_per_block=BLOCK_BYTES, clock=clock)
    with (
        open_worker(settings, plan, clock=clock) as worker,
        Custodian(worker.governor, tick_seconds=None if is_virtual else 0.01) as custodian,
    ):
        yield World(worker, custodian, clock, folder)


def person(tenant: str = "org", subject: str | None = "ada") -> Principal:
    return identify(issuer="idp", tenant=tenant, verified={} if subject is None else {"subject": subject})


def generate(model: Any, past: Cache, tokens: int = 30, prompt: list[int] | None = None, **options: Any) -> list[int]:
    """Greedy tokens, prompt included."""
    ids = torch.tensor([prompt or list(range(1, 21))])
    chosen = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    return model.generate(ids, past_key_values=past, **chosen)[0].tolist()


def nonzero(slabs: list[torch.Tensor]) -> int:
    return sum(int(torch.count_nonzero(slab)) for slab in slabs)
