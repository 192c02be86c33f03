"""The leaves of an export in a folder, as written; figures of its manifest are not used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvcustody.audit.exports.file_formats import leaves_of
from kvcustody.audit.exports.manifest import MANIFEST, parse_manifest
from kvcustody.audit.tlog.tiles import ExportError


def leaves_in_export(folder: Path) -> Iterator[bytes]:
    """Yield every leaf of an export by `kvcustody audit export`; raises `ExportError` for other folders.

    Nothing is verified here: `kvcustody audit verify` does that, and comes first.
    """
    try:
        manifest = parse_manifest((folder / MANIFEST).read_bytes())
    except OSError as problem:
        raise ExportError(f"export `{folder}`: {problem.strerror}", path=folder) from problem
    for log in manifest.logs:
        for file in log.files:
            yield from leaves_of(manifest.form, folder / file.path)
