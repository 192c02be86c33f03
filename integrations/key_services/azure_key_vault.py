"""Keys in Azure Key Vault or Managed HSM, from the published model of its API. NEVER RUN against the service.

1. The service's wrap takes no associated data: it wraps the context's digest ‖ the secret, under RSA-OAEP-256.
2. A deleted key can be recovered until it is purged: an end is pending until the purge, or until the service's date
   where the vault forbids to purge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import azure.core.exceptions as failures  # type: ignore[import-not-found, import-untyped, unused-ignore]
from azure.identity import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    DefaultAzureCredential,
)
from azure.keyvault.keys import KeyClient  # type: ignore[import-not-found, import-untyped, unused-ignore]
from azure.keyvault.keys.crypto import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    KeyWrapAlgorithm,
)

from kvcustody.clock import MICROSECONDS
from kvcustody.errors import KeyringError, KeyServiceUnavailable
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer, wipe_bytes
from kvcustody.governance.keys.root_key_wrapping import KeyEnd
from kvcustody.integrations.key_services.places import AzurePlace

_DIGEST_BYTES = 32
_ALGORITHM = KeyWrapAlgorithm.rsa_oaep_256
Answer = TypeVar("Answer")


class AzureKeyVault:
    """The keys of one vault. Safe for threads, as the SDK's client is."""

    def __init__(self, place: AzurePlace, client: Any = None) -> None:
        self.place = place.address
        self._purges = place.purge
        self._keys = client or KeyClient(
            place.address,
            DefaultAzureCredential(),
            connection_timeout=place.timeout_ms / 1000,
            read_timeout=place.timeout_ms / 1000,
        )

    def make_key(self, name: str) -> None:
        """Make an RSA key of 3,072 bits; an existing one stays as it is."""
        if self._found(name) is None:
            self._ask(lambda: self._keys.create_rsa_key(name, size=3072, key_operations=["wrapKey", "unwrapKey"]))

    def wrap(self, name: str, secret: KeyBuffer, context: bytes) -> bytes:
        """Return the secret wrapped as rule 1 says."""
        sealed = hashlib.sha256(context).digest() + bytes(secret.view())
        crypto = self._keys.get_cryptography_client(name)
        return bytes(self._ask(lambda: crypto.wrap_key(_ALGORITHM, sealed)).encrypted_key)

    def unwrap(self, name: str, wrapped: bytes, context: bytes) -> KeyBuffer:
        """Return the secret wrapped by this key with this context."""
        crypto = self._keys.get_cryptography_client(name)
        opened = bytes(self._ask(lambda: crypto.unwrap_key(_ALGORITHM, wrapped)).key)
        bound = opened[:_DIGEST_BYTES] == hashlib.sha256(context).digest()  # no secret
        if len(opened) != _DIGEST_BYTES + KEY_BYTES or not bound:
            raise KeyringError(f"{self.place}: key `{name}` opened no secret of this use")
        secret = KeyBuffer()
        secret.take(opened[_DIGEST_BYTES:])
        wipe_bytes(opened)
        return secret

    def end_key(self, name: str) -> KeyEnd:
        """End the key as rule 2 says."""
        if self._found(name) is not None:
            self._ask(lambda: self._keys.begin_delete_key(name).result())
        try:
            deleted = self._ask(lambda: self._keys.get_deleted_key(name))
        except KeyringError:
            return KeyEnd()
        if self._purges:
            self._ask(lambda: self._keys.purge_deleted_key(name))
            return KeyEnd()
        return KeyEnd(int(deleted.scheduled_purge_date.timestamp() * MICROSECONDS))

    def probe(self) -> None:
        """Request the first of the vault's keys."""
        self._ask(lambda: next(iter(self._keys.list_properties_of_keys(max_page_size=1)), None))

    def _found(self, name: str) -> Any:
        try:
            return self._ask(lambda: self._keys.get_key(name))
        except KeyringError:
            return None

    def _ask(self, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except failures.ResourceNotFoundError as error:
            raise KeyringError(f"{self.place}: {error.message}") from None
        except failures.AzureError as error:
            raise KeyServiceUnavailable(f"{self.place}: {error.message}") from None
