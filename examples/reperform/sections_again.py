"""The sections of a report, made again from leaves and from verdicts on custody, in the shape of the report's JSON."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import comb
from typing import Any

import lives_oracle
from cases_oracle import cases
from copies_oracle import NO_END
from coverage_oracle import (
    OPEN,
    Custody,
    History,
    figures,
    items_of,
    lag_us,
    listed,
    population_digest,
)
from lives_oracle import LISTED_MAX, PREFIX, Period

Body = dict[str, Any]
PPM = 1_000_000
LEAVES_MAX = 2_000
RISK_PPM, SIZE_MAX = 50_000, 10_000
NAMING = (
    "custody-ended",
    "receipt",
    "residency-opened",
    "blocks-attached",
    "residency-released",
    "blocks-released",
)
OF_RESIDENCIES = NAMING[2:]
ENDED_BY = {
    "deadline": ("expired", "ceiling", "lapsed", "deadline"),
    "eviction": ("evict",),
    "erasure": ("erasure", "erase"),
    "pressure": ("pressure",),
    "death": ("unproven",),
}
LAGS_US = (1_000, 10_000, 100_000, 250_000, 1_000_000, 5_000_000, 30_000_000, 300_000_000)
BIN_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 21_600, 86_400, 7 * 86_400, 30 * 86_400, 365 * 86_400)
BINS_MAX = 32
HANDED_OUT = "handed out by the pool's counter when it stopped"
ADVERSE_BELOW_PPM = 900_000

__all__ = ["items_of", "population_digest"]


def from_base64(text: str) -> bytes:
    """Bytes from base64."""
    return base64.b64decode(text, validate=True)


class Facts:
    """What all sections need: every leaf, the history that they tell, the period, and the lives of processes."""

    def __init__(self, bodies: list[Body], history: History, period: Period) -> None:
        self.bodies, self.history, self.period = bodies, history, period
        told = lives_oracle.lives(bodies)
        self.periods = lives_oracle.work_periods(told)
        self.workers = lives_oracle.reported_workers(told)
        self.policies = lives_oracle.policies(bodies)
        self.issuers = lives_oracle.issuers(bodies)
        self.history_said = lives_oracle.history(told, self.periods)
        self.monitored_said = lives_oracle.monitored(bodies, self.periods, period)
        self.orders_said = lives_oracle.orders(bodies)
        self.unscanned = lives_oracle.unscanned(bodies, self.periods, period)
        self.items = [item for body in bodies if period.has(body) for item in items_of(body)]

    @property
    def inside(self) -> Iterator[Body]:
        """The leaves of the period."""
        return (body for body in self.bodies if self.period.has(body))

    def offset_us(self, uuid: str) -> int:
        """What turns a process's boot time into UTC."""
        return self.history.lives[uuid].offset_us


# -- custody -------------------------------------------------------------------------------------------------------


def population(facts: Facts, custodies: Sequence[Custody]) -> Body:
    """What was counted, and its identities."""
    units = sum(one.shards for one in custodies)
    whole = figures(custodies)
    disputed = whole["in_time"] - whole["covered"]
    names = ("covered", "late", "failed", "missing", "unproven", "overdue")
    first = {
        "name": "units in the population = covered + disputed + late + failed + missing + unproven + overdue",
        "left": units,
        "right": disputed + sum(whole[name] for name in names),
    }
    return {
        "custodies": len(custodies),
        "units": units,
        "digest": population_digest(custodies),
        "balances": [first, *_conserved(facts)],
    }


def _conserved(facts: Facts) -> Iterator[Body]:
    """Identities of each process that announced memory: what was handed out, ended, counted and overwritten."""
    workers = {worker["incarnation"]: worker for worker in facts.workers}
    for uuid in sorted(facts.history.lives.keys() & workers.keys()):
        life, worker = facts.history.lives[uuid], workers[uuid]
        who = f"{worker['name']} {lives_oracle.short(uuid, facts.periods)}"
        uses = life.uses(facts.history.erasures)
        handed = {key for key, each in uses.items() if any(use.written for use in each)}
        ended = {key for key, _, _ in life.named("custody-ended")}
        highest: dict[int, int] = {}
        for pool, generation in uses.keys() | ended:
            highest[pool] = max(generation, highest.get(pool, 0))
        reached = sum(highest.values()) - worker["generation"] * len(highest)
        running: dict[int, int] = {}
        for (pool, generation), each in uses.items():
            if any(use.released == OPEN for use in each):
                running[pool] = min(generation, running.get(pool, generation))
        growth = sum(
            highest[pool] - first - sum(of == pool and number > first for of, number in handed)
            for pool, first in running.items()
        )
        yield _balance(
            f"{who}: generations up to the highest on record = listed as handed out + growth",
            reached,
            len(handed) + growth,
        )
        yield _balance(
            f"{who}: listed as handed out = ended + still in custody",
            len(handed),
            len(ended) + len(handed - ended),
        )
        if worker["allocated"] is None:
            continue
        yield _balance(f"{who}: {HANDED_OUT} = listed as handed out", worker["allocated"], len(handed))
        wiped: Counter[int] = Counter()
        for body in life.leaves["receipt"]:
            wiped[int(body["shard"])] += size_of(body["runs"])
        for shard, counter in enumerate(worker["scrubbed"]):
            yield _balance(f"{who}: blocks zeroized on shard {shard} = blocks in its receipts", counter, wiped[shard])


