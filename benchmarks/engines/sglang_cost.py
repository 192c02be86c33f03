"""What governance costs an SGLang engine, governed over plain: scheduler CPU time a request, and tokens per second.

    .venv-sglang/bin/python benchmarks/engines/sglang_cost.py [--page-size 16] [--pairs 3] [--wide] [--twin]
    .venv-sglang/bin/python benchmarks/engines/sglang_cost.py --tier host [--pairs 3] [--json FILE] [--page FILE]

- The two engines live in processes of their own and take turns, unit by unit, with the same requests; the other one
   sleeps. A unit is a number of requests at once: prompts of 64 to 600 tokens, half of which begin as an earlier one of
   their tenant did, and a pool that is full after a while.
- CPU time is the scheduler's thread on the way of requests (arrival, scheduling, the step's preparation, results),
   without the model, which runs in the same thread. Scrubs run in it too, here on the host's memory: the ratio is given
   with and without them, which on a device are the device's. The ledger's writer is a thread of its own.
- `ratio` is the median of the units' ratios, each of the same requests on both sides, one after the other. Tokens per
   second are wall time with a model of 140 thousand weights: this bounds what a real model would see; with `--wide` it
   has six million. `--twin` compares
   plain with plain: this machine's noise. Two engines of one kind differ by some hundredths, so several pairs are made.
- With `--tier` both sides are governed, of the same policy, and one has that tier; the pool has half the slots, so that
   what later prompts begin with has mostly left it. All that may move moves, whether it pays or not: an upper bound.
   The time that the tier takes of the scheduler's thread (seal, open, look-ups) is given by itself.
- `first_token` is of another pair of engines, over a model of six million weights, and of one prompt at a time: what
   was displaced comes back on one side and is computed again on the other, in turns. `--page` then puts every kept file
   of tiers (`benchmarks/results/sglang-tiers-cpu-page*.json`) into a page's table.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
for _folder in ("tests/lib", "benchmarks/harness"):
    sys.path.insert(0, str(_ROOT / _folder))

TENANTS, AT_ONCE, NEW_TOKENS = 6, 8, 16
WARM = 6  # units that count for nothing
GOALS = {"scheduler_cpu": 1.10, "tokens_per_second": 0.97}
SLOTS, FEW_SLOTS = 8192, 4096
PROMPT, ROUNDS = 960, 6  # of `first_token`
KEPT = "sglang-tiers-cpu-page*.json"
BEGIN, END = (
    "<!-- measured: benchmarks/engines/sglang_cost.py --tier --page -->",
    "<!-- end of what is measured -->",
)


class Side(NamedTuple):
    """What one engine of a pair is. `tier`: what keeps what it evicts; "": nothing."""

    governed: bool
    page_size: int
    slots: int = SLOTS
    tier: str = ""


def serve(pipe: Connection, model: str, site: list[str], side: Side) -> None:
    """One side's process: does a unit when told to."""
    sys.path[:0] = site
    from standins.engines.sglang.sglang_engine import SglangEngine
    from standins.engines.sglang.sglang_tiers import TIER_POLICY, settings
    from standins.engines.vllm.deployment import Deployment

    sampled = TIER_POLICY.replace("verify: all", "verify: 1/64")  # as a policy for serving has it
    folder = Path(tempfile.mkdtemp())
    deployment = Deployment(folder, sampled) if side.governed else None
    of_tier = settings(folder, side.tier, tier_object_blocks=16) if side.tier else {}
    engine = SglangEngine(
        Path(model),
        site,
        deployment=deployment,
        settings={"SGLANG_PROBE_BLIND": "1", "KVCUSTODY_LOG_LEVEL": "error", **of_tier},
        page_size=side.page_size,
        max_total_tokens=side.slots,
        chunked_prefill_size=512,
        max_running_requests=AT_ONCE,
        sleep_on_idle=True,
    )
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        unit, new_tokens = asked
        batch = [(tokens, deployment.token(tenant) if deployment is not None else tenant) for tenant, tokens in unit]
        before = engine.probe("spent")
        began = time.monotonic_ns()
        answers = engine.run_all(batch, new_tokens)
        wall_ns = time.monotonic_ns() - began
        after = engine.probe("spent")
        pipe.send(
            {
                "scheduler_ns": after["scheduler_ns"] - before["scheduler_ns"],
                "scrub_ns": after["scrub_ns"] - before["scrub_ns"],
                "tier_ns": after["tier_ns"] - before["tier_ns"],
                "wall_ns": wall_ns,
                "cached": sum(answer.cached_tokens for answer in answers),
                "tokens": [answer.tokens for answer in answers],
            }
        )
    engine.close()


