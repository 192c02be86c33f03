"""Keys in Google Cloud KMS, from the published model of its API. NEVER RUN against the service.

A key is a crypto key of one version. The service destroys a version after a waiting time that is set when the key is
made, so an end is pending until then; the version opens nothing from the order on. The key's name stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import google.api_core.exceptions as failures  # type: ignore[import-not-found, import-untyped, unused-ignore]
from google.cloud import kms  # type: ignore[import-not-found, import-untyped, unused-ignore]

from kvcustody.clock import MICROSECONDS
from kvcustody.errors import KeyringError, KeyServiceUnavailable
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import KeyEnd
from kvcustody.integrations.key_services.places import GooglePlace

_DAY_SECONDS = 86_400
_ENDING = ("DESTROY_SCHEDULED", "DESTROYED")
Answer = TypeVar("Answer")


class GoogleKms:
    """The keys of one key ring. Safe for threads, as the SDK's client is."""

    def __init__(self, place: GooglePlace, client: Any = None) -> None:
        self.place = place.key_ring
        self._seconds, self._days, self._level = place.timeout_ms / 1000, place.destroy_days, place.protection
        self._kms = client or kms.KeyManagementServiceClient()

    def make_key(self, name: str) -> None:
        """Make a symmetric key; an existing one stays as it is."""
        key = {
            "purpose": "ENCRYPT_DECRYPT",
            "version_template": {
                "algorithm": "GOOGLE_SYMMETRIC_ENCRYPTION",
                "protection_level": self._level,
            },
            "destroy_scheduled_duration": {"seconds": self._days * _DAY_SECONDS},
        }
        request = {"parent": self.place, "crypto_key_id": name, "crypto_key": key}
        try:
            self._ask(self._kms.create_crypto_key, request)
        except _KeyExistsError:
            return

    def wrap(self, name: str, secret: KeyBuffer, context: bytes) -> bytes:
        """Return the secret wrapped by a key, with the context as associated data."""
        request = {
            "name": self._path(name),
            "plaintext": bytes(secret.view()),
            "additional_authenticated_data": context,
        }
        return bytes(self._ask(self._kms.encrypt, request).ciphertext)

    def unwrap(self, name: str, wrapped: bytes, context: bytes) -> KeyBuffer:
        """Return the secret wrapped by this key with this context."""
        request = {"name": self._path(name), "ciphertext": wrapped, "additional_authenticated_data": context}
        opened = self._ask(self._kms.decrypt, request).plaintext
        if len(opened) != KEY_BYTES:
            raise KeyringError(f"{self.place}: key `{name}` opened no secret of ours")
        secret = KeyBuffer()
        secret.take(opened)
        return secret

    def end_key(self, name: str) -> KeyEnd:
        """Schedule every version's destruction; pending until the last of the service's dates."""
        until_us = 0
        try:
            versions = self._ask(self._kms.list_crypto_key_versions, {"parent": self._path(name)})
        except _AbsentKeyError:
            return KeyEnd()
        for version in versions:
            ended = version
            if version.state.name not in _ENDING:
                ended = self._ask(self._kms.destroy_crypto_key_version, {"name": version.name})
            if ended.state.name != "DESTROYED":
                until_us = max(until_us, int(ended.destroy_time.timestamp() * MICROSECONDS))
        return KeyEnd(until_us)

    def probe(self) -> None:
        """Request the key ring."""
        self._ask(self._kms.get_key_ring, {"name": self.place})

    def _path(self, name: str) -> str:
        return f"{self.place}/cryptoKeys/{name}"

    def _ask(self, call: Callable[..., Answer], request: dict[str, Any]) -> Answer:
        try:
            return call(request=request, timeout=self._seconds)
        except failures.AlreadyExists:
            raise _KeyExistsError(f"{self.place}: is there already") from None
        except failures.NotFound as error:
            raise _AbsentKeyError(f"{self.place}: {error}") from None
        except (failures.InvalidArgument, failures.FailedPrecondition) as error:
            raise KeyringError(f"{self.place}: {error}") from None
        except failures.GoogleAPIError as error:
            raise KeyServiceUnavailable(f"{self.place}: {error}") from None


class _KeyExistsError(KeyringError):
    """A key of this name exists."""


class _AbsentKeyError(KeyringError):
    """No key of this name exists."""
