"""The commands of `kvcustody tier`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvcustody.console.api.asking import asked
from kvcustody.console.command import Json, as_answered, make_table, print_json, print_period, say, stdout
from kvcustody.console.options import (
    LastDay,
    OldestFirst,
    PageCursor,
    Source,
    moment_us,
)
from kvcustody.console.report.render.number_format import size, time_text
from kvcustody.console.tier.wording import lines_of, predicted_text
from kvcustody.errors import ConfigError
from kvcustody.governance.api.models.custody import ExplainedTransfers, Tiers, Transfers
from kvcustody.governance.service.answers.tiers import EXPLAIN_TRANSFERS, LIST_TIERS, LIST_TRANSFERS
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.plurals import several
from kvcustody.times import readable

app = typer.Typer(
    no_args_is_help=True,
    help="Tiers: what was stored off the device and came back, what was left alone, and why.",
    epilog="docs/operate/tiers.md#why-was-it-moved-or-not says how a decision is made and what each figure means.",
)
NO_TIER = (
    "nothing is on record of any tier: a worker has one where `KVCUSTODY_HOST_TIER_BYTES` or "
    "`KVCUSTODY_NVME_TIER_PATH` is set and the policy's `offload` names it (docs/operate/tiers.md)"
)


class _Tier(StrEnum):
    HOST = "host"
    NVME = "nvme"
    REMOTE = "remote"


class _Action(StrEnum):
    STORE = "store"
    RESTORE = "restore"


class _Choice(StrEnum):
    TRANSFER = "transfer"
    RECOMPUTE = "recompute"
    NONE = "none"


class _Outcome(StrEnum):
    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"
    NONE = "none"


_Tenant = Annotated[str | None, typer.Option(help="Of this tenant alone.")]
_Incarnation = Annotated[
    str | None, typer.Option(help="Of this process alone: 32 hexadecimal digits.", metavar="ID")
]


@app.command(name="list", epilog="Example: `kvcustody tier list --since 2026-11-01 --tenant acme`")
@grouped
def list_tiers(
    *,
    period: LastDay,
    tenant: _Tenant = None,
    source: Source,
    as_json: Json = False,
) -> None:
    """Each tier's copies, and what stores and restores of a period moved, took, saved and were predicted to take."""
    since_us, until_us = period.bounds_us()
    found = asked(LIST_TIERS, source, since=since_us, until=until_us, tenant=tenant)
    if as_json:
        print_period(Tiers, "tiers", since_us, until_us, found["items"])
        return
    if not found["items"]:
        say(NO_TIER)
        return
    _print_tiers(found["items"], since_us, until_us)


@dataclass(frozen=True, kw_only=True)
class TransferOptions(ParameterGroup):
    """Which decisions are listed."""

    since: Annotated[str | None, typer.Option(help="From this UTC date or moment on.")] = None
    until: Annotated[str | None, typer.Option(help="Up to this one, not included.")] = None
    tenant: _Tenant = None
    tier: Annotated[_Tier | None, typer.Option(help="Only about this tier.")] = None
    action: Annotated[_Action | None, typer.Option(help="Only stores, or only restores.")] = None
    choice: Annotated[
        _Choice | None, typer.Option(help="Only what was moved, or what was left to be computed.")
    ] = None
    outcome: Annotated[
        _Outcome | None, typer.Option(help="Only with this outcome; `none`: nothing was to be moved.")
    ] = None
    residency: Annotated[
        int | None, typer.Option(min=0, help="Restored for this request; 0: stores, which are for none.")
    ] = None
    incarnation: _Incarnation = None


@app.command(
    name="transfers",
    epilog="Example: `kvcustody tier transfers --tier nvme --outcome failed --since 2026-11-01 --json`",
)
@grouped
def list_transfers(
    *,
    sought: TransferOptions,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 50,
    cursor: PageCursor = None,
    oldest_first: OldestFirst = False,
    source: Source,
    as_json: Json = False,
) -> None:
    """Decisions to move copies or not, newest first: what either way was predicted to take, and what it took."""
    found = asked(
        LIST_TRANSFERS,
        source,
        tier=sought.tier,
        action=sought.action,
        choice=sought.choice,
        outcome=sought.outcome,
        residency=sought.residency,
        incarnation=_process(sought.incarnation),
        since=moment_us(sought.since, "--since"),
        until=moment_us(sought.until, "--until"),
        tenant=sought.tenant,
        order="oldest" if oldest_first else "newest",
        limit=limit,
        cursor=cursor,
    )
    items, following = found["items"], found["next"]
    if as_json:
        print_json({"transfers": as_answered(Transfers, {"items": items})["items"], "next": following})
        return
    _print_transfers(items)
    if following is not None:
        say(f"more: --cursor {following}")


