"""JSON Web Tokens (RFC 7519): which of our issuers signed one, and what its claims say. Nothing unverified is returned.

1. Issuer, audience, algorithms and keys come from the settings. Nothing in a token chooses them: `jwk`, `jku`, `x5u`
   and `x5c` are not read, and a token with `crit` or `b64` is refused. A `kid` is compared with the names of the
   issuer's keys and used for nothing else: no path, no address, no query.
2. Only asymmetric algorithms exist here (`verification_keys`), and exactly one key must be the token's.
3. Expiry is required, and times are compared with our own clock.
4. A token that is bound to a key is no bearer token: it counts only together with the certificate that it names. Where
   no certificate is shown, as at an engine's door, it counts for nothing (RFC 8705).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import Field

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import credential_refused as refused
from kvcustody.governance.credentials.certificate_thumbprint import certificate_matches
from kvcustody.governance.credentials.verification_keys import VerificationKey

if TYPE_CHECKING:
    from jwt import PyJWS

CHARACTERS_MAX = 8_192
Algorithm: TypeAlias = Literal["RS256", "PS256", "ES256", "EdDSA"]
ALGORITHMS: tuple[Algorithm, ...] = ("RS256", "ES256", "EdDSA")  # where an issuer's settings name none
LEEWAY_SECONDS = 30  # how far an issuer's clock may be off, where its settings say nothing
LeewaySeconds = Annotated[int, Field(ge=0, le=300)]
Entry = TypeVar("Entry")


@cache
def _jws() -> PyJWS:
    """PyJWT is imported where a token is verified: commands load this module without it."""
    from jwt import PyJWS

    return PyJWS()


class TrustedIssuer(NamedTuple, Generic[Entry]):
    """One issuer whose tokens count. `keys` gives the keys that a `kid` may mean, all of them for None."""

    issuer: str
    audience: str
    algorithms: tuple[Algorithm, ...]
    leeway_seconds: int
    keys: Callable[[str | None], Sequence[VerificationKey]]
    entry: Entry  # what the settings say of it besides


class TokenVerifier(Generic[Entry]):
    """Verifies the tokens of the given issuers; as thread-safe as their `keys` are."""

    def __init__(self, issuers: Iterable[TrustedIssuer[Entry]], clock: Clock) -> None:
        self._clock = clock
        self._issuers = {trusted.issuer: trusted for trusted in issuers}

    def verify(self, token: str, certificate: str | None = None) -> tuple[Entry, dict[str, Any]]:
        """Whose the token is, and its claims; `IdentityError` for a token that proves nothing.

        `certificate`: the thumbprint of the client certificate that came with it (rule 4).
        """
        if len(token) > CHARACTERS_MAX:
            raise refused(f"token longer than {CHARACTERS_MAX} characters")
        import jwt

        try:
            header = jwt.get_unverified_header(token)
            issuer = jwt.decode(token, options={"verify_signature": False}).get("iss")
            trusted = self._issuers.get(issuer) if isinstance(issuer, str) else None
            if trusted is None:
                raise refused("unknown issuer")
            claims = _signed(token, header, trusted)
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise refused(f"token does not verify ({type(error).__name__})") from None
        if claims.get("iss") != trusted.issuer:
            raise refused("token of another issuer")
        audience = claims.get("aud")
        if trusted.audience not in (audience if isinstance(audience, list) else [audience]):
            raise refused("token is for another audience")
        self._check_times(claims, trusted.leeway_seconds)
        _check_bound(claims, certificate)
        return trusted.entry, claims

    def _check_times(self, claims: dict[str, Any], leeway_seconds: int) -> None:
        now_seconds = self._clock.utc_us() / MICROSECONDS
        for name in ("exp", "nbf", "iat"):
            value = claims.get(name)
            if value is None and name != "exp":
                continue
            if type(value) not in (int, float) or not abs(value) < 1 << 53:  # type: ignore[arg-type]
                raise refused(f"claim `{name}` is not a time")
            if name == "exp" and now_seconds >= value + leeway_seconds:  # type: ignore[operator]
                raise refused("token expired")
            if name != "exp" and now_seconds < value - leeway_seconds:  # type: ignore[operator]
                raise refused("token not valid yet")


def _signed(token: str, header: dict[str, Any], trusted: TrustedIssuer[Entry]) -> dict[str, Any]:
    """The claims, once the signature is right under the one key that the token may mean."""
    if "crit" in header or "b64" in header:
        raise refused("token with critical extensions")
    kid, algorithm = header.get("kid"), header.get("alg")
    if algorithm not in trusted.algorithms:
        raise refused("token's algorithm is not allowed")
    found = [key for key in trusted.keys(kid) if algorithm in key.algorithms]
    if len(found) != 1:
        raise refused("token names no key of its issuer")
    claims = json.loads(_jws().decode(token, found[0].key, algorithms=[algorithm]))
    if not isinstance(claims, dict):
        raise refused("token has no claims")
    return claims


def _check_bound(claims: dict[str, Any], certificate: str | None) -> None:
    """Refuse a token that is bound to a key that was not shown (rule 4)."""
    if "cnf" not in claims:
        return
    bound = claims["cnf"]
    stated = bound.get("x5t#S256") if isinstance(bound, dict) and len(bound) == 1 else None
    if not isinstance(stated, str) or certificate is None:
        raise refused("token is bound to a certificate, and the request has none")
    if not certificate_matches(stated, certificate):
        raise refused("token is bound to another certificate")


def named(keys: Iterable[VerificationKey], kid: str | None) -> list[VerificationKey]:
    """The keys that a token's `kid` may mean: those of this name or of none; all where the token names none."""
    return [key for key in keys if kid is None or key.kid is None or key.kid == kid]
