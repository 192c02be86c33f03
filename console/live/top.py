"""`kvcustody top`: what every worker does now, and for which tenants.

1. What is shown is what workers last said of themselves, ten seconds old at most: of a control plane (`--server`), or
   as the ledger has it. Nothing is asked of an engine.
2. The first look is since each worker began; later ones are between two looks.
3. One tenant's rows (`--tenant`) lead on: its subjects hold what the ledger says is running or held, and its denials.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any

import orjson
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvcustody.console.api.client import asking, call, every_page
from kvcustody.console.command import Json, make_table, print_json, stdout
from kvcustody.console.live.worker_status import worker_statuses
from kvcustody.console.options import ServiceSource
from kvcustody.console.render.number_format import size, time_text
from kvcustody.errors import ServiceError
from kvcustody.governance.observability.serving_summary import (
    SeenWorker,
    ServingSummary,
    Status,
    seconds_text,
    share_text,
    summary,
    tier_servings,
)
from kvcustody.governance.service.operations.parameter_groups import grouped
from kvcustody.times import SECOND_US, utc

EPILOG = (
    "Examples:\n\n    kvcustody top --server https://kv.example:8443 --api-key-file olive.key\n\n"
    "    kvcustody top --once --sort again\n\n"
    "    kvcustody top --once --tenant acme"
)


class TenantOrder(StrEnum):
    """The order of tenants: by name, or by a figure, the largest first."""

    THRASHING = "thrashing"
    TENANT = "tenant"
    BLOCKS = "blocks"
    TOKENS = "tokens"
    AGAIN = "again"
    HITS = "hits"
    DENIED = "denied"


_MEASURES = ("active_tokens", "denials", "hit_tokens", "prompt_tokens", "recomputed_blocks")
_ORDERS: dict[TenantOrder, Callable[[dict[str, Any]], tuple[Any, ...]]] = {
    TenantOrder.THRASHING: lambda row: (not row["thrashing"], -row["charged_blocks"], row["tenant"]),
    TenantOrder.TENANT: lambda row: (row["tenant"],),
    TenantOrder.BLOCKS: lambda row: (-row["charged_blocks"], row["tenant"]),
    TenantOrder.TOKENS: lambda row: (-row["active_tokens"], row["tenant"]),
    TenantOrder.AGAIN: lambda row: (-row["recomputed_blocks"], row["tenant"]),
    TenantOrder.HITS: lambda row: (-1.0 if row["hit_share"] is None else -1.0 - row["hit_share"], row["tenant"]),
    TenantOrder.DENIED: lambda row: (-row["denials"], row["tenant"]),
}


@grouped
def top(
    *,
    source: ServiceSource,
    interval: Annotated[float, typer.Option(min=0.5, max=600, help="Seconds between refreshes.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, and exit.")] = False,
    tenants: Annotated[int, typer.Option(min=0, max=1000, help="How many tenants to show, the first in order.")] = 10,
    sort: Annotated[TenantOrder, typer.Option(help="The order of tenants; figures: the largest first.")] = (
        TenantOrder.THRASHING
    ),
    tenant: Annotated[
        str | None, typer.Option(help="Show this tenant alone, once: its workers, subjects and denials.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Watch workers and tenants: hits, time to first token, prefill time avoided, evictions, thrash, waste.

    Until Ctrl-C, or once with `--once`, with `--json` or where the output is no terminal. Behind each table stands what
    its columns mean. `--tenant` leads from a tenant's row to its subjects, requests and denials.
    """
    with worker_statuses(source) as look:
        seen = look()
        if tenant is not None:
            document = _of_tenant(seen, tenant, source)
            if as_json:
                print_json(document)
            else:
                stdout().print(_tenant_shown(document))
            return
        if as_json:
            print_json(_document(seen, tenants, sort))
            return
        console = stdout()
        if once or not console.is_terminal:
            console.print(_shown(seen, {}, tenants, sort))
            return
        with Live(_shown(seen, {}, tenants, sort), console=console, screen=True) as live:
            try:
                while True:
                    time.sleep(interval)
                    before, seen = {one.worker: one.status for one in seen}, look()
                    live.update(_shown(seen, before, tenants, sort), refresh=True)
            except KeyboardInterrupt:
                return


def _document(seen: list[SeenWorker], tenants: int, sort: TenantOrder) -> dict[str, Any]:
    return {
        "workers": [
            {"worker": one.worker, "age_seconds": one.age_seconds, "silent": one.silent}
            | summary(one.status)._asdict()
            | {"tiers": [tier._asdict() for tier in tier_servings(one.status)]}
            for one in seen
        ],
        "tenants": _tenants(seen, sort)[:tenants],
    }