def _balance(name: str, left: int, right: int) -> Body:
    return {"name": name, "left": left, "right": right}


def coverage(custodies: Sequence[Custody]) -> list[Body]:
    """Coverage by tenant and classification."""
    groups: dict[tuple[str, str], list[Custody]] = defaultdict(list)
    for one in custodies:
        groups[one.tenant, one.classification].append(one)
    return [{"tenant": who[0], "classification": who[1], **figures(groups[who])} for who in sorted(groups)]


def _due_us(facts: Facts, one: Custody) -> int:
    return one.due + facts.offset_us(one.incarnation)


def timeline(facts: Facts, custodies: Sequence[Custody]) -> list[Body]:
    """Units by part of the period: the narrowest parts of which there are not too many."""
    since, until = facts.period
    fits = (seconds for seconds in BIN_SECONDS if seconds * PPM * BINS_MAX >= until - since)
    width = next(fits, BIN_SECONDS[-1]) * PPM
    due, covered = Counter[int](), Counter[int]()
    for one in custodies:
        place = (_due_us(facts, one) - since) // width
        due[place] += one.shards
        covered[place] += one.shards * one.covered
    return [
        {"start_us": start, "due": due[at], "covered": covered[at], "uncovered": due[at] - covered[at]}
        for at, start in enumerate(range(since, until, width))
    ]


def timeliness(custodies: Sequence[Custody]) -> Body:
    """The time from due to the last receipt."""
    lags = [one.lag for one in custodies if one.lag >= 0]
    section: Body = {
        name: lag_us(custodies, percent) for name, percent in (("p50_us", 50), ("p99_us", 99), ("max_us", 100))
    }
    bounds = [*zip((-1, *LAGS_US), LAGS_US, strict=False), (LAGS_US[-1], OPEN)]
    section["lags"] = [
        {"up_to_us": high if high < OPEN else 0, "custodies": sum(low < lag <= high for lag in lags)}
        for low, high in bounds
    ]
    return section


def exceptions(facts: Facts, custodies: Sequence[Custody]) -> tuple[list[Body], int]:
    """What is not covered, in groups, the largest first; and how many groups are not listed."""
    groups: dict[tuple[str, bool, str, str, str, str], list[Custody]] = defaultdict(list)
    for one in custodies:
        if not one.covered:
            cause = one.cause or NO_END
            who = (one.tenant, one.classification, cause, one.incarnation)
            groups[one.verdict, one.disputed, *who].append(one)
    names = ("verdict", "disputed", "tenant", "classification", "cause", "incarnation")
    rows = []
    for key, of in groups.items():
        due = [_due_us(facts, one) for one in of]
        counts = {"custodies": len(of), "units": sum(one.shards for one in of)}
        times = {"first_due_us": min(due), "last_due_us": max(due)}
        rows.append(dict(zip(names, key, strict=True)) | counts | times)
    rows.sort(key=lambda one: (-one["units"], *(one[name] for name in names)))
    return rows[:LISTED_MAX], max(0, len(rows) - LISTED_MAX)


def member(facts: Facts, custody: Custody) -> Body:
    """A custody as the sample has it."""
    names = (
        *("incarnation", "pool", "block", "generation", "shards"),
        *("tenant", "classification", "verdict", "covered", "level"),
    )
    return {name: getattr(custody, name) for name in names} | {
        "due_us": _due_us(facts, custody),
        "cause": custody.cause or NO_END,
        "tier": "device",
        "copy": 0,
    }


