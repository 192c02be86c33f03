"""Destinations of pushed leaves: a file for a collector, or a webhook. A failing one does not affect the others.

1. A sink is checked when it is opened: a folder that is not there or an address that cannot be one is an error at the
   start, not at the first event.
2. `deliver` returns when the other side has the batch; otherwise it raises within its deadline. `RejectedError` says
   that the batch itself was refused, so that trying again is of no use.
"""

from __future__ import annotations

import base64
import hmac
import time
from typing import Protocol
from urllib.parse import urlsplit

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvcustody.errors import LedgerError
from kvcustody.http_exchange import exchange

_ANSWER_BYTES_MAX = 1 << 20  # nobody reads it
_ABOUT_THE_BATCH = (400, 413, 415, 422)
_TOLERANCE_SECONDS = 300
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class SinkError(LedgerError):
    """A sink is misconfigured, gone, or did not take a batch."""

    code = "KVC640"


class RejectedError(SinkError):
    """The receiver permanently refused this batch."""

    code = "KVC641"


class Sink(Protocol):
    """Accepts batches; its name appears in status, files and events."""

    name: str
    content_type: str

    def deliver(self, identity: str, body: bytes, content_type: str = "") -> None:
        """Deliver a batch; `identity` is the same for every attempt. `content_type`: of a batch in another format."""


class WebhookSink:
    """Posts batches, signed by Standard Webhooks: HMAC-SHA-256 (`v1`) or Ed25519 (`v1a`) over id.time.body.

    `https://`, or `http://` to loopback alone. Redirects are not followed. 2xx is taken. A status about the batch
    itself (`_ABOUT_THE_BATCH`) is `RejectedError`; any other, such as 401 or 404, is about the receiver, and may end.
    """

    def __init__(
        self,
        name: str,
        url: str,
        key: bytes | Ed25519PrivateKey,
        *,
        content_type: str,
        deadline_seconds: float = 10.0,
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname or not (
            parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
        ):
            raise SinkError(f"sink `{name}`: `{url}` is not https (http is only allowed on loopback)", name=name)
        if isinstance(key, bytes) and len(key) < 24:
            raise SinkError(f"sink `{name}`: an HMAC key of `{len(key)}` bytes is shorter than 24", name=name)
        self.name = name
        self._url = url
        self._key = key
        self.content_type = content_type
        self._deadline_seconds = deadline_seconds

    def deliver(self, identity: str, body: bytes, content_type: str = "") -> None:
        """Post once (rule 2)."""
        moment = str(int(time.time()))
        headers = {
            "Content-Type": content_type or self.content_type,
            "webhook-id": identity,
            "webhook-timestamp": moment,
            "webhook-signature": sign_webhook(self._key, identity, moment, body),
        }
        try:
            status = exchange(
                "POST",
                self._url,
                body,
                headers,
                deadline_seconds=self._deadline_seconds,
                bytes_max=_ANSWER_BYTES_MAX,
            ).status
        except OSError as problem:
            raise SinkError(f"sink `{self.name}`: {problem}", name=self.name) from None
        if status in _ABOUT_THE_BATCH:
            raise RejectedError(f"sink `{self.name}` refused the batch ({status})", name=self.name, status=status)
        if not 200 <= status < 300:
            raise SinkError(f"sink `{self.name}` answered {status}", name=self.name, status=status)


def sign_webhook(key: bytes | Ed25519PrivateKey, identity: str, moment: str, body: bytes) -> str:
    """Return the `webhook-signature` header."""
    message = f"{identity}.{moment}.".encode() + body
    if isinstance(key, bytes):
        return "v1," + base64.b64encode(hmac.digest(key, message, "sha256")).decode()
    return "v1a," + base64.b64encode(key.sign(message)).decode()


def check_webhook(
    key: bytes | Ed25519PublicKey,
    identity: str,
    moment: str,
    signature: str,
    body: bytes,
    *,
    now_seconds: int,
) -> None:
    """Verify for receivers: raise `SinkError` unless the batch is signed and its time within five minutes of now."""
    try:
        kind, encoded = signature.split(",", 1)
        given = base64.b64decode(encoded, validate=True)
        fresh = abs(now_seconds - int(moment)) <= _TOLERANCE_SECONDS
    except ValueError:
        raise SinkError("a webhook's headers are malformed") from None
    message = f"{identity}.{moment}.".encode() + body
    if isinstance(key, bytes):
        good = kind == "v1" and hmac.compare_digest(hmac.digest(key, message, "sha256"), given)
    else:
        good = kind == "v1a" and _verifies(key, given, message)
    if not good or not fresh:
        raise SinkError("a webhook is not signed by the key, or is older than five minutes")


def _verifies(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True
