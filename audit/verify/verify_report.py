"""Checks a report offline: its digest, its seal, the sample's draw, and every leaf of the sample under the checkpoint.

1. Nothing is believed for standing in the report: proofs are checked against the reader's public keys.
2. A bad report is a list of problems, never an exception; a malformed key of the reader's is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from kvcustody.audit.report.model import SCHEMA
from kvcustody.audit.report.population import draw
from kvcustody.audit.tlog.checkpoint import open_checkpoint
from kvcustody.audit.tlog.root_log import check_leaf, parse_leaf_proof
from kvcustody.audit.tlog.signed_note import parse_vkey
from kvcustody.errors import LedgerError


class ReportCheck(NamedTuple):
    """What was looked at and what is wrong with it."""

    digest: str
    checkpoint: int
    leaves: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems


def verify_report(data: bytes, vkeys: Sequence[str], *, expected_digest: str | None = None) -> ReportCheck:
    """Check `report.json`; raises `NoteError` for a malformed key of the reader's."""
    keys = [parse_vkey(text) for text in vkeys]
    digest = hashlib.sha256(data).hexdigest()
    problems: list[str] = []
    if expected_digest is not None and digest != expected_digest:
        problems.append(f"the SHA-256 is `{digest}`, not `{expected_digest}`")
    try:
        body = orjson.loads(data)
        if body["schema"] != SCHEMA:
            problems.append(f"the schema is `{body['schema']}`, not `{SCHEMA}`")
        point = body["boundary"]["checkpoint"]
        sealed = open_checkpoint(point["note"].encode(), keys).checkpoint
        if (sealed.head.size, sealed.head.root.hex()) != (point["size"], point["root"]):
            problems.append("the checkpoint is not the one that its note states")
        if point["size"] != body["asked"]["checkpoint"]:
            problems.append("the report was asked for as of another checkpoint")
        problems += _drawn(body)
        leaves = _leaves(body, keys, point["note"], problems)
    except (LedgerError, ValueError, KeyError, TypeError, AttributeError) as problem:
        text = problem.message if isinstance(problem, LedgerError) else repr(problem)
        return ReportCheck(digest, 0, 0, (*problems, f"the report cannot be checked: {text}"))
    return ReportCheck(digest, int(point["size"]), leaves, tuple(problems))


def _drawn(body: dict[str, Any]) -> list[str]:
    asked, population = body["asked"], body["population"]["custodies"]
    numbers = draw(asked["seed"], asked["sample"], population)
    if numbers != [item["number"] for item in body["sample"]]:
        return ["the sample is not the one that the seed draws from the population"]
    return []


def _leaves(body: dict[str, Any], keys: Sequence[Any], note: str, problems: list[str]) -> int:
    count = 0
    for item in body["sample"]:
        custody = item["custody"]
        for leaf in item["leaves"]:
            count += 1
            where = f"leaf {leaf['idx']} of `{leaf['log']}`"
            data = leaf["leaf"].encode()
            try:
                proof = parse_leaf_proof(leaf["proof"].encode())
                sealed = check_leaf(proof, data, keys)
            except LedgerError as problem:
                problems.append(f"{where}: {problem.message}")
                continue
            if (sealed.name, proof.index) != (leaf["log"], leaf["idx"]):
                problems.append(f"{where} is leaf {proof.index} of `{sealed.name}`")
            if proof.head.note.decode() != note:
                problems.append(f"{where} is proved under another checkpoint")
            if not _names(orjson.loads(data), custody):
                problems.append(f"{where} does not name the custody that it was drawn for")
    return count


def _names(body: dict[str, Any], custody: dict[str, Any]) -> bool:
    """Whether a leaf names the block at the generation."""
    for item in (*body.get("runs", ()), *body.get("written", ())):
        first, deltas, counts = int(item[0]), item[1], item[2] or [1] * len(item[1])
        pool = item[3] if len(item) > 3 else 0
        steps = [delta for delta, count in zip(deltas, counts, strict=True) for _ in range(count)]
        place = custody["generation"] - first
        if (
            pool == custody["pool"]
            and 0 <= place < len(steps)
            and sum(steps[: place + 1]) == custody["block"]
        ):
            return True
    return False