def units(count: int, seed: int = 3) -> list[list[tuple[str, list[int]]]]:
    """Requests, a function of the seed."""
    random = Random(seed)
    heads: dict[str, list[list[int]]] = {}
    units = []
    for _ in range(count):
        unit = []
        for _ in range(AT_ONCE):
            tenant = f"tenant-{random.randrange(TENANTS)}"
            own = heads.setdefault(tenant, [])
            length = int(2 ** random.uniform(6, 9.2))
            head = random.choice(own) if own and random.random() < 0.5 else []
            head = head[: int(len(head) * random.uniform(0.3, 1.0))]
            tokens = head + [random.randrange(16, 500) for _ in range(max(1, length - len(head)))]
            own.append(tokens)
            unit.append((tenant, tokens))
        units.append(unit)
    return units


class Pair:
    """Two new engines, in processes of their own, that take turns."""

    def __init__(self, model: Path, site: list[str], sides: dict[str, Side]) -> None:
        context = multiprocessing.get_context("spawn")
        self._sides: dict[str, Any] = {}
        for name, side in sides.items():
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, str(model), site, side))
            process.start()
            there.close()  # so that the end of the process ends the pipe
            assert here.poll(180) and here.recv() == "ready", f"the engine `{name}` did not start"
            self._sides[name] = (here, process)
        self._turn = 0

    def ask(self, unit: list[tuple[str, list[int]]], new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
        """What each made of a unit; another one begins each time."""
        self._turn += 1
        found = {}
        for name in list(self._sides)[:: 1 if self._turn % 2 else -1]:
            self._sides[name][0].send((unit, new_tokens))
            found[name] = self._sides[name][0].recv()
        return found

    def close(self) -> None:
        """End both."""
        for pipe, process in self._sides.values():
            pipe.send(None)
            process.join(60)
            if process.is_alive():
                os.kill(process.pid, 9)


def first_tokens(folder: Path, site: list[str], tier: str, page_size: int) -> dict[str, Any]:
    """Times to the first token of a prompt that was displaced: what a tier brings back against what is computed."""
    from spread import paired, spread

    from standins.engines.vllm.tiny_model import save_model

    model = widened(save_model(folder / "wider"))
    slots = 2 * PROMPT
    pair = Pair(
        model,
        site,
        {"computed": Side(True, page_size, slots), "restored": Side(True, page_size, slots, tier)},
    )
    random, answers = Random(7), dict[str, list[Any]](computed=[], restored=[])
    for turn in range(-1, ROUNDS):
        mine = [random.randrange(16, 500) for _ in range(PROMPT + 1)]
        pair.ask([("acme", mine)], 1)
        for _ in range(2):
            pair.ask([("others", [random.randrange(16, 500) for _ in range(PROMPT)])], 1)
        for name, one in pair.ask([("acme", mine)], 1).items() if turn >= 0 else ():
            assert one["cached"] == (PROMPT if name == "restored" else 0), (name, one["cached"])
            answers[name].append(one["wall_ns"])
    pair.close()
    return {
        "tokens_that_come_back": PROMPT,
        "prompts": ROUNDS,
        "us": {name: spread(times)._asdict() for name, times in answers.items()},
        "restored_over_computed": paired(answers["restored"], answers["computed"])._asdict(),
    }


def widened(folder: Path) -> Path:
    """The tiny model's folder with a model of six million weights in it, over the same words."""
    import torch
    import transformers as hf

    torch.manual_seed(7)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = hf.LlamaConfig.from_pretrained(folder, **sizes, **heads)
    hf.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def tier_table(results: Path) -> str:
    """What a page says of the kept files: a row for each."""
    lines = []
    for file in sorted(results.glob(KEPT), key=lambda each: json.loads(each.read_text())["page_size"]):
        kept = json.loads(file.read_text())
        tier_us, first = kept["tier_us_per_request"]["median_us"], kept["first_token"]
        computed_us = first["us"]["computed"]["median_us"]
        cells = [
            str(kept["page_size"]),
            _with_interval(kept["scheduler_cpu"]),
            _with_interval(kept["scheduler_cpu_without_tier"]),
            f"{tier_us / 1000:.1f} ms",
            _with_interval(kept["tokens_per_second"]),
            f"{_with_interval(first['restored_over_computed'])} of {computed_us / 1000:.0f} ms",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return "No run is kept yet."
    head = [
        *("page size", "scheduler CPU a request", "without the tier's share", "the tier's share, a request"),
        *("tokens per second", f"time to the first token, {PROMPT} tokens restored over computed"),
    ]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines])


