"""Keys for one replay: a fresh root key and store in a private folder, destroyed at the end."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType

from kvcustody.clock import Clock
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore


class TemporaryKeys:
    """A context manager that yields a temporary `Keyring`: no later process can find what the replay cached."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> Keyring:
        self._folder = tempfile.TemporaryDirectory(prefix="kvcustody-replay-")
        place = self.place = Path(self._folder.name)
        self.port = open_wrapping("generated", place / "root.key")
        self._keyring = Keyring(FileKeyStore(place / "keys.json"), self.port, self._clock)
        return self._keyring

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keyring.close()
        self.port.destroy()
        self._folder.cleanup()
