"""An auditor's own run through a report: every figure that leaves give, made again from an export, and compared.

    python reperform.py EXPORT report.json [--key 'ledger.example.com+1a2b3c4d+AbC…']

It needs Python and the files beside it, and shares nothing with kvcustody: `signed_log.py` and `export_leaves.py` prove
the leaves, `coverage_oracle.py` and `copies_oracle.py` give verdicts in plain Python, custody by custody and copy by
copy, `lives_oracle.py` and `cases_oracle.py` what else leaves say. `--key` is the log's public key, which you have from
elsewhere: without it nothing is known about who signed. It reads exports as `ndjson`, and reports over all tenants.

A part of a report is made again, or it stands in `NOT_COVERED` with the reason; one that is neither differs. It prints
one line a field, `agrees` or `DIFFERS`, then what it does not cover; exit code 1 where one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import sections_again as sections
from copies_oracle import (
    NO_END,
    Copy,
    Process,
    copies_digest,
    judge_copies,
    tier_balances,
    tier_rows,
    transfer_decisions,
)
from coverage_oracle import Chosen, Custody, History, figures, judge, listed, unaccounted
from export_leaves import SYSTEM, Export, Leaf
from lives_oracle import Period
from routes_oracle import routes
from signed_log import (
    Key,
    ProofError,
    Turn,
    check_leaf_proof,
    consistency_path,
    ed25519_verifies,
    keys_in_turn,
    need,
    parse_key,
)

Body = dict[str, Any]
WORDS = "words, which no leaf has"
UNSIGNED = "when it was signed, and by which witnesses, is in no leaf"
NOT_COVERED = {
    "asked": "what was asked for is the reader's to know; the checkpoint is compared",
    "version": "no leaf says which version made it",
    "schema": "no figure",
    "rerun": "the request again, as a command",
    "framework": "the controls of kvcustody's library, or of the preparer's file",
    "statements": "the controls again",
    "statuses": "which sections a control may cite: no figure",
    "proof": "the proof of a policy: prove it again with `kvcustody policy prove`",
    "limitations": WORDS,
    "responses": "what people answered",
    "changes": "against the report as of the earlier checkpoint: compare with that one",
    "window": UNSIGNED,
    "boundary.witnessed": UNSIGNED,
    "boundary.checkpoint.at_us": UNSIGNED,
    "boundary.checkpoint.signed_us": UNSIGNED,
    "population.query": WORDS,
    "population.balances[].left_source": WORDS,
    "population.balances[].right_source": WORDS,
    "decided.balances[].left_source": WORDS,
    "decided.balances[].right_source": WORDS,
    "tiers.balances[].left_source": WORDS,
    "tiers.balances[].right_source": WORDS,
    "exceptions[].meaning": WORDS,
    **{
        f"opinion.exceptions[].{name}": "words, and what people answered"
        for name in ("cause", "risk", "owner", "date", "response", "compensating_control")
    },
    "signature": "by itself: its line below",
}


class Comparison:
    """Fields that were compared."""

    def __init__(self) -> None:
        self.lines: list[tuple[bool, str]] = []

    def add(self, name: str, stated: Any, made: Any) -> None:
        """One field, as the report states it and as leaves give it."""
        same = type(stated) is type(made) and stated == made
        text = "" if same else f": {_short(stated)} / {_short(made)}"
        self.lines.append((same, f"{'agrees ' if same else 'DIFFERS'}  {name}{text}"))

    @property
    def ok(self) -> bool:
        """Everything agrees."""
        return all(same for same, _ in self.lines)


def is_not_covered(path: str) -> bool:
    """Whether a field is of a part that is listed as not covered."""
    general = re.sub(r"\[\d+\]", "[]", path)
    return any(general == each or general.startswith((f"{each}.", f"{each}[")) for each in NOT_COVERED)


def compare(export: Path, report: Body, key: str | None = None) -> Comparison:
    """Every field of a report that is covered, and the proofs of the leaves."""
    again = Again(Export(export), report, parse_key(key) if key else None)
    return compare_with(again.report(), again.proofs(), report)


def compare_with(made: Body, proofs: Sequence[tuple[str, str]], report: Body) -> Comparison:
    """A report beside what was made again; `proofs` are names and problems, empty where there is none."""
    found = Comparison()
    for name, problem in proofs:
        found.add(name, problem, "")
    _fields(found, "", report, made)
    return found


_MISSING = "nothing"


def _fields(comparison: Comparison, path: str, stated: Any, recomputed: Any) -> None:
    """Field by field; what is nowhere made again has to be listed."""
    if recomputed is _MISSING and is_not_covered(path):
        return
    if isinstance(stated, dict) and isinstance(recomputed, dict):
        for name in sorted(stated.keys() | recomputed.keys()):
            below = f"{path}.{name}" if path else name
            _fields(comparison, below, stated.get(name, _MISSING), recomputed.get(name, _MISSING))
    elif isinstance(stated, list) and isinstance(recomputed, list) and (stated or recomputed):
        for place in range(max(len(stated), len(recomputed))):
            here, there = (side[place] if place < len(side) else _MISSING for side in (stated, recomputed))
            _fields(comparison, f"{path}[{place}]", here, there)
    else:
        comparison.add(path, stated, recomputed)


class Drawn(NamedTuple):
    """A stratum: its key, the numbers of its members in the population, and the places that the seed draws."""

    key: tuple[str, str, str, str]
    members: list[int]
    places: list[int]
    duplicates: int


class Again:
    """A report, made again from an export for the same request."""

    def __init__(self, export: Export, report: Body, key: Key | None) -> None:
        if report["asked"]["tenant"] is not None:
            raise SystemExit("this is a tenant's own report: only those over all tenants are read")
        self.export, self.stated, self.key = export, report, key
        self.asked = report["asked"]
        self.period = Period(self.asked["since_us"], self.asked["until_us"])
        self.leaves = export.leaves
        self.bodies = [leaf.body for leaf in self.leaves]
        self.history = History(leaf.data for leaf in self.leaves)
        self.custodies = self._judged(self.period)
        self.facts = sections.Facts(self.bodies, self.history, self.period)
        self.names = names = {
            body["incarnation"]: body["worker"] for body in self.bodies if body["kind"] == "worker-started"
        }
        processes = {uuid: Process(life.offset_us, names.get(uuid, "")) for uuid, life in self.history.lives.items()}
        self.copies = judge_copies(self.bodies, processes, self.history.last_us, *self.period)

    def _judged(self, period: Period) -> list[Custody]:
        return list(judge(self.history, Chosen(*period)))

    def report(self) -> Body:
        """Every part that is covered, in the shape of the report."""
        facts, custodies = self.facts, self.custodies
        body: Body = {
            "asked": {"checkpoint": self.export.head.size},
            "boundary": self._boundary(),
            "population": sections.population(facts, custodies),
            "coverage": sections.coverage(custodies),
            "total": {"tenant": "*", "classification": "*", **figures(custodies)},
            "timeline": sections.timeline(facts, custodies),
            "timeliness": sections.timeliness(custodies),
            "recount": self._recount(),
            "activity": sections.activity(facts),
            "decided": sections.decided(facts),
            "read_back": sections.read_back(facts),
            "losses": sections.losses(facts),
            "tiers": self._tiers(),
            "routes": routes(self.bodies, self.names, self.history.last_us, *self.period),
            "storage": sections.storage(facts, custodies),
            "unscanned": facts.unscanned,
        }
        body["exceptions"], body["exceptions_left_out"] = sections.exceptions(facts, custodies)
        body["sampling"], body["sample"] = self._sample()
        body["board"] = sections.board(facts, body, list(self.export.logs), self._judged)
        body["opinion"] = sections.opinion(body, self.stated["framework"])
        return body

    # -- proofs ----------------------------------------------------------------------------------------------------

    def proofs(self) -> list[tuple[str, str]]:
        """The export's trees, the checkpoint's signature, and the report's own: names and problems."""
        checks = [(f"leaves of `{name}`: their tree under the root log", "") for name in self.export.logs]
        checks += [("export", problem) for problem in self.export.problems()]
        note = self.stated["boundary"]["checkpoint"]["note"]
        same = note.rpartition("\n\n")[0] == self.export.note.rpartition("\n\n")[0]
        checks.append(("checkpoint of the export", "" if same else "the report is of another checkpoint"))
        if self.key is not None:
            checks.append(("checkpoint: signature", self._problem(partial(self.export.check_signature, self.key))))
            if self.stated.get("signature") is not None:
                checks.append(("report: signature", self._problem(self._signature)))
        return checks

    def _problem(self, check: Callable[[], None]) -> str:
        try:
            check()
        except (ProofError, ValueError, LookupError) as problem:
            return str(problem) or type(problem).__name__
        return ""

    def _signature(self) -> None:
        """The report's digest is signed by the key that leaves of the system log name."""
        body = {name: value for name, value in self.stated.items() if name != "signature"}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
        digest, signature = hashlib.sha256(text.encode()).hexdigest(), self.stated["signature"]
        named = []
        for carried in signature["enrolments"]:
            log, _, _ = self._proved(carried["proof"], carried["leaf"].encode())
            named.append(json.loads(carried["leaf"]))
            need((log, named[-1]["kind"]) == (SYSTEM, "report-key"), "a leaf names no key of reports")
        need(bool(named), "no leaf names the key that signed the report")
        records = [sections.from_base64(body["record"]) for body in named[1:]]
        key = keys_in_turn(parse_key(named[0]["vkey"]), records)[-1].key
        need(signature["key"] == named[-1]["vkey"], "another key signed than the one that leaves name")
        for turn in self._report_keys():
            may = turn.key != key or turn.may_sign(self.asked["checkpoint"])
            need(may, "the key handed over before this checkpoint")
        statement = f"{key.name}\n{self.stated['schema']}\n{digest}\n".encode()
        good = ed25519_verifies(key.public, statement, sections.from_base64(signature["data"]))
        need(good and signature["key_id"] == key.id.hex(), "the signature is not of this report")

    def _report_keys(self) -> list[Turn]:
        """The keys of reports that the export's own leaves name."""
        leaves = [leaf.body for leaf in self.export.logs.get(SYSTEM, ()) if leaf.body["kind"] == "report-key"]
        records = [sections.from_base64(body["record"]) for body in leaves[1:]]
        return keys_in_turn(parse_key(leaves[0]["vkey"]), records) if leaves else []

    @cached_property
    def turns(self) -> list[Turn]:
        """The log's key and its successors."""
        assert self.key is not None
        return self.export.turns(self.key)

    def _proved(self, proof: str, leaf: bytes) -> tuple[str, int, str]:
        return check_leaf_proof(proof, leaf, [turn.key for turn in self.turns])

    # -- parts -----------------------------------------------------------------------------------------------------

    def _boundary(self) -> Body:
        extends = self.asked["extends"]
        path = [] if extends is None else consistency_path(self.export.root_hashes(), extends)
        head = self.export.head
        return {
            "checkpoint": {
                "origin": self.export.origin,
                "size": head.size,
                "root": head.root.hex(),
                "note": self._note(),
            },
            "logs": [
                {"name": name, "size": root.size, "root": root.root.hex()}
                for name, root in sorted(self.export.roots.items())
                if root.size
            ],
            "workers": self.facts.workers,
            "policies": self.facts.policies,
            "issuers": self.facts.issuers,
            "history": self.facts.history_said,
            "monitored": self.facts.monitored_said,
            "orders": self.facts.orders_said,
            "extends": extends,
            "consistency": [node.hex() for node in path],
        }

    def _note(self) -> str:
        """The report's note where it is of the export's checkpoint: the lines of signatures may be others."""
        note: str = self.stated["boundary"]["checkpoint"]["note"]
        same = note.rpartition("\n\n")[0] == self.export.note.rpartition("\n\n")[0]
        return note if same else self.export.note

    def _recount(self) -> Body | None:
        if not self.asked["recount"]:
            return None
        strange, missing, stray = unaccounted(self.history)
        return {
            "leaves": len(self.leaves),
            "digest": sections.population_digest(self.custodies),
            "unaccounted_residencies": strange,
            "unaccounted_generations": missing,
            "unaccounted_receipts": stray,
            "differences": [],
        }

    def _tiers(self) -> Body:
        rows = tier_rows(self.copies)
        inside = [body for body in self.bodies if self.period.has(body)]
        return {
            "rows": rows,
            "digest": copies_digest(self.copies),
            "balances": list(tier_balances(rows, self.facts.workers, self.bodies)),
            "decisions": transfer_decisions(inside),
        }

    # -- the sample ------------------------------------------------------------------------------------------------

    def _sample(self) -> tuple[Body, list[Body]]:
        strata = self._strata()
        members = [sections.member(self.facts, one) for one in self.custodies]
        members += [_copy_member(copy) for copy in self.copies]
        drawn = [
            (number, place, stratum.members[place]) for number, stratum in enumerate(strata) for place in stratum.places
        ]
        people = [members[number] for _, _, number in drawn]
        finder = _LeavesOf(self, people)
        sample = []
        for (stratum, place, number), person in zip(drawn, people, strict=True):
            leaves = finder.of(person)
            sample.append(
                {
                    "stratum": stratum,
                    "place": place,
                    "number": number,
                    "custody": person,
                    "leaves": self._shown(len(sample), leaves),
                    "leaves_left_out": max(0, len(leaves) - sections.LEAVES_MAX),
                }
            )
        wrong = [sum(not members[one.members[at]]["covered"] for at in one.places) for one in strata]
        size, risk_ppm = sections.sample_size(self.asked)
        deviations, whole = sum(wrong), sum(len(one.places) for one in strata)
        return {
            "size": size,
            "risk_ppm": risk_ppm,
            "deviations": deviations,
            "upper_limit_ppm": sections.upper_limit_ppm(deviations, whole, risk_ppm),
            "strata": [
                dict(zip(("tier", "tenant", "classification", "cause"), one.key, strict=True))
                | {"members": len(one.members), "drawn": len(one.places)}
                | {"duplicates": one.duplicates, "deviations": deviating}
                for one, deviating in zip(strata, wrong, strict=True)
            ],
        }, sample

    def _strata(self) -> list[Drawn]:
        groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
        for number, one in enumerate(self.custodies):
            groups["device", one.tenant, one.classification, one.cause or NO_END].append(number)
        for number, copy in enumerate(self.copies, len(self.custodies)):
            groups[copy.tier, copy.tenant, copy.classification, copy.cause or NO_END].append(number)
        size, _ = sections.sample_size(self.asked)
        shares = sections.allocate(size, [len(groups[key]) for key in sorted(groups)])
        made = []
        for number, (key, share) in enumerate(zip(sorted(groups), shares, strict=True)):
            places, duplicates = sections.redraw(self.asked["seed"], number, share, len(groups[key]))
            made.append(Drawn(key, groups[key], places, duplicates))
        return made

    def _shown(self, item: int, leaves: Sequence[Leaf]) -> list[Body]:
        """The leaves as the report shows them, in its order where it has the same ones; its proofs where they hold."""
        by_place = {(leaf.log, leaf.index): leaf for leaf in leaves}
        stated = self.stated["sample"][item]["leaves"] if item < len(self.stated["sample"]) else []
        places = [(one["log"], one["idx"]) for one in stated]
        kept = len(places) == len(set(places)) == min(len(leaves), sections.LEAVES_MAX)
        if not (kept and by_place.keys() >= set(places)):
            return [self._leaf(leaf, "") for leaf in leaves[: sections.LEAVES_MAX]]
        return [self._leaf(by_place[place], one["proof"]) for place, one in zip(places, stated, strict=True)]

    def _leaf(self, leaf: Leaf, proof: str) -> Body:
        shown = {"log": leaf.log, "idx": leaf.index, "kind": leaf.body["kind"], "leaf": leaf.data.decode()}
        if self.key is None:
            return shown | {"proof": proof}
        try:
            log, index, note = self._proved(proof, leaf.data)
            need((log, index) == (leaf.log, leaf.index), "it is of another leaf")
            need(note == self.stated["boundary"]["checkpoint"]["note"], "it is under another checkpoint")
        except (ProofError, ValueError, LookupError) as problem:
            return shown | {"proof": f"a proof that holds ({problem})"}
        return shown | {"proof": proof}


