"""The wrapping port over a key service, whose keys never leave it.

    port = ServiceWrapping(service, Path("kvcustody-root.wrapped"), clock)

1. Each epoch of each owner is wrapped by a key of its own in the service. When that key is destroyed, no copy of the
   wrap opens any more, in whatever backup it is. A subject or an object never has a key in the service.
2. Shred keys are wrapped by a local root key, which a key of the service wraps (`path`). So a process asks the service
   once for all of them, and once for each epoch that it uses.
3. Names of keys in the service are digests of the deployment's root, owner and epoch. So a list of them reveals no
   tenant, and two deployments share no key.
4. A service that did not answer is not asked again for `_PAUSE_SECONDS`, or for `_PAUSE_TIMES` the time spent waiting
   for it if that is longer. Calls fail at once meanwhile. A hanging service holds an engine up for at most a fifth of
   the time.
5. A process with the unwrapped secrets continues without the service for `outage_seconds`. After that `may_seal`
   refuses, so that tiers neither seal nor open. Blocks on the device are served as before.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import orjson

from kvcustody.errors import KeyringError, KeyServiceUnavailable, NoKeyError
from kvcustody.files import sync_path, write_file
from kvcustody.governance.identity.domain_spec import KeyOwner
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer
from kvcustody.governance.keys.root_key_wrapping import KeyEnd, RootKeyWrapping, bound_to, read_private
from kvcustody.logger import get_logger

SCHEMA = "kvcustody/wrapped-root@1"
OUTAGE_SECONDS = 900.0
_FORMAT = b"\x02"
_SHRED = "shred-"
_ROOT = KeyOwner("root", "", "")
_PAUSE_SECONDS, _PAUSE_TIMES, _PROBE_SECONDS = 1.0, 4, 30.0
_PREFIX, _NAME_BYTES = "kvcustody-", 20
_ROOT_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{{2 * _NAME_BYTES}}}")  # it becomes a part of addresses
_log = get_logger(__name__)
Answer = TypeVar("Answer")


class KeyService(Protocol):
    """Keys by name, shared by several processes. Each call ends within the service's own deadline.

    Each raises `KeyServiceUnavailable` where the service does not answer or refuses this process. Each raises
    `KeyringError` for a destroyed key or a wrap that does not open.
    """

    @property
    def place(self) -> str:
        """The service's address, for people: no secret."""

    def make_key(self, name: str) -> None:
        """Create a key; an existing one stays as it is."""

    def wrap(self, name: str, secret: KeyBuffer, context: bytes) -> bytes:
        """Seal a secret under a key, bound to `context`."""

    def unwrap(self, name: str, wrapped: bytes, context: bytes) -> KeyBuffer:
        """Return the secret of a wrap under this key and context."""

    def end_key(self, name: str) -> KeyEnd:
        """Destroy a key or schedule its destruction; a destroyed one stays destroyed."""

    def probe(self) -> None:
        """Make one small call, to see whether the service answers."""


