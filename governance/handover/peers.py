"""The workers that hand over to each other: a document of names, addresses and public keys, and a worker's own key.

    schema: kvcustody/handover-peers@1
    workers:
      prefill-1: {address: "10.0.0.5:9470", key: "prefill-1+0a1b2c3d+Ad…"}
      decode-1:  {address: "10.0.0.6:9470", key: "decode-1+4e5f6a7b+Ad…"}

1. Addresses come from the document alone, never from a request: a request cannot have a worker ask anybody else.
2. The document may be replaced while the worker runs. While it cannot be read nobody is trusted: prompts are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import AfterValidator, Field

from kvcustody.audit.tlog.signed_note import KeyKind, NoteError, VerifierKey, parse_vkey
from kvcustody.audit.tlog.signing_key import SigningKey, create_signing_key, read_signing_key
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.credentials.watched_file import WatchedFile
from kvcustody.http_exchange import host_and_port
from kvcustody.policies.document.yaml_document import YamlModel, read_model


def _address(text: str) -> str:
    host_and_port(text)
    return text


Address = Annotated[str, AfterValidator(_address)]


class PeerEntry(YamlModel):
    """One worker: its address, and its public key as `kvcustody door key NAME --key FILE` prints it."""

    address: Address
    key: str


class PeersDocument(YamlModel):
    """The document of the setting `handover_peers_path`."""

    schema_: Annotated[Literal["kvcustody/handover-peers@1"], Field(alias="schema")]
    workers: dict[str, PeerEntry]


class Peers(NamedTuple):
    """The trusted workers: their public keys and addresses, by name."""

    keys: dict[str, VerifierKey]
    addresses: dict[str, tuple[str, int]]


def read_peers(path: Path) -> Peers:
    """Read the document. Raises `ConfigError` that names the worker whose key or address cannot be used."""
    document = read_model(PeersDocument, path)
    keys: dict[str, VerifierKey] = {}
    addresses: dict[str, tuple[str, int]] = {}
    for name, entry in document.workers.items():
        try:
            key = parse_vkey(entry.key)
        except NoteError as error:
            raise ConfigError(f"{path}: key of `{name}`: {error.message}", path=path) from None
        if key.kind is not KeyKind.ED25519:
            raise ConfigError(f"{path}: key of `{name}`: must be an Ed25519 key", path=path)
        if any(key.key_id == other.key_id for other in keys.values()):
            raise ConfigError(f"{path}: key of `{name}`: is another worker's too", path=path)
        keys[name], addresses[name] = key, host_and_port(entry.address)
    return Peers(keys, addresses)


def watch_peers(path: Path, clock: Clock) -> Callable[[], Peers]:
    """Return the workers that are trusted now (rule 2). Raises `ConfigError` for an unusable document at the start."""
    watched = WatchedFile(path, read_peers, clock)

    def trusted() -> Peers:
        try:
            return watched.content()
        except IdentityError:
            return Peers({}, {})

    return trusted


class PeerKey:
    """A worker's own signing key."""

    def __init__(self, key: SigningKey) -> None:
        """Raises `ConfigError` for a key that is not Ed25519."""
        if key.kind is not KeyKind.ED25519:
            raise ConfigError(f"hand-over key `{key.name}`: must be an Ed25519 key", name=key.name)
        self.verifier = key.verifier
        self.sign = Ed25519PrivateKey.from_private_bytes(key.seed).sign

    @classmethod
    def open(cls, path: Path, worker: str) -> PeerKey:
        """Open the key in a file, and create it at first use under the worker's name. Raises a `CustodyError`."""
        if not path.exists():
            try:
                return cls(create_signing_key(path, worker, KeyKind.ED25519))
            except FileExistsError:
                pass  # another process of this worker was quicker
        return cls(read_signing_key(path))
