"""The wrapping port: the holder of the root key wraps, unwraps, signs and destroys; the keyring never sees the root
key.

- A wrapped secret opens only under the same root key, owner and key epoch: all of them are bound into the
  wrap.
- No (key, nonce) pair repeats, across restarts, forks and restored directories included: each wrap has a key
  of its own, derived with a fresh 256-bit salt.
- A root key file is a regular file of exactly 32 bytes, mode 0600 or stricter, ours, reached through no
  symbolic link. Anything else is refused with one line that names the path, what is wrong and what to do.
- A root key from the environment is refused in the strict profile.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import MutableMapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kvcustody.errors import KeyringError
from kvcustody.files import sync_path, write_file
from kvcustody.governance.identity import tlv
from kvcustody.governance.identity.domain_spec import KeyOwner
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer, derive

ROOT_KEY_VARIABLE = "KVCUSTODY_ROOT_KEY"

_FORMAT = b"\x01"
_SALT_BYTES = 32
_TAG_BYTES = 16
_PRIVATE_BYTES_MAX = 65_536
_NONCE = bytes(12)  # every key encrypts once
WRAPPED_BYTES = 1 + _SALT_BYTES + KEY_BYTES + _TAG_BYTES


class KeyEnd(NamedTuple):
    """A key service's answer to a destruction. `until_us`: when the key is destroyed (UTC µs); 0: it is destroyed."""

    until_us: int = 0


class WrappingPort(Protocol):
    """The holder of one root key: a file, a key service or a hardware module."""

    def wrap(self, secret: KeyBuffer, *, owner: KeyOwner, epoch: int) -> bytes:
        """Seal a secret to (root key, owner, epoch); the result is safe to store."""

    def unwrap(self, wrapped: bytes, *, owner: KeyOwner, epoch: int) -> KeyBuffer:
        """Return the secret of `wrapped`; raises `KeyringError` unless root key, owner and epoch all match."""

    def sign(self, message: bytes) -> bytes:
        """Sign with Ed25519, under a key derived from the root key."""

    def verification_key(self) -> bytes:
        """Return the 32-byte Ed25519 public key for `sign`."""

    def destroy(self) -> KeyEnd:
        """Destroy the root key. Everything that it wrapped is lost."""

    @property
    def ends_under(self) -> str:
        """The root under which each epoch has its own wrapping key, which `end_epoch` destroys.

        Empty: they have none.
        """

    def end_epoch(self, owner: KeyOwner, epoch: int) -> KeyEnd:
        """Destroy the key that wraps only this epoch, so that no copy of the wrap opens, in any backup.

        A second call changes nothing. Only where `ends_under`. Raises `KeyServiceUnavailable`.
        """

    def may_seal(self) -> bool:
        """Whether tiers may seal and open now; never waits. False while the holder is away for too long."""


class RootKeyWrapping:
    """The wrapping port over a root key in this process's memory, with an optional file behind it."""

    def __init__(self, root: KeyBuffer, path: Path | None = None) -> None:
        self._root = root
        self._path = path

    def wrap(self, secret: KeyBuffer, *, owner: KeyOwner, epoch: int) -> bytes:
        """Seal a secret to (root key, owner, epoch): format ‖ salt ‖ AES-256-GCM ciphertext and tag."""
        salt = os.urandom(_SALT_BYTES)
        with self._wrapping_key(salt) as key:
            sealed = AESGCM(key.view()).encrypt(_NONCE, secret.view(), bound_to(owner, epoch))
        return _FORMAT + salt + sealed

    def unwrap(self, wrapped: bytes, *, owner: KeyOwner, epoch: int) -> KeyBuffer:
        """Return the secret of `wrapped`, in its own buffer."""
        if len(wrapped) != WRAPPED_BYTES or wrapped[:1] != _FORMAT:
            raise _unusable(owner, epoch, "the wrapped key is malformed")
        secret = KeyBuffer()
        salt, sealed = wrapped[1 : 1 + _SALT_BYTES], wrapped[1 + _SALT_BYTES :]
        try:
            with self._wrapping_key(salt) as key:
                secret.take(AESGCM(key.view()).decrypt(_NONCE, sealed, bound_to(owner, epoch)))
        except InvalidTag:
            secret.wipe()
            raise _unusable(owner, epoch, "the wrapped key does not open under this root key") from None
        return secret

    def sign(self, message: bytes) -> bytes:
        """Sign with Ed25519, under a key derived from the root key."""
        return self._signing_key().sign(message)

    def verification_key(self) -> bytes:
        """Return the 32-byte Ed25519 public key for `sign`."""
        return self._signing_key().public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def destroy(self) -> KeyEnd:
        """Wipe the root key in memory and on its file, then remove the file (media: docs/concepts/keys.md)."""
        self._root.wipe()
        if self._path is not None and self._path.exists():
            with self._path.open("r+b", buffering=0) as file:
                file.write(bytes(KEY_BYTES))
                os.fsync(file.fileno())
            self._path.unlink()
            sync_path(self._path.parent)
        return KeyEnd()

    @property
    def ends_under(self) -> str:
        """None: the root key wraps every epoch."""
        return ""

    def end_epoch(self, owner: KeyOwner, epoch: int) -> KeyEnd:
        """Raise `KeyringError`: no epoch has its own key."""
        raise _unusable(owner, epoch, "has no key of its own; rewrap the others, and destroy the root key")

    def may_seal(self) -> bool:
        """True: a root key in memory is always available."""
        return True

    def _wrapping_key(self, salt: bytes) -> KeyBuffer:
        key = KeyBuffer()
        derive(self._root, salt=salt, info=b"kvcustody/v1/wrapping-key", into=key)
        return key

    def _signing_key(self) -> Ed25519PrivateKey:
        with KeyBuffer() as seed:
            derive(self._root, salt=b"", info=b"kvcustody/v1/signing-key", into=seed)
            return Ed25519PrivateKey.from_private_bytes(seed.view())


