"""Every claim in a report is checked against leaves, by queries that import no report code.

`CLAIMS` maps a sentence to what the leaves give for each number or word in it. A sentence of a page makes a claim if it
has a number, or none, all, every, no, nobody or holds. It must be either a claim here or one of `DEFINITIONS`. Those
explain how something is counted, what a reader has to do, or what cannot be shown. A new sentence fails until it is
added here. Tables are read in the same way. For the headings of each table with counts, `TABLES` names what an
auditor's own program (`examples/reperform`) computes from the leaves. For every framework, each claim is shown to fail
when one of its words is changed. Each figure is shown to fail when the report's own facts are changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
import reperform
from coverage_oracle import Chosen, History, figures, judge, lag_us
from export_leaves import Export
from sqlalchemy import Engine, text

from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.store.database.engine import open_store
from kvcustody.console.render.number_format import duration, moment, second, size
from kvcustody.migrations.upgrade import upgrade
from standins.audit.ledgers import report_ledger, tiered_ledger
from standins.audit.one_process import OneProcess, clean
from standins.console.read_page import Facts, Items, Page, Paragraph, Table, page_of

FRAMEWORKS = ("soc2", "gdpr", "hipaa", "iso-27001", "nist-800-53", "cc-fdp-rip")
NUMBER = r"([\d,]+)"
Again = dict[str, Any]  # a report that the auditor's program made of the leaves


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
        self.again: Again = {}
        self.last_us = 0  # when the last leaf under the checkpoint was written

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
        """What ended in time, of custody on the device and copies off it; a range where some of it is unknown."""
        ends = (self.again["opinion"]["low_ppm"], self.again["opinion"]["high_ppm"])
        return "–".join(dict.fromkeys(f"{ppm // 10_000}.{ppm // 100 % 100:02d}" for ppm in ends))

    def period(self) -> tuple[str, str, int]:
        """The bounds, and how many seconds are between them."""
        seconds = (self.until_us - self.since_us) // 1_000_000
        return second(self.since_us), second(self.until_us), seconds

    def copies(self, verdict: str) -> int:
        return sum(row[verdict] for row in self.again["tiers"]["rows"])

    def uncovered(self) -> int:
        return self.units["due"] - self.units["covered"]

    def tenants(self) -> int:
        return len({body["log"] for body in self.bodies if body["log"].startswith("tenant/")})

    def stated_policies(self) -> str:
        """Revisions that workers put on record, and of which no release has an activation."""
        steps = [body for body in self.of("release-step", always=True) if body["action"] == "activated"]
        released = {(body["revision"], body["digest"]) for body in steps}
        stated = [
            f"`{body['name']}` revision {body['revision']}"
            for body in sorted(self.of("policy-activated", always=True), key=lambda body: int(body["at_us"]))
            if (body["revision"], body["digest"]) not in released
        ]
        return some_of(list(dict.fromkeys(stated)))

    def stated_tenants(self) -> list[str]:
        """Tenants with a log, and of an issuer that is not on record."""
        assigned = self.of("issuer-assigned", always=True)
        issuers = {"" if body["tenants"] == "bare" else body["issuer"] for body in assigned}
        names = {body["log"].removeprefix("tenant/") for body in self.bodies if "tenant/" in body["log"]}
        return sorted(name for name in names if name.partition("^")[2] not in issuers)

    def tenants_due(self) -> int:
        return len({one.tenant for one in self.custodies})

    def scanned(self) -> int:
        """Processes with a scan in the period, of those that did not die."""
        dead = {body["of_incarnation"] for body in self.of("worker-died", always=True)}
        return len({body["incarnation"] for body in self.of("orphan-scanned")} - dead)

    def erasures_on_time(self) -> int:
        """Every worker that had begun answered that all is gone by the deadline."""
        on_time = 0
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
                if body["erasure"] == asked["erasure"] and body["outcome"] == "complete" and int(body["at_us"]) <= due
            }
            on_time += owed <= done
        return on_time

    def erasures_open(self) -> int:
        """How many can still be answered in time at the last leaf under the checkpoint."""
        return sum(
            one["state"] == "open" and not 0 < one["due_us"] < self.last_us
            for one in self.again["activity"]["erasures"]
        )

    def left_out(self, *parts: tuple[str, str, str]) -> str:
        """The names of those parts that have nothing: each is a name, and its place in the report."""
        return ", ".join(name for name, section, part in parts if not self.again[section][part]) or "-"

    def identities(self, part: str) -> tuple[int, int]:
        """How many identities of a part hold, and how many there are."""
        balances = self.again[part]["balances"]
        return sum(one["left"] == one["right"] for one in balances), len(balances)

    def lag(self, percent: int) -> str:
        return duration(lag_us(self.custodies, percent))

    def verdict(self) -> str:
        """What became of the share that is asked for where a reader names none."""
        low, high = self.again["opinion"]["low_ppm"], self.again["opinion"]["high_ppm"]
        return "met" if low >= 999_000 else "missed" if high < 999_000 else "not known"

    def unbalanced(self) -> list[str]:
        """Identities that do not hold, as the report writes their sides."""
        return [
            f"{one['name']}: {one['left']:,} against {one['right']:,}"
            for part in ("population", "tiers", "decided")
            for one in self.again[part]["balances"]
            if one["left"] != one["right"]
        ]

    def by_verdict(self) -> str:
        """How many units have each verdict that is not covered."""
        names = ("late", "failed", "missing", "unproven", "overdue")
        return ", ".join(f"{self.units[name]:,} {name}" for name in names if self.units[name])

    def software(self) -> str:
        return ", ".join(sorted({body["software"] for body in self.of("worker-started", always=True)}))


Claim = tuple[str, Callable[[Leaves], tuple[Any, ...]]]


def some_of(names: list[str]) -> str:
    more = len(names) - 4
    return ", ".join(names[:4]) + (f" and {more} more" if more > 0 else "")


def _of_routes(name: str, leaves: Leaves) -> tuple[int]:
    return (leaves.again["routes"][name],)


CLAIMS: list[Claim] = [
    (
        r"No release on record put (.+) into effect: that workers ran it, .* rests on what these workers say\.",
        lambda leaves: (leaves.stated_policies(),),
    ),
    (
        rf"No issuer on record has {NUMBER} tenants? that workers name \((.+)\): .* rests on what the workers say\.",
        lambda leaves: (len(leaves.stated_tenants()), some_of(leaves.stated_tenants())),
    ),
    (r"([\d.–]+) % \| of units due ended in time, with evidence", lambda leaves: (leaves.share(),)),
    (rf"{NUMBER} \| units due: .*", lambda leaves: (leaves.units["due"],)),
    (rf"{NUMBER} \| units that are not covered", lambda leaves: (leaves.uncovered(),)),
    (
        r"(none|[\d.]+ \w+) \| age of the last witness",
        lambda leaves: ("none",) if not leaves.signatures else ("?",),
    ),
    (
        rf"workers that were scanned and did not die \| {NUMBER} of {NUMBER} at work in the period",
        lambda leaves: (leaves.scanned(), len(leaves.of("worker-started", always=True))),
    ),
    (
        rf"tenants with units due \| {NUMBER} of {NUMBER} with a record",
        lambda leaves: (leaves.tenants_due(), leaves.tenants()),
    ),
    (r"units that ended in time, with evidence \| ([\d.–]+) %", lambda leaves: (leaves.share(),)),
    (
        rf"erasures answered on time \| {NUMBER} of {NUMBER} that were due or answered; {NUMBER} not due yet",
        lambda leaves: (
            leaves.erasures_on_time(),
            len(leaves.of("erasure-requested")) - leaves.erasures_open(),
            leaves.erasures_open(),
        ),
    ),
    (
        rf"{NUMBER} units? of {NUMBER} custod(?:y|ies) were due\. {NUMBER} units? did not end in time with evidence\.",
        lambda leaves: (leaves.units["due"], len(leaves.custodies), leaves.uncovered()),
    ),
    (
        rf"units whose outcome is unknown: unproven, or in no leaf \| {NUMBER}",
        lambda leaves: (leaves.again["opinion"]["unknown"],),
    ),
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
    (rf"records \| {NUMBER} logs? under one signed root", lambda leaves: (leaves.logs,)),
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
    (rf"size \| \d+ of {NUMBER}", lambda leaves: (len(leaves.custodies) + leaves.copies("due"),)),
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
        r"The opinion is (\w+): (\d+) exceptions?, (\d+) with an owner\.",
        lambda leaves: (leaves.again["opinion"]["kind"], len(leaves.again["opinion"]["exceptions"]), 0),
    ),
    (
        r"Target (met|missed|not known): ([\d.–]+) % of the units due .*\. The target is ([\d.]+) % .*\.",
        lambda leaves: (leaves.verdict(), leaves.share(), "99.9"),
    ),
    (
        r"Scope \| (all) tenants of log (\S+)",
        lambda leaves: ("all", leaves.again["boundary"]["checkpoint"]["origin"]),
    ),
    (r"Period \| (\S+) to (\S+), (\d+) s", lambda leaves: leaves.period()),
    (r"As of \| checkpoint (\d+), (\S+)", lambda leaves: (leaves.roots, second(leaves.last_us))),
    (r"Opinion \| (\w+)", lambda leaves: (leaves.again["opinion"]["kind"],)),
    (
        r"It is asserted for the period (\S+) to (\S+), (\d+) s:",
        lambda leaves: leaves.period(),
    ),
    (
        r"(Each) custody on record that was due in the period is counted here: as ended in time with evidence, or .*",
        lambda leaves: ("Each",) if leaves.again["population"]["custodies"] == len(leaves.custodies) else ("Not each",),
    ),
    (r"Adverse: less than ([\d.]+) % of the units due are covered, .*", lambda leaves: ("90",)),
    (
        r"(Nothing) is on record in the period of: ((?:erasures|requests of persons)(?:, requests of persons)?)\.",
        lambda leaves: (
            "Nothing",
            leaves.left_out(("erasures", "activity", "erasures"), ("requests of persons", "activity", "cases")),
        ),
    ),
    (
        r"(Nothing) is on record in the period of: (.*)\.",
        lambda leaves: (
            "Nothing",
            leaves.left_out(
                ("decisions by rule", "decided", "counts"),
                ("reuse across tenants", "decided", "crossed"),
                ("residencies by rule", "decided", "residencies"),
                ("steps of the policy's release", "activity", "release"),
                ("orphan findings", "activity", "findings"),
                ("recorded events", "activity", "kinds"),
            ),
        ),
    ),
    (
        r"name and id of the log's key \| (\S+)\+[0-9a-f]{8}",
        lambda leaves: (leaves.again["boundary"]["checkpoint"]["origin"],),
    ),
    (
        r"(No) trend: there is no earlier period of this length with anything due\.",
        lambda leaves: ("No",) if not leaves.again["board"]["trend"][:-1] else ("Some",),
    ),
    (r"as of \| (\S+)", lambda leaves: (second(leaves.last_us),)),
    (r"last event under it \| (\S+)", lambda leaves: (moment(leaves.last_us),)),
    (r"root of the checkpoint \| (\w+)", lambda leaves: (leaves.again["boundary"]["checkpoint"]["root"],)),
    (r"digest of the population \| (\w+)", lambda leaves: (leaves.again["population"]["digest"],)),
    *(
        (rf"{shown} \| {NUMBER}", partial(_of_routes, name))
        for shown, name in (
            ("receipts", "receipts"),
            ("the other half may still come", "awaited"),
            ("with the worker's half", "measured"),
            ("prompt tokens", "prompt_tokens"),
            ("found where they went", "found_tokens"),
            ("promised tokens", "promised_tokens"),
            ("of these found", "kept_tokens"),
        )
    ),
    (r"digest of the copies \| (\w+)", lambda leaves: (leaves.again["tiers"]["digest"],)),
    (
        rf"not covered among those drawn \| {NUMBER}",
        lambda leaves: (leaves.again["sampling"]["deviations"],),
    ),
    (
        r"so at most, with that risk of being wrong \| ([\d.]+) % of all",
        lambda leaves: (f"{leaves.again['sampling']['upper_limit_ppm'] // 100 / 100:.2f}",),
    ),
    (
        r"(Workers that still run), or died, left no counters of their own in the ledger: .*",
        lambda leaves: (
            ("Workers that still run",)
            if any(one["allocated"] is None for one in leaves.again["boundary"]["workers"])
            else ("None",)
        ),
    ),
    (rf"Due off the device: {NUMBER} cop(?:y|ies), .*", lambda leaves: (leaves.copies("due"),)),
    (
        r"(Demo data: this ledger holds traffic .*\))\.(?: Figures of this report count it\.)?",
        lambda leaves: (leaves.again["boundary"]["history"].removesuffix("."),),
    ),
    (
        r"The policy was not (enforced) for everybody in this period: .*",
        lambda leaves: ("enforced",) if leaves.again["boundary"]["monitored"] else ("?",),
    ),
    (
        rf"Processes that ended without saying so, .*: {NUMBER} closed by a successor, {NUMBER} for their silence, "
        rf"{NUMBER} declared dead by two people\.",
        lambda leaves: (len(leaves.of("worker-died", always=True)), 0, 0),
    ),
    # Cells of tables that are sentences.
    (
        rf"{NUMBER} process(?:es)? ended without saying so",
        lambda leaves: (len(leaves.of("worker-died", always=True)),),
    ),
    (
        rf"{NUMBER} cop(?:y|ies) off the device not covered",
        lambda leaves: (leaves.copies("due") - leaves.copies("covered"),),
    ),
    (
        rf"(?:Adverse: )?(.*): {NUMBER} \((?:.*)\) against {NUMBER} \((?:.*)\)",
        lambda leaves: re.fullmatch(r"(.*): (.*) against (.*)", leaves.unbalanced()[0]).groups(),  # type: ignore[union-attr]
    ),
    (
        r"erasure (\S+): missed, due (\S+), not answered by .*",
        lambda leaves: next(
            (one["erasure"], second(one["due_us"]))
            for one in leaves.again["activity"]["erasures"]
            if one["state"] == "missed"
        ),
    ),
    (
        r"case (\S+): due before (\S+), not answered",
        lambda leaves: next((one["case_id"], second(one["due_us"])) for one in leaves.again["activity"]["cases"]),
    ),
    (
        r"(?:Adverse: )?units that are not covered: (.*)",
        lambda leaves: (leaves.by_verdict(),),
    ),
    (
        r"no scan for orphans in the period of: (.*)",
        lambda leaves: (", ".join(leaves.again["unscanned"][:5]),),
    ),
    (rf"{NUMBER} gaps?: records that are not there", lambda leaves: (len(leaves.of("gap", always=True)),)),
    (
        rf"{NUMBER} of {NUMBER} identit(?:y|ies) held; {NUMBER} gaps? on record",
        lambda leaves: (*leaves.identities("population"), len(leaves.of("gap", always=True))),
    ),
    (rf"{NUMBER} of {NUMBER} identit(?:y|ies) held", lambda leaves: leaves.identities("decided")),
    (
        rf"{NUMBER} of {NUMBER} strat(?:um|a) with a draw",
        lambda leaves: (
            sum(one["drawn"] > 0 for one in leaves.again["sampling"]["strata"]),
            len(leaves.again["sampling"]["strata"]),
        ),
    ),
    (
        rf"{NUMBER} late",
        lambda leaves: (sum(one["state"] in ("late", "missed") for one in leaves.again["activity"]["erasures"]),),
    ),
    (rf"{NUMBER} gaps? on record", lambda leaves: (len(leaves.of("gap", always=True)),)),
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
Rows = list[dict[str, Any]]
ROUTES = (
    "requests",
    "prompt tokens=prompt_tokens",
    "found=found_tokens",
    "promises",
    "not kept=stale_misses",
)
TABLES: dict[tuple[str, str], tuple[tuple[str, ...], Callable[[Again], Rows]]] = {
    # First two headings of a table: the columns that are counts, and the rows that leaves give for them.
    ("period from", "to"): (("due", "covered"), lambda again: again["board"]["trend"]),
    ("worker", "incarnation"): (
        ("shards", "blocks", "bytes a block=bytes_per_block"),
        lambda again: again["boundary"]["workers"],
    ),
    ("policy revision", "name"): (("policy revision=revision",), lambda again: again["boundary"]["policies"]),
    ("identity", "left side from"): (
        ("left", "right"),
        lambda again: [*again["population"]["balances"], *again["tiers"]["balances"]],
    ),
    ("tier", "tenant"): (
        (
            *(
                "due",
                "covered",
                "late",
                "open",
                "unproven",
                "disputed",
                "zeroized=zeroed",
                "unlinked",
                "deleted",
            ),
            "key destroyed=key_destroyed",
        ),
        lambda again: again["tiers"]["rows"],
    ),
    ("worker", "requests"): (ROUTES, lambda again: again["routes"]["workers"]),
    ("tenant", "requests"): (ROUTES, lambda again: again["routes"]["tenants"]),
    ("wrong with receipts", "findings"): (("findings",), lambda again: again["routes"]["problems"]),
    ("tier", "action"): (
        ("decisions", "bytes", "moving, predicted=transfer_us", "recomputing=recompute_us", "took=actual_us"),
        lambda again: [_as_shown(one) for one in again["tiers"]["decisions"]],
    ),
    ("identity", "left"): (("left", "right"), lambda again: again["decided"]["balances"]),
    ("tenant", "classification"): (
        ("due", "covered", "late", "failed", "missing", "unproven", "overdue", "disputed"),
        lambda again: [*again["coverage"], {**again["total"], "disputed": _disputed(again["total"])}],
    ),
    ("bytes destroyed, by weakest verification", "bytes"): (
        ("bytes",),
        lambda again: [
            {"bytes": again["total"][f"{level}_bytes"]} for level in ("full", "sampled", "retired", "launched")
        ],
    ),
    ("of", "level"): (
        (
            *("receipts", "that read nothing=receipts_unread", "blocks", "read=blocks_read", "bytes"),
            "bytes read=bytes_read",
        ),
        lambda again: again["read_back"],
    ),
    ("classification", "custodies ended"): (
        (
            "custodies ended=custodies",
            *(f"by {name}=by_{name}" for name in ("deadline", "eviction", "erasure", "pressure", "death", "other")),
            "overdue",
        ),
        lambda again: again["storage"],
    ),
    ("classification", "age: median"): (
        ("past ceiling and scrub.within=beyond_limit", "age unknown=unaged"),
        lambda again: again["storage"],
    ),
    ("what", "tenant"): (("units",), lambda again: again["exceptions"][:LISTED]),
    ("decision", "action"): (("requests", "straddling"), lambda again: again["decided"]["counts"]),
    ("reader", "owner"): (("requests", "blocks", "tokens"), lambda again: again["decided"]["crossed"]),
    ("rules that the leaves name", "residencies"): (
        ("residencies", "of these with a hit at their opening=attached"),
        lambda again: again["decided"]["residencies"],
    ),
    ("step of the policy's release", "revision"): (("revision",), lambda again: again["activity"]["release"]),
    ("erasure", "tenant"): (
        ("blocks ended=blocks", "remaining"),
        lambda again: again["activity"]["erasures"],
    ),
    ("orphan findings", "outcome"): (("findings",), lambda again: again["activity"]["findings"]),
    ("recorded events", "leaves"): (("leaves",), lambda again: again["activity"]["kinds"]),
    ("gap of worker", "incarnation"): (
        ("records missing=records", "from sequence=first_sequence", "to=last_sequence"),
        lambda again: [
            one | {"records": one["last_sequence"] - one["first_sequence"] + 1}
            for one in again["losses"]["listed_gaps"]
        ],
    ),
    ("stratum", "tier"): (
        ("members", "drawn", "duplicates", "not covered=deviations"),
        lambda again: again["sampling"]["strata"],
    ),
    ("number", "incarnation, pool/block/generation"): (("number",), lambda again: again["sample"]),
    ("log under the checkpoint", "root"): (("leaves=size",), lambda again: again["boundary"]["logs"]),
}
SENTENCES = {  # tables whose cells are sentences: the columns in which they stand
    ("exception", "risk"): ("exception",),
    ("first exceptions", "owner"): ("first exceptions",),
    ("information", "source"): ("complete", "accurate"),
}
NO_COUNTS = {  # digits in these are parts of names: ids of controls, of logs and leaves, of devices, of spills
    *(
        ("control", "status"),
        ("of", "log, idx"),
        ("service", "what is on record of it"),
        ("spill of worker", "incarnation"),
    ),
    *(("case", "tenant"), ("identifier of", "name")),
}
LISTED = 60
DEFINITIONS = {  # how a sentence begins that no leaf bears out, and why none does
    "A due time and": "what cannot be shown",
    "An engine that serves": "what a system of this kind does",
    "Classify requests": "what a reader has to do",
    "Each copy that was due": "how a count is made",
    "Each was made by": "how the report is made",
    "Evidence present: ": "what a status means",
    "Give each tenant": "what a reader has to do",
    "Ids: ": "where a framework's ids are from: `test_control_library` reads it",
    "No policy proof was supplied": "what was asked for",
    "Nobody is named who answers": "what was asked for",
    "Orders are not authenticated": "a setting of the service",
    "Outside the boundary": "what cannot be shown",
    "Policy proof: none": "what was asked for",
    "Receipts of the period": "how a count is made",
    "SHA-256 of ": "it is of the document: `verify_report` computes it",
    "Strata are by": "how a sample is drawn",
    "The log shows that": "what cannot be shown",
    "The population is ": "how a count is made",
    "What this report shows": "what a reader has to do",
    "a number that no leaf has": "how gaps are found",
    "deny |": "what a word means",
    "each answer is its": "how the report is made",
    "each leaf has a proof": "it is of the document: `verify_report` checks it",
    "kvcustody |": "the version of the program",
    "longest time between a leaf": "when a leaf was signed is in no leaf",
    "processing-restricted": "what a word means",
    "signature |": "it is of the document: `verify_report` checks it",
    "signed |": "when a checkpoint was signed is in no leaf",
    "stated risk": "what was asked for",
}
DEFINITIONS_MAX = 29  # a sentence that claims is a claim: this number goes down
_CLAIMS_SOMETHING = re.compile(r"\d|\b(none|all|every|no|nobody|nothing|holds?|each)\b", re.IGNORECASE)


def _disputed(total: dict[str, Any]) -> int:
    return int(total.get("disputed", total["in_time"] - total["covered"]))


def _plain(cell: object) -> str:
    """A cell as its digits, where it is a number."""
    text = str(cell)
    return text.replace(",", "") if re.fullmatch(r"[\d,]+", text) else text


def _as_shown(decided: dict[str, Any]) -> dict[str, Any]:
    """What was decided about moving copies, with times and bytes as a page writes them."""
    times = {name: duration(decided[name]) for name in ("transfer_us", "recompute_us", "actual_us")}
    return decided | times | {"bytes": size(decided["bytes"])}


def tables_of(page: Page) -> Iterator[Table]:
    """Every table; those of one form, as the identities of device and tiers, as one."""
    found: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for block in page.blocks():
        if isinstance(block, Table):
            found.setdefault(block.headings, []).extend(tuple(row) for row in block.rows)
    return (Table(headings, rows) for headings, rows in found.items())


def wrong_tables(page: Page, again: Again, leaves: Leaves) -> list[str]:
    """Every table whose counts are not those of the leaves, or that nothing here reads."""
    problems: list[str] = []
    for table in tables_of(page):
        heads = (table.headings[0], table.headings[1])
        if heads in TABLES:
            columns, query = TABLES[heads]
            pairs = [(column.split("=")[0], column.split("=")[-1]) for column in columns]
            places = [table.headings.index(shown) for shown, _ in pairs]
            given = [tuple(_plain(row[place]) for place in places) for row in table.rows]
            true = [tuple(str(row[name]) for _, name in pairs) for row in query(again)]
            if sorted(given) != sorted(true) and not (not true and _is_none(table)):
                problems.append(f"{heads}: the page has {given}, the leaves give {true}")
        elif heads in SENTENCES:
            for column in SENTENCES[heads]:
                place = table.headings.index(column)
                problems += filter(None, (wrong(row[place], leaves) for row in table.rows))
        elif heads not in NO_COUNTS and any(re.search(r"\d", cell) for row in table.rows for cell in row):
            problems.append(f"unknown: a table {heads} with counts")
    return problems


def _is_none(table: Table) -> bool:
    """One row, that says there is nothing: only its first cell has words."""
    return len(table.rows) == 1 and not any(table.rows[0][1:])


def _none(found: list[Any]) -> tuple[str]:
    return ("no",) if not found else ("some",)


def sentences_of(page: Page) -> Iterator[str]:
    """Tiles, facts, list items and paragraphs; cells of tables are for `wrong_tables`."""
    for tile in page.tiles:
        yield f"{tile.value} | {tile.label}"
    cover = next(block for block in page.front if isinstance(block, Facts))  # the other says what words mean
    for block in (cover, *page.blocks()):
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
    if sentence.startswith(tuple(DEFINITIONS)) or not _CLAIMS_SOMETHING.search(sentence):
        return None
    return f"unknown: {sentence!r}"


class Told:
    """A ledger, its reports, and what its leaves say."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        with engine.connect() as connection:
            self.size = newest_checkpoint(connection)
            self.bounds = period(connection, self.size, None, None)
        self.leaves = Leaves(engine, *self.bounds)
        write_export(folder / "export", LedgerSource(engine), made_at_us=1)
        self._export = Export(folder / "export")
        self.leaves.last_us = max(int(leaf.body["at_us"]) for leaf in self._export.leaves)
        self._again: dict[str, Again] = {}
        self.about("soc2")

    def about(self, framework: str) -> None:
        """From now on leaves answer for a report by this framework: it says which cases it shows."""
        if framework not in self._again:
            stated = orjson.loads(self.report(framework).to_bytes())
            self._again[framework] = reperform.Again(self._export, stated, None).report()
        self.leaves.again = self._again[framework]

    def problems(self, page: Page) -> list[str]:
        """Every sentence and table of a page that the leaves do not bear out."""
        found = filter(None, (wrong(sentence, self.leaves) for sentence in sentences_of(page)))
        return [*found, *wrong_tables(page, self.leaves.again, self.leaves)]

    def report(self, framework: str) -> Report:
        with self.engine.connect() as connection:
            asked = ReportParameters(framework, self.size, *self.bounds, sample=3, recount=False)
            return build_report(connection, asked)


