"""The source of an export: a pinned state of the ledger, read log by log.

The database is one (`exports/ledger_source.py`); tests have one in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvcustody.audit.evidence.processes.marked_processes import Marked
from kvcustody.audit.exports.enclosures import HandoverProof, Stamp
from kvcustody.audit.leaf.merkle import TreeHead
from kvcustody.audit.tlog.proofs import TileSource
from kvcustody.audit.tlog.root_log import HeadProof, RootLeafOpening


class SubLog(NamedTuple):
    """One sub-log as a checkpoint of the root log covers it. Leaves below `purged_below` have lost their content."""

    name: str
    head: TreeHead
    proof: HeadProof
    purged_below: int = 0


class RootLeaf(NamedTuple):
    """A leaf of the root log and its opening (None: its salt was destroyed)."""

    commitment: bytes
    opening: RootLeafOpening | None


class ExportSource(Protocol):
    """One checkpoint and everything under it; later writes are invisible."""

    @property
    def note(self) -> bytes:
        """The signed checkpoint."""

    def logs(self) -> Sequence[SubLog]:
        """Return every sub-log under the checkpoint, in name order."""

    def tiles(self, name: str) -> TileSource:
        """Return the hashes of a sub-log."""

    def leaves(self, name: str, first: int, end: int) -> Iterator[bytes]:
        """Return the leaves from `first` up to but without `end`, in order."""

    def root_leaves(self) -> Iterator[RootLeaf]:
        """Return every leaf of the root log under the checkpoint, in order."""

    def span(self, name: str, since_us: int | None, until_us: int | None) -> tuple[int, int]:
        """Return the shortest run of leaves that holds every leaf whose `at_us` is in [since, until)."""

    def marked(self) -> Marked:
        """Return the processes that replayed or generated their records, as of the checkpoint."""

    def handovers(self) -> Sequence[HandoverProof]:
        """Return every handover of the signing key under the checkpoint, in order."""

    def stamps(self) -> Sequence[Stamp]:
        """Return the newest timestamp of each authority, of this checkpoint or an earlier one."""
