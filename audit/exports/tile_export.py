"""One log of a ledger as C2SP tiles (tlog-tiles), for other monitors and readers.

1. The root log comes with the signed checkpoint, so that any reader of tlog-tiles checks it; its entries are the
   salted commitments. A sub-log comes with the proof of its head under that checkpoint.
2. A log whose first leaves retention dropped has no whole tiles any more and is refused.
"""

from __future__ import annotations

from pathlib import Path

from kvcustody.audit.exports.source import ExportSource
from kvcustody.audit.leaf.merkle import TreeHead
from kvcustody.audit.tlog.checkpoint import parse_checkpoint
from kvcustody.audit.tlog.signed_note import parse_note
from kvcustody.audit.tlog.tiles import CHECKPOINT, HEAD_PROOF, ExportError, write_export


def export_tiles(folder: Path, source: ExportSource, log: str | None = None) -> TreeHead:
    """Write the root log (None) or a sub-log as tiles, completely or not at all; return its head. Raises
    `ExportError`.
    """
    if log is None:
        head = parse_checkpoint(parse_note(source.note).text).head
        commitments = (leaf.commitment for leaf in source.root_leaves())
        write_export(folder, commitments, head, {CHECKPOINT: source.note})
        return head
    sub_log = next((each for each in source.logs() if each.name == log), None)
    if sub_log is None:
        raise ExportError(f"log `{log}` is not under the checkpoint", log=log)
    if sub_log.purged_below:
        raise ExportError(
            f"leaves 0 to `{sub_log.purged_below}` of `{log}` were dropped; `audit export` writes the remaining leaves",
            log=log,
        )
    leaves = source.leaves(log, 0, sub_log.head.size)
    write_export(folder, leaves, sub_log.head, {HEAD_PROOF: sub_log.proof.to_bytes()})
    return sub_log.head
