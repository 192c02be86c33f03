"""Tokens per CPU second of transformers' classic caches, governed over plain, in interleaved pairs.

    python benchmarks/engines/classic_caches.py [--pairs 15] [--prompt 512] [--new 64] [--json FILE]

1. One process, one random-weight model, the same prompt. Each pair generates once with the plain class and once with
   the governed one, in turns which goes first; greedy outputs are checked to be equal.
2. The time is CPU time of the calling thread, in which all of torch's work runs too (one thread), so that a busy
   machine adds noise and no bias. It covers `generate`, or the updates, alone; opening a cache and ending it (scrub,
   read-back, evidence) are apart.
3. The governed side runs with its timer on and a real ledger in SQLite. transformers' own offloading needs a GPU, so
   `offloaded` is compared with the plain dynamic class: on a CPU that is the cost of copying between two host areas.
4. `cache` is the same comparison without a model: updates of one token after a prompt, all layers.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns
from typing import Any

import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache

from kvcustody.governance.identity.principal import identify
from kvcustody.governance.settings import Settings
from kvcustody.governance.worker.worker import open_worker
from kvcustody.integrations.transformers.classic.custodian import Custodian, SlabMemory
from kvcustody.integrations.transformers.classic.governed_cache import governed_cache
from kvcustody.testkit.tiny_model import tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench, table
from spread import ratio

KINDS = ("dynamic", "static", "quantized", "offloaded")
PERSON = identify(issuer="idp", tenant="org", verified={"subject": "ada"})
IDENTITY = tiny_model(
    weights_digest="sha256:w",
    tokenizer_digest="sha256:t",
    chat_template="none",
    kv_dtype="fp32",
    kv_layout="bhtd",
    attention={"heads": 4},
)
POLICY = """\
schema: kvcustody/policy@1
name: benchmark
profile: shared
classifications: [internal]
classify: [{tenant: "*", as: internal}]
tenants: {org: {quota: {guaranteed: 100%, cap: 100%}}}
rules: [{id: own, effect: permit, action: reuse, when: {reader: owner}}]
retention: {internal: {idle: 1h, absolute: 12h, active_max: 2h}}
scrub: {default: {within: 1s, verify: all}}
offload: {internal: {tiers: [host], encrypt: none}}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
eviction: {policy: lru}
"""
Work = Callable[[Cache], tuple[int, Any]]  # nanoseconds, and what must be equal on both sides


def model() -> Any:
    """A random Llama, small enough for two cores and large enough for a cache to matter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).eval()


def plain(kind: str, config: Any, tokens: int) -> Cache:
    """The class that `kind` stands for."""
    if kind == "static":
        return StaticCache(config, max_cache_len=tokens)
    return QuantizedCache("fp8", config) if kind == "quantized" else DynamicCache(config=config)


class Sides:
    """The same work on either side; nanoseconds by side, and of opening and ending apart."""

    def __init__(self, custodian: Custodian, config: Any, tokens: int) -> None:
        self.custodian, self.config, self.tokens = custodian, config, tokens
        self.opening: list[int] = []
        self.ending: list[int] = []

    def pair(self, kind: str, work: Work, *, governed_first: bool) -> dict[str, int]:
        """One pair; raises where the outputs differ."""
        took: dict[str, int] = {}
        results = []
        for side in ("governed", "plain") if governed_first else ("plain", "governed"):
            start = thread_time_ns()
            cache = self._open(side, kind)
            opened = thread_time_ns()
            took[side], result = work(cache)
            results.append(result)
            if side == "governed":
                self.opening.append(opened - start)
                start = thread_time_ns()
                cache.end()
                self.ending.append(thread_time_ns() - start)
        if results[0] != results[1]:
            raise SystemExit(f"{kind}: outputs differ")
        return took

    def _open(self, side: str, kind: str) -> Any:
        if side == "plain":
            return plain(kind, self.config, self.tokens)
        return governed_cache(self.custodian, PERSON, IDENTITY, config=self.config, kind=kind, max_tokens=self.tokens)


def generating(llama: Any, prompt: torch.Tensor, new: int) -> Work:
    """Greedy tokens of one `generate`."""

    def work(cache: Cache) -> tuple[int, list[int]]:
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        start = thread_time_ns()
        found = llama.generate(prompt, past_key_values=cache, **options)
        return thread_time_ns() - start, found[0].tolist()

    return work


