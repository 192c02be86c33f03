"""Prints the figures of route receipts, the receipts, and their problems."""

from __future__ import annotations

from typing import Any

from kvcustody.console.command import make_table, print_more, say, stdout
from kvcustody.plurals import several
from kvcustody.times import readable

NO_RECEIPT = (
    "no route receipt is on record from {since} to {until}: doors write them of the requests that the policy says "
    "(docs/concepts/route-receipts.md)"
)
UNKNOWN = "–"


def print_routes(answer: dict[str, Any]) -> None:
    """Print the figures in total, by worker and by tenant."""
    since, until = readable(answer["measured_since_us"]), readable(answer["until_us"])
    if not answer["receipts"]:
        say(NO_RECEIPT.format(since=since, until=until))
        return
    table = make_table(f"{since} to {until}", "measure", "figure")
    for name, shown in (
        ("receipts", f"{answer['receipts']:,}"),
        ("waiting for a half", f"{answer['awaited']:,}"),
        ("locality", percent(answer["locality"])),
        ("routed hit length, tokens", decimal(answer["hit_length"])),
        ("queue delta, mean", decimal(answer["queue_delta_mean"])),
        ("stale-location misses", stale(answer)),
        ("imbalance", decimal(answer["imbalance"])),
        ("promised tokens that were found", kept(answer)),
    ):
        table.add_row(name, shown)
    stdout().print(table, markup=False)
    columns = ("requests", "locality", "queue", "free blocks", "stale")
    for what, key in (("worker", "workers"), ("tenant", "tenants")):
        by = make_table(f"by {what}", what, *(columns if what == "worker" else columns[:2]))
        for row in answer[key]:
            figures = [f"{row['requests']:,}", percent(row["locality"])]
            if what == "worker":
                figures += [
                    decimal(row["queue_mean"]),
                    f"{row['free_blocks_last']:,}",
                    percent(row["stale_rate"]),
                ]
            by.add_row(row[what], *figures)
        stdout().print(by, markup=False)
    wrong = {name: number for name, number in answer["findings"].items() if number}
    say("; ".join(f"{number:,} {name}" for name, number in wrong.items()) or "no receipt has a problem")


def print_receipts(answer: dict[str, Any]) -> None:
    """Print receipts, one per line."""
    names = ("when (UTC)", "tenant", "receipt", "worker", "promised", "found", "prompt")
    table = make_table(several(len(answer["items"]), "receipt"), *names, left=4)
    for one in answer["items"]:
        sent, found = one["sent"], one["found"]
        last = found[-1] if found else None
        promised = UNKNOWN if sent is None or sent["promised_tokens"] < 0 else f"{sent['promised_tokens']:,}"
        table.add_row(
            readable(one["at_us"]),
            one["tenant"],
            one["receipt"],
            last["worker"] if last else (sent or {}).get("worker") or UNKNOWN,
            promised,
            f"{last['found_tokens']:,}" if last else "no worker's half",
            f"{last['prompt_tokens']:,}" if last else UNKNOWN,
        )
    stdout().print(table, markup=False)
    print_more(answer)


def print_findings(answer: dict[str, Any]) -> None:
    """Print receipts' problems, one per line."""
    names = ("when (UTC)", "tenant", "receipt", "problem", "worker", "detail")
    table = make_table(several(len(answer["items"]), "finding"), *names, left=len(names))
    for one in answer["items"]:
        table.add_row(
            readable(one["at_us"]),
            *(one[name] for name in ("tenant", "receipt", "problem", "worker", "detail")),
        )
    stdout().print(table, markup=False)
    print_more(answer)


def percent(share: float | None) -> str:
    """Return a share, or that it is unknown."""
    return UNKNOWN if share is None else f"{share:.1%}"


def decimal(value: float | None) -> str:
    """Return a number with two decimals, or that it is unknown."""
    return UNKNOWN if value is None else f"{value:,.2f}".replace("-", "−")


def stale(answer: dict[str, Any]) -> str:
    """Return stale-location misses out of the requests that had a promised hit."""
    if not answer["promises"]:
        return f"{UNKNOWN} (no router reports its promises)"
    return f"{answer['stale_misses']:,} of {answer['promises']:,}"


def kept(answer: dict[str, Any]) -> str:
    """Return the share of promised tokens that were found."""
    return f"{answer['kept_tokens']:,} of {answer['promised_tokens']:,}" if answer["promises"] else UNKNOWN
