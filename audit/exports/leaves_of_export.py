"""The leaves of an export in a folder, as they were written: no figure of its manifest is handed on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvcustody.audit.exports.file_formats import leaves_of
from kvcustody.audit.exports.manifest import MANIFEST, parse_manifest
from kvcustody.audit.tlog.tiles import ExportError


def leaves_in_export(folder: Path) -> Iterator[bytes]:
    """Every leaf of an export that `kvcustody audit export` wrote; raises `ExportError` where it is none.

    Nothing is verified here: `kvcustody audit verify` does that, and comes first.
    """
    try:
        manifest = parse_manifest((folder / MANIFEST).read_bytes())
    except OSError as problem:
        raise ExportError(f"export `{folder}`: {problem.strerror}", path=folder) from problem
    for log in manifest.logs:
        for file in log.files:
            yield from leaves_of(manifest.form, folder / file.path)