def updating(config: Any, length: int, new: int) -> Work:
    """After a prompt of `length`, which is not timed, `new` tokens one by one through every layer; no model."""
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    state = states[:, :, :1].contiguous()

    def work(cache: Cache) -> tuple[int, float]:
        for layer in range(config.num_hidden_layers):
            cache.update(states, states, layer)
        start = thread_time_ns()
        for _ in range(new):
            for layer in range(config.num_hidden_layers):
                keys, _ = cache.update(state, state, layer)
        return thread_time_ns() - start, float(keys[0, 0, :, 0].contiguous().sum())

    return work


def compare(sides: Sides, kind: str, work: Work, pairs: int, new: int) -> dict[str, Any]:
    """Medians, and the ratio of times with its interval over resampled pairs (below 1: governed is faster)."""
    for first in (True, False):
        sides.pair(kind, work, governed_first=first)
    sides.opening.clear()
    sides.ending.clear()
    gc.collect()
    took = [sides.pair(kind, work, governed_first=bool(number % 2)) for number in range(pairs)]
    ours, theirs = ([one[side] for one in took] for side in ("governed", "plain"))
    rate = ratio(theirs, ours)  # tokens/s are the reciprocal of times
    middle = pairs // 2
    return {
        "pairs": pairs,
        "plain_tokens_per_cpu_second": round(new * 1e9 / sorted(theirs)[middle], 2),
        "governed_tokens_per_cpu_second": round(new * 1e9 / sorted(ours)[middle], 2),
        "governed_over_plain": rate.value,
        "interval_95": [rate.low, rate.high],
        "open_ms": round(sorted(sides.opening)[middle] / 1e6, 3),
        "end_ms": round(sorted(sides.ending)[middle] / 1e6, 3),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every kind, with the model and without."""
    llama = model()
    prompt = torch.randint(1, 2048, (1, arguments.prompt), generator=torch.Generator().manual_seed(1))
    tokens = arguments.prompt + arguments.new + 1
    results: dict[str, Any] = {"generate": {}, "cache": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "policy.yaml").write_text(POLICY, encoding="utf-8")
        settings = Settings(
            policy_path=folder / "policy.yaml",
            database_url=f"sqlite:///{folder / 'ledger.db'}",
            spill_path=folder / "spill",
            root_key_path=folder / "root.key",
            keyring_path=folder / "keys.json",
        )
        with (
            open_worker(settings, SlabMemory.plan(256 << 20)) as worker,
            Custodian(worker.governor) as custodian,
        ):
            for kind in (arguments.only or ",".join(KINDS)).split(","):
                sides = Sides(custodian, llama.config, tokens)
                for part, work in (
                    ("generate", generating(llama, prompt, arguments.new)),
                    ("cache", updating(llama.config, arguments.prompt, arguments.new)),
                ):
                    results[part][kind] = compare(sides, kind, work, arguments.pairs, arguments.new)
    return results


def main() -> None:
    bench = Bench(__doc__, "kvcustody", "torch", "transformers", only=f"kinds, of {','.join(KINDS)}")
    bench.add("--pairs", type=int, default=15)
    bench.add("--prompt", type=int, default=512, help="tokens")
    bench.add("--new", type=int, default=64, help="tokens generated")
    arguments = bench.parse()
    torch.set_num_threads(1)
    results = measure(arguments)
    rows = [
        [
            part,
            kind,
            f"{one['plain_tokens_per_cpu_second']:.1f}",
            f"{one['governed_tokens_per_cpu_second']:.1f}",
            f"{one['governed_over_plain']:.3f} ({one['interval_95'][0]:.3f}–{one['interval_95'][1]:.3f})",
            f"{one['open_ms']:.2f} / {one['end_ms']:.2f}",
        ]
        for part, kinds in results.items()
        for kind, one in kinds.items()
    ]
    print(table(["part", "kind", "plain tok/s", "governed tok/s", "governed ÷ plain", "open / end ms"], rows))
    settings = {"prompt": arguments.prompt, "new": arguments.new}
    bench.keep({"benchmark": "classic-caches", "settings": settings, "results": results})


if __name__ == "__main__":
    main()
