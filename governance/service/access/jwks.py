"""The public keys of an issuer: a JWKS from a file or an https address, remembered and asked for again.

1. A key that is not in the set makes us ask again, at most every ten seconds: no token can make us ask faster.
2. When the issuer cannot be asked, the last answer holds for an hour; then its tokens are refused.
3. Asking ends within five seconds, whatever the issuer's server does, and no lock is held meanwhile. A token whose key
   is known never waits for an address. Of the others a few wait, so that they cannot take every thread of the service.
4. Keys that are not understood are left out, and logged when they change.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import structlog

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.service.settings import Issuer
from kvcustody.governance.tokens.json_web_token import named
from kvcustody.governance.tokens.verification_keys import (
    FILE_BYTES_MAX,
    IssuerKeys,
    VerificationKey,
    parse_verification_keys,
    read_verification_keys,
)
from kvcustody.http_exchange import exchange

_log = structlog.get_logger(__name__)
_ASKING_SECONDS = 5.0
_ASK_AGAIN_US = 10 * MICROSECONDS
_STALE_US = 3600 * MICROSECONDS
_WAITING_MAX = 4


class KeySet:
    """The keys of one issuer; thread-safe."""

    def __init__(self, issuer: Issuer, clock: Clock) -> None:
        self._issuer = issuer
        self._clock = clock
        self._is_file = "://" not in issuer.keys
        self._lock = threading.Lock()  # over the fields below; never held while the issuer is asked
        self._keys = IssuerKeys()
        self._asked_us = self._answered_us = -_STALE_US
        self._asker = ThreadPoolExecutor(1, f"jwks-{issuer.name}")
        self._asking: Future[None] | None = None
        self._waiting = 0
        if self._is_file:
            self._ask()  # a file that cannot be read is a wrong setting, told at start

    def find(self, kid: str | None) -> list[VerificationKey]:
        """The keys of this name; all of them where the token names none."""
        with self._lock:
            now_us = self._clock.now_us()
            known = self._named(kid, now_us)
            due = now_us - self._answered_us >= self._issuer.refresh_seconds * MICROSECONDS
            if (due or not known) and self._asking is None and now_us - self._asked_us >= _ASK_AGAIN_US:
                self._asked_us = now_us
                self._asking = self._asker.submit(self._refresh)
            asking_now = self._asking
            if asking_now is None or (known and not self._is_file) or self._waiting >= _WAITING_MAX:
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
            _log.error("issuer's keys cannot be read", issuer=self._issuer.name, reason=reason)
        finally:
            with self._lock:
                self._asking = None

    def _ask(self) -> None:
        now_us = self._clock.now_us()
        place = self._issuer.keys
        keys = read_verification_keys(Path(place)) if self._is_file else _fetched(place)
        with self._lock:
            news = keys.left_out and keys.left_out != self._keys.left_out
            self._keys, self._asked_us, self._answered_us = keys, now_us, now_us
        if news:
            _log.warning("issuer's keys left out", issuer=self._issuer.name, keys=keys.left_out)


def _fetched(address: str) -> IssuerKeys:
    answer = exchange("GET", address, deadline_seconds=_ASKING_SECONDS, bytes_max=FILE_BYTES_MAX)
    if answer.status != 200:
        raise ConfigError(f"{address}: answered {answer.status}")
    return parse_verification_keys(answer.body, address)