@app.command(epilog="Example: `kvcustody tier explain 17 --worker gpu-0`")
@grouped
def explain(
    residency: Annotated[
        int, typer.Argument(min=0, metavar="RESIDENCY", help="The request's number, as its process counts.")
    ],
    *,
    incarnation: _Incarnation = None,
    worker: Annotated[str | None, typer.Option(help="Of this worker's processes alone.")] = None,
    tenant: _Tenant = None,
    source: Source,
    as_json: Json = False,
) -> None:
    """Say for one request what its look-up found in which tier, what was chosen and why, and what it took.

    `kvcustody audit query --kind residency-opened` shows requests with their numbers; of these, `--residency` and
    `--kind transfer-decided` show the leaves that this is said from.
    """
    found = asked(
        EXPLAIN_TRANSFERS,
        source,
        residency=residency,
        incarnation=_process(incarnation),
        worker=worker,
        tenant=tenant,
    )
    any_tier = found["any_tier"]
    one = _only(found["items"], residency, source.plane.server or source.ledger, any_tier)
    lines = lines_of(one) if any_tier else [*lines_of(one)[:1], NO_TIER]
    if as_json:
        [one] = as_answered(ExplainedTransfers, {"items": [one]})["items"]
        print_json({"request": one, "explained": lines})
        return
    say(f"{readable(one['opened_us'])} {one['incarnation']}")
    say("\n".join(lines))


def _only(items: list[dict[str, Any]], residency: int, place: str, any_tier: bool) -> dict[str, Any]:
    """The one request that is meant; raises `ConfigError` where there is none, or several."""
    if not items:
        problem = (
            f"`{place}` has no request {residency} that fits; "
            "`kvcustody audit query --kind residency-opened` shows those it has"
        )
        raise ConfigError(problem if any_tier else f"{problem}; {NO_TIER}", residency=residency)
    if len(items) > 1:
        processes = ", ".join(f"`{item['incarnation']}`" for item in items[:5])
        raise ConfigError(
            f"request {residency} is of {several(len(items), 'process')}: name one with --incarnation, "
            f"the newest first: {processes}",
            residency=residency,
        )
    return items[0]


def _process(said: str | None) -> str | None:
    if said is not None and not re.fullmatch(r"[0-9a-f]{32}", said):
        raise ConfigError(
            f"--incarnation `{said}` is no process: it has 32 hexadecimal digits, "
            "as `kvcustody worker list` shows them",
            incarnation=said,
        )
    return said


def _print_tiers(items: list[dict[str, Any]], since_us: int, until_us: int) -> None:
    title = f"{readable(since_us)} to {readable(until_us)}"
    tiers = make_table("copies, of all time", "tier", "stored", "bytes", "ended", "there now")
    for item in items:
        numbers = (f"{item[name]:,}" for name in ("stored", "ended", "living"))
        stored, ended, living = numbers
        tiers.add_row(item["tier"], stored, size(item["stored_bytes"]), ended, living)
    stdout().print(tiers, markup=False)
    if not any(item["transfers"] for item in items):
        say(f"nothing was decided about moving copies from {title}; give an earlier --since")
        return
    columns = ("moved", "blocks", "bytes", "took", "partial", "failed", "wrong by", "saved", "left alone")
    table = make_table(title, "tier", "action", "decisions", *columns, left=2)
    for item in items:
        for row in item["transfers"]:
            saved, error = row["saved_us"], row["error"]
            table.add_row(
                row["tier"],
                row["action"],
                *(f"{row[name]:,}" for name in ("decisions", "transfers", "blocks")),
                size(row["bytes"]),
                time_text(row["measured_us"]),
                *(f"{row[name]:,}" for name in ("partial", "failed")),
                "–" if error is None else f"{error:.0%}",
                "–" if saved is None else ("−" if saved < 0 else "") + time_text(abs(saved)),
                ", ".join(f"{number:,} {reason}" for reason, number in row["against"].items()) or "0",
            )
    stdout().print(table, markup=False)
    for item in items:
        if item["transfers"]:
            sign = "−" if item["net_us"] < 0 else ""
            say(f"{item['tier']}: saved less spent, stores included: {sign}{time_text(abs(item['net_us']))}")


def _print_transfers(items: list[dict[str, Any]]) -> None:
    columns = ("blocks", "bytes", "to move", "to compute", "took")
    names = ("when (UTC)", "tenant", "tier", "action", "request", "choice", "outcome", "why")
    table = make_table(several(len(items), "decision"), *names, *columns, left=len(names))
    for item in items:
        table.add_row(
            readable(item["at_us"]),
            item["tenant"],
            item["tier"],
            item["action"],
            str(item["residency"] or "–"),
            item["choice"],
            item["outcome"] or "–",
            item["reason"],
            f"{item['blocks']:,}",
            size(item["bytes"]),
            *(predicted_text(item, name) for name in ("transfer_us", "recompute_us")),
            time_text(item["actual_us"]) if item["outcome"] else "–",
        )
    stdout().print(table, markup=False)
