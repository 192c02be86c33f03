"""Prove that a run of leaves stands at its place in a signed log, without the leaves before and after it.

1. The proof is the frontier at the first leaf and the consistency path from the end of the run to the signed tree.
   Extending the frontier by the leaves gives the root of the tree that ends with them; the path shows that the signed
   tree extends it. A leaf that is changed, left out, added or moved gives another root.
2. A run from leaf 0 to the log's end needs neither: its leaves give the signed root.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcustody.audit.leaf.merkle import Frontier, TreeHead, split_hashes
from kvcustody.audit.tlog.proofs import (
    ProofError,
    TileSource,
    check_consistency,
    consistency_proof,
    frontier_at,
)


class RangeProof(NamedTuple):
    """The leaves from `first` up to but without `end` are part of a log: `before` is the frontier at `first`."""

    first: int
    end: int
    before: Frontier
    path: tuple[bytes, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the proof in the manifest's form."""
        return {
            "first": self.first,
            "end": self.end,
            "before": _text(self.before.to_bytes()),
            "path": [_text(node) for node in self.path],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RangeProof:
        """Return the proof from the manifest's form; raises `ProofError` for anything else."""
        try:
            before = Frontier.from_bytes(base64.b64decode(value["before"], validate=True))
            path = b"".join(base64.b64decode(node, validate=True) for node in value["path"])
            proof = cls(value["first"], value["end"], before, tuple(split_hashes(path)))
        except (KeyError, TypeError, ValueError):
            raise ProofError("the proof of a run of leaves is malformed") from None
        if proof.first.__class__ is not int or proof.end.__class__ is not int:
            raise ProofError("the proof of a run of leaves is malformed")
        if not 0 <= proof.first <= proof.end or before.size != proof.first:
            problem = f"the proof of leaves `{proof.first}` to `{proof.end}` contradicts itself"
            raise ProofError(problem, first=proof.first, end=proof.end)
        return proof

    def check(self, after: Frontier, head: TreeHead) -> None:
        """Raise `ProofError` unless `after`, this frontier extended by the leaves, is the start of the signed tree."""
        if after.size != self.end:
            problem = f"`{after.size - self.first}` leaves were given for `{self.first}` to `{self.end}`"
            raise ProofError(problem, first=self.first, end=self.end)
        check_consistency(after.head(), head, self.path)


def range_proof(tiles: TileSource, first: int, end: int, size: int) -> RangeProof:
    """Return the proof for leaves `first` up to but without `end` of the tree of `size` leaves."""
    if not 0 <= first <= end <= size:
        raise ProofError(f"leaves `{first}` to `{end}` are not in a tree of `{size}`", first=first, end=end)
    return RangeProof(first, end, frontier_at(tiles, first), tuple(consistency_proof(tiles, end, size)))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
