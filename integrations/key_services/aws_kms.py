"""Keys in AWS KMS, from the published model of its API. NEVER RUN against the service: only against the SDK's model.

A key is found by an alias. The service destroys a key after a waiting time of 7 to 30 days, so an end is pending until
then; the key is disabled by the service at once.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, TypeVar

import boto3  # type: ignore[import-not-found, import-untyped, unused-ignore]
import botocore.config  # type: ignore[import-not-found, import-untyped, unused-ignore]
import botocore.exceptions  # type: ignore[import-not-found, import-untyped, unused-ignore]

from kvcustody.clock import MICROSECONDS
from kvcustody.errors import KeyringError, KeyServiceUnavailable
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import KeyEnd
from kvcustody.integrations.key_services.places import AwsPlace

_REFUSALS = frozenset({
    "NotFoundException",
    "InvalidCiphertextException",
    "KMSInvalidStateException",
    "IncorrectKeyException",
    "DisabledException",
})  # fmt: skip
Answer = TypeVar("Answer")


class AwsKms:
    """The keys of one account and region. Safe for threads, as the SDK's client is."""

    def __init__(self, place: AwsPlace, client: Any = None) -> None:
        self.place = f"AWS KMS {place.region}"
        self._days = place.destroy_days
        how = botocore.config.Config(
            connect_timeout=place.timeout_ms / 1000,
            read_timeout=place.timeout_ms / 1000,
            retries={"total_max_attempts": 2},
        )
        self._kms = client or boto3.client("kms", region_name=place.region, endpoint_url=place.endpoint, config=how)

    def make_key(self, name: str) -> None:
        """Make a symmetric key and its alias; an existing one stays as it is."""
        if self._described(name) is None:
            made = self._ask(
                lambda: self._kms.create_key(Description="kvcustody: wraps one key epoch", KeyUsage="ENCRYPT_DECRYPT")
            )
            key = made["KeyMetadata"]["KeyId"]
            self._ask(lambda: self._kms.create_alias(AliasName=_alias(name), TargetKeyId=key))

    def wrap(self, name: str, secret: KeyBuffer, context: bytes) -> bytes:
        """Return the secret wrapped by a key, with the context as the service's encryption context."""
        return bytes(
            self._ask(
                lambda: self._kms.encrypt(
                    KeyId=_alias(name), Plaintext=bytes(secret.view()), EncryptionContext=_context(context)
                )
            )["CiphertextBlob"]
        )

    def unwrap(self, name: str, wrapped: bytes, context: bytes) -> KeyBuffer:
        """Return the secret wrapped by this key with this context."""
        opened = self._ask(
            lambda: self._kms.decrypt(KeyId=_alias(name), CiphertextBlob=wrapped, EncryptionContext=_context(context))
        )["Plaintext"]
        if len(opened) != KEY_BYTES:
            raise KeyringError(f"{self.place}: key `{name}` opened no secret of ours")
        secret = KeyBuffer()
        secret.take(opened)
        return secret

    def end_key(self, name: str) -> KeyEnd:
        """Schedule the key's deletion; pending until the service's date."""
        described = self._described(name)
        if described is None:
            return KeyEnd()
        when = described.get("DeletionDate")
        if when is None:
            when = self._ask(
                lambda: self._kms.schedule_key_deletion(KeyId=described["KeyId"], PendingWindowInDays=self._days)
            )["DeletionDate"]
        return KeyEnd(int(when.timestamp() * MICROSECONDS))

    def probe(self) -> None:
        """Request one key of the account."""
        self._ask(lambda: self._kms.list_keys(Limit=1))

    def _described(self, name: str) -> Any:
        try:
            return self._ask(lambda: self._kms.describe_key(KeyId=_alias(name)))["KeyMetadata"]
        except KeyringError:
            return None

    def _ask(self, ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except botocore.exceptions.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            said = f"{self.place}: {error}"
            raise KeyringError(said) if code in _REFUSALS else KeyServiceUnavailable(said) from None
        except botocore.exceptions.BotoCoreError as error:
            raise KeyServiceUnavailable(f"{self.place}: {error}") from None


def _alias(name: str) -> str:
    return f"alias/{name}"


def _context(context: bytes) -> dict[str, str]:
    return {"kvcustody": base64.b64encode(context).decode("ascii")}