class _LeavesOf:
    """Finds every leaf that the verdict of a drawn member needs."""

    def __init__(self, again: Again, people: Sequence[Body]) -> None:
        self.leaves, self.named = again.leaves, defaultdict[tuple[str, int, int], list[Leaf]](list)
        self.releases: dict[tuple[str, int], list[Leaf]] = defaultdict(list)
        self.residencies: dict[tuple[str, int], set[int]] = defaultdict(set)
        wanted = {(one["incarnation"], one["pool"], one["generation"]): one["block"] for one in people}
        for leaf in again.leaves:
            for body in sections.items_of(leaf.body):
                self._take(leaf, body, wanted)

    def _take(self, leaf: Leaf, body: Body, wanted: dict[tuple[str, int, int], int]) -> None:
        life, kind = body.get("of_incarnation") or body["incarnation"], body["kind"]
        if kind in sections.OF_RESIDENCIES:
            self.residencies[leaf.log, leaf.index].add(int(body["residency"]))
        if kind == "residency-released":
            self.releases[life, int(body["residency"])].append(leaf)
        if kind in sections.NAMING:
            for (pool, generation), block in listed([*body.get("runs", ()), *body.get("written", ())]):
                key = (life, pool, generation)
                if key in wanted and block in (wanted[key], -1):
                    self.named[key].append(leaf)

    def of(self, person: Body) -> list[Leaf]:
        """The leaves of one member, each once, by log and place."""
        made = self._of_copy(person) if person["tier"] != "device" else self._of_custody(person)
        return [made[place] for place in sorted(made)]

    def _of_custody(self, person: Body) -> dict[tuple[str, int], Leaf]:
        uuid = person["incarnation"]
        named = self.named[uuid, person["pool"], person["generation"]]
        leaves = list(named)
        for residency in {one for leaf in named for one in self.residencies[leaf.log, leaf.index]}:
            leaves += self.releases[uuid, residency]
        own = (SYSTEM, f"tenant/{person['tenant']}")
        asked = set()
        for leaf in self.leaves:
            if leaf.body["kind"] == "erasure-requested" and leaf.body["tenant"] in (person["tenant"], None):
                leaves.append(leaf)
                asked.add(leaf.body["erasure"])
        for leaf in self.leaves:
            body = leaf.body
            if body["kind"] == "erasure-applied" and body["erasure"] in asked:
                leaves += [leaf] if (body.get("of_incarnation") or body["incarnation"]) == uuid else []
            elif body["kind"] in ("worker-started", "holds-narrowed"):
                leaves += [leaf] if body["incarnation"] == uuid and leaf.log in own else []
        return {(leaf.log, leaf.index): leaf for leaf in leaves}

    def _of_copy(self, person: Body) -> dict[tuple[str, int], Leaf]:
        leaves = {}
        for leaf in self.leaves:
            body, kind = leaf.body, leaf.body["kind"]
            about = body.get("of_incarnation") or body["incarnation"]
            lists = kind.startswith("copies-") and body["tier"] == person["tier"]
            lists = lists and about == person["incarnation"] and person["copy"] in body["numbers"]
            if lists or (kind == "worker-started" and body["incarnation"] == person["incarnation"]):
                leaves[leaf.log, leaf.index] = leaf
        return leaves