def _with_interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"


def write_page(page: Path, results: Path) -> None:
    """Replace what stands between the marks of `page`."""
    text = page.read_text()
    before, after = text.split(BEGIN)[0], text.split(BEGIN)[1].split(END)[1]
    page.write_text(f"{before}{BEGIN}\n\n{tier_table(results)}\n\n{END}{after}")


def main() -> int:
    """Run both sides in turns."""
    from bench import Bench
    from spread import paired, spread

    from standins.engines.vllm.engine_site import add_distribution
    from standins.engines.vllm.tiny_model import save_model

    bench = Bench(__doc__, "numpy", "torch", "sglang", rounds=30, strict=True)
    bench.add("--page-size", type=int, default=16)
    bench.add("--wide", action="store_true", help="a model of six million weights, not of 140 thousand")
    bench.add("--twin", action="store_true", help="plain against plain")
    bench.add("--tier", choices=("host", "nvme"), help="governed with this tier against governed without")
    bench.add("--page", type=Path, help="rewrite what this page says of tiers, from all kept files")
    bench.add("--pairs", type=int, default=3, help="of engines, one after the other (default: %(default)s)")
    options = bench.parse()
    folder = Path(tempfile.mkdtemp())
    model = save_model(folder / "model")
    model = widened(model) if options.wide else model
    add_distribution(
        folder / "site",
        "sglang-probe",
        "0",
        "[sglang.srt.plugins]\nprobe = standins.engines.sglang.sglang_probe:register\n",
    )
    site = [str(folder / "site"), str(_ROOT / "tests/lib")]
    if options.tier:
        here = Side(True, options.page_size, FEW_SLOTS)
        base, subject, sides = "without", "with", {"without": here, "with": here._replace(tier=options.tier)}
    else:
        here = Side(False, options.page_size)
        base, subject = "plain", "governed"
        sides = {base: here, subject: here._replace(governed=not options.twin)}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    differing = 0
    for _ in range(options.pairs):
        pair = Pair(model, site, sides)
        for number, unit in enumerate(units(options.rounds + WARM)):
            made = pair.ask(unit)
            differing += len({str(one["tokens"]) for one in made.values()}) - 1
            for name, one in made.items() if number >= WARM else ():
                answers[name].append(one)
        pair.close()

    def per_request(*taken: str, less: tuple[str, ...] = ()) -> dict[str, list[float]]:
        return {
            name: [(sum(one[key] for key in taken) - sum(one[key] for key in less)) / AT_ONCE for one in each]
            for name, each in answers.items()
        }

    cpu, rate = (
        per_request("scheduler_ns"),
        {name: [1e9 / one["wall_ns"] for one in rows] for name, rows in answers.items()},
    )
    bare = per_request("scheduler_ns", less=("scrub_ns",))
    figures: dict[str, Any] = {
        "page_size": options.page_size,
        "twin": options.twin,
        "weights": "six million" if options.wide else "140 thousand",
        "tier": options.tier,
        "slots": here.slots,
        "pairs_of_engines": options.pairs,
        "units": options.rounds * options.pairs,
        "requests_per_unit": AT_ONCE,
        "units_with_other_tokens": differing,
        "cached_tokens": {name: sum(one["cached"] for one in rows) for name, rows in answers.items()},
        "scheduler_cpu_per_request_us": {name: spread(costs)._asdict() for name, costs in cpu.items()},
        "scheduler_cpu": paired(cpu[subject], cpu[base])._asdict(),
        "scheduler_cpu_without_scrubs": paired(bare[subject], bare[base])._asdict(),
        "tokens_per_second": paired(rate[subject], rate[base])._asdict(),
        "goals": GOALS,
    }
    if options.tier:
        rest = per_request("scheduler_ns", less=("tier_ns",))
        figures |= {
            "tier_us_per_request": spread(per_request("tier_ns")[subject])._asdict(),
            "scheduler_cpu_without_tier": paired(rest[subject], rest[base])._asdict(),
            "first_token": first_tokens(folder, site, options.tier, options.page_size),
        }
        del figures["goals"]  # which are of governed over plain
    bench.keep(figures, show=True)
    if options.page is not None:
        write_page(options.page, _ROOT / "benchmarks" / "results")
    met = figures["scheduler_cpu"]["value"] <= GOALS["scheduler_cpu"]
    return bench.status(met and figures["tokens_per_second"]["value"] >= GOALS["tokens_per_second"])


if __name__ == "__main__":
    sys.exit(main())
