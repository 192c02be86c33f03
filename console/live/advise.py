"""`kvcustody advise`: seven questions about a cache, answered from running workers' status or from a trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from sqlalchemy import Connection

from kvcustody.audit.evidence.counters.hourly_coverage import recent
from kvcustody.audit.evidence.counters.read_figures import orphans_by_class
from kvcustody.console.command import Json, make_table, print_json, stdout
from kvcustody.console.live.worker_status import worker_statuses
from kvcustody.console.opening import reading, service_settings
from kvcustody.console.options import ServiceSource
from kvcustody.console.replay.command import read_unit, replayed_aside
from kvcustody.errors import ConfigError
from kvcustody.governance.observability.serving_summary import SeenWorker
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.lab.advise import questions
from kvcustody.lab.advise.replayed_worker import as_worker, custody_of, trace_findings
from kvcustody.lab.replay.run.workload_from_options import Choice

EPILOG = """
Examples:

    kvcustody advise --server https://kv.example:8443 --api-key-file olive.key

    kvcustody advise conversation_trace.jsonl --pool-blocks 4000 --model config.json
"""


@dataclass(frozen=True, kw_only=True)
class TraceOptions(ParameterGroup):
    """The trace to replay instead of using workers' status."""

    trace_format: Annotated[
        str | None, typer.Option(help="The format, where a trace's own is not recognised; `generated` reads no file.")
    ] = None
    policy: Annotated[str, typer.Option(help="Of a trace: a library policy or a YAML file.")] = "regulated-saas"
    tenants: Annotated[int, typer.Option(min=1, help="Of a trace: how many tenants share it.")] = 8
    unit: Annotated[str, typer.Option(help="Of a trace: what belongs to one tenant.")] = "session"
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only the first requests.")] = None
    pool_blocks: Annotated[int | None, typer.Option(min=8, help="Of a trace: blocks of the pool.")] = None


@grouped
def advise(
    *,
    trace: Annotated[
        Path | None, typer.Argument(help="A recorded trace, as `replay` takes it: no worker is needed.")
    ] = None,
    source: ServiceSource,
    load: TraceOptions,
    model: Annotated[
        Path | None, typer.Option(help="Of a trace: the config.json of its model, for the bytes of a token.")
    ] = None,
    prefill_rate: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Of a trace: prompt tokens that a device computes a second."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Seven questions about the cache of running workers or for a trace, answered with the evidence.

    Bytes of a token, budgets, prefixes, what is in the key, offload, locations, cleanup. Of a trace it is replayed, and
    its ledger is thrown away. What nobody said is unknown, with the reason. docs/how-to/operate/ask-about-a-cache.md
    says how each answer is made.
    """
    of: dict[str, str] | None = None
    if trace is not None or load.trace_format is not None:
        given = [source.ctx.get_parameter_source(name) for name in ("server", "ledger")]
        if any(said is not None and said.name == "COMMANDLINE" for said in given):
            raise ConfigError("a trace is replayed locally: omit --server and --ledger")
        choice = Choice(trace, load.trace_format, load.tenants, unit=read_unit(load.unit), limit=load.limit)
        with replayed_aside(choice, load.policy, load.pool_blocks) as (report, _):
            seen = [as_worker(report)]
            findings = trace_findings(report, model, prefill_rate)
            of = {"title": report.title, "origin": report.origin, **report.settings}
            advice = questions.advise(seen, custody_of(report), trace=findings)
    else:
        if model is not None or prefill_rate is not None:
            raise ConfigError("`--model` and `--prefill-rate` apply to a trace: workers report their own")
        with worker_statuses(source) as look:
            seen = look()
        custody = None
        if source.plane.server is None:
            with (
                reading(service_settings(source.config, source.ledger).database_url) as engine,
                engine.connect() as connection,
            ):
                custody = _of_ledger(connection)
        advice = questions.advise(seen, custody, prefixes=_prefixes_command())
    _show(seen, advice, of, as_json)


def _show(seen: list[SeenWorker], advice: list[questions.Advice], of: dict[str, str] | None, as_json: bool) -> None:
    """Print the answers. `of`: what was replayed, and how."""
    if as_json:
        answers = [one._asdict() | {"evidence": [row._asdict() for row in one.evidence]} for one in advice]
        told = {"workers": [one.worker for one in seen], "answers": answers}
        print_json(told if of is None else {"replay": of} | told)
        return
    console = stdout()
    if of is not None:
        console.print(Text(f"{of['title']}: {of['origin']} traffic, {of['pool']}; no engine served it", "bold"))
        console.print()
    for number, one in enumerate(advice, 1):
        console.print(Text(f"{number}. {one.question}", "bold"))
        console.print(Text(one.answer))
        if one.evidence:
            table = make_table("", "evidence", "worker", "value", left=2)
            for row in one.evidence:
                shown = row.value if isinstance(row.value, str) else f"{row.value:,.6g}"
                table.add_row(Text(row.metric), Text(row.worker), Text(shown))
            console.print(table)
        for missing in one.unknown:
            console.print(Text(f"unknown: {missing}", "yellow"))
        console.print()


def _of_ledger(connection: Connection) -> dict[str, float]:
    """Return a ledger's figures about orphans and about custody due in the last hours."""
    counts: Counter[str] = Counter()
    for orphan, number in orphans_by_class(connection).items():
        counts[f'orphan_findings{{orphan="{orphan}"}}'] += number
    for unit in recent(connection).rows:
        for name in ("due", "covered", "overdue", "unproven"):
            counts[f"deletion_{name}_units"] += getattr(unit, name)
    return dict(counts)


def _prefixes_command() -> str | None:
    from kvcustody.console.main import COMMANDS

    return "kvcustody prefixes top" if "prefixes" in COMMANDS else None
