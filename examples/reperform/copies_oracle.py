"""Copies off the device a second time: docs/concepts/deletion-coverage.md copy by copy, in plain Python.

Leaves go in, the chapter of tiers comes out: coverage by tier, tenant and class, the digest, identities, decisions.
Of copies of one number the first leaf counts: the process's own, then by sequence.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lives_oracle import short

Body = dict[str, Any]
VERDICTS = ("covered", "late", "open", "unproven", "disputed")
EVIDENCE = ("zeroed", "unlinked", "key-destroyed", "deleted")
DIED = "unproven: process death"
UNSEEN = (DIED, "orphan: its end was not recorded")  # ends that somebody else recorded
STOPPED = "teardown"
NEVER = 1 << 62
NO_END = "no end on record"


class Listed(NamedTuple):
    """A copy as one leaf lists it; `at` is when it was stored or ended."""

    name: str
    due: int
    at: int
    bytes: int
    leaf: Body


class Copy(NamedTuple):
    """A copy that was due, with its verdict; `due` is boot time."""

    incarnation: str
    tier: str
    number: int
    tenant: str
    classification: str
    cause: str
    verdict: str
    due: int
    due_us: int
    bytes: int
    is_ended: bool
    evidence: frozenset[str]
    lag: int


class Process(NamedTuple):
    """What turns a process's boot time into UTC, and its worker's name."""

    offset_us: int
    worker: str


class Found(NamedTuple):
    """What a process found under a name that one before it had left, when (UTC); `is_heirs`: of another worker."""

    name: str
    incarnation: str
    worker: str
    at_us: int
    cause: str
    is_heirs: bool = False


def judge_copies(
    leaves: Iterable[Body], processes: dict[str, Process], now_us: int, since_us: int, until_us: int
) -> list[Copy]:
    """Every copy that was due in a period, by incarnation, tier and number."""
    steps: dict[tuple[str, str], list[Body]] = defaultdict(list)
    by_tier: dict[str, list[Found]] = defaultdict(list)
    opened: dict[tuple[str, str, str], set[str]] = defaultdict(set)  # by whom, whose tier: names that it found
    for body in leaves:
        if body["kind"] == "copies-destroyed" and not any(body["numbers"]):
            by = processes.get(body["incarnation"], Process(0, ""))
            for name, at in zip(body["names"], body["destroyed_boot_us"], strict=True):
                of = Found(name, body["incarnation"], by.worker, int(at) + by.offset_us, body["cause"])
                by_tier[body["tier"]].append(of)
        elif body["kind"] == "tier-inherited":
            opened[body["incarnation"], body["left_by_process"], body["tier"]] |= {*body["copies"]}
        elif body["kind"] in ("copies-stored", "copies-ended", "copies-destroyed"):
            steps[body.get("of_incarnation") or body["incarnation"], body["tier"]].append(body)
    copies: list[Copy] = []
    for uuid, tier in sorted(steps):
        process = processes.get(uuid, Process(0, ""))
        left = []
        for one in by_tier[tier]:
            if one.incarnation != uuid and process.worker and one.worker == process.worker:
                left.append(one)
            elif one.incarnation != uuid and _is_heir(opened, one, uuid, tier, set()):
                left.append(one._replace(is_heirs=True))
        judged = _Tier(uuid, tier, steps[uuid, tier], process, left).judge(now_us)
        copies += (copy for copy in judged if since_us <= copy.due_us < until_us)
    return copies


def _is_heir(opened: dict[tuple[str, str, str], set[str]], one: Found, uuid: str, tier: str, passed: set[str]) -> bool:
    """Whether who found a name says that it opened the tier of this process, or of one that did, and found it there."""
    for (by, before, of), names in opened.items():
        if before != uuid or of != tier or one.name not in names or by in passed:
            continue
        if by == one.incarnation or _is_heir(opened, one, by, tier, passed | {by}):
            return True
    return False


class _Tier:
    """All copies of one tier of one process."""

    def __init__(self, uuid: str, tier: str, steps: list[Body], process: Process, left: list[Found]) -> None:
        self.uuid, self.tier, self.process, self.left = uuid, tier, process, left
        self.stored = self._listed(steps, "copies-stored", "stored_boot_us")
        self.ended = self._listed(steps, "copies-ended", "ended_boot_us")
        self.proved = {
            kind: self._listed(
                [body for body in steps if body.get("cause") == kind],
                "copies-destroyed",
                "destroyed_boot_us",
            )
            for kind in EVIDENCE
        }

    def _listed(self, steps: list[Body], kind: str, moment: str) -> dict[int, Listed]:
        leaves = [body for body in steps if body["kind"] == kind]
        leaves.sort(key=lambda body: (body["incarnation"] != self.uuid, int(body["sequence"]), int(body["part"])))
        listed: dict[int, Listed] = {}
        for body in leaves:
            dues = body.get("due_boot_us", [0] * len(body["numbers"]))
            columns = (body["numbers"], body["names"], dues, body[moment], body["bytes_each"])
            for number, name, due, at, size in zip(*columns, strict=True):
                listed.setdefault(int(number), Listed(name, int(due), int(at), int(size), body))
        return listed

    def judge(self, now_us: int) -> list[Copy]:
        """Copies that ended, and those that are due without an end; by number."""
        now = now_us - self.process.offset_us
        made = [self._ended(number, end, now) for number, end in self.ended.items()]
        for number, begun in self.stored.items():
            end = self.ended.get(number)
            if (end is None or end.name != begun.name) and begun.due < now:
                made.append(self._overdue(number, begun))
        kept = [copy for copy in made if copy is not None]
        return sorted(kept, key=lambda copy: (copy.number, not copy.cause))

    def _evidence(self, number: int, name: str) -> dict[str, int]:
        """When each kind of evidence of a copy came, where it is of the copy's name."""
        return {
            kind: found[number].at
            for kind, found in self.proved.items()
            if number in found and found[number].name == name
        }

    def _found_later(self, name: str, since: int, *, died: bool = False) -> dict[str, int]:
        """Evidence that a later process gave under the name of a copy that was there since then.

        An heir's counts where the death is on record (`died`).
        """
        made: dict[str, int] = {}
        for one in self.left:
            at = one.at_us - self.process.offset_us
            if one.name == name and at >= since and one.cause in EVIDENCE and (died or not one.is_heirs):
                made[one.cause] = min(at, made.get(one.cause, NEVER))
        return made

    def _ended(self, number: int, end: Listed, now: int) -> Copy | None:
        begun = self.stored.get(number)
        if begun is not None and begun.name != end.name:
            begun = None
        cause, evidence = end.leaf["cause"], self._evidence(number, end.name)
        stated = end.due if begun is None else begun.due
        stayed = cause == STOPPED and not evidence  # in files: due when it was, not when the process stopped
        due = stated if stayed else min(stated, end.due)
        if begun is not None and not evidence:
            evidence = self._found_later(end.name, begun.at, died=cause == DIED)
        if stayed and not evidence and due >= now:
            return None
        unseen = cause in UNSEEN
        within = int((begun.leaf if unseen and begun is not None else end.leaf)["within_us"])
        first = min(evidence.values(), default=NEVER)
        if begun is None:
            verdict = "unproven"
        elif end.due > stated:
            verdict = "disputed"
        elif evidence:
            in_time = first <= due + within and (unseen or end.at <= due + within)
            verdict = "covered" if in_time else "late"
        else:
            verdict = "unproven" if unseen else "open"
        return self._copy(number, end, cause, verdict, due, evidence)

    def _overdue(self, number: int, begun: Listed) -> Copy:
        """Its end is not on record: the evidence of a later process alone counts."""
        own = self._evidence(number, begun.name)
        later = {} if own else self._found_later(begun.name, begun.at)
        in_time = min(later.values(), default=NEVER) <= begun.due + int(begun.leaf["within_us"])
        verdict = ("covered" if in_time else "late") if later else "open"
        made = self._copy(number, begun, "", verdict, begun.due, own or later)
        return made._replace(is_ended=bool(later))

    def _copy(self, number: int, listed: Listed, cause: str, verdict: str, due: int, evidence: dict[str, int]) -> Copy:
        lag = max(0, min(evidence.values()) - due) if evidence else 0
        who = listed.leaf["tenant"], listed.leaf["classification"]
        return Copy(
            *(self.uuid, self.tier, number, *who, cause, verdict, due, due + self.process.offset_us),
            *(listed.bytes, True, frozenset(evidence), lag),
        )


