"""Reads an export and proves it: every leaf in its log's tree, every head in the root log, that under the signature.

Nothing that the manifest says is believed but where the files are.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from signed_log import (
    Head,
    Key,
    ProofError,
    Turn,
    keys_in_turn,
    leaf_hash,
    need,
    open_checkpoint,
    open_root_leaf,
    tree_root,
)

Body = dict[str, Any]
SYSTEM = "system"


class Leaf(NamedTuple):
    """A leaf where it stands, as bytes and as what it says."""

    log: str
    index: int
    data: bytes
    body: Body


class Export:
    """Every log of an export, whole; `roots` are what their leaves give."""

    def __init__(self, folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if manifest["format"] != "ndjson":
            raise SystemExit("export it as ndjson: `kvcustody audit export --format ndjson`")
        if not manifest["openings"]:
            raise SystemExit("the export has no root log: export every log of the ledger, whole")
        self.note = (folder / "checkpoint").read_text()
        origin, size, root = self.note.splitlines()[:3]
        self.origin, self.head = origin, Head(int(size), base64.b64decode(root))
        self.logs: dict[str, list[Leaf]] = {}
        for log in manifest["logs"]:
            some: list[Leaf] = []
            for file in log["files"]:
                for data in (folder / file["path"]).read_bytes().split(b"\n")[:-1]:
                    some.append(Leaf(log["name"], len(some), data, json.loads(data)))
            self.logs[log["name"]] = some
        self.roots = {name: Head(len(some), _root(some)) for name, some in self.logs.items()}
        lines = (folder / "root.ndjson").read_bytes().splitlines()
        self.openings = [(line["leaf"], line["opening"]) for line in map(json.loads, lines)]

    @property
    def leaves(self) -> list[Leaf]:
        """Every leaf of every log."""
        return [leaf for some in self.logs.values() for leaf in some]

    def root_hashes(self) -> list[bytes]:
        """The leaf hashes of the root log."""
        return [leaf_hash(bytes.fromhex(leaf)) for leaf, _ in self.openings]

    def problems(self) -> list[str]:
        """Why the leaves are not those that stand under the checkpoint; empty where they are."""
        newest: dict[str, Head] = {}
        faults: list[str] = []
        for leaf, opening in self.openings:
            try:
                if opening is not None:
                    opened = open_root_leaf(bytes.fromhex(leaf), bytes.fromhex(opening))
                    newest[opened.name] = opened.head
            except (ProofError, ValueError) as problem:
                faults.append(f"root log: {problem}")
        if Head(len(self.openings), tree_root(self.root_hashes())) != self.head:
            faults.append("the root log does not have the root that the checkpoint states")
        faults += [
            f"the leaves of `{name}` do not give the head that stands in the root log"
            for name in sorted(newest.keys() | self.roots.keys())
            if newest.get(name) != self.roots.get(name)
        ]
        wrong = [leaf for leaf in self.leaves if leaf.body.get("log") != leaf.log]
        return faults + [f"leaf {leaf.index} of `{leaf.log}` says that it is another log's" for leaf in wrong]

    def turns(self, first: Key) -> list[Turn]:
        """The log's key that was given, and those that it handed over to on record.

        Raises `ProofError` for a handover that does not count: not signed by both, or of another tree than this one.
        """
        leaves = [leaf.body for leaf in self.logs.get(SYSTEM, ()) if leaf.body["kind"] == "signing-key"]
        records = [base64.b64decode(body["record"]) for body in leaves]
        turns = keys_in_turn(first, [record for record in records if record])
        hashes = self.root_hashes()
        for until in (turn.until for turn in turns if turn.until is not None):
            need(tree_root(hashes[: until.size]) == until.root, "a handover is of another tree than this log's")
        return turns

    def check_signature(self, first: Key) -> None:
        """Raise `ProofError` unless the checkpoint is signed by the key that was given, or its successor."""
        open_checkpoint(self.note, [turn.key for turn in self.turns(first) if turn.may_sign(self.head.size)])


def _root(leaves: Sequence[Leaf]) -> bytes:
    return tree_root(leaf_hash(leaf.data) for leaf in leaves)
