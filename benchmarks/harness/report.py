"""The Markdown tables of a comparison; every figure is the median of thread CPU time unless it says wall."""

from __future__ import annotations

from typing import Any

from bench import table
from workload import BLOCK_TOKENS


def markdown(result: dict[str, Any]) -> str:
    """Heading with the facts, the request tables, the decode table."""
    parts = [heading(result)]
    if result["requests"]:
        parts += [requests(result["requests"]), reported(result["requests"])]
    if result["decode"]:
        parts.append(decode(result["decode"]))
    if result["requests"] and all("governed" in record["ratios"] for record in result["requests"]):
        parts += [claim(result["requests"]), goals(result["requests"])]
    return "\n\n".join(filter(None, parts))


def heading(result: dict[str, Any]) -> str:
    """One line: processor, versions, commit."""
    facts, settings = result["facts"], result["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    return (
        f"{facts['processor']['model']} ({facts['processor']['cores']} cores), Python {facts['python']}, "
        f"{versions}, "
        f"commit {(facts['commit'] or 'none')[:12]}; pool {settings['pool_blocks']:,} blocks of "
        f"{settings['block_tokens']} tokens, {settings['rounds']} rounds"
    )


def requests(records: list[dict[str, Any]]) -> str:
    """One row a point: microseconds a request of the baseline and the judged peer, and the ratio with its goal."""
    baseline, *others = records[0]["peers"]
    names = [baseline, *others[:1]]
    header = ["tokens", "hit", "pool"]
    for name in names:
        header += [f"{name} µs (wall)", *phases_header(records[0]["peers"][name])]
        header += leaves_header(records[0]["peers"][name])
    judged = [name for name in names if name in records[0]["ratios"]]
    for _ in judged:
        header += ["ratio [95 %]", "with leaves", "wall ratio", "goal"]
    rows = []
    for record in records:
        row = point(record)
        for name in names:
            peer = record["peers"][name]
            row += [both(peer), *phases_cell(peer), *leaves_cells(peer, record["tokens"])]
        for name in judged:
            row += judgement(record["ratios"][name], record["goal"])
        rows.append(row)
    return table(header, rows)


def reported(records: list[dict[str, Any]]) -> str:
    """One row a point: the ratios of the peers after the first, which no goal binds."""
    names = list(records[0]["ratios"])[1:]
    if not names:
        return ""
    header = ["tokens", "hit", "pool", *(f"{name} µs: ratio" for name in names)]
    rows = [
        [
            *point(record),
            *(
                f"{record['peers'][name]['cpu']['median_us']:,.1f}: {record['ratios'][name]['cpu']['value']:.3f}"
                for name in names
            ),
        ]
        for record in records
    ]
    return table(header, rows)


def claim(records: list[dict[str, Any]]) -> str:
    """README.md's figure: the span of the ratio at each size, without the writer's thread and with it."""
    names = {1024: "1K", 8192: "8K", 32768: "32K"}
    by_size: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        by_size.setdefault(record["tokens"], []).append(record)
    leaves = [record["peers"]["governed"]["leaves"]["us_per_request"] for record in records if record["tokens"] == 1024]
    alone = ", ".join(
        f"{span([record['ratios']['governed']['cpu']['value'] for record in some])} at {names[tokens]}"
        for tokens, some in by_size.items()
    )
    both = ", ".join(
        f"{span([record['ratios']['governed']['with_leaves'] for record in some])} at {names[tokens]}"
        for tokens, some in by_size.items()
    )
    cost = f" ({span(leaves, 0)} µs a request at 1K)" if leaves else ""
    return f"Share of its time: {alone} tokens; with the audit leaves that another thread makes{cost}: {both}"


def span(values: list[float], digits: int = 2) -> str:
    """The least and the greatest."""
    return f"{min(values):.{digits}f}–{max(values):.{digits}f}"


def goals(records: list[dict[str, Any]]) -> str:
    """How many points meet their goal, and which do not."""
    missed = [
        f"{record['tokens']:,}/{record['hit_percent']}/{record['pool']} "
        f"({record['ratios']['governed']['cpu']['value']:.2f})"
        for record in records
        if not record["ratios"]["governed"]["met"]
    ]
    counted = f"{len(records) - len(missed)} of the {len(records)} request points meet their goal."
    return f"{counted}\nMissed: {', '.join(missed)}." if missed else counted


def point(record: dict[str, Any]) -> list[str]:
    """The cells that name a point."""
    return [f"{record['tokens']:,}", f"{record['hit_percent']} %", record["pool"]]


def decode(record: dict[str, Any]) -> str:
    """One row a peer: microseconds a step."""
    rows = []
    for name, peer in record["peers"].items():
        verdict = record["ratios"].get(name)
        cells = judgement(verdict, record["goal"]) if verdict else [""] * 4
        split = ", ".join(f"{phase} {part['median_us']:.0f}" for phase, part in peer["phases"].items())
        rows.append([name, both(peer), split, *cells])
    title = f"decode step, {record['sequences']} sequences"
    return table([title, "µs a step (wall)", "of which", "ratio [95 %]", "with leaves", "wall ratio", "goal"], rows)


def both(peer: dict[str, Any]) -> str:
    """CPU time, and wall time in brackets."""
    return f"{peer['cpu']['median_us']:,.1f} ({peer['wall']['median_us']:,.1f})"


def phases_header(peer: dict[str, Any]) -> list[str]:
    """A column for the split, where the peer has one."""
    return [" + ".join(peer["phases"])] if peer["phases"] else []


def phases_cell(peer: dict[str, Any]) -> list[str]:
    """The split's medians."""
    return [" + ".join(f"{part['median_us']:,.0f}" for part in peer["phases"].values())] if peer["phases"] else []


def leaves_header(peer: dict[str, Any]) -> list[str]:
    """Columns for a peer that puts requests on record."""
    return ["µs/block", "leaves, apart"] if peer["leaves"]["median_batch"] else []


def leaves_cells(peer: dict[str, Any], tokens: int) -> list[str]:
    """What a block costs, and CPU time of a request's leaves on the writer's thread."""
    if not peer["leaves"]["median_batch"]:
        return []
    per_block = peer["cpu"]["median_us"] / (tokens / BLOCK_TOKENS)
    return [f"{per_block:.2f}", f"{peer['leaves']['us_per_request']:,.1f}"]


def judgement(verdict: dict[str, Any], goal: float) -> list[str]:
    """Ratio with interval, ratio with leaves, wall ratio, goal with its outcome."""
    cpu = verdict["cpu"]
    outcome = {True: f"≤ {goal:.2f} met", False: f"≤ {goal:.2f} missed", None: "reported"}[verdict["met"]]
    return [
        f"{cpu['value']:.3f} [{cpu['low']:.3f}, {cpu['high']:.3f}]",
        f"{verdict['with_leaves']:.3f}",
        f"{verdict['wall']['value']:.3f}",
        outcome,
    ]