@pytest.fixture(scope="module", params=["with much that is wrong", "with nothing that is wrong", "with tiers"])
def claims(
    request: pytest.FixtureRequest, world_class: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Told]:
    folder: Path = tmp_path_factory.mktemp("claims")
    engine = open_store(folder / "ledger.db")
    upgrade(engine)
    if "much" in request.param:
        report_ledger.fill(engine, world_class, folder)
    elif "tiers" in request.param:
        tiered_ledger.fill(engine, world_class, folder)
    else:
        OneProcess(engine, folder).fill(clean(world_class))
    yield Told(engine, folder)
    engine.dispose()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_sentence_that_claims_is_true(claims: Told, framework: str) -> None:
    claims.about(framework)
    assert claims.problems(page_of(claims.report(framework))) == []
    assert len(DEFINITIONS) <= DEFINITIONS_MAX


# Figures of a report: each is made wrong where the report has it.
PLANTS = (
    *("total.due", "total.covered", "total.late", "total.full_bytes", "opinion.low_ppm", "opinion.unknown"),
    *("population.custodies", "population.units", "population.balances.0.left", "coverage.0.due"),
    *(
        "coverage.0.late",
        "timeliness.p99_us",
        "timeliness.max_us",
        "storage.0.custodies",
        "storage.0.overdue",
    ),
    *(
        "storage.0.beyond_limit",
        "exceptions.0.units",
        "activity.kinds.0.leaves",
        "activity.erasures.0.blocks",
    ),
    *("activity.erasures.0.remaining", "activity.findings.0.findings", "activity.release.0.revision"),
    *("decided.counts.0.requests", "decided.crossed.0.blocks", "decided.residencies.0.attached"),
    *(
        "decided.balances.0.right",
        "read_back.0.blocks",
        "read_back.0.bytes_read",
        "losses.gaps",
        "losses.spills",
    ),
    *("losses.listed_gaps.0.first_sequence", "boundary.workers.0.blocks", "boundary.policies.0.revision"),
    *("boundary.checkpoint.size", "boundary.logs.0.size", "board.workers_scanned", "board.tenants_due"),
    *("board.erasures", "board.trend.-1.covered", "sampling.strata.0.drawn", "sampling.strata.0.members"),
)

