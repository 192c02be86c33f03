"""Enclosures of an export: handovers of the signing key, and timestamps of checkpoints.

1. Each is tied to the export's checkpoint: a consistency path leads from the tree that it speaks of to the signed
   one.
2. A handover is a leaf of the system log, with its inclusion proof under that checkpoint. One that is in no log
   counts for nothing.
3. A timestamp's token is over the text of a checkpoint. It needs the authority's certificate, which the reader
   brings.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcustody.audit.leaf.merkle import HASH_BYTES, split_hashes
from kvcustody.audit.tlog.tiles import ExportError

KEYS, TIMESTAMPS = "keys", "timestamps"
LEAF, PROOF, TEXT, TOKEN = ".leaf", ".tlog-proof", ".txt", ".tsr"


@dataclass(frozen=True, slots=True)
class HandoverProof:
    """A leaf of the system log by which one key hands over to the next, and the proof of its place."""

    leaf: bytes
    proof: bytes
    path: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stamp:
    """An authority's token (RFC 3161) over the text of a checkpoint."""

    authority: str
    text: bytes
    token: bytes
    path: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Enclosed:
    """An enclosure in the manifest: the path of its two files without their endings. `authority` of a stamp."""

    place: str
    path: tuple[bytes, ...]
    authority: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the enclosure in the manifest's form."""
        path = [base64.b64encode(node).decode() for node in self.path]
        return {"place": self.place, "consistency": path} | ({"authority": self.authority} if self.authority else {})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Enclosed:
        """Return the enclosure from the manifest's form; raises `ExportError` for a place outside, and errors of
        malformed values.
        """
        place = str(value["place"])
        if place.startswith("/") or "\\" in place or ".." in place.split("/"):
            raise ExportError(f"the manifest names `{place[:64]}`, which is outside the export")
        nodes = [base64.b64decode(node, validate=True) for node in value["consistency"]]
        if any(len(node) != HASH_BYTES for node in nodes):
            raise ValueError("a path is not of hashes")
        return cls(place, tuple(split_hashes(b"".join(nodes))), str(value.get("authority", "")))


def handover_files(handovers: Sequence[HandoverProof]) -> tuple[tuple[Enclosed, ...], dict[str, bytes]]:
    """Return the manifest's entries for handovers, and their files by path."""
    entries = tuple(Enclosed(f"{KEYS}/{number:06d}", each.path) for number, each in enumerate(handovers, 1))
    files: dict[str, bytes] = {}
    for entry, each in zip(entries, handovers, strict=True):
        files |= {entry.place + LEAF: each.leaf, entry.place + PROOF: each.proof}
    return entries, files


def stamp_files(stamps: Sequence[Stamp]) -> tuple[tuple[Enclosed, ...], dict[str, bytes]]:
    """Return the manifest's entries for timestamps, and their files by path."""
    entries = tuple(
        Enclosed(f"{TIMESTAMPS}/{number:06d}", each.path, each.authority) for number, each in enumerate(stamps, 1)
    )
    files: dict[str, bytes] = {}
    for entry, each in zip(entries, stamps, strict=True):
        files |= {entry.place + TEXT: each.text, entry.place + TOKEN: each.token}
    return entries, files
