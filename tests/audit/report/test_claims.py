"""Every sentence of a report that claims something is read against leaves, by queries that import no report code.

`CLAIMS` is the reading: a sentence, and what the leaves give for each number or word in it. A sentence of a page that
claims (a number, or none, all, every, no, nobody, holds) is either a claim here or one of `DEFINITIONS`, which say how
something is counted, what a reader has to do, or what cannot be shown. A new sentence fails until it is put here.
Each claim is shown to fail where one word of it is changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from coverage_oracle import Chosen, History, figures, judge, lag_us
from sqlalchemy import Engine, text

from kvcustody.audit.database.engine import open_store
from kvcustody.audit.report.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.report.model import Report, ReportParameters
from kvcustody.console.report.document import page_of
from kvcustody.console.report.render.number_format import duration
from kvcustody.console.report.render.page_model import Facts, Items, Page, Paragraph
from kvcustody.migrations.upgrade import upgrade
from standins.audit import report_ledger
from standins.audit.one_process import OneProcess, clean

FRAMEWORKS = ("soc2", "gdpr", "hipaa", "iso-27001", "nist-800-53", "cc-fdp-rip")
NUMBER = r"([\d,]+)"


class Leaves:
    """What the leaves of a ledger say of a period, by SQL over their bytes and by the oracle of custody."""

    def __init__(self, engine: Engine, since_us: int, until_us: int) -> None:
        self.since_us, self.until_us = since_us, until_us
        with engine.connect() as connection:
            rows = connection.execute(text("SELECT leaf FROM events")).scalars().all()
            self.roots = connection.execute(text("SELECT count(*) FROM root_leaves")).scalar()
            self.logs = connection.execute(text("SELECT count(*) FROM logs WHERE size > 0")).scalar()
            self.signatures = connection.execute(text("SELECT count(*) FROM cosignatures")).scalar()
        self.bodies = [orjson.loads(bytes(leaf)) for leaf in rows]
        self.custodies = list(judge(History(map(bytes, rows)), Chosen(since_us, until_us)))
        self.units = figures(self.custodies)

    def of(self, *kinds: str, always: bool = False) -> list[dict[str, Any]]:
        """Leaves of these kinds in the period, or of all time; of one that has parts, the first."""
        return [
            body
            for body in self.bodies
            if body["kind"] in kinds
            and body["part"] == 1
            and (always or self.since_us <= int(body["at_us"]) < self.until_us)
        ]

    def share(self) -> str:
        ppm = self.units["covered"] * 1_000_000 // self.units["due"]
        return f"{ppm // 10_000}.{ppm // 100 % 100:02d}"

    def uncovered(self) -> int:
        return self.units["due"] - self.units["covered"]

    def tenants(self) -> int:
        return len({body["log"] for body in self.bodies if body["log"].startswith("tenant/")})

    def tenants_due(self) -> int:
        return len({one.tenant for one in self.custodies})

    def scanned(self) -> int:
        """Processes with a scan in the period, of those that did not die."""
        dead = {body["of_incarnation"] for body in self.of("worker-died", always=True)}
        return len({body["incarnation"] for body in self.of("orphan-scanned")} - dead)

    def erasures_on_time(self) -> int:
        """Every worker that had begun answered that all is gone by the deadline."""
        made = 0
        for asked in self.of("erasure-requested"):
            due = int(asked["at_us"]) - int(asked["boot_us"]) + int(asked["deadline_boot_us"])
            owed = {
                body["incarnation"]
                for body in self.of("worker-started", always=True)
                if int(body["at_us"]) <= int(asked["at_us"])
                and body["incarnation"]
                not in {
                    each["incarnation"]
                    for each in self.of("worker-stopped", always=True)
                    if int(each["at_us"]) < int(asked["at_us"])
                }
            }
            done = {
                body["incarnation"]
                for body in self.of("erasure-completed", always=True)
                if body["erasure"] == asked["erasure"]
                and body["outcome"] == "complete"
                and int(body["at_us"]) <= due
            }
            made += owed <= done
        return made

    def lag(self, percent: int) -> str:
        return duration(lag_us(self.custodies, percent))

    def software(self) -> str:
        return ", ".join(sorted({body["software"] for body in self.of("worker-started", always=True)}))


Claim = tuple[str, Callable[[Leaves], tuple[Any, ...]]]
CLAIMS: list[Claim] = [
    (r"([\d.]+) % \| of units due ended in time, with evidence", lambda leaves: (leaves.share(),)),
    (rf"{NUMBER} \| units due: .*", lambda leaves: (leaves.units["due"],)),
    (rf"{NUMBER} \| units that are not covered", lambda leaves: (leaves.uncovered(),)),
    (
        r"(none|[\d.]+ \w+) \| age of the last witness",
        lambda leaves: ("none",) if not leaves.signatures else ("?",),
    ),
    (
        rf"workers covered \| {NUMBER} of {NUMBER} at work in the period",
        lambda leaves: (leaves.scanned(), len(leaves.of("worker-started", always=True))),
    ),
    (
        rf"tenants covered \| {NUMBER} of {NUMBER} with a record",
        lambda leaves: (leaves.tenants_due(), leaves.tenants()),
    ),
    (r"units that ended in time, with evidence \| ([\d.]+) %", lambda leaves: (leaves.share(),)),
    (
        rf"erasures answered on time \| {NUMBER} of {NUMBER} asked for",
        lambda leaves: (leaves.erasures_on_time(), len(leaves.of("erasure-requested"))),
    ),
    (
        rf"{NUMBER} units of {NUMBER} custodies were due, and {NUMBER} of them did not end in time with evidence\.",
        lambda leaves: (leaves.units["due"], len(leaves.custodies), leaves.uncovered()),
    ),
    (rf"units whose outcome is unknown \| {NUMBER}", lambda leaves: (leaves.units["unproven"],)),
    (r"(.*) \| from due to destroyed, 99th percentile", lambda leaves: (leaves.lag(99),)),
    (r"median, 99th percentile \| (.*), (.*)", lambda leaves: (leaves.lag(50), leaves.lag(99))),
    (r"longest \| (.*)", lambda leaves: (leaves.lag(100),)),
    (
        r"longest fence, which excuses a late scrub \| (.*)",
        lambda leaves: (duration(leaves.units["fence_us_max"]),),
    ),
    (rf"processes \| {NUMBER}", lambda leaves: (len(leaves.of("worker-started", always=True)),)),
    (r"software \| (.*)", lambda leaves: (leaves.software(),)),
    (
        rf"policies in effect in the record \| {NUMBER}",
        lambda leaves: (len(leaves.of("policy-activated", always=True)),),
    ),
    (
        r"tiers off the device \| (.*)",
        lambda leaves: (
            ", ".join(sorted({body["tier"] for body in leaves.of("copies-stored", always=True)})) or "none",
        ),
    ),
    (rf"records \| {NUMBER} logs under one signed root", lambda leaves: (leaves.logs,)),
    (rf"checkpoint \| {NUMBER} root leaves, root [0-9a-f]+", lambda leaves: (leaves.roots,)),
    (rf"custodies \(block, generation\) \| {NUMBER}", lambda leaves: (len(leaves.custodies),)),
    (rf"units \(a custody on each shard\) \| {NUMBER}", lambda leaves: (leaves.units["due"],)),
    (
        rf"{NUMBER} gaps? and {NUMBER} spill events? under the checkpoint\.",
        lambda leaves: (
            len(leaves.of("gap", always=True)),
            len(leaves.of("spill-started", "replay-completed", always=True)),
        ),
    ),
    (
        rf"Gaps \({NUMBER}\): what they would have said is unknown\.",
        lambda leaves: (len(leaves.of("gap", always=True)),),
    ),
    (rf"size \| \d+ of {NUMBER}", lambda leaves: (len(leaves.custodies),)),
    (
        r"Policies: this ledger records (no) activation\.",
        lambda leaves: _none(leaves.of("policy-activated", always=True)),
    ),
    (
        r"(None): every unit that was due is covered\.",
        lambda leaves: ("None",) if not leaves.uncovered() else ("some",),
    ),
    (
        r"Witnesses: (no) witness has signed this ledger: .*|(No) witness has signed this ledger: .*",
        lambda leaves: ("no", "No") if not leaves.signatures else ("some", "Some"),
    ),
    (
        r"(Nothing) qualifies the figures: every identity holds, every erasure is answered, nothing is missing\.",
        lambda leaves: (
            ("Nothing",)
            if not leaves.uncovered()
            and not leaves.of("gap", "worker-died", always=True)
            and leaves.erasures_on_time() == len(leaves.of("erasure-requested"))
            else ("Something",)
        ),
    ),
]
DEFINITIONS = (
    # What follows from the report's own facts, compared by `verify_report`: the opinion, its words, who was named.
    "The opinion is ", "At least ", "Decision asked: ", "There is no earlier period", "The share covered is ",
    # What was asked for, and how it was made or signed: no leaf has it.
    "It is asserted that ", "Nobody is named who answers", "prepared by", "signed by", "as of", "kvcustody |", "log |",
    "last event under it", "signed |", "Policy proof: none", "No policy proof was supplied", "Ids: ", "signature |",
    "SHA-256 of ", "seed |", "stated risk", "not covered among", "so at most", "digest of", "The checkpoint as it was",
    "Not done for this report", "Coverage was not recomputed", "The same command", "The sample's seed",
    "longest time between a leaf", "the same, from leaves",
    # How something is counted, what is outside, and what a reader has to do.
    "An engine that serves", "Evidence present: ", "The population is ", "Totals against ", "Two figures, never mixed",
    "Receipts of the period", "Age is from ", "Each was made by", "What this report shows", "Give each tenant",
    "Classify requests", "Keep ", "Answer exceptions", "Delete prompts", "Services of others", "The log shows that",
    "A leaf shows", "Outside the boundary", "KV caches only", "A due time and", "Orders are not authenticated",
    "Review, risk", "Workers that still run", "Strata are by", "Leaves of the sample", "permit |", "deny |",
    "requests |", "straddling |", "residencies |", "processing-restricted", "own-scope |", "Requests of people",
    "This is one tenant",
)  # fmt: skip
_CLAIMS_SOMETHING = re.compile(r"\d|\b(none|all|every|no|nobody|nothing|holds?|each)\b", re.IGNORECASE)


def _none(found: list[Any]) -> tuple[str]:
    return ("no",) if not found else ("some",)


def sentences_of(page: Page) -> Iterator[str]:
    """Tiles, facts, list items and paragraphs; cells of tables are compared by `examples/reperform`, field by field."""
    for tile in page.tiles:
        yield f"{tile.value} | {tile.label}"
    for section in page.sections:
        for block in section.blocks:
            if isinstance(block, Paragraph):
                yield block.text
            elif isinstance(block, Facts):
                yield from (f"{name} | {value}" for name, value in block.items)
            elif isinstance(block, Items):
                yield from block.items


def wrong(sentence: str, leaves: Leaves) -> str | None:
    """What is wrong with a sentence; `unknown` where nothing here reads it, None where it is true."""
    for pattern, query in CLAIMS:
        said = re.fullmatch(pattern, sentence)
        if said is None:
            continue
        given = [group.replace(",", "") if group[0].isdigit() else group for group in said.groups() if group]
        true = [str(value) for value, group in zip(query(leaves), said.groups(), strict=True) if group]
        true = [value.replace(",", "") if value[0].isdigit() else value for value in true]
        return None if given == true else f"{sentence!r}: the leaves give {true}"
    if sentence.startswith(DEFINITIONS) or not _CLAIMS_SOMETHING.search(sentence):
        return None
    return f"unknown: {sentence!r}"


class Told:
    """A ledger, its reports, and what its leaves say."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        with engine.connect() as connection:
            self.size = newest_checkpoint(connection)
            self.bounds = period(connection, self.size, None, None)
        self.leaves = Leaves(engine, *self.bounds)

    def report(self, framework: str) -> Report:
        with self.engine.connect() as connection:
            asked = ReportParameters(framework, self.size, *self.bounds, sample=3, recount=False)
            return build_report(connection, asked)


