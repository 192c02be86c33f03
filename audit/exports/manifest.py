"""The manifest: what an export claims to hold. A verifier recomputes what it can and names the rest.

Signed, and so proved: the leaves of each listed log. Not signed: which logs were listed, unless the root log came
along (`openings`), which shows that no sub-log is missing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from kvcustody.audit.evidence.processes.marked_processes import Marked, MarkedProcess, history
from kvcustody.audit.exports.enclosures import LEAF, PROOF, TEXT, TOKEN, Enclosed
from kvcustody.audit.exports.file_formats import LeafFormat
from kvcustody.audit.exports.range_proof import RangeProof
from kvcustody.audit.leaf.merkle import TreeHead
from kvcustody.audit.tlog.backend import parse_json
from kvcustody.audit.tlog.tiles import CHECKPOINT, HEAD_PROOF, ExportError

EXPORT_SCHEMA = "kvcustody/export@1"
MANIFEST = "manifest.json"
OPENINGS = "root.ndjson"
VERIFIER = "verify_kvcustody.py"
UNWITNESSED = "no witness cosigned this checkpoint: split views and cut tails are undetected"


@dataclass(frozen=True, slots=True)
class ExportFile:
    """A file of leaves: their number, the first one, and the SHA-256 of its bytes (hexadecimal)."""

    path: str
    first: int
    leaves: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ExportedLog:
    """One sub-log of an export: its head under the checkpoint, and the exported run of leaves.

    `digest` is SHA-256 (hexadecimal) over the leaves, each followed by a newline, whatever the format.
    """

    name: str
    folder: str
    head: TreeHead
    range: RangeProof
    purged_below: int
    digest: str
    files: tuple[ExportFile, ...]

    @property
    def leaves(self) -> int:
        """The number of its exported leaves."""
        return self.range.end - self.range.first


@dataclass(frozen=True, slots=True)
class ExportManifest:
    """The whole export. `made_at_us` is UTC; `witnesses` are the names on the note, unchecked.

    `marked` are the processes of the ledger that replayed or generated what they recorded, whatever was exported.
    """

    origin: str
    root: TreeHead
    form: LeafFormat
    made_at_us: int
    witnesses: tuple[str, ...]
    openings: bool
    logs: tuple[ExportedLog, ...]
    handovers: tuple[Enclosed, ...] = ()
    stamps: tuple[Enclosed, ...] = ()
    marked: Marked = ()

    @property
    def paths(self) -> list[str]:
        """Every file of the export according to its manifest, without the enclosed verifier, which is no evidence."""
        paths = [MANIFEST, CHECKPOINT, VERIFIER, *([OPENINGS] if self.openings else [])]
        paths += [f"{log.folder}/{HEAD_PROOF}" for log in self.logs]
        paths += [file.path for log in self.logs for file in log.files]
        paths += [each.place + ending for each in self.handovers for ending in (LEAF, PROOF)]
        return paths + [each.place + ending for each in self.stamps for ending in (TEXT, TOKEN)]

    @property
    def leaves(self) -> int:
        """The number of exported leaves."""
        return sum(log.leaves for log in self.logs)


def manifest_bytes(manifest: ExportManifest) -> bytes:
    """Return the manifest's bytes: JSON with sorted keys."""
    value = {
        "schema": EXPORT_SCHEMA,
        "origin": manifest.origin,
        "root": _head(manifest.root),
        "format": str(manifest.form),
        "made_at_us": manifest.made_at_us,
        "witnesses": list(manifest.witnesses),
        "warning": None if manifest.witnesses else UNWITNESSED,
        "openings": manifest.openings,
        "leaves": manifest.leaves,
        "logs": [_log(log) for log in manifest.logs],
        "handovers": [each.to_json() for each in manifest.handovers],
        "timestamps": [each.to_json() for each in manifest.stamps],
        "marked": [each._asdict() for each in manifest.marked],
        "history": history(manifest.marked) or None,
    }
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2) + b"\n"


def parse_manifest(data: bytes) -> ExportManifest:
    """Return the manifest from its bytes; raises `ExportError` for anything else."""
    try:
        value = parse_json(data)
        if value["schema"] != EXPORT_SCHEMA:
            raise ExportError(f"`{MANIFEST}` is of another schema than `{EXPORT_SCHEMA}`")
        logs = tuple(_parse_log(log) for log in value["logs"])
        return ExportManifest(
            str(value["origin"]),
            _parse_head(value["root"]),
            LeafFormat(value["format"]),
            int(value["made_at_us"]),
            tuple(map(str, value["witnesses"])),
            value["openings"] is True,
            logs,
            tuple(Enclosed.from_json(each) for each in value.get("handovers", ())),
            tuple(Enclosed.from_json(each) for each in value.get("timestamps", ())),
            tuple(_parse_marked(each) for each in value.get("marked", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ExportError(f"`{MANIFEST}` is malformed: {type(problem).__name__}") from None


def root_line(leaf: bytes, opening: bytes | None) -> bytes:
    """Return one leaf of the root log and its opening as a line of `root.ndjson`: hexadecimal, in one form."""
    opened = "null" if opening is None else f'"{opening.hex()}"'
    return f'{{"leaf":"{leaf.hex()}","opening":{opened}}}\n'.encode()


def _log(log: ExportedLog) -> dict[str, Any]:
    return {
        "name": log.name,
        "folder": log.folder,
        "head": _head(log.head),
        "range": log.range.to_json(),
        "leaves": log.leaves,
        "purged_below": log.purged_below,
        "digest": log.digest,
        "files": [
            {"path": file.path, "first": file.first, "leaves": file.leaves, "bytes": file.bytes, "sha256": file.sha256}
            for file in log.files
        ],
    }  # fmt: skip


def _parse_log(value: Mapping[str, Any]) -> ExportedLog:
    files = tuple(
        ExportFile(str(file["path"]), int(file["first"]), int(file["leaves"]), int(file["bytes"]), str(file["sha256"]))
        for file in value["files"]
    )  # fmt: skip
    folder = str(value["folder"])
    for path in (folder, *(file.path for file in files)):
        if path.startswith("/") or "\\" in path or ".." in path.split("/"):
            raise ExportError(f"`{MANIFEST}` names `{path[:64]}`, which is outside the export")
    return ExportedLog(
        str(value["name"]),
        folder,
        _parse_head(value["head"]),
        RangeProof.from_json(value["range"]),
        int(value["purged_below"]),
        str(value["digest"]),
        files,
    )


def _parse_marked(value: Mapping[str, Any]) -> MarkedProcess:
    life, worker, origin = (str(value[name]) for name in ("incarnation", "worker", "origin"))
    ended = value["ended_us"]
    return MarkedProcess(life, worker, origin, int(value["started_us"]), None if ended is None else int(ended))


def _head(head: TreeHead) -> dict[str, Any]:
    return {"size": head.size, "root": base64.b64encode(head.root).decode()}


def _parse_head(value: Mapping[str, Any]) -> TreeHead:
    return TreeHead(int(value["size"]), base64.b64decode(value["root"], validate=True))
