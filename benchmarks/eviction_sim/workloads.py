"""The streams of the eviction benchmark: recorded traces where they are at hand, and generated ones always.

Sessions of the recorded agentic trace have no time in common. Their starts are drawn from recorded arrivals of an
hour (Azure's, by a hash of seed and session), so that about as many run at once as one worker serves; the seed is part
of a stream's name. Halves are by lineage, by a hash: `dev` is what a policy may be tuned on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from streams import Stream, make_stream

from kvcustody.clock import MICROSECONDS
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.readers import open_trace
from kvcustody.lab.replay.traces.seeded_draws import draw
from kvcustody.lab.replay.traces.timeline import arrivals_us, stagger
from kvcustody.lab.replay.workload.generator import Lognormal, WorkloadSpec, generate
from kvcustody.lab.replay.workload.labels import Labeller, load_weights, zipf_weights

TENANTS = 16
DEV_SEED = 7
WEIGHTS = "servegen_client_skew.json"


class Workload(NamedTuple):
    """A stream to be made, what it is for, and the pools to try it in, as shares of its distinct blocks."""

    name: str
    role: str  # "dev": policies may be tuned on it; "report": they may not
    shares: tuple[float, ...]
    make: Callable[[], Stream]


def workloads(folder: Path | None, *, quick: bool = False) -> Iterator[Workload]:
    """Every workload; without a folder of traces only the generated ones."""
    weights = load_weights(folder / WEIGHTS) if folder is not None else zipf_weights(TENANTS, 1.1)
    labeller = Labeller(weights, tenants=TENANTS, seed=1, unit="lineage")
    scale = 8 if quick else 1
    for name, seed, role in (("agents, seed 1", 1, "dev"), ("agents, seed 2", 2, "report")):
        yield Workload(name, role, (0.05, 0.1, 0.25, 0.5), lambda s=seed, n=name: _agents(n, s, 64 // scale, labeller))
    yield Workload("chat", "report", (0.05, 0.1, 0.25, 0.5), lambda: _chat(2400 // scale, labeller))
    if folder is None or quick:
        return
    for half, seed, role in (("dev", 1, "dev"), ("held out", 2, "report"), ("held out", 3, "report")):
        name = f"agentic, {half}, seed {seed}"
        yield Workload(
            name,
            role,
            (0.04, 0.06, 0.1, 0.16),
            lambda h=half, s=seed, n=name: _agentic(folder, n, h, s, labeller),
        )
    for name, file in (("mooncake conversation", "conv_dev40"), ("mooncake synthetic", "synthetic_upstream")):
        yield Workload(
            name,
            "report",
            (0.02, 0.05, 0.1, 0.2),
            lambda f=file, n=name: _mooncake(folder / f"mooncake_{f}.jsonl.gz", n, labeller),
        )


def _stream(name: str, requests: Sequence[TraceRequest], block_tokens: int, labeller: Labeller) -> Stream:
    return make_stream(name, requests, block_tokens, [labeller.tenant(r.lineage) for r in requests])


def _agentic(folder: Path, name: str, half: str, seed: int, labeller: Labeller) -> Stream:
    trace = open_trace(folder / "agentic_v6_dev.jsonl.gz", "agentic")
    kept = [r for r in trace if (draw(DEV_SEED, "half", r.lineage) < 0.5) == (half == "dev")]
    arrivals = arrivals_us(folder / "AzureLLMInferenceTrace2023_conv.csv.gz")
    return _stream(name, stagger(kept, arrivals, seed=seed, stretch=1), trace.block_tokens, labeller)


def _mooncake(path: Path, name: str, labeller: Labeller) -> Stream:
    trace = open_trace(path, "mooncake")
    return _stream(name, list(trace), trace.block_tokens, labeller)


def _chat(conversations: int, labeller: Labeller) -> Stream:
    spec = WorkloadSpec(
        seed=3,
        conversations=conversations,
        turns_mean=5.0,
        system=Lognormal(2000, 0.6, 256, 8192),
        prompts_per_tenant=4,
    )
    return _stream("chat", generate(spec).requests, spec.block_tokens, labeller)


# -- generated agents -------------------------------------------------------------------------------------------------

AGENT_BLOCK = 64  # tokens
STREAM = 1 << 16  # ids a text
TOOL_SECONDS = Lognormal(8, 0.8, 1, 120)
USER_SECONDS = Lognormal(120, 1.2, 10, 3600)
STEP_BLOCKS = Lognormal(14, 1.0, 1, 400)


def _agents(name: str, seed: int, sessions: int, labeller: Labeller) -> Stream:
    """Agents that call tools in a loop, wait for their user, retry failed tool calls, and send out sub-agents."""
    rng = np.random.Generator(np.random.PCG64(seed))
    requests: list[TraceRequest] = []
    failures: dict[int, int] = {}  # by the request's identity
    texts = 1000  # the first ids are the system prompts of 12 projects and their sub-agents
    for session in range(sessions):
        project = int(rng.integers(12))
        at = float(rng.uniform(0, 3600))
        chain = _text(project, 60 + 25 * project)
        lineage = f"{seed}:{session}"
        for turn in range(int(rng.geometric(1 / 50))):
            texts += 1
            chain = np.concatenate((chain, _text(texts, int(STEP_BLOCKS.sample(rng, 1)[0]))))
            requests.append(_request(at, chain, lineage, turn, 0))
            kind = rng.random()
            if kind < 0.06:
                texts, at = _send_out(rng, requests, texts, at, project, lineage)
            elif kind < 0.16:  # the tool failed: its output is dropped and the call made again
                texts += 1
                failed = np.concatenate((chain, _text(texts, int(STEP_BLOCKS.sample(rng, 1)[0]))))
                at += float(TOOL_SECONDS.sample(rng, 1)[0])
                requests.append(_request(at, failed, lineage, turn, 0))
                failures[id(requests[-1])] = len(chain)
            waits = USER_SECONDS if rng.random() < 0.12 else TOOL_SECONDS
            at += float(waits.sample(rng, 1)[0])
    requests.sort(key=lambda r: (r.at_us, r.session, r.stream))
    system = [int((each.blocks // STREAM == each.blocks[0] // STREAM).sum()) for each in requests]
    failed = [failures.get(id(each)) for each in requests]
    stream = _stream(name, requests, AGENT_BLOCK, labeller)
    return replace(stream, system_blocks=system, failed_from=failed)


def _send_out(
    rng: np.random.Generator, requests: list[TraceRequest], texts: int, at: float, project: int, lineage: str
) -> tuple[int, float]:
    """Two to four sub-agents at once, each a few turns on a prompt of their own; the agent waits for the last."""
    latest = at
    for stream in range(1, int(rng.integers(2, 5)) + 1):
        chain, then = _text(500 + project, 40), at
        for turn in range(int(rng.integers(2, 9))):
            texts += 1
            chain = np.concatenate((chain, _text(texts, int(STEP_BLOCKS.sample(rng, 1)[0]))))
            requests.append(_request(then, chain, lineage, turn, stream))
            then += float(TOOL_SECONDS.sample(rng, 1)[0])
        latest = max(latest, then)
    return texts, latest


def _text(number: int, blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return number * STREAM + np.arange(blocks, dtype=np.int64)


def _request(
    at: float, chain: np.ndarray[tuple[int], np.dtype[np.int64]], lineage: str, turn: int, stream: int
) -> TraceRequest:
    tokens = len(chain) * AGENT_BLOCK
    return TraceRequest(int(at * MICROSECONDS), tokens, 200, chain, lineage, lineage, lineage, turn, stream)
