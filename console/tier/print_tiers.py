"""Prints tiers, decisions about moving copies, and one request's decisions."""

from __future__ import annotations

from typing import Any

from kvcustody.console.command import make_table, print_more, say, stdout
from kvcustody.console.render.number_format import size, time_text
from kvcustody.console.tier.wording import lines_of, predicted_text
from kvcustody.errors import ConfigError
from kvcustody.plurals import several
from kvcustody.times import readable

NO_TIER = (
    "nothing is on record of any tier: a worker has one where `KVCUSTODY_HOST_TIER_BYTES` or "
    "`KVCUSTODY_NVME_TIER_PATH` is set and the policy's `offload` names it (docs/concepts/tiers.md)"
)


def print_tiers(answer: dict[str, Any]) -> None:
    """Print each tier's copies, and what a period's stores and restores moved, took and saved, with the predictions."""
    items, since_us, until_us = answer["items"], answer["since_us"], answer["until_us"]
    if not items:
        say(NO_TIER)
        return
    title = f"{readable(since_us)} to {readable(until_us)}"
    tiers = make_table("copies, of all time", "tier", "stored", "bytes", "ended", "there now")
    for item in items:
        numbers = (f"{item[name]:,}" for name in ("stored", "ended", "living"))
        stored, ended, living = numbers
        tiers.add_row(item["tier"], stored, size(item["stored_bytes"]), ended, living)
    stdout().print(tiers, markup=False)
    if not any(item["transfers"] for item in items):
        say(f"there are no decisions about moving copies from {title}; give an earlier --since")
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
    _print_sizes([row for item in items for row in item["transfers"] if row["sizes"]])
    for item in items:
        if item["transfers"]:
            sign = "−" if item["net_us"] < 0 else ""
            say(f"{item['tier']}: saved less spent, stores included: {sign}{time_text(abs(item['net_us']))}")


def _print_sizes(summed: list[dict[str, Any]]) -> None:
    """Print the mean duration of transfers by size, with the prediction."""
    if not summed:
        return
    columns = ("moved", "each took", "with a prediction", "predicted, each", "took, each")
    table = make_table("transfers that were done, by size", "tier", "action", "bytes, from", *columns, left=2)
    for row in summed:
        for one in row["sizes"]:
            count = one["predicted"]
            predicted, took = (
                time_text(one[name] // count) if count else "–" for name in ("predicted_us", "predicted_actual_us")
            )
            table.add_row(
                row["tier"],
                row["action"],
                size(one["bytes_min"]),
                f"{one['transfers']:,}",
                time_text(one["measured_us"] // one["transfers"]),
                f"{count:,}",
                predicted,
                took,
            )
    stdout().print(table, markup=False)


def print_transfers(answer: dict[str, Any]) -> None:
    """Print decisions to move copies or not: the predicted times of both choices, and the measured time."""
    items = answer["items"]
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
    print_more(answer)


def print_request(answer: dict[str, Any], residency: int) -> None:
    """Print one request's decisions.

    Raises:
        ConfigError: no request matches, or several do.
    """
    items, any_tier = answer["items"], answer["any_tier"]
    if not items:
        problem = (
            f"the ledger has no request {residency} that fits; "
            "`kvcustody audit query --kind residency-opened` shows those it has"
        )
        raise ConfigError(problem if any_tier else f"{problem}; {NO_TIER}")
    if len(items) > 1:
        processes = ", ".join(f"`{item['incarnation']}`" for item in items[:5])
        raise ConfigError(
            f"request {residency} is of {several(len(items), 'process')}: name one with --incarnation, "
            f"the newest first: {processes}"
        )
    [one] = items
    lines = lines_of(one) if any_tier else [*lines_of(one)[:1], NO_TIER]
    say(f"{readable(one['opened_us'])} {one['incarnation']}")
    say("\n".join(lines))
