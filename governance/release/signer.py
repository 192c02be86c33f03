"""Signers of policy statements: a key's file, a wrapping port, or an extension that holds the key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey, read_signing_key
from kvcustody.errors import ConfigError
from kvcustody.extensions import SIGNERS, load, names_extension
from kvcustody.policies.bundle.trust import Signer


@dataclass(frozen=True, slots=True)
class FileSigner:
    """A person's key, read from a 0600 file."""

    key: SigningKey

    @property
    def name(self) -> str:
        """The key's name."""
        return self.key.name

    def sign(self, message: bytes) -> bytes:
        """Sign a message; messages carry their kind in the first line (`policies.bundle_manifest`)."""
        return self.key.raw(message)


def open_signer(path: Path) -> Signer:
    """Open the signer of a key file, or of `plugin:NAME`.

    Raises `SigningKeyError`, or `ConfigError` for a key that is not Ed25519 and an extension that cannot be used.
    """
    if names_extension(str(path)):
        return cast(Signer, load(SIGNERS, str(path)).make(Signer))
    key = read_signing_key(path)
    if key.kind is not KeyKind.ED25519:
        raise ConfigError(f"key `{path}` is not an Ed25519 key; make one with `kvcustody policy key`", path=path)
    return FileSigner(key)