def _tenants(seen: list[SeenWorker], sort: TenantOrder = TenantOrder.THRASHING) -> list[dict[str, Any]]:
    """Return tenants' figures, summed over workers, in order: tenants that thrash first, then the busiest."""
    charged: Counter[str] = Counter()
    measures: dict[str, Counter[str]] = {name: Counter() for name in _MEASURES}
    knows_hits = any("hit_tokens" in one.tenants for one in seen)
    thrashing: set[str] = set()
    for one in seen:
        charged.update(one.charged)
        for name, sums in measures.items():
            sums.update({tenant: int(value) for tenant, value in one.tenants.get(name, {}).items()})
        thrashing |= {tenant for tenant, value in one.tenants.get("thrashing", {}).items() if value}
    names = charged.keys() | thrashing
    names = names.union(*measures.values())
    prompts, hits = measures["prompt_tokens"], measures["hit_tokens"]
    rows = [
        {
            "tenant": name,
            "charged_blocks": charged[name],
            **{measure: sums[name] for measure, sums in measures.items()},
            "hit_share": hits[name] / prompts[name] if prompts[name] and knows_hits else None,
            "thrashing": name in thrashing,
        }
        for name in names
    ]
    return sorted(rows, key=_ORDERS[sort])


def _of_tenant(seen: list[SeenWorker], tenant: str, source: ServiceSource) -> dict[str, Any]:
    """Return a tenant's figures at each worker, the subjects that hold something now, and its denials by rule."""
    rows = ((worker.worker, row) for worker in seen for row in _tenants([worker]))
    workers = [{"worker": name, **row} for name, row in rows if row["tenant"] == tenant]
    document: dict[str, Any] = {"tenant": tenant, "workers": workers, "subjects": None, "denials": None, "refused": ""}
    try:
        held, denied = (_rows(source, name, tenant) for name in ("listLive", "listDenials"))
    except ServiceError as error:
        if error.operands.get("problem") != "forbidden":
            raise
        return document | {"refused": error.message}
    subjects: dict[str, dict[str, Any]] = {}
    for row in held:
        name = row["subject"] or ""
        of_subject = subjects.setdefault(name, {"subject": name, "running": 0, "held": 0, "until_us": None})
        of_subject["running" if row["running"] else "held"] += 1
        of_subject["until_us"] = max(filter(None, (of_subject["until_us"], row["until_us"])), default=None)
    rules: Counter[str] = Counter()
    for row in denied:
        if row["reader"] == tenant:
            rules[row["rule"]] += row["requests"]
    ordered = sorted(subjects.values(), key=lambda row: (-row["running"], -row["held"], row["subject"]))
    denials = [{"rule": rule, "requests": requests} for rule, requests in rules.most_common()]
    return document | {"subjects": ordered, "denials": denials}


def _rows(source: ServiceSource, operation: str, tenant: str) -> list[dict[str, Any]]:
    with asking(source, operation) as asker:
        wanted = {"limit": 1000, "tenant": tenant}
        answer = every_page(asker, operation, wanted, call(asker, operation, wanted))
        rows: list[dict[str, Any]] = orjson.loads(answer.body)["items"]
        return rows


def _tenant_shown(document: dict[str, Any]) -> Group:
    tenant = document["tenant"]
    if not document["workers"] and not document["subjects"] and not document["denials"]:
        return Group(f"no worker and no leaf has anything of tenant `{tenant}` now; `kvcustody top` lists tenants")
    workers = make_table(f"{tenant}, by worker", "worker", *_TENANT_COLUMNS, left=1)
    for row in document["workers"]:
        workers.add_row(Text(row["worker"]), *_tenant_cells(row))
    parts: list[Table | str] = [workers]
    if document["refused"]:
        return Group(*parts, f"subjects and denials are not shown: {document['refused']}")
    shown = document["subjects"][:_SUBJECTS_SHOWN]
    count = len(document["subjects"])
    subjects = make_table(f"{tenant}, {len(shown)} of {count} subjects with something now", *_SUBJECT_COLUMNS, left=1)
    for row in shown:
        until = "" if row["until_us"] is None else f"{utc(row['until_us']):%Y-%m-%d %H:%M:%S}"
        subjects.add_row(Text(row["subject"] or "no subject"), f"{row['running']:,}", f"{row['held']:,}", until)
    denials = make_table(f"{tenant}, denied reuse by rule", "rule", "requests", left=1)
    for row in document["denials"]:
        denials.add_row(Text(row["rule"]), f"{row['requests']:,}")
    parts += [subjects, denials, f"next: `kvcustody subject show` and `kvcustody custody live --tenant {tenant}`"]
    return Group(*parts)