def storage(facts: Facts, custodies: Sequence[Custody]) -> list[Body]:
    """Ages at the end, what ended custody, and the limits, by classification."""
    people = {uuid: life.people() for uuid, life in facts.history.lives.items()}
    groups: dict[str, list[Custody]] = defaultdict(list)
    for one in custodies:
        groups[one.classification].append(one)
    rows = []
    for name in sorted(groups):
        ended = [one for one in groups[name] if one.verdict != "overdue"]
        row: Body = {
            "classification": name,
            "custodies": len(ended),
            "overdue": len(groups[name]) - len(ended),
        }
        causes = Counter(_ended_by(one.cause) for one in ended)
        row |= {f"by_{by}": causes[by] for by in (*ENDED_BY, "other")}
        openings = [people[one.incarnation].get(one.writer) for one in ended]
        aged = [(one, opened) for one, opened in zip(ended, openings, strict=True) if opened is not None]
        row["unaged"] = len(ended) - len(aged)
        ages = sorted(max(0, one.ended - int(opened["boot_us"])) for one, opened in aged)
        for place, percent in (("p50", 50), ("p99", 99), ("max", 100)):
            row[f"age_us_{place}"] = ages[-(-len(ages) * percent // 100) - 1] if ages else 0
        limits = [
            int(opened["absolute_boot_us"]) - int(opened["boot_us"])
            for _, opened in aged
            if int(opened["absolute_boot_us"]) > 0
        ]
        for key, values in (("absolute_us", limits), ("within_us", [one.within for one in ended])):
            row |= {f"{key}_min": min(values, default=0), f"{key}_max": max(values, default=0)}
        row["beyond_limit"] = sum(0 < one.ceiling < one.ended - one.within for one in ended)
        rows.append(row)
    return rows


def _ended_by(cause: str) -> str:
    return next((name for name, begins in ENDED_BY.items() if cause.startswith(begins)), "other")


# -- what leaves say -----------------------------------------------------------------------------------------------


def activity(facts: Facts) -> Body:
    """Leaves by kind, erasures, findings and cases of the period."""
    kinds = Counter(body["kind"] for body in facts.inside)
    return {
        "kinds": [{"kind": kind, "leaves": number} for kind, number in sorted(kinds.items())],
        "erasures": lives_oracle.erasures(facts.bodies, facts.periods, facts.period),
        "findings": lives_oracle.findings(facts.bodies, facts.period),
        "release": sorted(
            (
                {"at_us": int(body["at_us"])} | {name: body[name] for name in ("action", "revision", "actor")}
                for body in facts.bodies
                if body["kind"] == "release-step" and facts.period.has(body)
            ),
            key=lambda step: tuple(step.values()),
        ),
        "cases": cases(facts.bodies, *facts.period, facts.history.last_us),
    }


def losses(facts: Facts) -> Body:
    """Gaps and spills."""
    return lives_oracle.losses(facts.bodies)


def decided(facts: Facts) -> Body:
    """Decisions by rule, residencies by the rules that their leaves name, and that these are all."""
    since, until = facts.period
    counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    opened: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    met: set[tuple[str, int]] = set()
    crossed: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for body in facts.bodies:
        kind, at_us = body["kind"], int(body["at_us"])
        own = body["log"] == f"{PREFIX}{body.get('tenant') or body.get('reader')}"
        if kind == "hit-counters" and own:
            begun = at_us - int(body["boot_us"]) + int(body["from_boot_us"])
            if begun < until and at_us >= since:
                inside = begun >= since and at_us < until
                counts[body["action"], body["effect"], body["rule"]][not inside] += body["requests"]
        elif kind == "decision" and own and facts.period.has(body):
            counts[body["action"], body["effect"], (body["reasons"] or ["default-deny"])[0]][0] += 1
        elif kind == "residency-opened" and body["part"] == 1 and facts.period.has(body):
            rules = ", ".join(body["reasons"]) or "none named"
            opened[rules][0] += 1
            opened[rules][1] += any(True for _ in listed(body["runs"]))
        leaf = body["incarnation"], body["sequence"]
        if kind == "hit-counters" and since <= at_us < until and leaf not in met:  # it is in both parties' logs
            met.add(leaf)
            if body["effect"] == "permit" and body["blocks"]:
                row = crossed[body["tenant"], body["owner"], body["rule"]]
                for place, name in enumerate(("requests", "blocks", "tokens")):
                    row[place] += body[name]
    openings = sum(body["kind"] == "residency-opened" and body["part"] == 1 for body in facts.inside)
    return {
        "counts": [
            dict(zip(("action", "effect", "rule"), key, strict=True)) | {"requests": whole, "straddling": straddling}
            for key, (whole, straddling) in sorted(counts.items())
        ],
        "residencies": [
            {"rules": rules, "residencies": number, "attached": attached}
            for rules, (number, attached) in sorted(opened.items())
        ],
        "balances": [
            _balance(
                "residencies opened = residencies by the rules that their leaves name",
                openings,
                sum(number for number, _ in opened.values()),
            )
        ],
        "crossed": [
            dict(zip(("reader", "owner", "rule"), key, strict=True))
            | dict(zip(("requests", "blocks", "tokens"), row, strict=True))
            for key, row in sorted(crossed.items())
            if key[0] != key[1]
        ],
    }


def read_back(facts: Facts) -> list[Body]:
    """Receipts of the period by level and result, and what was really read."""
    names = ("receipts", "receipts_unread", "blocks", "blocks_read", "bytes", "bytes_read")
    rows: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0] * len(names))
    for body in facts.items:
        if body["kind"] != "receipt":
            continue
        here, whole = size_of(body["runs"]), int(body["blocks"])
        is_custody = any(True for _ in listed(body["runs"]))
        read = body["verified"] if body["part"] == 1 else 0
        size = body["bytes"] * here // whole if whole else 0
        row = rows["custody" if is_custody else "boot", body["level"], body["result"]]
        for place, value in enumerate((1, not read, here, read, size, size // here * read if here else 0)):
            row[place] += value
    return [
        dict(zip(("scrub", "level", "result"), key, strict=True)) | dict(zip(names, row, strict=True))
        for key, row in sorted(rows.items())
    ]


def size_of(runs: list[Any]) -> int:
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


# -- the first page ------------------------------------------------------------------------------------------------


def board(facts: Facts, report: Body, logs: Sequence[str], judged: Callable[[Period], list[Custody]]) -> Body:
    """Workers scanned, tenants with units due, erasures on time and not due yet, and the trend of four periods."""
    since, until = facts.period
    at_work = [worker for worker in facts.workers if facts.periods[worker["incarnation"]].within(facts.period)]
    seen = [
        worker
        for worker in at_work
        if not worker["end"].startswith("died")
        and f"{worker['name']} {lives_oracle.short(worker['incarnation'], facts.periods)}" not in facts.unscanned
    ]
    due = {row["tenant"] for row in report["coverage"] if row["due"]}
    known = {name.removeprefix(PREFIX) for name in logs if name.startswith(PREFIX)}
    heads: dict[str, int] = {}
    for body in facts.bodies:  # the first leaf of each log
        heads.setdefault(body["log"], int(body["at_us"]))
    trend = []
    for back in (3, 2, 1, 0):
        period = Period(since - back * (until - since), until - back * (until - since))
        if not back or period.until_us > min(heads.values()):
            of = figures(judged(period))
            trend.append({**period._asdict(), "due": of["due"], "covered": of["covered"]})
    asked = report["activity"]["erasures"]
    return {
        "workers": len(at_work),
        "workers_scanned": len(seen),
        "tenants": len(known | due),
        "tenants_due": len(due),
        "erasures": len(asked),
        "erasures_on_time": sum(lives_oracle.is_on_time(one) for one in asked),
        "erasures_open": sum(one["state"] == "open" for one in asked),
        "trend": trend,
    }


def opinion(report: Body, framework: Body) -> Body:
    """The opinion and its range, with what qualifies it."""
    whole, balances = report["total"], report["population"]["balances"]
    shards = max((worker["shards"] for worker in report["boundary"]["workers"]), default=1) or 1
    lost = sum(max(0, one["left"] - one["right"]) for one in balances if HANDED_OUT in one["name"])
    unknown, all_of_it = whole["unproven"] + lost * shards, whole["due"] + lost * shards
    low = whole["covered"] * PPM // all_of_it if all_of_it else 0
    high = (whole["covered"] + unknown) * PPM // all_of_it if all_of_it else 0
    found = [*_qualifying(report, framework, is_adverse=bool(whole["due"]) and high < ADVERSE_BELOW_PPM)]
    kind = "unqualified" if not found else "adverse" if any(one["is_adverse"] for one in found) else "qualified"
    return {"kind": kind, "low_ppm": low, "high_ppm": high, "unknown": unknown, "exceptions": found}


def _qualifying(report: Body, framework: Body, *, is_adverse: bool) -> Iterator[Body]:
    def one(name: str, amount: int, adverse: bool = False) -> Body:
        return {"id": name, "amount": amount, "is_adverse": adverse}

    whole, tiers = report["total"], report["tiers"]["rows"]
    if any(worker["origin"] for worker in report["boundary"]["workers"]):
        yield one("history", 1)
    if whole["due"] > whole["covered"]:
        yield one("uncovered", whole["due"] - whole["covered"], is_adverse)
    copies = sum(row["due"] - row["covered"] for row in tiers)
    if copies:
        yield one("copies", copies)
    if not whole["due"] and not any(row["due"] for row in tiers):
        yield one("nothing-due", 0)
    for part in ("population", "tiers", "decided"):
        for each in report[part]["balances"]:
            off = abs(each["left"] - each["right"])
            if off:
                yield one(f"identity:{each['name']}", off, off * 100 > max(each["left"], each["right"]))
    for each in report["activity"]["erasures"]:
        if each["state"] in ("late", "missed"):
            yield one(f"erasure:{each['erasure']}", max(1, len(each["unanswered"])))
        elif each["remaining"] and each["outcome"] != "complete" and each["state"] != "open":
            yield one(f"erasure:{each['erasure']}", each["remaining"])
    shows = {each["name"] for control in framework["controls"] for each in control["shows"]}
    for each in report["activity"]["cases"]:
        if "answer-deadline" in shows and each["state"] in ("missed", "late"):
            yield one(f"case:{each['case_id']}", 1)
    if report["unscanned"]:
        yield one("unscanned", len(report["unscanned"]))
    if report["losses"]["gaps"]:
        yield one("gap", report["losses"]["gaps"])
    died = sum(worker["end"].startswith("died") for worker in report["boundary"]["workers"])
    if died:
        yield one("death", died)


# -- sampling ------------------------------------------------------------------------------------------------------


def sample_size(asked: Body) -> tuple[int, int]:
    """How many are drawn, and at which risk: of a stated risk the smallest sample that keeps it."""
    if not (asked["risk_ppm"] and asked["tolerable_ppm"]):
        return asked["sample"], asked["risk_ppm"] or RISK_PPM
    low, high = asked["expected"] + 1, SIZE_MAX
    while low < high:
        middle = (low + high) // 2
        if _is_rare(asked["expected"], middle, asked["tolerable_ppm"], asked["risk_ppm"]):
            high = middle
        else:
            low = middle + 1
    return low, asked["risk_ppm"]


def upper_limit_ppm(failures: int, size: int, risk_ppm: int) -> int:
    """The rate that the population exceeds with a chance of `risk` at most."""
    if not size or failures >= size:
        return PPM
    low, high = 0, PPM
    while low < high:
        middle = (low + high) // 2
        if _is_rare(failures, size, middle, risk_ppm):
            high = middle
        else:
            low = middle + 1
    return low


def _is_rare(found: int, size: int, rate_ppm: int, risk_ppm: int) -> bool:
    """Whether so few deviations among `size` have a chance of `risk` at most, in whole numbers (binomial)."""
    if found >= size:
        return risk_ppm >= PPM
    ways = sum(
        comb(size, number) * rate_ppm**number * (PPM - rate_ppm) ** (size - number) for number in range(found + 1)
    )
    return ways * PPM <= risk_ppm * PPM**size


def allocate(size: int, members: Sequence[int]) -> list[int]:
    """How many are drawn of each stratum: one of each, the rest in proportion, by largest remainder."""
    if size >= sum(members):
        return list(members)
    if size <= len(members):
        largest = sorted(range(len(members)), key=lambda number: (-members[number], number))[:size]
        return [int(number in largest) for number in range(len(members))]
    rest, whole = size - len(members), sum(members) - len(members)
    made = [1 + rest * (of - 1) // whole for of in members]
    order = sorted(range(len(members)), key=lambda number: (-(rest * (members[number] - 1) % whole), number))
    for number in order[: size - sum(made)]:
        made[number] += 1
    return made


def redraw(seed: str, stratum: int, count: int, members: int) -> tuple[list[int], int]:
    """The places that the seed draws of a stratum, and how many turns came to one that was drawn before."""
    picks: dict[int, None] = {}
    turn = 0
    while len(picks) < min(count, members):
        picked = hashlib.sha256(f"{seed}:{stratum}:{turn}".encode()).hexdigest()
        picks.setdefault(int(picked, 16) % members)
        turn += 1
    return list(picks), turn - len(picks)