def copies_digest(copies: Sequence[Copy]) -> str:
    """SHA-256: of each incarnation and tier their names, then four numbers a copy."""
    digest, before = hashlib.sha256(), ("", "")
    for copy in copies:
        if (copy.incarnation, copy.tier) != before:
            before = copy.incarnation, copy.tier
            digest.update(f"{copy.incarnation}\n{copy.tier}\n".encode())
        for number in (copy.number, copy.due, copy.bytes, VERDICTS.index(copy.verdict)):
            digest.update(number.to_bytes(8, "big", signed=True))
    return digest.hexdigest()


def tier_rows(copies: Sequence[Copy]) -> list[Body]:
    """Coverage of copies by tier, tenant and classification."""
    groups: dict[tuple[str, str, str], list[Copy]] = defaultdict(list)
    for copy in copies:
        groups[copy.tier, copy.tenant, copy.classification].append(copy)
    rows = []
    for key in sorted(groups):
        of = groups[key]
        row: Body = dict(zip(("tier", "tenant", "classification"), key, strict=True)) | {"due": len(of)}
        row |= {verdict: sum(copy.verdict == verdict for copy in of) for verdict in VERDICTS}
        row["waiting"] = sum(copy.verdict == "open" and copy.is_ended for copy in of)
        row |= {kind.replace("-", "_"): sum(kind in copy.evidence for copy in of) for kind in EVIDENCE}
        row["bytes"] = sum(copy.bytes for copy in of if copy.evidence)
        row["lag_us_max"] = max(copy.lag for copy in of)
        rows.append(row)
    return rows