_SUBJECTS_SHOWN = 20
_SUBJECT_COLUMNS = ("subject", "requests running", "requests held", "held until, UTC")


_TENANT_COLUMNS = ("blocks", "active tokens", "hits", "denied", "computed again", "")


def _tenant_cells(row: dict[str, Any]) -> list[str | Text]:
    state = Text("thrashing", "bold red") if row["thrashing"] else ""
    blocks, tokens, denied, again = (
        f"{row[name]:,}" for name in ("charged_blocks", "active_tokens", "denials", "recomputed_blocks")
    )
    return [blocks, tokens, share_text(row["hit_share"]), denied, again, state]


def _shown(seen: list[SeenWorker], before: Mapping[str, Status], tenants: int, sort: TenantOrder) -> Group:
    if not seen:
        return Group(
            "no worker has reported its status yet; docs/how-to/operate/connect-workers.md shows how to enrol one"
        )
    workers = make_table(
        "workers, " + ("since the last refresh" if before else "since each began"),
        *(
            "worker",
            "heard",
            "running",
            "used",
            "hits",
            "first token",
            "without hit",
            "waited",
            "prefill saved",
        ),
        *("evicted", "again", "advised", "waste", "cancel", "no kind"),
        left=1,
    )
    for one in seen:
        _add(workers, one, summary(one.status, before.get(one.worker, {})))
    parts: list[Table | str] = [workers]
    parts.append(
        "hits: share of prompt tokens · first token: median with a hit · waited, cancel: nine in ten, at most · "
        "again: blocks computed again after an eviction · advised: pool blocks that would have kept them"
    )
    parts += _tiers(seen, before)
    rows = _tenants(seen, sort)
    if tenants and rows:
        table = make_table(
            f"tenants, {min(tenants, len(rows))} of {len(rows)}",
            *("tenant", *_TENANT_COLUMNS),
            left=1,
        )
        for row in rows[:tenants]:
            table.add_row(Text(row["tenant"]), *_tenant_cells(row))
        parts.append(table)
    return Group(*parts)


def _tiers(seen: list[SeenWorker], before: Mapping[str, Status]) -> list[Table | str]:
    """Return the tiers of the workers that have one, and the meaning of the columns."""
    table = make_table(
        "tiers",
        *("worker", "tier", "used", "of", "copies", "stored", "restored", "storing", "restoring"),
        *("refused", "left alone", "wrong by"),
        left=2,
    )
    for one in seen:
        for tier in tier_servings(one.status, before.get(one.worker, {})):
            table.add_row(
                Text(one.worker),
                tier.tier,
                size(tier.used_bytes),
                "–" if tier.capacity_bytes is None else size(tier.capacity_bytes),
                *(f"{number:,}" for number in (tier.copies, tier.stored_blocks, tier.restored_blocks)),
                *(time_text(int(seconds * SECOND_US)) for seconds in (tier.store_seconds, tier.restore_seconds)),
                Text(f"{tier.refused:,}", "red" if tier.refused else ""),
                f"{tier.left_alone:,}",
                share_text(tier.prediction_error),
            )
    if not table.rows:
        return []
    return [
        table,
        "stored, restored: blocks · storing, restoring: the time it took, in which the engine waited · "
        "left alone: slower than computing, or not worth it · wrong by: predictions of restores",
    ]


def _add(table: Table, one: SeenWorker, serving: ServingSummary) -> None:
    table.add_row(
        Text(one.worker),
        Text(f"{one.age_seconds} s", "red" if one.silent else ""),
        f"{serving.running:,}",
        share_text(serving.usage),
        share_text(serving.hit_share),
        seconds_text(serving.first_token_hit),
        seconds_text(serving.first_token_miss),
        seconds_text(serving.queue),
        seconds_text(serving.avoided_seconds),
        f"{serving.evicted_blocks:,}",
        Text(f"{serving.recomputed_blocks:,}", "red" if serving.recomputed_blocks else ""),
        "–" if serving.advised_blocks is None else f"{serving.advised_blocks:,}",
        share_text(serving.waste),
        seconds_text(serving.cancel),
        f"{serving.without_kinds:,}",
    )
