"""What zeroization costs a serving engine: transformers' continuous batching with scrubs off, on free, and read back.

    python benchmarks/engines/serving_cost.py --device cuda --shape llama-8b --json benchmarks/results/serving-cuda.json

1. One engine a mode, on one model with the same pool, prompts and seed; the modes take turns, round by round, and the
   order turns too. All modes must produce the same tokens, or the run fails.
2. The engine is transformers' own; the only thing added is that every block it frees is scrubbed: on CUDA on a stream
   of its own, behind the step that used it and before the step that may write it next (kernels.ordered), on the
   host in place. `verify` reads every block back. No policy and no ledger: `transformers_cost.py` measures those.
3. `saturation`: all requests at once. `churn`: one request every 50 ms of wall time, so that frees fall between
   decodes. Tokens a second count everything; time per output token is a step of the decode.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from kvcustody.kernels.ordered import OrderedScrub
from kvcustody.kernels.prepare import prepare
from kvcustody.kernels.scrub import scrub
from kvcustody.kernels.segment import SegmentTable
from kvcustody.kernels.tuning import tune
from kvcustody.kernels.verify import verify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

import hardware
from spread import ratio, spread
from transformers_cost import MARGIN, SHAPES, WARM, build_model

MODES = ("off", "free", "verify")
GOAL = 0.99
PROMPT, NEW = 192, 48


class Scrubber:
    """Scrubs what the engine frees, in the way of one mode, and says how much it was."""

    def __init__(self, cache: Any, mode: str) -> None:
        (allocator,) = cache.cache_allocators.values()
        rows = cache.cache_tensor.view(-1, int(allocator.bytes_per_block))
        self.table = SegmentTable.from_tensors([rows])
        self.mode = mode
        self.blocks = 0
        self.ordered = OrderedScrub(self.table) if rows.device.type == "cuda" and mode != "off" else None
        if self.ordered is not None:
            tune(self.table)
            prepare(self.table)
        self._freed: list[int] = []
        if mode != "off":
            free = cache.pool.free_blocks
            cache.pool.free_blocks = lambda index, blocks: (self._freed.extend(blocks), free(index, blocks))[
                1
            ]

    def before_step(self) -> None:
        """What was freed is zero before the step's first write."""
        if not self._freed:
            return
        blocks = np.unique(np.array(self._freed, dtype=np.int64))
        self._freed.clear()
        self.blocks += len(blocks)
        if self.ordered is None:
            scrub(self.table, blocks)
            dirty = verify(self.table, blocks).dirty.tolist() if self.mode == "verify" else []
        else:
            self.ordered.launch([(blocks, self.mode == "verify")])
            self.ordered.order_before()
            dirty = [
                int(one) for answer in self.ordered.answered() for batch in answer.dirty for one in batch
            ]
        if dirty:
            raise RuntimeError(f"blocks {dirty} did not verify")

    def after_step(self) -> None:
        """The step's reads and writes come before the next scrub."""
        if self.ordered is not None:
            self.ordered.used()


