"""From command-line options to a workload: its requests, their senders, and its duration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvcustody.audit.kinds import GENERATED, REPLAYED
from kvcustody.clock import MICROSECONDS
from kvcustody.errors import ConfigError, TraceError
from kvcustody.lab.replay.run.golden_check import find_traces
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.readers import READERS, Trace, open_trace
from kvcustody.lab.replay.traces.timeline import arrivals_us, stagger
from kvcustody.lab.replay.traces.token_ids import expand
from kvcustody.lab.replay.workload.generator import WorkloadSpec, generate
from kvcustody.lab.replay.workload.labels import Labeller, Unit, load_weights, zipf_weights
from kvcustody.lab.replay.workload.model import Job, Workload
from kvcustody.lab.replay.workload.scenarios import SCENARIOS
from kvcustody.lab.replay.workload.statistics import expected, measure
from kvcustody.plurals import several

FORMATS = (GENERATED, *SCENARIOS, *sorted(READERS))
_TENANTS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Choice:
    """The trace or generator to replay, and its tenants."""

    trace: Path | None = None
    format: str | None = None
    tenants: int = 8
    seed: int = 1
    unit: Unit = "session"
    skew: Path | None = None
    limit: int | None = None
    conversations: int = 500


def block_tokens_of(choice: Choice, asked: int | None) -> int:
    """Return the pool's block size: a trace's own, a scenario's, or the option's (default 16)."""
    name = _format(choice)
    reader = READERS.get(name)
    if name in SCENARIOS:
        return asked or SCENARIOS[name].block_tokens
    if reader is None:
        return asked or 16
    if asked not in (None, reader.block_tokens):
        raise ConfigError(
            f"--block-tokens `{asked}`: this trace's ids stand for blocks of {reader.block_tokens} tokens",
            block_tokens=asked,
        )
    return reader.block_tokens


def load_workload(choice: Choice, block_tokens: int, policy: str) -> Workload:
    """Return the workload.

    Raises:
        ConfigError: an option is wrong.
        TraceError: the trace cannot be read.
    """
    if not 1 <= choice.tenants <= _TENANTS_MAX:
        raise ConfigError(f"--tenants `{choice.tenants}`: from 1 to {_TENANTS_MAX:,} can share a workload")
    if _format(choice) == GENERATED:
        return _generated(choice, block_tokens, policy)
    if _format(choice) in SCENARIOS:
        return _scenario(choice, policy)
    if choice.trace is None:
        raise ConfigError(f"--trace-format `{choice.format}` reads a file: name the trace, or leave the format out")
    return _recorded(choice, open_trace(choice.trace, _format(choice)), policy)


def _format(choice: Choice) -> str:
    if choice.format is None:
        if choice.trace is not None:
            names = ", ".join(sorted(READERS))
            raise ConfigError(f"trace `{choice.trace}`: say what it is with --trace-format ({names})")
        return GENERATED
    if choice.format not in FORMATS:
        raise ConfigError(f"unknown format `{choice.format}`; use one of {', '.join(FORMATS)}")
    if choice.format not in READERS and choice.trace is not None:
        raise ConfigError(f"trace `{choice.trace}`: a generated workload reads no file")
    return choice.format


def _generated(choice: Choice, block_tokens: int, policy: str) -> Workload:
    spec = WorkloadSpec(
        seed=choice.seed,
        tenants=choice.tenants,
        conversations=choice.conversations,
        block_tokens=block_tokens,
    )
    workload = generate(spec)
    promised, measured = expected(spec), measure(workload)
    jobs = list(islice(zip(workload.requests, workload.labels, strict=True), choice.limit))
    return Workload(
        title=f"Generated workload under {policy}",
        jobs=jobs,
        tenants=spec.tenants,
        span_us=jobs[-1][0].at_us if jobs else 0,
        origin=GENERATED,
        longest_answer=max((request.output_tokens for request, _ in jobs), default=0),
        house_prompt=expand(workload.house_prompt, block_tokens),
        requests=len(jobs),
        notes=(
            (
                "workload",
                f"{several(len(jobs), 'request')}, {several(spec.conversations, 'conversation')}, seed {spec.seed}",
            ),
            (
                "hit share without limits",
                f"{measured.hit_share_tenant:.2%} if a tenant's conversations shared everything "
                f"(promised {promised.hit_share_tenant:.2%}), {measured.hit_share_conversation:.2%} if they "
                f"shared nothing (promised {promised.hit_share_conversation:.2%})",
            ),
        ),
    )


def _scenario(choice: Choice, policy: str) -> Workload:
    scenario = SCENARIOS[_format(choice)]
    jobs = scenario.jobs()[: choice.limit]
    return Workload(
        title=f"{scenario.title}, under {policy}",
        jobs=jobs,
        tenants=1,
        span_us=jobs[-1][0].at_us,
        origin=GENERATED,
        longest_answer=max(request.output_tokens for request, _ in jobs),
        requests=len(jobs),
        notes=(("scenario", _format(choice)),),
    )


def _recorded(choice: Choice, trace: Trace, policy: str) -> Workload:
    weights = load_weights(choice.skew) if choice.skew else zipf_weights(choice.tenants)
    labeller = Labeller(weights, tenants=choice.tenants, seed=choice.seed, unit=choice.unit)
    placed: list[TraceRequest] | None = None
    if trace.relative_sessions:  # sessions have to be put on one time line, so all of them are read first
        placed = stagger(trace, _starts(choice), seed=choice.seed)

    def jobs() -> Iterator[Job]:
        for request in islice(iter(placed if placed is not None else trace), choice.limit):
            yield request, labeller.label(request)

    size = _measured(islice(iter(placed if placed is not None else trace), choice.limit))
    origin_us = placed[0].at_us if placed else 0
    return Workload(
        title=f"{trace.path.name} under {policy}",
        jobs=jobs(),
        tenants=choice.tenants,
        span_us=max(0, size.last_us - origin_us),
        origin=REPLAYED,
        longest_answer=size.longest_answer,
        origin_us=origin_us,
        requests=size.requests,
        notes=(
            ("trace", f"{trace.path} ({trace.format})"),
            ("labels", f"{choice.tenants} tenants by {choice.unit}, seed {choice.seed}"),
            ("tenant weights", str(choice.skew) if choice.skew else "Zipf, exponent 1.1"),
        ),
    )


class _Size(NamedTuple):
    """A trace's size: its requests, the last arrival, and the longest answer's tokens."""

    requests: int = 0
    last_us: int = 0
    longest_answer: int = 0


def _measured(requests: Iterable[TraceRequest]) -> _Size:
    """Return the size of the readable part. An unreadable line ends the replay, which reports it then."""
    size = _Size()
    try:
        for request in requests:
            longest = max(size.longest_answer, request.output_tokens)
            size = _Size(size.requests + 1, max(size.last_us, request.at_us), longest)
    except TraceError:
        pass
    return size


def _starts(choice: Choice) -> list[int]:
    """Return arrival times for sessions: the recorded ones where they exist, else one every 20 seconds."""
    folder = find_traces()
    beside = choice.trace.parent if choice.trace is not None else None
    for place in (beside, folder):
        path = place / "AzureLLMInferenceTrace2023_conv.csv.gz" if place is not None else None
        if path is not None and path.exists():
            return arrivals_us(path)
    return [index * 20 * MICROSECONDS for index in range(180)]