class ServiceWrapping:
    """The wrapping port over one key service. Thread-safe; a forked child opens its own."""

    def __init__(self, service: KeyService, path: Path, *, outage_seconds: float = OUTAGE_SECONDS) -> None:
        self._service = service
        self._path = path
        self._outage_seconds = outage_seconds
        self._answered = self._asked = time.monotonic()
        self._asks_from = 0.0  # after a failure: when it is asked again
        self._probes = ThreadPoolExecutor(1, thread_name_prefix="kvcustody-key-service")
        self._local = RootKeyWrapping(self._open_root())

    def wrap(self, secret: KeyBuffer, *, owner: KeyOwner, epoch: int) -> bytes:
        """Seal a secret under the epoch's own key in the service; a shred key under the local root key."""
        if owner.kind.startswith(_SHRED):
            return self._local.wrap(secret, owner=owner, epoch=epoch)
        name = self._name(owner, epoch)

        def ask() -> bytes:
            self._service.make_key(name)
            return _FORMAT + self._service.wrap(name, secret, bound_to(owner, epoch))

        return self._ask(ask)

    def unwrap(self, wrapped: bytes, *, owner: KeyOwner, epoch: int) -> KeyBuffer:
        """Return the secret of `wrapped`. Raises `KeyServiceUnavailable` where the service is needed and away."""
        if owner.kind.startswith(_SHRED):
            return self._local.unwrap(wrapped, owner=owner, epoch=epoch)
        if wrapped[:1] != _FORMAT:
            raise KeyringError(
                f"{owner} epoch `{epoch}`: is not wrapped by a key service; run `kvcustody keys rewrap`",
                owner=owner,
                epoch=epoch,
            )
        name, context = self._name(owner, epoch), bound_to(owner, epoch)
        return self._ask(lambda: self._service.unwrap(name, wrapped[1:], context))

    def sign(self, message: bytes) -> bytes:
        """Sign with Ed25519, under a key derived from the local root key."""
        return self._local.sign(message)

    def verification_key(self) -> bytes:
        """Return the 32-byte Ed25519 public key for `sign`."""
        return self._local.verification_key()

    def destroy(self) -> KeyEnd:
        """Destroy the local root key and the service's key that wraps it: every shred key is lost."""
        end = self._ask(lambda: self._service.end_key(self._root_name))
        self._local.destroy()
        self._path.unlink(missing_ok=True)
        sync_path(self._path.parent)
        return end

    @property
    def ends_under(self) -> str:
        """The root that this service's keys belong to (rules 1 and 3)."""
        return self._root_name

    def end_epoch(self, owner: KeyOwner, epoch: int) -> KeyEnd:
        """Destroy the epoch's own key in the service."""
        return self._ask(lambda: self._service.end_key(self._name(owner, epoch)))

    def may_seal(self) -> bool:
        """Whether the service answered within `outage_seconds`; probes it from time to time on another thread."""
        now = time.monotonic()
        if now - self._asked >= _PROBE_SECONDS and now - self._answered >= _PROBE_SECONDS:
            self._asked = now
            self._probes.submit(self._probe)
        return now - self._answered < self._outage_seconds

    def _name(self, owner: KeyOwner, epoch: int) -> str:
        """Rule 3."""
        of = hashlib.blake2b(self._root_name.encode() + bound_to(owner, epoch), digest_size=_NAME_BYTES)
        return _PREFIX + of.hexdigest()

    def _probe(self) -> None:
        try:
            self._ask(self._service.probe)
        except NoKeyError as error:
            away = time.monotonic() - self._answered
            _log.warning("the key service does not answer", why=error.message, seconds=round(away))

    def _ask(self, ask: Callable[[], Answer]) -> Answer:
        """Rule 4. An answer of whatever kind is one: a refusal of a key says that the service is there.

        What a service's library raises beside that, for an answer that it cannot read, is no answer.
        """
        began = time.monotonic()
        if began < self._asks_from:
            raise KeyServiceUnavailable(f"key service {self._service.place}: did not answer at the last attempt")
        try:
            answer = ask()
        except KeyServiceUnavailable:
            self._is_away(began)
            raise
        except KeyringError:
            self._is_there()
            raise
        except Exception as error:
            self._is_away(began)
            _log.exception("the key service cannot be understood")
            raise KeyServiceUnavailable(
                f"key service {self._service.place}: cannot be understood ({type(error).__name__})"
            ) from None
        self._is_there()
        return answer

    def _is_away(self, began: float) -> None:
        now = time.monotonic()
        self._asks_from = now + max(_PAUSE_SECONDS, _PAUSE_TIMES * (now - began))

    def _is_there(self) -> None:
        self._asks_from, self._answered = 0.0, time.monotonic()

    def _open_root(self) -> KeyBuffer:
        """The local root key, made with the file where there is none."""
        content = read_private(self._path)
        if content is None:
            self._make_root()
            content = read_private(self._path)
        try:
            document = orjson.loads(content or b"")
            if document["schema"] != SCHEMA:
                raise ValueError("unknown schema")
            self._root_name, wrapped = (
                str(document["key"]),
                base64.b64decode(document["wrapped"], validate=True),
            )
            if not _ROOT_NAME.fullmatch(self._root_name):
                raise ValueError("names another key than a root's")
        except (KeyError, TypeError, ValueError):
            raise KeyringError(
                f"wrapped root key `{self._path}`: is no {SCHEMA} document; restore it, or give another path",
                path=self._path,
            ) from None
        return self._ask(lambda: self._service.unwrap(self._root_name, wrapped, bound_to(_ROOT, 1)))

    def _make_root(self) -> None:
        with KeyBuffer.random(KEY_BYTES) as root:
            name = _PREFIX + os.urandom(_NAME_BYTES).hex()
            self._ask(lambda: self._service.make_key(name))
            wrapped = self._ask(lambda: self._service.wrap(name, root, bound_to(_ROOT, 1)))
        document = {"schema": SCHEMA, "key": name, "wrapped": base64.b64encode(wrapped).decode("ascii")}
        try:
            write_file(self._path, orjson.dumps(document, option=orjson.OPT_INDENT_2), exclusive=True)
        except FileExistsError:  # another process was quicker: its key counts
            self._service.end_key(name)
        except OSError as error:
            raise KeyringError(
                f"wrapped root key `{self._path}`: cannot be created ({error.strerror}); choose a writable directory",
                path=self._path,
            ) from None
