"""Every door that shows figures of one ledger, and whether all of them agree with its leaves.

    [problem for shown in show(site) for problem in shown.differences()]    # while requests run, or after

1. A door is asked between two looks at the ledger. Where something was recorded meanwhile it is asked again: what
   stands is one state of the ledger against one answer, figure by figure.
2. A report and hourly coverage name the tree size that they count to (`is_bound`). They are compared with the leaves
   under it, whatever is recorded meanwhile.
3. `Door.figures` reads the text that a person or a script gets. A wrong number that is planted in that text is found.
"""

from __future__ import annotations

import html
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import coverage_oracle as oracle
import httpx
import orjson
from typer.testing import CliRunner

from kvcustody.console.main import app
from standins.audit.leaf_figures import (
    HELD_MEASURES,
    LeafFigures,
    PrefillCost,
    read_leaves,
    snapshot,
)
from standins.console.page_tables import rows_of

FRAMEWORKS = ("gdpr", "soc2", "hipaa")
SINCE_US = 1_700_000_000_000_000  # before every ledger that is compared
_HOUR_US, _DAY_US = 3_600_000_000, 86_400_000_000
_TRIES = 200
_ROUNDING = 1e-6  # of sums of seconds, which are floats

Figures = dict[tuple[str, ...], float | str]


class Site(NamedTuple):
    """A ledger, the service on it, and a key that reads everything."""

    url: str
    key: str
    database_url: str


class Facts(NamedTuple):
    """What figures are made of: leaves, the period, what a prefill costs, and the time."""

    leaves: LeafFigures
    read_at: Callable[[int], LeafFigures]
    until_us: int
    costs: Mapping[str, PrefillCost]
    now_us: int


class Door(NamedTuple):
    """Where figures are shown: how it is asked, what its text says, and what the leaves say instead."""

    name: str
    ask: Callable[[Visitor, int], str]
    figures: Callable[[str], Figures]
    expected: Callable[[Facts, str], Figures]
    is_bound: bool = False


