"""Reloads a keyring whose file another process changed; checks the file's status before each use.

watch = KeyringWatch(keyring, path)
watch.look()
"""

from __future__ import annotations

import os
from pathlib import Path

from kvcustody.governance.keys.keyring import Keyring


class KeyringWatch:
    """One keyring over one file."""

    def __init__(self, keyring: Keyring, path: Path) -> None:
        self._keyring = keyring
        self._path = os.fspath(path)
        self._seen: tuple[int, int, int] | None = None

    def look(self) -> None:
        """Forget keys that were destroyed elsewhere."""
        try:
            status = os.stat(self._path)  # noqa: PTH116 - before each use: a path object takes as long again
        except OSError:
            seen = None
        else:
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen != self._seen:
            self._seen = seen
            self._keyring.refresh()
