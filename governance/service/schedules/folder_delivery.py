"""Delivers reports into a folder: each gets a folder of its own, complete or absent.

1. The folder is the service's own user's, nobody else may write in it, and it is no link: what another could have
   placed there is never written into, nor through.
2. What has the parcel's name already is left as it is: the same bytes are a delivery, anything else is refused.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from kvcustody.audit.siem.sink import SinkError
from kvcustody.files import evidence_mode, publish_folder, write_file
from kvcustody.governance.service.schedules.parcel import Parcel

_DRAFT = ".new"


class FolderDelivery:
    """Delivers into a folder of this machine; `path` is in the settings."""

    kind = "folder"

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._path = path
        self._check()

    def deliver(self, parcel: Parcel) -> str:
        """Write the parcel's folder (rule 2 of `parcel`)."""
        self._check()
        try:
            self._write(parcel)
        except OSError as error:
            raise SinkError(f"folder `{self.name}`: {error.strerror or type(error).__name__}") from None
        return parcel.name

    def _write(self, parcel: Parcel) -> None:
        target = self._path / parcel.name
        if os.path.lexists(target):
            self._same(target, parcel)
            return
        for draft in self._path.glob(f".{parcel.name}.*{_DRAFT}"):  # of a process that was killed
            shutil.rmtree(draft)
        draft = Path(tempfile.mkdtemp(prefix=f".{parcel.name}.", suffix=_DRAFT, dir=self._path))
        try:
            mode = evidence_mode()
            for name, data in parcel.ordered():
                write_file(draft / name, data, mode=mode)
            draft.chmod(0o750 if mode & 0o040 else 0o700)
            publish_folder(draft, target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _same(self, target: Path, parcel: Parcel) -> None:
        """Raise where what has this name is not what would be written."""
        if not stat.S_ISDIR(target.lstat().st_mode) or target.lstat().st_uid != os.geteuid():
            raise SinkError(f"folder `{self.name}`: `{parcel.name}` exists and was not written by kvcustody")
        there = {entry.name for entry in os.scandir(target) if entry.is_file(follow_symlinks=False)}
        every = {entry.name for entry in os.scandir(target)}
        if every != there or there != set(parcel.files):
            raise SinkError(f"folder `{self.name}`: `{parcel.name}` exists and holds other files")
        for name, data in parcel.files.items():
            if (target / name).read_bytes() != data:
                raise SinkError(f"folder `{self.name}`: `{parcel.name}/{name}` exists with other content")

    def _check(self) -> None:
        """Raise unless the folder is ours alone to write in (rule 1)."""
        try:
            found = self._path.lstat()
        except OSError as error:
            raise SinkError(f"folder `{self.name}`: {error.strerror}", name=self.name) from None
        if not stat.S_ISDIR(found.st_mode):
            raise SinkError(f"folder `{self.name}` is no folder", name=self.name)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise SinkError(
                f"folder `{self.name}` is another user's, or others may write in it; chmod go-w it",
                name=self.name,
            )
