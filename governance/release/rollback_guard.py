"""A process's rollback mark: how far it has followed a release, kept across restarts so that nobody can lead it back.

1. The mark only rises: a lower revision, another manifest under the same one, or a release that is shorter than it
   was or went another way, is refused.
2. It is durable before what it marks takes effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvcustody.errors import ConfigError
from kvcustody.files import write_file
from kvcustody.governance.release.record import NOTHING_BEFORE, ReleaseError
from kvcustody.policies.bundle.manifest import BundleManifest
from kvcustody.signed_document import DocumentRejected, decode, digest, encode


@dataclass(frozen=True, slots=True)
class RollbackMark:
    """The last active revision with its manifest's digest, and the release's record count with the last record's
    digest.
    """

    revision: int = 0
    manifest: str = ""
    records: int = 0
    head: str = NOTHING_BEFORE


class RevisionMark:
    """The mark of one process, in a file."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` for a file that is no mark: without it, a rollback would go unseen."""
        self.path = path
        self.mark = self._read()

    def check_records(self, records: Sequence[bytes]) -> None:
        """Raise `ReleaseError` unless these records continue those of the mark."""
        mark = self.mark
        if len(records) < mark.records:
            raise ReleaseError(
                f"the release has {len(records)} records and had {mark.records}: it was truncated, or "
                f"replaced by an old copy"
            )
        if mark.records and digest(records[mark.records - 1]) != mark.head:
            raise ReleaseError(f"record `{mark.records}` of the release differs from the one seen before")

    def check_revision(self, manifest: BundleManifest) -> None:
        """Raise `ReleaseError` for a revision below the mark, or another one of the same number."""
        mark = self.mark
        if manifest.revision < mark.revision:
            raise ReleaseError(
                f"revision `{manifest.revision}` is lower than `{mark.revision}`, which was in effect here already"
            )
        if manifest.revision == mark.revision and manifest.id != mark.manifest:
            raise ReleaseError(
                f"revision `{manifest.revision}` differs from the one that was in effect here under that number"
            )

    def advance(self, manifest: BundleManifest | None = None, *, records: int = 0, head: str = "") -> None:
        """Move the mark durably. It never moves back."""
        mark = self.mark
        if manifest is not None:
            self.check_revision(manifest)
            mark = RollbackMark(manifest.revision, manifest.id, mark.records, mark.head)
        if records > mark.records:
            mark = RollbackMark(mark.revision, mark.manifest, records, head)
        if mark != self.mark:
            self._write(mark)
            self.mark = mark

    def _read(self) -> RollbackMark:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return RollbackMark()
        except OSError as error:
            raise ConfigError(f"revision mark `{self.path}`: {error.strerror}", path=self.path) from None
        try:
            return RollbackMark(**decode(data, "revision mark"))
        except (DocumentRejected, TypeError):
            raise ConfigError(
                f"revision mark `{self.path}` is damaged: put back its last copy, or remove it after checking that the "
                "policy in effect is the newest",
                path=self.path,
            ) from None

    def _write(self, mark: RollbackMark) -> None:
        try:
            write_file(self.path, encode(asdict(mark)))
        except OSError as error:
            raise ConfigError(f"revision mark `{self.path}`: {error.strerror}", path=self.path) from None