TIER_PLANTS = (
    *(f"tiers.rows.0.{name}" for name in ("due", "covered", "late", "open", "unproven", "zeroed")),
    *(
        "tiers.rows.-1.unlinked",
        "tiers.rows.-1.deleted",
        "tiers.rows.-1.key_destroyed",
        "tiers.balances.0.left",
        "tiers.balances.-1.right",
    ),
    *(
        "tiers.decisions.0.decisions",
        "tiers.decisions.0.bytes",
        "tiers.decisions.0.transfer_us",
        "tiers.digest",
    ),
    *("tiers.decisions.0.recompute_us", "tiers.decisions.0.actual_us"),
)


def planted(value: Any, path: list[str]) -> Any:
    """The same facts, with the figure at a path more than doubled; raises `IndexError` where there is none."""
    if not path:
        if isinstance(value, str):
            return f"{value[1:]}{value[:1]}x"
        return 2 * value + 20_000  # more than rounding a share or a time could hide
    first, rest = path[0], path[1:]
    if isinstance(value, Report):
        return value.replace(**{first: planted(value[first], rest)})
    if hasattr(value, "_replace"):
        return value._replace(**{first: planted(getattr(value, first), rest)})
    place = int(first) % max(1, len(value))
    return (*value[:place], planted(value[place], rest), *value[place + 1 :])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_wrong_figure_among_the_facts_of_a_report_is_found(claims: Told, framework: str) -> None:
    claims.about(framework)
    report, there = claims.report(framework), set()
    plants = (*PLANTS, *(TIER_PLANTS if report["tiers"].rows else ()))
    place = FRAMEWORKS.index(framework)  # the first has each planted, the others, which share its sections, a part
    for path in plants[max(0, place - 1) :: len(FRAMEWORKS) - 1 if place else 1]:
        try:
            false = planted(report, path.split("."))
        except IndexError:
            continue
        there.add(path)
        assert claims.problems(page_of(false)) != [], path
    assert there
    if place:
        return
    if report["tiers"].rows:
        assert there >= {*TIER_PLANTS}
    elif report["losses"].gaps:  # the ledger with much that is wrong has each of the others
        assert there == {*PLANTS}


def test_each_check_finds_a_planted_wrong_value(claims: Told) -> None:
    """Of every sentence that a claim reads, with each of its words in turn made another."""
    claims.about("soc2")
    planted, read = Counter[str](), sentences_of(page_of(claims.report("soc2")))
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
                    assert wrong(changed, claims.leaves), changed
                    planted[pattern] += 1
            break
    assert len(planted) >= 15, planted
