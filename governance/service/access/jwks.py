"""The public keys of an issuer: a JWKS from a file or an https address, remembered and asked for again.

1. Only public keys of the kinds that we verify with are taken; a set with a symmetric or private key is refused
   whole.
2. A key that is not in the set makes us ask again, at most every ten seconds: no token can make us ask faster.
3. When the issuer cannot be asked, the last answer holds for an hour; then its tokens are refused.
4. A token's `kid` is compared with the set's names and used for nothing else: no path, no address, no query.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.service.settings import Issuer

_log = structlog.get_logger(__name__)
_BYTES_MAX = 1 << 20
_ASK_AGAIN_US = 10 * MICROSECONDS
_STALE_US = 3600 * MICROSECONDS
_RSA_BITS_MIN = 2048
_CURVES = {"P-256": "ES256", "Ed25519": "EdDSA"}


class PublicKey(NamedTuple):
    """One key and the algorithms that it verifies."""

    kid: str | None
    algorithms: frozenset[str]
    key: Any  # a joserfc key


class KeySet:
    """The keys of one issuer; thread-safe."""

    def __init__(self, issuer: Issuer, clock: Clock) -> None:
        self._issuer = issuer
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: tuple[PublicKey, ...] = ()
        self._asked_us = self._answered_us = -_STALE_US
        if "://" not in issuer.keys:
            self._ask()  # a file that cannot be read is a wrong setting, told at start

    def find(self, kid: str | None) -> list[PublicKey]:
        """The keys of this name; all of them where the token names none."""
        with self._lock:
            now_us = self._clock.now_us()
            due = now_us - self._answered_us >= self._issuer.refresh_seconds * MICROSECONDS
            if (due or not self._named(kid)) and now_us - self._asked_us >= _ASK_AGAIN_US:
                self._refresh(now_us)
            return self._named(kid)

    def _named(self, kid: str | None) -> list[PublicKey]:
        return [key for key in self._keys if kid is None or key.kid == kid]

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
        self._keys = read_key_set(_fetch(place) if "://" in place else _read(Path(place)), place)
        self._answered_us = self._asked_us


def read_key_set(content: bytes, place: str) -> tuple[PublicKey, ...]:
    """The public signature keys of a JWKS; `ConfigError` where it is none, or holds what it must not (rule 1)."""
    from joserfc.errors import JoseError
    from joserfc.jwk import import_key

    try:
        rows = json.loads(content)["keys"]
        found = []
        for row in rows:
            if row.get("kty") == "oct" or "d" in row or "k" in row:
                raise ConfigError(f"{place}: holds a symmetric or private key; give public keys only")
            if row.get("use", "sig") == "sig":
                found.append(_public(row, import_key(row), place))
    except (ValueError, KeyError, TypeError, AttributeError, JoseError):
        raise ConfigError(f"{place}: is not a JSON Web Key Set") from None
    if not found or len({key.kid for key in found}) != len(found):
        raise ConfigError(f"{place}: must hold at least one signature key, each with a `kid` of its own")
    return tuple(found)


def _public(row: dict[str, Any], key: Any, place: str) -> PublicKey:
    kid = row.get("kid")
    if kid is not None and not isinstance(kid, str):
        raise ConfigError(f"{place}: a `kid` must be text")
    if row["kty"] == "RSA" and key.raw_value.key_size >= _RSA_BITS_MIN:
        algorithms = {"RS256", "PS256"}
    elif row.get("crv") in _CURVES:
        algorithms = {_CURVES[row["crv"]]}
    else:
        raise ConfigError(f"{place}: keys must be RSA of {_RSA_BITS_MIN} bits or more, P-256 or Ed25519")
    stated = row.get("alg")
    return PublicKey(kid, frozenset(algorithms if stated is None else algorithms & {stated}), key)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its path and mode") from None
    if len(content) > _BYTES_MAX:
        raise ConfigError(f"{path}: is larger than 1 MiB")
    return content


def _fetch(address: str) -> bytes:
    import httpx

    with (
        httpx.Client(timeout=5.0, follow_redirects=False, trust_env=False) as client,
        client.stream("GET", address) as answer,
    ):
        if answer.status_code != 200:
            raise ConfigError(f"{address}: answered {answer.status_code}")
        content = b""
        for chunk in answer.iter_bytes():
            content += chunk
            if len(content) > _BYTES_MAX:
                raise ConfigError(f"{address}: is larger than 1 MiB")
    return content
