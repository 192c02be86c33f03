"""Keys in a token of a hardware security module: AES-256 that cannot be read out, used by AES-GCM (PKCS#11 2.40).

1. A wrap is nonce ‖ ciphertext ‖ tag, with the context as associated data. A key wraps a secret once or twice in its
   life, each time under a fresh random nonce.
2. A library's call has no deadline of its own: it is made on a thread, and one that does not come back in time counts
   as no answer. Until it comes back nothing else is asked.
3. A session that the token dropped is opened again once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import Any, TypeVar

import pkcs11  # type: ignore[import-not-found, import-untyped, unused-ignore]

from kvcustody.errors import KeyringError, KeyServiceUnavailable
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import KeyEnd
from kvcustody.integrations.key_services.places import Pkcs11Place

_NONCE_BYTES = 12
Answer = TypeVar("Answer")


class Pkcs11Token:
    """A token, through one session on its own thread. Safe for threads."""

    def __init__(self, place: Pkcs11Place, folder: Path) -> None:
        self.place = f"token `{place.token}` of {place.library}"
        self._library, self._token = str(place.library), place.token
        self._pin = folder / place.pin_path
        self._seconds = place.timeout_ms / 1000
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvcustody-pkcs11")
        self._late: Future[Any] | None = None
        self._session: Any = None

    def make_key(self, name: str) -> None:
        """Make an AES-256 key that stays in the token; an existing one stays as it is."""

        def make(session: Any) -> None:
            if not _keys(session, name):
                kinds, attribute = pkcs11.KeyType, pkcs11.Attribute
                template = {
                    attribute.SENSITIVE: True,
                    attribute.EXTRACTABLE: False,
                    attribute.ENCRYPT: True,
                    attribute.DECRYPT: True,
                }
                session.generate_key(kinds.AES, 8 * KEY_BYTES, label=name, store=True, template=template)

        self._ask(make)

    def wrap(self, name: str, secret: KeyBuffer, context: bytes) -> bytes:
        """Return the secret wrapped as rule 1 says."""
        nonce = os.urandom(_NONCE_BYTES)

        def wrap(session: Any) -> bytes:
            parameters = pkcs11.GCMParams(nonce, context)
            sealed = self._key(session, name).encrypt(
                bytes(secret.view()), mechanism=pkcs11.Mechanism.AES_GCM, mechanism_param=parameters
            )
            return nonce + bytes(sealed)

        return self._ask(wrap)

    def unwrap(self, name: str, wrapped: bytes, context: bytes) -> KeyBuffer:
        """Return the secret wrapped by this key with this context."""

        def unwrap(session: Any) -> KeyBuffer:
            parameters = pkcs11.GCMParams(wrapped[:_NONCE_BYTES], context)
            key = self._key(session, name)
            try:
                opened = bytes(
                    key.decrypt(
                        wrapped[_NONCE_BYTES:],
                        mechanism=pkcs11.Mechanism.AES_GCM,
                        mechanism_param=parameters,
                    )
                )
            except (pkcs11.EncryptedDataInvalid, pkcs11.EncryptedDataLenRange):
                raise self._refused(name, "does not open this wrap") from None
            except pkcs11.GeneralError:  # of SoftHSM for a tag that does not match, of any token that is broken
                session.generate_random(128)
                raise self._refused(name, "does not open this wrap") from None
            if len(opened) != KEY_BYTES:
                raise self._refused(name, "opened no secret of ours")
            secret = KeyBuffer()
            secret.take(opened)
            return secret

        return self._ask(unwrap)

    def end_key(self, name: str) -> KeyEnd:
        """Destroy the key's object, and verify that no other object has its name."""

        def end(session: Any) -> KeyEnd:
            for key in _keys(session, name):
                key.destroy()
            if _keys(session, name):
                raise KeyServiceUnavailable(f"{self.place}: key `{name}` still exists after its destruction")
            return KeyEnd()

        return self._ask(end)

    def probe(self) -> None:
        """Request random bytes from the token."""
        self._ask(lambda session: session.generate_random(128))

    def _key(self, session: Any, name: str) -> Any:
        found = _keys(session, name)
        if not found:
            raise self._refused(name, "does not exist or is destroyed")
        return found[0]

    def _refused(self, name: str, problem: str) -> KeyringError:
        return KeyringError(f"{self.place}: key `{name}` {problem}")

    def _ask(self, ask: Callable[[Any], Answer]) -> Answer:
        """Run a call on the session's thread (rule 2)."""
        if self._late is not None and not self._late.done():
            raise KeyServiceUnavailable(f"{self.place}: an earlier call has not returned")
        asked = self._thread.submit(self._in_session, ask)
        try:
            return asked.result(self._seconds)
        except Late:
            self._late = asked
            raise KeyServiceUnavailable(f"{self.place}: no answer within {self._seconds:g} s") from None

    def _in_session(self, ask: Callable[[Any], Answer]) -> Answer:
        """Run a call in the session (rule 3)."""
        for is_last in (False, True):
            try:
                if self._session is None:
                    self._session = self._open()
                return ask(self._session)
            except pkcs11.PKCS11Error as error:
                self._session = None
                if is_last:
                    raise KeyServiceUnavailable(f"{self.place}: {type(error).__name__} {error}".strip()) from None
        raise AssertionError("the second attempt returns or raises")

    def _open(self) -> Any:
        try:
            pin = self._pin.read_text("utf-8").strip()
            token = pkcs11.lib(self._library).get_token(token_label=self._token)
        except (OSError, RuntimeError) as error:
            raise KeyServiceUnavailable(f"{self.place}: {error}") from None
        try:
            return token.open(rw=True, user_pin=pin)
        except pkcs11.UserAlreadyLoggedIn:  # by this process, of which the login is
            return token.open(rw=True)


def _keys(session: Any, name: str) -> list[Any]:
    found = session.get_objects({pkcs11.Attribute.LABEL: name, pkcs11.Attribute.CLASS: pkcs11.ObjectClass.SECRET_KEY})
    return list(found)
