"""The public keys of an issuer: a JWKS (or a PEM) in a file that is watched, or a JWKS at an https address.

1. A file that changes takes effect within a second; while it cannot be read, no token of its issuer counts
   (`watched_file`).
2. An address is asked again when its keys are due, and for a key that is not in the set: at most every ten seconds, so
   no token can make us ask faster.
3. When the issuer cannot be asked, its last answer holds for an hour; then its tokens are refused.
4. Asking ends within five seconds, whatever the issuer's server does, and no lock is held meanwhile. A token whose key
   is known never waits. Of the others a few wait, so that they cannot take every thread of the service.
5. Keys that are not understood are left out, and logged when they change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.credentials.json_web_token import named
from kvcustody.governance.credentials.verification_keys import (
    FILE_BYTES_MAX,
    IssuerKeys,
    VerificationKey,
    parse_verification_keys,
    read_verification_keys,
)
from kvcustody.governance.credentials.watched_file import WatchedFile
from kvcustody.http_exchange import exchange
from kvcustody.logger import get_logger

_log = get_logger(__name__)
_ASKING_SECONDS = 5.0
_ASK_AGAIN_US = 10 * MICROSECONDS
_STALE_US = 3600 * MICROSECONDS
_WAITING_MAX = 4

FindKeys = Callable[[str | None], Sequence[VerificationKey]]
"""The keys that a `kid` may mean; all of them for None."""


def keys_in_file(path: Path, clock: Clock) -> FindKeys:
    """The keys in a file (rule 1); `ConfigError` where it cannot be read now."""
    file = WatchedFile(path, _read, clock)
    return lambda kid: named(file.content().keys, kid)


def keys_at(place: str, issuer: str, refresh_seconds: int, clock: Clock) -> FindKeys:
    """The keys in a file, or at an https address; `issuer` is what the log calls it."""
    if "://" in place:
        return KeysAtAddress(place, issuer, refresh_seconds, clock).find
    return keys_in_file(Path(place), clock)


def _read(path: Path) -> IssuerKeys:
    keys = read_verification_keys(path)
    if keys.left_out:
        _log.warning("issuer's keys left out", path=path, keys=keys.left_out)
    return keys


class KeysAtAddress:
    """The keys that an issuer's address gives; thread-safe."""

    def __init__(self, address: str, issuer: str, refresh_seconds: int, clock: Clock) -> None:
        self._address = address
        self._issuer = issuer
        self._refresh_us = refresh_seconds * MICROSECONDS
        self._clock = clock
        self._lock = threading.Lock()  # over the fields below; never held while the issuer is asked
        self._keys = IssuerKeys()
        self._asked_us = self._answered_us = -_STALE_US
        self._asker = ThreadPoolExecutor(1, f"jwks-{issuer}")
        self._asking: Future[None] | None = None
        self._waiting = 0

    def find(self, kid: str | None) -> list[VerificationKey]:
        """The keys of this name; all of them where the token names none."""
        with self._lock:
            now_us = self._clock.now_us()
            known = self._named(kid, now_us)
            due = now_us - self._answered_us >= self._refresh_us
            if (due or not known) and self._asking is None and now_us - self._asked_us >= _ASK_AGAIN_US:
                self._asked_us = now_us
                self._asking = self._asker.submit(self._refresh)
            asking_now = self._asking
            if asking_now is None or known or self._waiting >= _WAITING_MAX:
                return known
            self._waiting += 1
        wait([asking_now], _ASKING_SECONDS)
        with self._lock:
            self._waiting -= 1
            return self._named(kid, self._clock.now_us())

    def _named(self, kid: str | None, now_us: int) -> list[VerificationKey]:
        stale = now_us - self._answered_us >= _STALE_US
        return [] if stale else named(self._keys.keys, kid)

    def _refresh(self) -> None:
        try:
            self._ask()
        except Exception as error:
            reason = error.message if isinstance(error, ConfigError) else type(error).__name__
            _log.error("issuer's keys cannot be read", issuer=self._issuer, reason=reason)
        finally:
            with self._lock:
                self._asking = None

    def _ask(self) -> None:
        now_us = self._clock.now_us()
        keys = _fetched(self._address)
        with self._lock:
            news = keys.left_out and keys.left_out != self._keys.left_out
            self._keys, self._asked_us, self._answered_us = keys, now_us, now_us
        if news:
            _log.warning("issuer's keys left out", issuer=self._issuer, keys=keys.left_out)


def _fetched(address: str) -> IssuerKeys:
    answer = exchange("GET", address, deadline_seconds=_ASKING_SECONDS, bytes_max=FILE_BYTES_MAX)
    if answer.status != 200:
        raise ConfigError(f"{address}: answered {answer.status}")
    return parse_verification_keys(answer.body, address)
