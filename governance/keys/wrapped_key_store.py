"""Storage of wrapped secrets: one JSON file, or a table elsewhere.

- A store holds wrapped secrets only, never a secret.
- A save is all or nothing: a crash at any point leaves the old document or the new one, readable.
- Changes are made under a lock shared by every process that opens the file, on a document read under that
  lock.
- An epoch number, once given to an owner, is never given again, not even after its destruction.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson

from kvcustody.errors import KeyringError
from kvcustody.files import discard_drafts, write_file
from kvcustody.governance.identity.domain_spec import KeyOwner

SCHEMA = "kvcustody/keyring@1"
BACKED_UP = "backups"  # in place of a root: no service wraps epochs, and known backups of the store have this one


class WrappedEpoch(NamedTuple):
    """One (owner, epoch) secret as stored."""

    wrapped: bytes
    created_utc_us: int


class EndingKey(NamedTuple):
    """The key-service key that wrapped a destroyed epoch: 0, or when the service destroys it (UTC µs).

    `under`: the root that its name is of (`WrappingPort.ends_under`). Under another root a key of that name never was.
    `BACKED_UP`: until when known backups of the store open instead.
    """

    until_us: int
    under: str


@dataclass(slots=True)
class KeyDocument:
    """A store's whole content. `latest` keeps the highest epoch that an owner ever had.

    `ending`: destroyed epochs whose own key in a key service is to go.
    """

    epochs: dict[tuple[KeyOwner, int], WrappedEpoch] = field(default_factory=dict)
    latest: dict[KeyOwner, int] = field(default_factory=dict)
    destroyed: dict[tuple[KeyOwner, int], int] = field(default_factory=dict)
    ending: dict[tuple[KeyOwner, int], EndingKey] = field(default_factory=dict)

    def copy(self) -> KeyDocument:
        """Return a copy that may be changed."""
        return KeyDocument(dict(self.epochs), dict(self.latest), dict(self.destroyed), dict(self.ending))


class KeyStore(Protocol):
    """A holder of one `KeyDocument`."""

    def load(self) -> KeyDocument:
        """Return the last saved document, or an empty one."""

    def exclusive(self) -> Any:
        """Return a context manager under which a load and a save are one change."""

    def save(self, document: KeyDocument) -> None:
        """Replace the document, durably and atomically."""


class FileKeyStore:
    """A JSON file of mode 0600, replaced atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> KeyDocument:
        """Return the file's document, or an empty one without a file."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return KeyDocument()
        except OSError as error:
            raise self._refused(f"cannot be opened ({error.strerror})") from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
            os.close(descriptor)
            mode = stat.S_IMODE(status.st_mode)
            raise self._refused(f"is no regular file or is open to others (mode `{mode:04o}`); chmod 600 it")
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
            content = file.read()
        try:
            return _parse(orjson.loads(content))
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise self._refused(f"is not a {SCHEMA} document ({type(error).__name__}); restore a backup") from None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock file beside the store; it carries no data and is never removed."""
        try:
            descriptor = os.open(self.path.with_name(self.path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise self._refused(f"cannot be locked ({error.strerror})") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def save(self, document: KeyDocument) -> None:
        """Write a new file durably, put it in the old one's place, then overwrite the old content."""
        old: int | None = None
        try:
            discard_drafts(self.path)
            old = _open_if_exists(self.path)
            write_file(
                self.path,
                orjson.dumps(_render(document), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS),
            )
            if old is not None:
                _blank(old)
        except OSError as error:
            raise self._refused(f"cannot be written ({error.strerror}); nothing was changed") from None
        finally:
            if old is not None:
                os.close(old)

    def _refused(self, problem: str) -> KeyringError:
        return KeyringError(f"key store `{self.path}`: {problem}", path=self.path, problem=problem)


def _open_if_exists(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None


def _blank(descriptor: int) -> None:
    """Overwrite a replaced file, so that a destroyed epoch's wrapped copy does not stay in its old blocks.

    Best effort: copy-on-write filesystems, snapshots and flash keep what they keep (docs/concepts/keys.md).
    """
    os.pwrite(descriptor, bytes(os.fstat(descriptor).st_size), 0)
    os.fsync(descriptor)


def _render(document: KeyDocument) -> dict[str, Any]:
    def named(owner: KeyOwner, epoch: int) -> dict[str, Any]:
        return {**owner._asdict(), "epoch": epoch}

    return {
        "schema": SCHEMA,
        "epochs": [
            {
                **named(*key),
                "wrapped": base64.b64encode(epoch.wrapped).decode("ascii"),
                "created_utc_us": epoch.created_utc_us,
            }
            for key, epoch in sorted(document.epochs.items())
        ],
        "latest": [named(owner, epoch) for owner, epoch in sorted(document.latest.items())],
        "destroyed": [{**named(*key), "utc_us": at} for key, at in sorted(document.destroyed.items())],
        "ending": [{**named(*key), **one._asdict()} for key, one in sorted(document.ending.items())],
    }


def _parse(data: Any) -> KeyDocument:
    if data["schema"] != SCHEMA:
        raise ValueError("unknown schema")
    document = KeyDocument()
    for row in data["epochs"]:
        wrapped = base64.b64decode(row["wrapped"], validate=True)
        document.epochs[_owner(row), int(row["epoch"])] = WrappedEpoch(wrapped, int(row["created_utc_us"]))
    for row in data["latest"]:
        document.latest[_owner(row)] = int(row["epoch"])
    for row in data["destroyed"]:
        document.destroyed[_owner(row), int(row["epoch"])] = int(row["utc_us"])
    for row in data.get("ending", ()):
        document.ending[_owner(row), int(row["epoch"])] = EndingKey(int(row["until_us"]), str(row["under"]))
    return document


def _owner(row: Any) -> KeyOwner:
    return KeyOwner(str(row["kind"]), str(row["issuer"]), str(row["name"]))
