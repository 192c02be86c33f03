"""From command-line options to a workload: its requests, their senders, and its duration.

1. A recorded trace is read once before it is replayed: wrong rows are refused before anything is recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kvcustody.audit.kinds import GENERATED, REPLAYED
from kvcustody.clock import MICROSECONDS
from kvcustody.errors import ConfigError
from kvcustody.lab.replay.run.golden_check import find_traces
from kvcustody.lab.replay.traces.model import Key, TraceRequest
from kvcustody.lab.replay.traces.readers import READERS, Trace, WrongRows, open_trace, recognise
from kvcustody.lab.replay.traces.rows import SENDER_ROLES
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
    """The trace or generator to replay, and its tenants.

    Args:
        columns: the field of a trace that holds the tenant, session or subject, where it has another name.
        skip_wrong_rows: whether a trace's wrong rows are left out instead of refused.
    """

    trace: Path | None = None
    format: str | None = None
    tenants: int = 8
    seed: int = 1
    unit: Unit = "session"
    skew: Path | None = None
    limit: int | None = None
    conversations: int = 500
    columns: Mapping[str, str] = field(default_factory=dict)
    skip_wrong_rows: bool = False

    @property
    def format_name(self) -> str:
        """The format, recognised by the trace's content where it is not given.

        Raises:
            ConfigError: there is no such format, or it reads no file.
            TraceError: the trace cannot be read, or its format is not recognised.
        """
        return _format(self)


def block_tokens_of(choice: Choice, asked: int | None) -> int:
    """Return the pool's block size: a trace's own, a scenario's, or the option's (default 16)."""
    name = _format(choice)
    reader = READERS.get(name)
    if name in SCENARIOS:
        return asked or SCENARIOS[name].block_tokens
    if reader is None:
        return asked or 16
    if not reader.blocks_fixed:
        return asked or reader.block_tokens
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
    trace = open_trace(
        choice.trace,
        _format(choice),
        columns=choice.columns,
        block_tokens=block_tokens,
        skip_wrong_rows=choice.skip_wrong_rows,
    )
    return _recorded(choice, trace, policy)


def _format(choice: Choice) -> str:
    if choice.format is None:
        return GENERATED if choice.trace is None else recognise(choice.trace)
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
    skew = load_weights(choice.skew) if choice.skew else None
    wrong = WrongRows()
    requests: Iterable[TraceRequest] = trace.noting(wrong)
    placed: list[TraceRequest] | None = None
    if trace.relative_sessions:  # sessions have to be put on one time line, so all of them are read first
        requests = placed = stagger(requests, _starts(choice), seed=choice.seed)
    size = _measured(islice(iter(requests), choice.limit))
    if not choice.skip_wrong_rows:
        wrong.check()
    if not size.requests:
        raise ConfigError(f"trace `{trace.path}` ({trace.format}): it holds no requests", path=str(trace.path))
    names = tuple(name for name, _ in size.by_tenant.most_common())
    tenants = len(names) or choice.tenants
    if tenants > _TENANTS_MAX:
        raise ConfigError(f"trace `{trace.path}` names {tenants:,} tenants: at most {_TENANTS_MAX:,} can be replayed")
    weights = zipf_weights(tenants) if skew is None or names else skew
    labeller = Labeller(weights, tenants=tenants, seed=choice.seed, unit=choice.unit, named=names)

    def jobs() -> Iterator[Job]:
        for request in islice(iter(placed if placed is not None else trace), choice.limit):
            yield request, labeller.label(request)

    origin_us = placed[0].at_us if placed else 0
    drawn = (
        ("labels", f"{several(tenants, 'tenant')} by {choice.unit}, seed {choice.seed}"),
        ("tenant weights", str(choice.skew) if choice.skew else "Zipf, exponent 1.1"),
    )
    named = (("labels", f"{several(tenants, 'tenant')} as the trace names them"),)
    return Workload(
        title=f"{trace.path.name} under {policy}",
        jobs=jobs(),
        tenants=tenants,
        span_us=max(0, size.last_us - origin_us),
        origin=REPLAYED,
        longest_answer=size.longest_answer,
        origin_us=origin_us,
        requests=size.requests,
        notes=(("trace", f"{trace.path} ({trace.format})"), *(named if names else drawn)),
        tenant_names=names,
        remarks=_remarks(choice, trace, size, wrong),
        has_content=trace.reader.has_content,
    )


@dataclass(slots=True)
class _Size:
    """A trace's size: its requests, the last arrival, the longest answer's tokens, and who sent how many."""

    requests: int = 0
    last_us: int = 0
    longest_answer: int = 0
    by_tenant: Counter[str] = field(default_factory=Counter)
    sessions: set[Key] = field(default_factory=set)
    has_subjects: bool = False


def _measured(requests: Iterable[TraceRequest]) -> _Size:
    """Return the size of what is to be replayed."""
    size = _Size()
    for request in requests:
        size.requests += 1
        size.last_us = max(size.last_us, request.at_us)
        size.longest_answer = max(size.longest_answer, request.output_tokens)
        size.sessions.add(request.session)
        size.has_subjects |= request.subject is not None
        if request.tenant is not None:
            size.by_tenant[request.tenant] += 1
    return size


def _remarks(choice: Choice, trace: Trace, size: _Size, wrong: WrongRows) -> tuple[str, ...]:
    """Return what the file does not say, in a sentence each, with what to do about it."""
    remarks = []
    if wrong.count:
        places = "; ".join(error.message for error in wrong.first[:3])
        remarks.append(f"{several(wrong.count, 'wrong row')} left out: {places}{'; …' if wrong.count > 3 else ''}")
    sessions = several(len(size.sessions), "session")
    remedy = "Give every row the field `{role}`, or name the field that has it: --column {role}=FIELD."
    if not size.by_tenant:
        seed = f"--tenants {choice.tenants} --seed {choice.seed}"
        missing = f"The file names no tenant: tenants and classifications of its {sessions} were drawn ({seed})."
        remarks.append(f"{missing} {remedy.format(role='tenant')}")
    elif not size.has_subjects:
        missing = f"The file names no subject: each of its {sessions} counts as one."
        remarks.append(f"{missing} {remedy.format(role='subject')}")
    return (*remarks, *trace.reader.assumptions)


def _starts(choice: Choice) -> list[int]:
    """Return arrival times for sessions: the recorded ones where they exist, else one every 20 seconds."""
    folder = find_traces()
    beside = choice.trace.parent if choice.trace is not None else None
    for place in (beside, folder):
        path = place / "AzureLLMInferenceTrace2023_conv.csv.gz" if place is not None else None
        if path is not None and path.exists():
            return arrivals_us(path)
    return [index * 20 * MICROSECONDS for index in range(180)]


def read_columns(texts: Iterable[str]) -> dict[str, str]:
    """Return the fields that `--column ROLE=FIELD` options name, by role.

    Raises:
        ConfigError: an option has another form, or names a role twice.
    """
    columns: dict[str, str] = {}
    for text in texts:
        role, separator, name = text.partition("=")
        if role not in SENDER_ROLES or not separator or not name or role in columns:
            roles = ", ".join(SENDER_ROLES)
            raise ConfigError(f"--column `{text}`: write ROLE=FIELD, each role once: {roles}; e.g. tenant=customer_id")
        columns[role] = name
    return columns