@pytest.fixture(scope="module", params=["with much that is wrong", "with nothing that is wrong"])
def told(
    request: pytest.FixtureRequest, world_class: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Told]:
    folder: Path = tmp_path_factory.mktemp("claims")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    if "much" in request.param:
        report_ledger.fill(engine, world_class, folder)
    else:
        OneProcess(engine, folder).fill(clean(world_class))
    yield Told(engine)
    engine.dispose()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_sentence_that_claims_is_true(told: Told, framework: str) -> None:
    found = [wrong(sentence, told.leaves) for sentence in sentences_of(page_of(told.report(framework)))]
    assert [problem for problem in found if problem] == []


def test_each_check_finds_a_planted_wrong_value(told: Told) -> None:
    """Of every sentence that a claim reads, with each of its words in turn made another."""
    planted, read = Counter[str](), sentences_of(page_of(told.report("soc2")))
    for sentence in read:
        for pattern, _ in CLAIMS:
            said = re.fullmatch(pattern, sentence)
            if said is None:
                continue
            for place, group in enumerate(said.groups(), 1):
                if group:
                    start, end = said.span(place)
                    other = f"{int(group.replace(',', '')) + 1}" if group.isdigit() else f"9{group[1:]}x"
                    changed = sentence[:start] + other + sentence[end:]
                    assert wrong(changed, told.leaves), changed
                    planted[pattern] += 1
            break
    assert len(planted) >= 15, planted