class Visitor:
    """Somebody who asks: over HTTP with a key and a session of the console, and by commands on the ledger."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._client = httpx.Client(base_url=site.url, timeout=120)
        answer = self._client.post("/console/login", data={"key": site.key})
        assert answer.status_code == 303, answer.text

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **params: Any) -> str:
        """The text of one answer. A list has to be whole."""
        headers = {"Authorization": f"Bearer {self.site.key}"} if path.startswith("/v1/") else {}
        answer = self._client.get(path, params=params, headers=headers)
        assert answer.status_code == 200, (path, answer.text)
        assert not path.startswith("/v1/") or answer.json().get("next") is None, f"{path}: more than a page"
        return answer.text

    def command(self, *words: str) -> str:
        """What a command on this ledger prints."""
        answer = CliRunner().invoke(app, [*words, "--ledger", self.site.database_url, "--json"])
        assert answer.exit_code == 0, answer.output
        return answer.stdout


def _items(text: str) -> list[dict[str, Any]]:
    return list(orjson.loads(text)["items"])


# -- totals, quotas, reuse, denials ---------------------------------------------------------------------------------


def _totals(text: str) -> Figures:
    names = ("residencies", "released", "leaves", "held_blocks", *HELD_MEASURES)
    return {(row["tenant"], name): row[name] for row in _items(text) for name in names}


def _expected_totals(facts: Facts, text: str) -> Figures:
    found: Figures = {}
    for tenant, sums in facts.leaves.totals.items():
        found[tenant, "held_blocks"] = facts.leaves.held[tenant]
        for name in ("residencies", "released", "leaves", *HELD_MEASURES):
            found[tenant, name] = sums[name]
    return found


def _held(text: str) -> Figures:
    return {(row["tenant"], "held_blocks"): row["held_blocks"] for row in _items(text)}


def _expected_held(facts: Facts, text: str) -> Figures:
    """Of every tenant with a record, and 0 of those that the policy alone names."""
    named = [row["tenant"] for row in _items(text)]
    return {(tenant, "held_blocks"): facts.leaves.held[tenant] for tenant in (*facts.leaves.totals, *named)}


def _reuse(rows: Sequence[Mapping[str, Any]]) -> Figures:
    return {
        (row["reader"], row["owner"], row["rule"], name): row[name]
        for row in rows
        for name in ("requests", "blocks", "tokens")
    }


def _expected_reuse(leaves: LeafFigures, since_us: int, until_us: int) -> Figures:
    names = ("requests", "blocks", "tokens")
    return {
        (*who, name): value
        for who, sizes in leaves.crossed(since_us, until_us).items()
        for name, value in zip(names, sizes, strict=True)
    }


def _denials(text: str) -> Figures:
    return {(row["reader"], row["owner"], row["rule"], str(row["revision"])): row["requests"] for row in _items(text)}


def _expected_denials(facts: Facts, text: str) -> Figures:
    return {
        (reader, owner, rule, str(revision)): requests
        for (reader, owner, rule, revision), requests in facts.leaves.denials.items()
    }


# -- showback -------------------------------------------------------------------------------------------------------

_BILLED = ("block_seconds", "own_hit_blocks", "taken_hit_blocks", "given_hit_blocks")
_SECONDS = ("saved_seconds", "taken_seconds", "given_seconds")


def _showback(rows: Sequence[Mapping[str, Any]]) -> Figures:
    return {(row["tenant"], name): row[name] for row in rows for name in (*_BILLED, *_SECONDS) if row[name] is not None}


def _expected_showback(facts: Facts, text: str) -> Figures:
    bill = facts.leaves.showback(SINCE_US, facts.until_us, facts.costs)
    shown = (*_BILLED, *_SECONDS) if facts.costs else _BILLED
    return {
        (tenant, name): value
        for tenant, row in bill.items()
        for name, value in zip((*_BILLED, *_SECONDS), row, strict=True)
        if name in shown
    }


# -- coverage -------------------------------------------------------------------------------------------------------


def _of_custodies(custodies: Sequence[oracle.Custody]) -> Figures:
    """Every figure of coverage: of all, and by tenant and classification."""
    groups: dict[tuple[str, ...], list[oracle.Custody]] = {("*", "*"): list(custodies)}
    for custody in custodies:
        groups.setdefault((custody.tenant, custody.classification), []).append(custody)
    return {(*who, name): value for who, some in groups.items() for name, value in oracle.figures(some).items()}


def _of_rows(rows: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> Figures:
    names = tuple(oracle.figures([]))
    return {(row["tenant"], row["classification"], name): row[name] for row in (*rows, total) for name in names}


def _covered(text: str) -> Figures:
    body = orjson.loads(text)
    lags: Figures = {("lag", name): body[f"lag_us_{name}"] for name in ("p50", "p99", "max")}
    return _of_rows(body["rows"], body["total"]) | lags


def _lags(custodies: Sequence[oracle.Custody]) -> Figures:
    return {
        ("lag", name): oracle.lag_us(custodies, percent) for name, percent in (("p50", 50), ("p99", 99), ("max", 100))
    }


def _expected_coverage(facts: Facts, text: str) -> Figures:
    custodies = facts.leaves.coverage(SINCE_US, facts.until_us)
    return _of_custodies(custodies) | _lags(custodies)


def _hours(text: str) -> Figures:
    return {
        (str(item["hour_us"]), item["row"]["tenant"], item["row"]["classification"], name): item["row"][name]
        for item in _items(text)
        for name in oracle.figures([])
    }


def _judged(facts: Facts, text: str) -> list[oracle.Custody]:
    """What was due in the hours that `/v1/custody/coverage/hours` names, under the tree size that it names."""
    body = orjson.loads(text)
    at_us = body["judged_us"]
    if at_us is None:
        return []
    since_us = (at_us - _DAY_US) // _HOUR_US * _HOUR_US + _HOUR_US
    return facts.read_at(body["as_of"]).coverage(since_us, at_us, as_of_us=at_us)


def _expected_hours(facts: Facts, text: str) -> Figures:
    groups: dict[tuple[str, ...], list[oracle.Custody]] = {}
    judged_at = orjson.loads(text)["as_of"]
    for custody in _judged(facts, text):
        due_us = custody.due + facts.read_at(judged_at).history.lives[custody.incarnation].offset_us
        who = (str(due_us // _HOUR_US * _HOUR_US), custody.tenant, custody.classification)
        groups.setdefault(who, []).append(custody)
    return {(*who, name): value for who, some in groups.items() for name, value in oracle.figures(some).items()}


# -- erasures and events --------------------------------------------------------------------------------------------


def _erasures(text: str) -> Figures:
    return {(row["erasure"], "state"): row["state"] for row in _items(text)}


def _expected_erasures(facts: Facts, text: str) -> Figures:
    return {(erasure, "state"): state for erasure, state in facts.leaves.erasures(facts.now_us).items()}


def _counts(text: str) -> Figures:
    return {(row["log"], row["kind"], row["outcome"]): row["events"] for row in _items(text) if row["kind"] != "access"}


def _expected_counts(facts: Facts, text: str) -> Figures:
    return {name: value for name, value in facts.leaves.events.items() if name[1] != "access"}


def _explorer(text: str) -> Figures:
    facets = {facet["name"]: facet["values"] for facet in orjson.loads(text)["facets"]}
    return {
        (name, row["value"]): row["events"]
        for name in ("tenant", "kind", "rule")
        for row in facets[name]
        if row["value"] != "access"
    }


def _expected_explorer(facts: Facts, text: str) -> Figures:
    figures: Counter[tuple[str, ...]] = Counter()
    for (log, kind, _), events in facts.leaves.events.items():
        if kind != "access":
            figures["kind", kind] += events
        if log.startswith("tenant/"):
            figures["tenant", log.removeprefix("tenant/")] += events
    for (_, _, rule, _), requests in facts.leaves.denials.items():
        figures["rule", rule] += requests
    return dict(figures)


# -- pages ----------------------------------------------------------------------------------------------------------

_HELD = "Blocks in custody, by tenant"
_TILE = re.compile(r'<div class="tile[^"]*"><b>(?:<span[^>]*>[^<]*</span>)?\s*([^<]+)</b>\s*<span>(.*?)</span>')
_DENIED = "Denied requests by reader, owner and rule"
_DENIED_MAX = 5


def _ask_overview(visitor: Visitor, until_us: int) -> str:
    """The page between two answers of what was judged, which have to be the same."""
    while True:
        before = visitor.get("/v1/custody/coverage/hours", limit=1000)
        page = visitor.get("/console/")
        if before == visitor.get("/v1/custody/coverage/hours", limit=1000):
            return f"{before}\n{page}"


def _overview(text: str) -> Figures:
    page = text.partition("\n")[2]
    figures: Figures = {("held", tenant): blocks for tenant, blocks in _held_at_the_end(page)}
    for value, label in _TILE.findall(page):
        words = html.unescape(re.sub(r"<[^>]*>", "", label))
        if words.startswith("deletion coverage"):
            figures[("covered",)] = value.strip()
        elif words.startswith("units overdue"):
            figures[("overdue",)] = _number(value)
        elif words.startswith("erasures missed"):
            late = re.search(r"(\d+) complete but late", words)
            figures["erasures", "missed"] = _number(value)
            figures["erasures", "late"] = int(late[1]) if late else 0
    if f">{_DENIED}<" in page:
        for reader, owner, rule, revision, requests in rows_of(page, _DENIED):
            figures["denied", reader, owner, rule, revision] = _number(requests)
    return figures


def _held_at_the_end(page: str) -> Iterator[tuple[str, int]]:
    """The last row of the table beside the chart of custody: blocks by tenant."""
    if f">{_HELD}<" in page:
        table = page[page.index(f">{_HELD}<") :]
        tenants = re.findall(r"<th[^>]*>(.*?)</th>", table.partition("</thead>")[0])[1:]
        for tenant, blocks in zip(tenants, rows_of(page, _HELD)[-1][1:], strict=True):
            yield html.unescape(tenant), _number(blocks)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _expected_overview(facts: Facts, text: str) -> Figures:
    leaves = facts.leaves
    figures: Figures = {("held", tenant): leaves.held[tenant] for tenant in leaves.totals}
    units = oracle.figures(_judged(facts, text.partition("\n")[0]))
    if units["due"]:
        share = units["covered"] * 10_000 // units["due"]
        figures[("covered",)] = f"{share // 100}.{share % 100:02d} %"
    else:
        figures[("covered",)] = "nothing due"
    figures[("overdue",)] = units["overdue"]
    states = Counter(leaves.erasures(facts.now_us).values())
    figures |= {("erasures", state): states[state] for state in ("missed", "late")}
    for (reader, owner, rule, revision), requests in sorted(leaves.denials.items(), key=_most_first)[:_DENIED_MAX]:
        figures["denied", reader, owner, rule, str(revision)] = requests
    return figures


def _most_first(denied: tuple[tuple[str, str, str, int], int]) -> tuple[int, tuple[str, str, str, int]]:
    return -denied[1], denied[0]


# -- reports --------------------------------------------------------------------------------------------------------


def _ask_report(framework: str) -> Callable[[Visitor, int], str]:
    def ask(visitor: Visitor, until_us: int) -> str:
        with tempfile.TemporaryDirectory() as folder:
            period = ("--since", _date(SINCE_US), "--until", _date(until_us))
            form = ("--format", "json", "--no-recount", "--out", f"{folder}/report")
            visitor.command("report", "make", "--framework", framework, *period, *form)
            return Path(folder, "report", "report.json").read_text()

    return ask


def _date(at_us: int) -> str:
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _report(text: str) -> Figures:
    body = orjson.loads(text)
    figures = _of_rows(body["coverage"], body["total"])
    figures |= {("lag", name): body["timeliness"][f"{name}_us"] for name in ("p50", "p99", "max")}
    figures |= {("population", name): body["population"][name] for name in ("custodies", "units")}
    figures |= _reuse(body["decided"]["crossed"])
    figures |= {(row["erasure"], "state"): row["state"] for row in body["activity"]["erasures"]}
    figures |= {("leaves", row["kind"]): row["leaves"] for row in body["activity"]["kinds"]}
    board = body["board"]
    figures |= {("board", name): board[name] for name in ("erasures", "erasures_on_time", "tenants")}
    return figures


def _expected_report(facts: Facts, text: str) -> Figures:
    asked = orjson.loads(text)["asked"]
    leaves, bounds = facts.read_at(asked["checkpoint"]), (asked["since_us"], asked["until_us"])
    custodies = leaves.coverage(*bounds)
    figures = _of_custodies(custodies) | _lags(custodies) | _expected_reuse(leaves, *bounds)
    figures["population", "custodies"] = len(custodies)
    figures["population", "units"] = oracle.figures(custodies)["due"]
    states = leaves.erasures(leaves.last_us, *bounds)
    figures |= {(erasure, "state"): state for erasure, state in states.items()}
    figures["board", "erasures"] = len(states)
    figures["board", "erasures_on_time"] = sum(state == "complete" for state in states.values())
    figures["board", "tenants"] = len(leaves.totals)
    within = (body for body in leaves.bodies if bounds[0] <= int(body["at_us"]) < bounds[1])
    kinds = Counter(body["kind"] for body in within)
    return figures | {("leaves", kind): number for kind, number in kinds.items()}


# -- all of them ----------------------------------------------------------------------------------------------------


def _api(name: str, path: str, **params: Any) -> Callable[[Visitor, int], str]:
    def ask(visitor: Visitor, until_us: int) -> str:
        period = {"since": SINCE_US, "until": until_us} if name in _OF_A_PERIOD else {}
        return visitor.get(path, **params, **period)

    return ask


def _ask_command(*words: str, names: tuple[str, str]) -> Callable[[Visitor, int], str]:
    def ask(visitor: Visitor, until_us: int) -> str:
        return visitor.command(*words, names[0], _date(SINCE_US), names[1], _date(until_us))

    return ask


_OF_A_PERIOD = ("reuse", "showback", "coverage")
DOORS = (
    Door("overview", _ask_overview, _overview, _expected_overview),
    Door("totals", _api("totals", "/v1/custody/totals", limit=1000), _totals, _expected_totals),
    Door("quotas", _api("quotas", "/v1/quotas", limit=1000), _held, _expected_held),
    Door(
        "reuse",
        _api("reuse", "/v1/custody/reuse", limit=1000),
        lambda text: _reuse(_items(text)),
        lambda facts, _: _expected_reuse(facts.leaves, SINCE_US, facts.until_us),
    ),
    Door("denials", _api("denials", "/v1/custody/denials", limit=1000), _denials, _expected_denials),
    Door(
        "showback",
        _api("showback", "/v1/showback"),
        lambda text: _showback(_items(text)),
        _expected_showback,
    ),
    Door(
        "showback command",
        _ask_command("showback", names=("--since", "--until")),
        lambda text: _showback(_items(text)),
        _expected_showback,
    ),
    Door("coverage", _api("coverage", "/v1/custody/coverage"), _covered, _expected_coverage),
    Door(
        "coverage command",
        _ask_command("coverage", "show", names=("--since", "--until")),
        _covered,
        _expected_coverage,
    ),
    Door(
        "hours",
        _api("hours", "/v1/custody/coverage/hours", limit=1000),
        _hours,
        _expected_hours,
        is_bound=True,
    ),
    Door("erasures", _api("erasures", "/v1/erasures", limit=1000), _erasures, _expected_erasures),
    Door("counts", _api("counts", "/v1/audit/counts", limit=1000), _counts, _expected_counts),
    Door("explorer", _api("explorer", "/v1/audit/summary"), _explorer, _expected_explorer),
    *(Door(f"{name} report", _ask_report(name), _report, _expected_report, is_bound=True) for name in FRAMEWORKS),
)


class Shown(NamedTuple):
    """What one door said, and what the leaves say instead."""

    door: Door
    text: str
    expected: Figures

    @property
    def figures(self) -> Figures:
        """What the door shows."""
        return self.door.figures(self.text)

    def differences(self) -> list[str]:
        """Every figure that the leaves do not give."""
        shown, made = self.figures, []
        for name in sorted(shown.keys() | self.expected.keys()):
            here, there = shown.get(name, 0), self.expected.get(name, 0)
            if here != there and not _is_near(here, there):
                made.append(f"{self.door.name}: {' '.join(name)} is {here}, and the leaves say {there}")
        return made


def _is_near(here: float | str, there: float | str) -> bool:
    return isinstance(here, float) and isinstance(there, float) and abs(here - there) <= _ROUNDING * max(1.0, there)


class _Reader:
    """Leaves of a ledger, read once for each state of it; the state before is forgotten, it takes much memory."""

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url
        self._newest: tuple[object, LeafFigures] = (None, LeafFigures([]))
        self._sealed: tuple[int, LeafFigures] = (0, LeafFigures([]))

    def now(self, state: object) -> LeafFigures:
        if self._newest[0] != state:
            self._newest = (None, LeafFigures([]))
            self._newest = (state, read_leaves(self._database_url))
        return self._newest[1]

    def at(self, tree_size: int) -> LeafFigures:
        if self._sealed[0] != tree_size:
            self._sealed = (0, LeafFigures([]))
            self._sealed = (tree_size, read_leaves(self._database_url, tree_size))
        return self._sealed[1]


def show(site: Site, doors: Sequence[Door] = DOORS) -> list[Shown]:
    """Ask every door, each in a moment in which nothing was recorded (rule 1)."""
    visitor, reader = Visitor(site), _Reader(site.database_url)
    until_us = read_leaves(site.database_url).last_us // 1_000_000 * 1_000_000
    try:
        return [_ask(visitor, reader, door, until_us) for door in doors]
    finally:
        visitor.close()


def _ask(visitor: Visitor, reader: _Reader, door: Door, until_us: int) -> Shown:
    url = visitor.site.database_url
    for _ in range(_TRIES):
        before, began_us = snapshot(url), _utc_us()
        text = door.ask(visitor, until_us)
        ended_us, after = _utc_us(), snapshot(url)
        if door.is_bound:
            return Shown(door, text, door.expected(Facts(LeafFigures([]), reader.at, until_us, {}, ended_us), text))
        if before != after:
            continue
        leaves = reader.now(after)
        if snapshot(url) != after or leaves.erasures(began_us) != leaves.erasures(ended_us):
            continue
        facts = Facts(leaves, reader.at, until_us, dict(after.costs), ended_us)
        return Shown(door, text, door.expected(facts, text))
    raise AssertionError(f"{door.name}: something was recorded every time it was asked")


def _utc_us() -> int:
    return time.time_ns() // 1000
