"""Private keys as signers of policy statements: a signing key's file, or a wrapping port."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcustody.audit.tlog.signed_note import KeyKind, VerifierKey
from kvcustody.audit.tlog.signing_key import SigningKey, read_signing_key
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.root_key_wrapping import WrappingPort


@dataclass(frozen=True, slots=True)
class FileSigner:
    """A person's key, read from a 0600 file."""

    key: SigningKey

    @property
    def name(self) -> str:
        """The key's name."""
        return self.key.name

    def sign(self, message: bytes) -> bytes:
        """The signature; messages carry their kind in their first line (`policies.bundle_manifest`)."""
        return self.key.raw(message)


@dataclass(frozen=True, slots=True)
class PortSigner:
    """The key of a wrapping port (a file here, a key service elsewhere), under the name that trust gives it."""

    name: str
    port: WrappingPort

    def sign(self, message: bytes) -> bytes:
        """The port's signature."""
        return self.port.sign(message)

    @property
    def vkey(self) -> str:
        """The public key, as a trust file names it."""
        return str(VerifierKey(self.name, KeyKind.ED25519, self.port.verification_key()))


def open_signer(path: Path) -> FileSigner:
    """The signer behind a key file; raises `SigningKeyError`, or `ConfigError` for a key that is not Ed25519."""
    key = read_signing_key(path)
    if key.kind is not KeyKind.ED25519:
        raise ConfigError(
            f"key `{path}` is not an Ed25519 key; make one with `kvcustody policy key`", path=path
        )
    return FileSigner(key)
