"""`kvcustody policy lint`: findings in a sound policy that are probably mistakes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcustody.console.command import Json, print_json, say
from kvcustody.console.opening import snapshot
from kvcustody.console.options import GivenLedger
from kvcustody.console.policy.sarif_junit import junit, problem_data, sarif
from kvcustody.console.policy.validate import EXIT_NO, Files, FormatOption, ProblemFormat
from kvcustody.errors import ConfigError
from kvcustody.files import read_words
from kvcustody.governance.decisions.replay_decisions import sources_in_use, tenants_seen
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.plurals import several
from kvcustody.policies.document.model import Tier
from kvcustody.policies.document.problems import Problem, quote
from kvcustody.policies.workbench.lint.lint import ERRORS, SOON_DAYS, ScrubRate, lint
from kvcustody.policies.workbench.lint.without_effect import PoolOwner
from kvcustody.policies.workbench.validate import load_table

_SIZE = re.compile(r"([0-9]+)\s*([KMGT]i?)?B?\Z")
_UNITS = {"": 1, **{f"{p}i": 1 << 10 * n for n, p in enumerate("KMGT", 1)},
          **{p: 1000**n for n, p in enumerate("KMGT", 1)}}  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="lint", epilog=_EPILOG)(lint_command)


_EPILOG = (
    "Examples:\n\n    kvcustody policy lint policy.yaml --soon-days 60\n\n"
    "    kvcustody policy lint policy.yaml --ledger kvcustody.db\n\n"
    "    kvcustody policy lint policy.yaml --scrub-rate benchmarks/results/scrub-cpu.json --pool 64GiB"
)
Soon = Annotated[int, typer.Option("--soon-days", min=0, help="Report grants that end within this many days.")]
At = Annotated[str | None, typer.Option("--at", help="The day to lint for, as 2027-03-31; today if left out.")]
Tenants = Annotated[Path | None, typer.Option("--tenants", help="A file with the existing tenants, one per line.")]
Used = Annotated[Path | None, typer.Option("--used", help="A file with the grants and segments in use, one per line.")]
Rate = Annotated[
    Path | None,
    typer.Option("--scrub-rate", help="What `benchmarks/device/scrub.py --json` measured on the device."),
]
Pool = Annotated[str | None, typer.Option("--pool", help="The bytes of the device's pool, such as 64GiB.")]
Engine = Annotated[
    PoolOwner | None,
    typer.Option("--engine", help="Also report what has no effect with this engine."),
]
TiersOption = Annotated[
    str | None,
    typer.Option("--tiers", help="The tiers that workers have, as host,nvme: report others, which have no effect."),
]
Strict = Annotated[bool, typer.Option("--fail", help="Exit 1 when there is a finding.")]


@dataclass(frozen=True, kw_only=True)
class SeenOptions(ParameterGroup):
    """The tenants and ids that are in use."""

    tenants: Tenants = None
    used: Used = None
    ledger: GivenLedger = None


@dataclass(frozen=True, kw_only=True)
class HardwareOptions(ParameterGroup):
    """The hardware that the policy runs on."""

    scrub_rate: Rate = None
    pool: Pool = None
    engine: Engine = None
    tiers: TiersOption = None


@grouped
def lint_command(
    *,
    files: Files,
    style: FormatOption = ProblemFormat.TEXT,
    soon_days: Soon = SOON_DAYS,
    at: At = None,
    seen: SeenOptions,
    runs: HardwareOptions,
    fail: Strict = False,
    as_json: Json = False,
) -> None:
    """Tell what is sound and yet probably not meant: rules that do nothing, grants that end or that nobody needs.

    Also names that look alike, tenants that the identity provider does not know (with --tenants), grants that nobody
    used (with --used), scrub deadlines that the measured rate cannot meet (with --scrub-rate and --pool), and fields
    that do nothing, beside one engine (with --engine) or with the tiers that workers have (with --tiers). With --ledger
    the ledger says what was reused and which tenants ever came; it is only read. Exit 0; 1 where a grant or
    segment can open nothing (KVP716), where copies go to a store that workers lack (KVP775), and with --fail on any
    finding.
    """
    known, reused = _lines(seen.tenants), _lines(seen.used)
    if seen.ledger is not None:
        known, reused = _from_ledger(seen.ledger, known, reused)
    rate, now_us, configured = _rate(runs.scrub_rate, runs.pool), day_us(at), _tiers(runs.tiers)
    problems_of: dict[str, tuple[Problem, ...]] = {}
    for path in files:
        table = load_table(path)
        problems_of[str(path)] = lint(
            table,
            now_us=now_us,
            soon_days=soon_days,
            used=reused,
            known_tenants=known,
            rate=rate,
            owner=runs.engine,
            tiers=configured,
        )
    problems = [problem for each in problems_of.values() for problem in each]
    _show(problems_of, problems, ProblemFormat.JSON if as_json else style)
    if any(fail or problem.code in ERRORS for problem in problems):
        raise typer.Exit(EXIT_NO)


def _show(problems_of: dict[str, tuple[Problem, ...]], problems: list[Problem], style: ProblemFormat) -> None:
    if style is ProblemFormat.JSON:
        print_json([problem_data(problem) for problem in problems])
    elif style is ProblemFormat.SARIF:
        say(sarif(problems, level="warning"))
    elif style is ProblemFormat.JUNIT:
        say(junit("lint", list(problems_of.items())))
    else:
        for problem in problems:
            say(problem)
        say(f"{several(len(problems), 'finding')} in {several(len(problems_of), 'file')}")


def _from_ledger(
    ledger: str, known: frozenset[str] | None, seen: frozenset[str] | None
) -> tuple[frozenset[str], frozenset[str]]:
    """Return (tenants, ids in use) from the ledger; a given file overrides it."""
    with snapshot(ledger) as connection:
        return (
            tenants_seen(connection) if known is None else known,
            sources_in_use(connection) if seen is None else seen,
        )


def _lines(path: Path | None) -> frozenset[str] | None:
    if path is None:
        return None
    return frozenset(line.strip() for line in _read(path).splitlines() if line.strip())


def _tiers(said: str | None) -> frozenset[str] | None:
    if said is None:
        return None
    names = {part.strip() for part in said.split(",")} - {""}
    for name in sorted(names - set(Tier)):
        known = ", ".join(Tier)
        raise ConfigError(f"`--tiers` {quote(name)} is no tier; tiers are {known}", tier=name)
    return frozenset(names)


def _read(path: Path) -> str:
    try:
        return read_words(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"file `{path}` cannot be read: {type(error).__name__}", path=path) from error


def day_us(at: str | None) -> int:
    """Return the start of a UTC day, or now, in microseconds.

    Raises:
        ConfigError: it is no day.
    """
    if at is None:
        return int(datetime.now(tz=UTC).timestamp() * 1_000_000)
    try:
        day = datetime.strptime(at, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise ConfigError(f"`--at` {quote(at)} is not a date; write it as 2027-03-31", at=at) from None
    return int(day.timestamp()) * 1_000_000


def _rate(measured: Path | None, pool: str | None) -> ScrubRate | None:
    """Return the slowest measured point, because a deadline must be met on bad days too."""
    if measured is None and pool is None:
        return None
    if measured is None or pool is None:
        raise ConfigError("`--scrub-rate` and `--pool` go together: give both")
    size = _SIZE.match(pool)
    if size is None:
        raise ConfigError(f"`--pool` {quote(pool)} is not a size; write it as 64GiB", pool=pool)
    try:
        points: list[dict[str, Any]] = json.loads(_read(measured))["points"]
        overwrite = min(float(point["scrub_gbps"]) for point in points) * 1e9
        read_back = min(float(point["verify_gbps"]) for point in points) * 1e9
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        message = f"file `{measured}` is not what `benchmarks/device/scrub.py --json` writes: {type(error).__name__}"
        raise ConfigError(message, path=measured) from error
    return ScrubRate(overwrite, read_back, int(size[1]) * _UNITS[size[2] or ""])