def open_wrapping(
    source: str,
    path: Path,
    *,
    strict: bool = False,
    environment: MutableMapping[str, str] | None = None,
) -> RootKeyWrapping:
    """Open the wrapping port of a root key from a `file`, the `environment`, or `generated` at `path` if absent.

    A variable that was read is removed from the environment, so that child processes do not inherit it.
    """
    if source == "environment":
        return RootKeyWrapping(_from_environment(os.environ if environment is None else environment, strict))
    if source == "generated" and not os.path.lexists(path):
        create_root_key(path)
    return RootKeyWrapping(read_root_key(path), path)


def create_root_key(path: Path) -> None:
    """Write a fresh root key to a new 0600 file, durable on return; refuses to touch a file that exists."""
    try:
        with KeyBuffer.random() as root:
            write_file(path, root.view(), exclusive=True)
    except FileExistsError:
        raise _refused(path, "already exists", "use it, or choose another path") from None
    except OSError as error:
        raise _refused(path, f"cannot be created ({error.strerror})", "choose a writable directory") from None


def read_root_key(path: Path) -> KeyBuffer:
    """Read the root key in `path`; checks owner and mode on the opened descriptor."""
    root = KeyBuffer()
    with _open_private(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != KEY_BYTES:
            raise _refused(path, f"has `{size}` bytes, not {KEY_BYTES}", "give exactly 32 random bytes")
        if file.readinto(root.writable()) != KEY_BYTES:
            raise _refused(path, "ended early", "restore it from its backup")
    return root


def read_private(path: Path) -> bytes | None:
    """Read a file that only its owner may read, like a root key's; None without one."""
    if not os.path.lexists(path):
        return None
    with _open_private(path) as file:
        return file.read(_PRIVATE_BYTES_MAX)


def _open_private(path: Path) -> FileIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _refused(path, "does not exist", "create it with `kvcustody keys init`") from None
    except OSError as error:
        if path.is_symlink():
            raise _refused(path, "is a symbolic link", "give the path of the file itself") from None
        raise _refused(path, f"cannot be opened ({error.strerror})", "check its owner and mode") from None
    try:
        _check_file(path, os.fstat(descriptor))
    except KeyringError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb", buffering=0)  # noqa: PTH123 - a descriptor, closed by the caller


def _check_file(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise _refused(path, "is not a regular file", "give the path of a key file")
    if mode & 0o077:
        raise _refused(path, f"has mode `{mode:04o}`, open to others", "chmod 600 it; replace the key if it was seen")
    if status.st_uid != os.geteuid():
        raise _refused(path, f"belongs to user `{status.st_uid}`", f"chown it to user {os.geteuid()}")


def _from_environment(environment: MutableMapping[str, str], strict: bool) -> KeyBuffer:
    if strict:
        raise KeyringError(
            f"root key from `{ROOT_KEY_VARIABLE}` is refused in the strict profile; use a key file",
            variable=ROOT_KEY_VARIABLE,
        )
    text = environment.pop(ROOT_KEY_VARIABLE, None)
    if text is None:
        raise KeyringError(
            f"root key: `{ROOT_KEY_VARIABLE}` is not set; give 32 random bytes in base64",
            variable=ROOT_KEY_VARIABLE,
        )
    try:
        decoded = bytearray(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        decoded = bytearray()
    if len(decoded) != KEY_BYTES:
        raise KeyringError(
            f"root key: `{ROOT_KEY_VARIABLE}` is not 32 bytes in base64 (`openssl rand -base64 32`)",
            variable=ROOT_KEY_VARIABLE,
        )
    root = KeyBuffer()
    root.writable()[:] = decoded
    decoded[:] = bytes(KEY_BYTES)
    return root


def bound_to(owner: KeyOwner, epoch: int) -> bytes:
    """Return the canonical bytes that a wrap is sealed to."""
    return tlv.encode("kvcustody/wrapped-key", 1, {1: owner.kind, 2: owner.issuer, 3: owner.name, 4: epoch})


def _unusable(owner: KeyOwner, epoch: int, problem: str) -> KeyringError:
    return KeyringError(f"{owner} epoch `{epoch}`: {problem}", owner=owner, epoch=epoch)


def _refused(path: Path, problem: str, advice: str) -> KeyringError:
    return KeyringError(f"root key `{path}`: {problem}; {advice}", path=path, problem=problem, advice=advice)
