"""An auditor's own run through a report: every figure that leaves give, made again from an export, and compared.

    python reperform.py EXPORT report.json

It needs Python and the two files beside it, and shares nothing with kvcustody: `coverage_oracle.py` gives verdicts in
plain Python, custody by custody. Verify the export (`verify_kvcustody.py` in it) and the report's signature first: this
program believes the leaves. It reads exports as `ndjson`, and reports over all tenants.

It prints one line a figure, `agrees` or `DIFFERS`, then what it does not cover; exit code 1 where one differs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coverage_oracle import (
    Chosen,
    Custody,
    History,
    figures,
    items_of,
    judge,
    lag_us,
    listed,
    population_digest,
)

Body = dict[str, Any]
NOT_COVERED = (
    "boundary (checkpoint, logs, witnesses, workers): verify the export",
    "sample: whether leaves are proved (`kvcustody report verify`)",
    "tiers: copies off the device",
    "recount, proof, window, opinion, limitations: they are no figures of leaves, or follow from others",
    "board: which workers are covered",
)
ENDED_BY = {
    "deadline": ("expired", "ceiling", "lapsed", "deadline"),
    "eviction": ("evict",),
    "erasure": ("erasure", "erase"),
    "pressure": ("pressure",),
    "death": ("unproven",),
}
LEVELS = ("launched", "retired", "sampled", "full")
LAGS_US = (1_000, 10_000, 100_000, 250_000, 1_000_000, 5_000_000, 30_000_000, 300_000_000)
VERDICTS = ("in_time", "late", "failed", "missing", "unproven", "overdue")


class Comparison:
    """Figures that were compared."""

    def __init__(self) -> None:
        self.lines: list[tuple[bool, str]] = []

    def add(self, name: str, stated: Any, made: Any) -> None:
        """One figure, as the report states it and as leaves give it."""
        same = stated == made
        self.lines.append(
            (same, f"{'agrees ' if same else 'DIFFERS'}  {name}" + ("" if same else f": {stated} / {made}"))
        )

    @property
    def ok(self) -> bool:
        """Everything agrees."""
        return all(same for same, _ in self.lines)


def leaves_of(export: Path) -> Iterator[bytes]:
    """Every leaf of an export in ndjson."""
    manifest = json.loads((export / "manifest.json").read_bytes())
    if manifest["format"] != "ndjson":
        raise SystemExit("export it as ndjson: `kvcustody audit export --format ndjson`")
    for log in manifest["logs"]:
        for file in log["files"]:
            yield from (export / file["path"]).read_bytes().split(b"\n")[:-1]


def compare(export: Path, report: Body) -> Comparison:
    """Every figure that is covered."""
    leaves = list(leaves_of(export))
    bodies = [json.loads(leaf) for leaf in leaves]
    asked = report["asked"]
    history = History(leaves)
    custodies = list(judge(history, Chosen(asked["since_us"], asked["until_us"])))
    made = Comparison()
    _population(made, report, custodies)
    _coverage(made, report, custodies)
    _time(made, report, custodies, history)
    _sample(made, report, custodies, history)
    _activity(made, report, bodies)
    _decided(made, report, bodies)
    _read_back(made, report, bodies)
    _storage(made, report, custodies, history)
    _losses(made, report, bodies)
    _board(made, report, bodies, history)
    return made


def _population(made: Comparison, report: Body, custodies: list[Custody]) -> None:
    facts = report["population"]
    made.add("population: custodies", facts["custodies"], len(custodies))
    made.add("population: units", facts["units"], sum(one.shards for one in custodies))
    made.add("population: digest", facts["digest"], population_digest(custodies))


def _coverage(made: Comparison, report: Body, custodies: list[Custody]) -> None:
    groups: dict[tuple[str, str], list[Custody]] = defaultdict(list)
    for one in custodies:
        groups[one.tenant, one.classification].append(one)
    rows = {(row["tenant"], row["classification"]): row for row in report["coverage"]}
    made.add("coverage: tenants and classes", sorted(rows), sorted(groups))
    for who in sorted(rows):
        again = figures(groups[who])
        for name in again:
            made.add(f"coverage: {' '.join(who)}: {name}", rows[who][name], again[name])
    for name, value in figures(custodies).items():
        made.add(f"total: {name}", report["total"][name], value)
    uncovered = sum(one.shards for one in custodies if not one.covered)
    made.add("exceptions: units", sum(item["units"] for item in report["exceptions"]), uncovered)
    by_verdict: Counter[str] = Counter()
    for one in custodies:
        if not one.covered:
            by_verdict[one.verdict] += one.shards
    stated: Counter[str] = Counter()
    for item in report["exceptions"]:
        stated[item["verdict"]] += item["units"]
    made.add("exceptions: units by verdict", stated, by_verdict)


def _time(made: Comparison, report: Body, custodies: list[Custody], history: History) -> None:
    since, bins = report["asked"]["since_us"], report["timeline"]
    width = bins[1]["start_us"] - since if len(bins) > 1 else report["asked"]["until_us"] - since
    due, covered = [0] * len(bins), [0] * len(bins)
    for one in custodies:
        place = (one.due + history.lives[one.incarnation].offset_us - since) // width
        due[place] += one.shards
        covered[place] += one.shards * one.covered
    made.add("timeline: due", [item["due"] for item in bins], due)
    made.add("timeline: covered", [item["covered"] for item in bins], covered)
    for name, percent in (("p50_us", 50), ("p99_us", 99), ("max_us", 100)):
        made.add(f"timeliness: {name}", report["timeliness"][name], lag_us(custodies, percent))
    lags = [one.lag for one in custodies if one.lag >= 0]
    counts = [
        sum(low < lag <= high for lag in lags) for low, high in zip((-1, *LAGS_US), LAGS_US, strict=False)
    ]
    counts.append(sum(lag > LAGS_US[-1] for lag in lags))
    made.add("timeliness: lags", [item["custodies"] for item in report["timeliness"]["lags"]], counts)


def _sample(made: Comparison, report: Body, custodies: list[Custody], history: History) -> None:
    causes = {}
    for uuid, life in history.lives.items():
        for key, _, body in sorted(
            life.named("custody-ended"),
            key=lambda found: (
                found[2]["incarnation"] != uuid,
                int(found[2]["sequence"]),
                int(found[2]["part"]),
            ),
        ):
            causes.setdefault((uuid, *key), body["cause"])
    strata: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, one in enumerate(custodies):
        late = one.verdict == "overdue"
        cause = "no end on record" if late else causes[one.incarnation, one.pool, one.generation]
        strata["device", one.tenant, one.classification, cause].append(number)
    stated = {
        (one["tier"], one["tenant"], one["classification"], one["cause"]): (number, one)
        for number, one in enumerate(report["sampling"]["strata"])
    }
    device = {key: value for key, value in stated.items() if key[0] == "device"}
    made.add("strata of the device", sorted(device), sorted(strata))
    for key in sorted(device.keys() & strata.keys()):
        number, one = device[key]
        members = strata[key]
        made.add(f"stratum {number}: members", one["members"], len(members))
        places = redraw(report["asked"]["seed"], number, one["drawn"], len(members))
        items = [item for item in report["sample"] if item["stratum"] == number]
        made.add(f"stratum {number}: draws", [item["place"] for item in items], places)
        made.add(
            f"stratum {number}: numbers", [item["number"] for item in items], [members[at] for at in places]
        )
        for item, at in zip(items, places, strict=False):
            mine, told = custodies[members[at]], item["custody"]
            names = (
                "incarnation",
                "pool",
                "block",
                "generation",
                "tenant",
                "classification",
                "verdict",
                "covered",
            )
            made.add(
                f"member {item['number']}",
                [told[name] for name in names],
                [getattr(mine, name) for name in names],
            )
        wrong = sum(not custodies[members[at]].covered for at in places)
        made.add(f"stratum {number}: deviations", one["deviations"], wrong)


def redraw(seed: str, stratum: int, count: int, members: int) -> list[int]:
    """The places that the seed draws of a stratum."""
    found: dict[int, None] = {}
    turn = 0
    while len(found) < min(count, members):
        picked = hashlib.sha256(f"{seed}:{stratum}:{turn}".encode()).hexdigest()
        found.setdefault(int(picked, 16) % members)
        turn += 1
    return list(found)


def _within(report: Body, body: Body) -> bool:
    return bool(report["asked"]["since_us"] <= int(body["at_us"]) < report["asked"]["until_us"])


def _activity(made: Comparison, report: Body, bodies: list[Body]) -> None:
    kinds = Counter(body["kind"] for body in bodies if _within(report, body))
    made.add(
        "recorded events", {item["kind"]: item["leaves"] for item in report["activity"]["kinds"]}, dict(kinds)
    )
    asked = sorted(
        body["erasure"] for body in bodies if body["kind"] == "erasure-requested" and _within(report, body)
    )
    made.add("erasures", sorted(item["erasure"] for item in report["activity"]["erasures"]), asked)


def _decided(made: Comparison, report: Body, bodies: list[Body]) -> None:
    since, until = report["asked"]["since_us"], report["asked"]["until_us"]
    counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    opened: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for body in bodies:
        own = body["log"] == f"tenant/{body.get('tenant') or body.get('reader')}"
        if body["kind"] == "hit-counters" and own:
            begun = int(body["at_us"]) - int(body["boot_us"]) + int(body["from_boot_us"])
            if begun < until and int(body["at_us"]) >= since:
                inside = begun >= since and int(body["at_us"]) < until
                counts[body["action"], body["effect"], body["rule"]][not inside] += body["requests"]
        elif body["kind"] == "decision" and own and _within(report, body):
            counts[body["action"], body["effect"], (body["reasons"] or ["default-deny"])[0]][0] += 1
        elif body["kind"] == "residency-opened" and body["part"] == 1 and _within(report, body):
            rules = ", ".join(body["reasons"]) or "none named"
            opened[rules][0] += 1
            opened[rules][1] += any(True for _ in listed(body["runs"]))
    decided = report["decided"]
    stated = {
        (item["action"], item["effect"], item["rule"]): [item["requests"], item["straddling"]]
        for item in decided["counts"]
    }
    made.add("decisions", stated, dict(counts))
    rules = {item["rules"]: [item["residencies"], item["attached"]] for item in decided["residencies"]}
    made.add("residencies by rule", rules, dict(opened))


def _read_back(made: Comparison, report: Body, bodies: list[Body]) -> None:
    rows: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0] * 6)
    for leaf in bodies:
        if not _within(report, leaf):
            continue
        for body in items_of(leaf):
            if body["kind"] != "receipt":
                continue
            here, total = _size(body["runs"]), int(body["blocks"])
            custody = any(True for _ in listed(body["runs"]))
            read = body["verified"] if body["part"] == 1 else 0
            size = body["bytes"] * here // total if total else 0
            row = rows["custody" if custody else "boot", body["level"], body["result"]]
            for place, value in enumerate(
                (1, not read, here, read, size, size // here * read if here else 0)
            ):
                row[place] += value
    names = ("receipts", "receipts_unread", "blocks", "blocks_read", "bytes", "bytes_read")
    stated = {
        (row["scrub"], row["level"], row["result"]): [row[name] for name in names]
        for row in report["read_back"]
    }
    made.add("read back", stated, dict(rows))


def _size(runs: list[Any]) -> int:
    """How many blocks a list of runs has, those of boots among them."""
    count = 0
    for run in runs:
        if isinstance(run[0], list):
            count += sum(run[0][2::2])
        elif isinstance(run[1], list):
            count += sum(run[2] or [1] * len(run[1]))
        else:
            count += sum(run[2::2])
    return count


def _storage(made: Comparison, report: Body, custodies: list[Custody], history: History) -> None:
    people = {uuid: life.people() for uuid, life in history.lives.items()}
    groups: dict[str, list[Custody]] = defaultdict(list)
    for one in custodies:
        groups[one.classification].append(one)
    rows = {row["classification"]: row for row in report["storage"]}
    made.add("storage: classifications", sorted(rows), sorted(groups))
    for name in sorted(rows.keys() & groups.keys()):
        ended = [one for one in groups[name] if one.verdict != "overdue"]
        again: dict[str, int] = {"custodies": len(ended), "overdue": len(groups[name]) - len(ended)}
        causes = Counter(_ended_by(one.cause) for one in ended)
        again |= {f"by_{by}": causes[by] for by in (*ENDED_BY, "other")}
        openings = [people[one.incarnation].get(one.writer) for one in ended]
        aged = [(one, person) for one, person in zip(ended, openings, strict=True) if person is not None]
        again["unaged"] = len(ended) - len(aged)
        ages = sorted(max(0, one.ended - int(person["boot_us"])) for one, person in aged)
        for place, percent in (("p50", 50), ("p99", 99), ("max", 100)):
            again[f"age_us_{place}"] = ages[-(-len(ages) * percent // 100) - 1] if ages else 0
        limits = [
            int(person["absolute_boot_us"]) - int(person["boot_us"])
            for _, person in aged
            if int(person["absolute_boot_us"]) > 0
        ]
        for key, values in (("absolute_us", limits), ("within_us", [one.within for one in ended])):
            again |= {f"{key}_min": min(values, default=0), f"{key}_max": max(values, default=0)}
        again["beyond_limit"] = sum(0 < one.ceiling < one.ended for one in ended)
        for figure, value in again.items():
            made.add(f"storage: {name}: {figure}", rows[name][figure], value)


def _ended_by(cause: str) -> str:
    return next((name for name, begins in ENDED_BY.items() if cause.startswith(begins)), "other")


def _losses(made: Comparison, report: Body, bodies: list[Body]) -> None:
    known: dict[str, list[tuple[int, int]]] = defaultdict(list)
    held: dict[str, set[int]] = defaultdict(set)
    parts: dict[tuple[str, int, str], tuple[int, int]] = {}
    gaps = spills = 0
    for body in bodies:
        life, sequence = body["incarnation"], int(body["sequence"])
        held[life].add(sequence)
        if body["parts"] > 1:
            have, _ = parts.get((life, sequence, body["log"]), (0, 0))
            parts[life, sequence, body["log"]] = (have + 1, int(body["parts"]))
        spills += body["kind"] in ("spill-started", "replay-completed")
        if body["kind"] in ("gap", "withdrawn"):
            first = int(body.get("first_sequence") or body.get("of_sequence") or 0)
            known[life].append((first, int(body.get("last_sequence") or first)))
            gaps += body["kind"] == "gap"
    gaps += sum(have != whole for have, whole in parts.values())
    for life, numbers in held.items():
        there = numbers.union(*(range(first, last + 1) for first, last in known[life]))
        gaps += sum(each not in there and each - 1 in there | {0} for each in range(1, max(numbers)))
    made.add("losses: gaps", report["losses"]["gaps"], gaps)
    made.add("losses: spills", report["losses"]["spills"], spills)


def _board(made: Comparison, report: Body, bodies: list[Body], history: History) -> None:
    board, since, until = report["board"], report["asked"]["since_us"], report["asked"]["until_us"]
    trend = []
    heads: dict[str, int] = {}
    for body in bodies:  # the first leaf of each log
        heads.setdefault(body["log"], int(body["at_us"]))
    first = min(heads.values())
    for back in (3, 2, 1, 0):
        start, end = since - back * (until - since), until - back * (until - since)
        if not back or end > first:
            of = figures(judge(history, Chosen(start, end)))
            trend.append({"since_us": start, "until_us": end, "due": of["due"], "covered": of["covered"]})
    made.add("board: trend", board["trend"], trend)
    due = {row["tenant"] for row in report["coverage"] if row["due"]}
    logs = {body["log"].removeprefix("tenant/") for body in bodies if body["log"].startswith("tenant/")}
    made.add("board: tenants", [board["tenants"], board["tenants_covered"]], [len(logs | due), len(due)])
    erasures = report["activity"]["erasures"]
    on_time = 0
    for one in erasures:
        answers = [
            body
            for body in bodies
            if body.get("erasure") == one["erasure"] and body["kind"] == "erasure-completed"
        ]
        asked = next(
            body
            for body in bodies
            if body["kind"] == "erasure-requested" and body["erasure"] == one["erasure"]
        )
        left = int(asked["deadline_boot_us"]) - int(asked["boot_us"]) if asked["deadline_boot_us"] else 0
        made.add(f"erasure {one['erasure']}: due", one["due_us"], int(asked["at_us"]) + left if left else 0)
        if answers and not one["unanswered"] and one["outcome"] == "complete":
            last = max(int(body["at_us"]) for body in answers if body["outcome"] == "complete")
            on_time += not left or last <= int(asked["at_us"]) + left
    made.add("board: erasures", [board["erasures"], board["erasures_on_time"]], [len(erasures), on_time])


def main(arguments: list[str]) -> int:
    """Compare, and say what differs."""
    if len(arguments) != 2:
        print(__doc__)
        return 2
    made = compare(Path(arguments[0]), json.loads(Path(arguments[1]).read_bytes()))
    for _, line in made.lines:
        print(line)
    for each in NOT_COVERED:
        print(f"not covered: {each}")
    differing = sum(not same for same, _ in made.lines)
    print(f"{len(made.lines)} figures, {differing} differ")
    return 0 if made.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
