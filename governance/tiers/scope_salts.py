"""Salts that a governed engine gives a cache layer beside it instead of tenants' names: one a domain.

    salts = ScopeSalts(keys, directory)
    salt = salts.of(label)                       # 64 hexadecimal digits; the same for the same domain
    directory.label_of(salt)                     # in the other process: whose it is; None: nobody of ours

1. A salt is made with the secret of the domain's owner: who does not have it can neither make one nor tell whose it is.
   When the owner's epoch ends, so does the salt.
2. `once` is a salt that nobody is told again: what is kept under it is never found.
3. A directory is a file that engines append to and cache layers read. Its records are sealed under the file of shred
   keys. One that does not open, or whose salt its domain does not have, says nothing, and neither does a torn end.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag

from kvcustody.errors import ConfigError, IdentityError, KeyringError, KeyServiceUnavailable, NoKeyError
from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.identity.domain_spec import DomainSpec, ScopeKind
from kvcustody.governance.tiers.seal.extended_nonce import NONCE_BYTES
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.logger import get_logger

SALT_DIGITS = 64
_BOUND = b"kvcustody/scope-salts@1"
_TOLD = (ScopeKind.TENANT, ScopeKind.SUBJECT, ScopeKind.SESSION)  # others have no one whose they are
_LENGTH_BYTES = 2
_FILE_BYTES_MAX = 256 << 20  # some 700,000 domains
_log = get_logger(__name__)


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """One domain of one owner, as another process has to know it."""

    tenant: str
    classification: str
    level: int
    scope: str
    subject: str | None
    session: str | None
    issuer: str | None
    spec_tenant: str | None
    spec_subject: str | None
    spec_session: str | None
    model: bytes
    key_epoch: int
    labels: tuple[tuple[str, str], ...]
    salt: str | None

    def label(self) -> DomainLabel:
        """Raises `IdentityError` where it is no domain."""
        spec = DomainSpec(
            scope=ScopeKind(self.scope),
            classification=self.classification,
            model=self.model,
            key_epoch=self.key_epoch,
            issuer=self.issuer,
            tenant=self.spec_tenant,
            subject=self.spec_subject,
            session=self.spec_session,
            labels=self.labels,
            salt=self.salt,
            tenant_name=self.tenant,
        )
        whose = (self.tenant, self.classification, self.level, self.scope, self.subject, self.session)
        return DomainLabel(*whose, spec)


def _record_of(label: DomainLabel, spec: DomainSpec) -> _Record:
    return _Record(
        label.tenant,
        label.classification,
        label.level,
        label.scope,
        label.subject,
        label.session,
        spec.issuer,
        spec.tenant,
        spec.subject,
        spec.session,
        spec.model,
        spec.key_epoch,
        spec.labels,
        spec.salt,
    )


class ScopeDirectory:
    """The domains that engines on this machine have registered, by salt. Not thread-safe."""

    def __init__(self, path: Path, keys: SealKeys, look: Callable[[], None] = lambda: None) -> None:
        """`look`, before a record is opened, has the keyring know of owners that other processes added.

        Raises `ConfigError` where the file cannot be had, or is somebody else's to read.
        """
        self._path = path
        self._keys = keys
        self._look = look
        self._labels: dict[str, DomainLabel] = {}
        self._read_bytes = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(path, flags, 0o600)
            status = os.fstat(self._file)
        except OSError as error:
            raise ConfigError(f"setting `scope_salts_path`: `{path}` cannot be opened ({error.strerror})") from None
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
            os.close(self._file)
            raise ConfigError(f"setting `scope_salts_path`: `{path}` must be a file of its owner alone (0600)")

    def label_of(self, salt: str) -> DomainLabel | None:
        """Return the domain of a salt, as far as a key service permits; reads what others appended first."""
        if salt not in self._labels and len(salt) == SALT_DIGITS:
            with suppress(KeyServiceUnavailable):
                self._read()
        return self._labels.get(salt)

    def labels(self) -> dict[str, DomainLabel]:
        """Every registered domain, by salt."""
        self._read()
        return dict(self._labels)

    def add(self, salt: str, label: DomainLabel) -> None:
        """Register a salt's domain for others. Raises `OSError` where the file is full or cannot be written."""
        if salt in self._labels or label.spec is None:
            return
        plain = msgspec.msgpack.encode(_record_of(label, label.spec))
        nonce = os.urandom(NONCE_BYTES)
        cipher, short = self._keys.catalogue().of_message(nonce)
        sealed = nonce + cipher.encrypt(short, plain, _BOUND)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._read()
            if salt not in self._labels:
                if self._read_bytes >= _FILE_BYTES_MAX:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self._path))
                os.ftruncate(self._file, self._read_bytes)  # what a process left that ended while it wrote
                os.write(self._file, len(sealed).to_bytes(_LENGTH_BYTES, "little") + sealed)
                os.fsync(self._file)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._read()

    def _read(self) -> None:
        """Records that were appended since the last call.

        Raises `KeyServiceUnavailable` before one that cannot be opened now, which the next call reads again.
        """
        while True:
            head = os.pread(self._file, _LENGTH_BYTES, self._read_bytes)
            size = int.from_bytes(head, "little")
            sealed = os.pread(self._file, size, self._read_bytes + _LENGTH_BYTES)
            if len(head) < _LENGTH_BYTES or size <= NONCE_BYTES or len(sealed) < size:
                return
            self._look()  # behind the reading: whoever wrote the record had the owner's epoch on file by then
            self._learn(sealed)
            self._read_bytes += _LENGTH_BYTES + size

    def _learn(self, sealed: bytes) -> None:
        cipher, short = self._keys.catalogue().of_message(sealed[:NONCE_BYTES])
        try:
            plain = cipher.decrypt(short, sealed[NONCE_BYTES:], _BOUND)
            label = msgspec.msgpack.decode(plain, type=_Record).label()
            assert label.spec is not None
            self._labels[self._keys.domain(label.spec).hex()] = label
        except (InvalidTag, msgspec.MsgspecError, IdentityError, ValueError):
            _log.error("scope record does not open", path=str(self._path))
        except KeyringError:  # its epoch was destroyed: nobody has this salt any more
            return

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class ScopeSalts:
    """Salts of one engine's domains. Called on the engine's thread."""

    def __init__(self, keys: SealKeys, directory: ScopeDirectory | None = None) -> None:
        self._keys = keys
        self._directory = directory

    def of(self, label: DomainLabel) -> str:
        """Return the domain's registered salt; a unique unregistered one where registering fails."""
        if label.spec is None or label.spec.scope not in _TOLD:
            return self.once()
        try:
            salt = self._keys.domain(label.spec).hex()
            if self._directory is not None:
                self._directory.add(salt, label)
        except (NoKeyError, OSError) as error:
            _log.error("domain has no salt", error=repr(error))
            return self.once()
        return salt

    @staticmethod
    def once() -> str:
        """Return a salt that nothing else has (rule 2)."""
        return secrets.token_hex(SALT_DIGITS // 2)