def _copy_member(copy: Copy) -> Body:
    return {
        **{name: getattr(copy, name) for name in ("incarnation", "tenant", "classification", "verdict")},
        **dict.fromkeys(("pool", "block", "generation"), 0),
        "shards": 1,
        "covered": copy.verdict == "covered",
        "due_us": copy.due_us,
        "cause": copy.cause or NO_END,
        "level": "",
        "tier": copy.tier,
        "copy": copy.number,
    }


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def lines_of(comparison: Comparison, *, is_signed: bool) -> Iterator[str]:
    """What is printed: every field, then what is not covered."""
    for _, line in comparison.lines:
        yield line
    for reason in dict.fromkeys(NOT_COVERED.values()):
        names = [path for path, why in NOT_COVERED.items() if why == reason]
        yield f"not covered: {', '.join(names)}: {reason}"
    if not is_signed:
        yield "not covered: signatures, and the proofs of drawn leaves: give the log's key (`--key`)"
    differing = sum(not same for same, _ in comparison.lines)
    yield f"{len(comparison.lines)} figures, {differing} differ"


def main(arguments: list[str]) -> int:
    """Compare, and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--key", help="the log's public key")
    options = parser.parse_args(arguments)
    found = compare(options.export, json.loads(options.report.read_bytes()), options.key)
    for line in lines_of(found, is_signed=options.key is not None):
        print(line)
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
