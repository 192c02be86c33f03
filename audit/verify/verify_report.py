"""Checks a report offline: its digest, its seal, the sample's draw, and every leaf of the sample under the checkpoint.

1. Nothing is believed for standing in the report: proofs are checked against the reader's public keys.
2. A bad report is a list of problems, never an exception; a malformed key of the reader's is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import orjson

from kvcustody.audit.events.block_runs import UNNAMED, decode_flat
from kvcustody.audit.events.change_items import runs_of_items
from kvcustody.audit.report.model import SCHEMA
from kvcustody.audit.report.population import draw
from kvcustody.audit.tlog.checkpoint import SignedCheckpoint, open_checkpoint
from kvcustody.audit.tlog.root_log import check_leaf, parse_leaf_proof
from kvcustody.audit.tlog.signed_note import VerifierKey, parse_vkey
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
        note = point["note"].encode()
        signed = open_checkpoint(note, keys)
        head = signed.checkpoint.head
        if (head.size, head.root.hex()) != (point["size"], point["root"]):
            problems.append("the checkpoint is not the one that its note states")
        if point["size"] != body["asked"]["checkpoint"]:
            problems.append("the report was asked for as of another checkpoint")
        problems += _drawn(body)
        problems += _added_up(body.get("tiers", {"rows": []}))  # reports from before have none
        leaves = _leaves(body, keys, note, signed, problems)
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


def _added_up(tiers: dict[str, Any]) -> list[str]:
    """Copies of each row have one verdict each, and none waits that is not open."""
    verdicts = ("covered", "late", "open", "unproven", "disputed")
    wrong = (
        row
        for row in tiers["rows"]
        if sum(row[name] for name in verdicts) != row["due"] or not 0 <= row["waiting"] <= row["open"]
    )
    return [f"verdicts of copies in tier `{row['tier']}` do not add up to what was due" for row in wrong]


def _leaves(
    body: dict[str, Any],
    keys: Sequence[VerifierKey],
    note: bytes,
    signed: SignedCheckpoint,
    problems: list[str],
) -> int:
    """Check every leaf of the sample; how many there are. All stand under one note, whose signature is checked once."""
    count = 0
    for item in body["sample"]:
        custody = item["custody"]
        for leaf in item["leaves"]:
            count += 1
            where = f"leaf {leaf['idx']} of `{leaf['log']}`"
            data = leaf["leaf"].encode()
            try:
                proof = parse_leaf_proof(leaf["proof"].encode())
                sealed = check_leaf(proof, data, keys, signed=signed if proof.head.note == note else None)
            except LedgerError as problem:
                problems.append(f"{where}: {problem.message}")
                continue
            if (sealed.name, proof.index) != (leaf["log"], leaf["idx"]):
                problems.append(f"{where} is leaf {proof.index} of `{sealed.name}`")
            if proof.head.note != note:
                problems.append(f"{where} is proved under another checkpoint")
            if not _names(orjson.loads(data), custody):
                problems.append(f"{where} does not name the custody that it was drawn for")
    return count


def _names(body: dict[str, Any], custody: dict[str, Any]) -> bool:
    """Whether a leaf names the block at the generation."""
    pairs, _ = decode_flat(
        [*body.get("runs", ()), *body.get("written", ()), *chain.from_iterable(runs_of_items(body))]
    )
    there = (pairs.pools == custody["pool"]) & (pairs.generations == custody["generation"])
    return bool((there & np.isin(pairs.blocks, (custody["block"], UNNAMED))).any())
