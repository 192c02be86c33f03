"""What an erasure's certificate proves from its own JSON: leaves under a checkpoint, and their content.

It takes no package, so that the stand-alone verifier has it too (`audit/exports/amalgamate.py`). Figures need
the blocks that leaves name: `certificate_rules` has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcustody.audit.evidence.erasure.ended_names import ended_names
from kvcustody.audit.evidence.erasure.erasure_holds import holds_among
from kvcustody.audit.evidence.erasure.figures_from_leaves import waiting_copies
from kvcustody.audit.evidence.erasure.who_owes import owing, without_answer
from kvcustody.audit.evidence.processes.enforcement import CANARY, MONITOR
from kvcustody.audit.evidence.processes.marked_processes import marked_processes
from kvcustody.audit.evidence.processes.work_periods import work_periods
from kvcustody.audit.leaf.merkle import TreeHead, leaf_hash
from kvcustody.audit.reports.document import Facts
from kvcustody.audit.reports.erasure.certificate import LIMITS
from kvcustody.audit.tlog.backend import canonical_json, parse_json
from kvcustody.audit.tlog.proofs import check_inclusion
from kvcustody.audit.tlog.root_log import check_head, parse_head_proof
from kvcustody.audit.tlog.signed_note import VerifierKey, decode_base64
from kvcustody.errors import LedgerError

Bodies = Sequence[Mapping[str, Any]]
REQUESTED_KIND = "erasure-requested"
_PARTS = {
    *("erasure", "issued_us", "outcome", "request", "marked", "monitored", "workers", "waiting"),
    *("unreachable", "holds", "population", "figures", "ledger", "leaves", "limits"),
}
_REQUEST = {"erasure", "tenant", "selector", "subject", "session", "actor", "at_us", "deadline_us", "detail"}


def check_parts(facts: Facts) -> None:
    """Raise `LedgerError` if a part is missing or foreign to a certificate."""
    if facts.keys() - {"order", "routers"} != _PARTS:
        raise LedgerError("it has unknown parts, or lacks some")
    if facts["request"].keys() != _REQUEST | {"commitment"}:
        raise LedgerError("its request has unknown parts, or lacks some")


def proved_bodies(facts: Facts, keys: Sequence[VerifierKey], problems: list[str]) -> list[dict[str, Any]]:
    """Return the bodies of the leaves whose place is proved; the others are problems."""
    heads: dict[str, TreeHead] = {}
    ledger = facts["ledger"]
    for log, text in ledger["heads"].items():
        sealed = check_head(parse_head_proof(text.encode()), keys)
        if sealed.name != log:
            problems.append(f"the head of `{log}` is that of another log")
            continue
        heads[log] = sealed.head
        size = sealed.signed.checkpoint.head.size
        if size != ledger["checkpoint_size"]:
            problems.append(f"the head of `{log}` is under a checkpoint of {size}, not the stated one")
    bodies = []
    seen: set[tuple[str, int]] = set()
    for one in facts["leaves"]:
        log, idx, leaf = one["log"], one["idx"], one["leaf"].encode()
        if log not in heads or (log, idx) in seen:
            problems.append(f"leaf {idx} of `{log}` has no head, or is there twice")
            continue
        seen.add((log, idx))
        path = [decode_base64(hash_, "path") for hash_ in one["path"]]
        check_inclusion(leaf_hash(leaf), idx, heads[log], path)
        if one.keys() != {"log", "idx", "leaf", "path"}:
            problems.append(f"leaf {idx} of `{log}` has unknown parts")
        bodies.append(parse_json(leaf))
    if heads.keys() != {log for log, _ in seen} or ledger.keys() != {"checkpoint_size", "heads"}:
        problems.append("it has heads of logs without a leaf, or unknown parts")
    return bodies


def certificate_disagreements(facts: Facts, bodies: Bodies) -> Iterator[str]:
    """Yield statements that its leaves do not support or that contradict each other, except its figures."""
    if differ(facts["marked"], [one._asdict() for one in marked_processes(bodies)]):
        yield "the processes that it calls replayed or generated are not those of its leaves"
    if any(set(one) != {"from_us", "until_us", "mode"} for one in facts["monitored"]) or any(
        one["mode"] not in (MONITOR, CANARY) or type(one["from_us"]) is not int for one in facts["monitored"]
    ):
        yield "the times of monitoring that it states are none"
    asked = facts["request"]
    holds = [one._asdict() for one in holds_among(bodies, asked["tenant"], asked["subject"])]
    if differ(facts["holds"], holds):
        yield "the legal holds that it lists are not those of its leaves"
    if differ(facts.get("routers"), ended_names(bodies, facts["erasure"])):
        yield "what it says of routers' names and doors is not what its leaves show"
    if facts["limits"] != [*LIMITS]:
        yield "its limits are not those that every certificate states"
    if differ(facts["population"]["units"], facts["figures"]["units"]):
        yield "the units of its population are not those of its figures"
    if facts.get("order"):
        yield f"nobody follows its request, as its issuer says: {facts['order']}"
    yield from _request(facts, bodies)
    yield from _outcome(facts, bodies)


def differ(one: Any, other: Any) -> bool:
    """Return whether two JSON values differ: `1` is not `true`."""
    return canonical_json(one) != canonical_json(other)


def _request(facts: Facts, bodies: Bodies) -> Iterator[str]:
    asked = [one for one in bodies if one["kind"] == REQUESTED_KIND and one["erasure"] == facts["erasure"]]
    if len(asked) != 1:
        yield f"it has one request, and the leaves of requests are {len(asked)}"
        return
    stated, body = facts["request"], asked[0]
    deadline_us = int(body["at_us"]) - int(body["boot_us"]) + int(body["deadline_boot_us"])
    if stated["erasure"] != facts["erasure"] or differ(stated["deadline_us"], deadline_us):
        yield "it states another erasure or deadline than the request says"
    for name in ("tenant", "selector", "subject", "session", "actor", "at_us", "detail"):
        if differ(stated[name], body[name]):
            yield f"it states `{name}` as `{stated[name]}`, the request says `{body[name]}`"


def _outcome(facts: Facts, bodies: Bodies) -> Iterator[str]:
    figures, away = facts["figures"], len(facts["waiting"]) + len(facts["unreachable"])
    copies, silent = waiting_copies(figures), without_answer(bodies, facts["erasure"])
    is_open = figures["unproven"] or copies or figures["reread_nonzero"] or away
    if facts["outcome"] == "partial":
        if not (is_open or silent):
            yield "it states `partial` although its leaves leave nothing open"
        return
    if facts["outcome"] != "complete":
        yield f"its outcome `{facts['outcome']}` is none"
        return
    for worker in silent:
        yield f"no leaf of worker `{worker}` says that it is complete"
    owed = owing(work_periods(bodies), int(facts["request"]["at_us"]))
    if owed != sorted(worker["worker"] for worker in facts["workers"]):
        yield "the workers that it lists are not those that were at work when it was requested"
    if is_open:
        yield (
            f"it says complete, with {figures['unproven']} blocks unproven, {copies} copies without evidence of their "
            f"end, {figures['reread_nonzero']} bytes not zero, and {away} workers without an answer"
        )