class Engine:
    """One mode's engine, driven on the calling thread."""

    def __init__(
        self, model: Any, mode: str, requests: int, blocks: int, options: argparse.Namespace
    ) -> None:
        config = ContinuousBatchingConfig(
            page_size=options.page,
            num_blocks=blocks,
            max_batch_tokens=options.batch_tokens,
            max_requests_per_batch=requests,
            max_memory_percent=0.95,
            use_async_batching=False,
            safety_margin=MARGIN,
            seed=0,
        )
        generation = GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=-1)
        self._manager: Any = ContinuousBatchingManager(
            model=model, generation_config=generation, continuous_batching_config=config
        )
        self._manager.batch_processor = self._manager._create_batch_processor()
        self.scrubber = Scrubber(self._manager.batch_processor.cache, mode)
        self.device = options.device
        self.wall_ns: list[int] = []
        self.step_ns: list[int] = []

    def round(self, prompts: list[list[int]], gap_seconds: float, counting: bool) -> list[list[int]]:
        """All prompts to their end, one every `gap_seconds`; returns the tokens by prompt."""
        manager, processor = self._manager, self._manager.batch_processor
        names: list[str] = []
        steps: list[int] = []
        began = time.perf_counter()
        started = time.perf_counter_ns()
        while True:
            while len(names) < len(prompts) and time.perf_counter() - began >= gap_seconds * len(names):
                names.append(manager.add_request(prompts[len(names)]))
            clock = time.perf_counter_ns()
            if not processor.prepare_next_batch():
                if len(names) == len(prompts):
                    break
                continue
            self.scrubber.before_step()
            processor._generation_step(manager.model)
            self.scrubber.after_step()
            processor.update_batch()
            steps.append(time.perf_counter_ns() - clock)
        if self.device == "cuda":
            torch.cuda.synchronize()
        wall = time.perf_counter_ns() - started
        queue = manager.output_router.output_queue
        results = {result.request_id: result for result in (queue.get() for _ in range(queue.qsize()))}
        for result in results.values():
            if result.error is not None:
                raise RuntimeError(f"a request failed: {result.error}")
        if counting:
            self.wall_ns.append(wall)
            self.step_ns.append(int(np.median(steps)))
        return [list(results[name].generated_tokens) for name in names]


def measure(load: str, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of one load in every mode."""
    shape = SHAPES[options.shape]
    requests = options.requests or shape.requests
    a_request = -(-(options.prompt + options.new) // options.page)
    blocks = int(2.3 * requests * a_request) + 8
    model = build_model(shape, options.device)
    engines = {mode: Engine(model, mode, requests, blocks, options) for mode in MODES}
    random = np.random.default_rng(options.seed)
    gap = 0.05 if load == "churn" else 0.0
    for turn in range(WARM + options.pairs):
        prompts = [random.integers(1, shape.vocabulary, options.prompt).tolist() for _ in range(requests)]
        order = MODES[turn % 3 :] + MODES[: turn % 3]
        tokens = {mode: engines[mode].round(prompts, gap, turn >= WARM) for mode in order}
        if any(one != tokens["off"] for one in tokens.values()):
            raise RuntimeError(f"{load}: the modes differ in their tokens")
    off = engines["off"]
    made = requests * options.new
    found: dict[str, Any] = {"requests": requests, "pool_blocks": blocks, "pairs": len(off.wall_ns)}
    for mode, engine in engines.items():
        speed = ratio(off.wall_ns, engine.wall_ns)
        found[mode] = {
            "tokens_per_second": round(made * 1e9 / float(np.median(engine.wall_ns)), 1),
            "ratio_to_off": speed._asdict(),
            "time_per_output_token": spread(engine.step_ns)._asdict(),
            "step_ratio": ratio(engine.step_ns, off.step_ns)._asdict(),
            "blocks_scrubbed": engine.scrubber.blocks,
            "host_waits": engine.scrubber.ordered.waits if engine.scrubber.ordered else 0,
        }
    found["met"] = found["free"]["ratio_to_off"]["value"] >= GOAL
    return found


def main() -> None:
    """Measure, print the table, and write the result file where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--loads", default="saturation,churn")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--requests", type=int, help="requests a round (default: the shape's)")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {}
    print("| load | mode | tokens/s | of off [95 %] | step us | scrubbed |\n|---|---|---|---|---|---|")
    for load in options.loads.split(","):
        found[load] = one = measure(load, options)
        for mode in MODES:
            row = one[mode]
            low, value, high = (row["ratio_to_off"][name] for name in ("low", "value", "high"))
            print(
                f"| {load} | {mode} | {row['tokens_per_second']} | {value:.4f} [{low:.4f}, {high:.4f}] "
                f"| {row['time_per_output_token']['median_us']:.0f} | {row['blocks_scrubbed']} |",
                flush=True,
            )
    if options.json is not None:
        result = {
            "benchmark": "serving_cost",
            "facts": hardware.facts("transformers", "torch", "triton", "kvcustody", "numpy"),
            "settings": {
                "device": options.device,
                "shape": options.shape,
                "prompt": options.prompt,
                "new": options.new,
                "block_tokens": options.page,
                "load_average": [round(load, 2) for load in os.getloadavg()],
            },
            "loads": found,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
