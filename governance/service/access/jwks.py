"""The public keys of an issuer: a JWKS from a file or an https address, remembered and asked for again.

1. A key that is not in the set makes us ask again, at most every ten seconds: no token can make us ask faster.
2. When the issuer cannot be asked, the last answer holds for an hour; then its tokens are refused.
3. Asking ends within five seconds, whatever the issuer's server does.
"""

from __future__ import annotations

import threading
from pathlib import Path

import structlog

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.service.settings import Issuer
from kvcustody.governance.tokens.json_web_token import named
from kvcustody.governance.tokens.verification_keys import (
    FILE_BYTES_MAX,
    VerificationKey,
    parse_verification_keys,
    read_verification_keys,
)
from kvcustody.http_exchange import exchange

_log = structlog.get_logger(__name__)
_ASKING_SECONDS = 5.0
_ASK_AGAIN_US = 10 * MICROSECONDS
_STALE_US = 3600 * MICROSECONDS


class KeySet:
    """The keys of one issuer; thread-safe."""

    def __init__(self, issuer: Issuer, clock: Clock) -> None:
        self._issuer = issuer
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: tuple[VerificationKey, ...] = ()
        self._asked_us = self._answered_us = -_STALE_US
        if "://" not in issuer.keys:
            self._ask()  # a file that cannot be read is a wrong setting, told at start

    def find(self, kid: str | None) -> list[VerificationKey]:
        """The keys of this name; all of them where the token names none."""
        with self._lock:
            now_us = self._clock.now_us()
            due = now_us - self._answered_us >= self._issuer.refresh_seconds * MICROSECONDS
            if (due or not self._named(kid)) and now_us - self._asked_us >= _ASK_AGAIN_US:
                self._refresh(now_us)
            return self._named(kid)

    def _named(self, kid: str | None) -> list[VerificationKey]:
        return named(self._keys, kid)

    def _refresh(self, now_us: int) -> None:
        try:
            self._ask()
        except Exception as error:
            reason = error.message if isinstance(error, ConfigError) else type(error).__name__
            _log.error("issuer's keys cannot be read", issuer=self._issuer.name, reason=reason)
            if now_us - self._answered_us >= _STALE_US:
                self._keys = ()

    def _ask(self) -> None:
        self._asked_us = self._clock.now_us()
        place = self._issuer.keys
        self._keys = _fetched(place) if "://" in place else read_verification_keys(Path(place))
        self._answered_us = self._asked_us


def _fetched(address: str) -> tuple[VerificationKey, ...]:
    answer = exchange("GET", address, deadline_seconds=_ASKING_SECONDS, bytes_max=FILE_BYTES_MAX)
    if answer.status != 200:
        raise ConfigError(f"{address}: answered {answer.status}")
    return parse_verification_keys(answer.body, address)