def tier_balances(rows: Sequence[Body], workers: Sequence[Body], leaves: Sequence[Body]) -> Iterator[Body]:
    """Identities: verdicts beside what was due, and each worker's own counters beside its leaves."""
    for tier in dict.fromkeys(row["tier"] for row in rows):
        of = [row for row in rows if row["tier"] == tier]
        yield {
            "name": f"copies due in {tier} = covered + late + open + unproven + disputed",
            "left": sum(row["due"] for row in of),
            "right": sum(row[verdict] for row in of for verdict in VERDICTS),
        }
    listed: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for body in leaves:
        if body["kind"] in ("copies-stored", "copies-ended", "copies-destroyed") and any(body["numbers"]):
            about = body.get("of_incarnation") or body["incarnation"]
            listed[about, body["tier"], body["kind"].removeprefix("copies-")] += body["numbers"]
    lives = [worker["incarnation"] for worker in workers]
    for worker in workers:
        for tier in worker["tiers"]:
            for step in ("stored", "ended", "destroyed"):
                numbers = listed[worker["incarnation"], tier["tier"], step]
                who = f"{worker['name']} {short(worker['incarnation'], lives)}"
                yield {
                    "name": f"{who}: copies {step} in {tier['tier']} by its counter when it stopped = in leaves",
                    "left": tier[step],
                    "right": len(set(numbers)) if step == "destroyed" else len(numbers),
                }


def transfer_decisions(leaves: Iterable[Body]) -> list[Body]:
    """What was decided about moving copies, and what it took, of leaves of a period."""
    names = ("tier", "action", "choice", "outcome")
    sums = ("bytes", "transfer_us", "recompute_us", "actual_us")
    groups: dict[tuple[str, ...], list[Body]] = defaultdict(list)
    for body in leaves:
        if body["kind"] == "transfer-decided":
            groups[tuple(body[name] for name in names)].append(body)
    return [
        dict(zip(names, key, strict=True))
        | {"decisions": len(groups[key])}
        | {name: sum(int(body[name]) for body in groups[key]) for name in sums}
        for key in sorted(groups)
    ]
