"""Keys in the transit engine of OpenBao or Vault: AES-256-GCM, with the context as associated data.

The token's policy needs `create` and `update` on `MOUNT/keys/*`, `MOUNT/encrypt/*` and `MOUNT/decrypt/*`, and `read`
and `delete` on `MOUNT/keys/*`. A deletion is read back: a key counts as gone when its mount says that it has none of
this name, in a 404 without errors. A redirect, an absent mount or a status that HTTP does not define is no answer.
"""

from __future__ import annotations

import base64
import binascii
import ssl
from http import HTTPStatus
from http.client import responses
from pathlib import Path
from typing import Any

import httpx
import orjson

from kvcustody.errors import ConfigError, KeyringError, KeyServiceUnavailable
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import KeyEnd
from kvcustody.http_exchange import deadline_transport, read_bounded
from kvcustody.integrations.key_services.places import OpenBaoPlace

_ANSWER_BYTES_MAX = 1 << 20
_REFUSALS = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND)


class OpenBaoTransit:
    """One mount of one server, over persistent connections. Safe for threads."""

    def __init__(self, place: OpenBaoPlace, folder: Path) -> None:
        self.place = f"{place.address}/{place.mount}"
        self._base = f"{place.address}/v1/"
        self._mount = place.mount.strip("/")
        self._token = folder / place.token_path
        self._seconds = place.timeout_ms / 1000
        self._namespace = {"X-Vault-Namespace": place.namespace} if place.namespace else {}
        verify: ssl.SSLContext | bool = True
        if place.certificate_authority is not None:
            try:
                verify = ssl.create_default_context(cafile=str(folder / place.certificate_authority))
            except OSError as error:
                raise ConfigError(
                    f"certificate authority `{folder / place.certificate_authority}`: cannot be read ({error})"
                ) from None
        self._client = httpx.Client(transport=deadline_transport(verify=verify), timeout=self._seconds, trust_env=False)

    def make_key(self, name: str) -> None:
        """Make an AES-256-GCM key; an existing one stays as it is."""
        self._ask("POST", f"{self._mount}/keys/{name}", {"type": "aes256-gcm96"})

    def wrap(self, name: str, secret: KeyBuffer, context: bytes) -> bytes:
        """Return the service's own text of the wrap, which names the key's version."""
        body = {"plaintext": base64.b64encode(secret.view()).decode(), "associated_data": _text(context)}
        return self._data("encrypt", name, body, "ciphertext").encode("ascii")

    def unwrap(self, name: str, wrapped: bytes, context: bytes) -> KeyBuffer:
        """Return the secret wrapped by this key with this context."""
        body = {"ciphertext": wrapped.decode("ascii", "replace"), "associated_data": _text(context)}
        plain = self._data("decrypt", name, body, "plaintext")
        secret = KeyBuffer()
        try:
            opened = base64.b64decode(plain, validate=True)
            if len(opened) != KEY_BYTES:
                raise ValueError("another length")
        except (binascii.Error, ValueError):
            raise KeyringError(f"key service {self.place}: key `{name}` opened no secret of ours") from None
        secret.take(opened)
        return secret

    def end_key(self, name: str) -> KeyEnd:
        """Permit the deletion, delete the key, and verify that it is gone."""
        if not self._has(name):
            return KeyEnd()
        self._ask("POST", f"{self._mount}/keys/{name}/config", {"deletion_allowed": True})
        self._ask("DELETE", f"{self._mount}/keys/{name}")
        if self._has(name):
            raise KeyServiceUnavailable(f"key service {self.place}: key `{name}` still exists after its deletion")
        return KeyEnd()

    def probe(self) -> None:
        """Check that the server accepts the token."""
        self._ask("GET", "auth/token/lookup-self")

    def _has(self, name: str) -> bool:
        """Return whether the mount says that it has a key of this name."""
        status, answer = self._send("GET", f"{self._mount}/keys/{name}")
        if status == HTTPStatus.NOT_FOUND and answer == {"errors": []}:
            return False
        try:
            self._checked(status, answer)
        except KeyringError as error:
            raise KeyServiceUnavailable(error.message) from None
        return True

    def _data(self, verb: str, name: str, body: dict[str, str], field: str) -> str:
        answer = self._ask("POST", f"{self._mount}/{verb}/{name}", body)
        try:
            return str(answer["data"][field])
        except (KeyError, TypeError):
            raise KeyServiceUnavailable(
                f"key service {self.place}: answers without `{field}`; is it a transit engine?"
            ) from None

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._checked(*self._send(method, path, body))

    def _checked(self, status: int, answer: Any) -> Any:
        if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            return answer
        errors = answer.get("errors") if isinstance(answer, dict) else None
        why = "; ".join(map(str, errors)) if isinstance(errors, list) else ""
        named = f"{status} {responses.get(status, '')}".rstrip()
        said = f"key service {self.place}: {named}{': ' + why[:200] if why else ''}"
        raise KeyringError(said) if status in _REFUSALS else KeyServiceUnavailable(said)

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        try:
            token = self._token.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise KeyServiceUnavailable(f"token of the key service `{self._token}`: cannot be read ({error})") from None
        request = self._client.build_request(
            method,
            self._base + path,
            content=None if body is None else orjson.dumps(body),
            headers={"X-Vault-Token": token, "Content-Type": "application/json", **self._namespace},
        )
        try:
            answer = read_bounded(self._client, request, deadline_seconds=self._seconds, bytes_max=_ANSWER_BYTES_MAX)
            return answer.status_code, orjson.loads(answer.content) if answer.content else None
        except (httpx.HTTPError, ValueError) as error:
            raise KeyServiceUnavailable(f"key service {self.place}: {error or type(error).__name__}") from None


def _text(context: bytes) -> str:
    return base64.b64encode(context).decode("ascii")
