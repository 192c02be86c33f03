"""OpenID Connect tokens: which issuer signed one, and which principal, roles and tenant its claims name.

1. Issuer, audience, algorithms and keys come from the settings. Nothing in a token chooses them: `jwk`, `jku`, `x5u`
   and `x5c` are not read, and a token with `crit` is refused.
2. Only asymmetric algorithms exist here, and a key verifies with those of its own kind alone.
3. Expiry is required, and times are compared with our own clock.
4. A role that the settings do not name gives nothing. Roles that nobody may hold together refuse the token.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from typing import Any, NamedTuple

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import IdentityError
from kvcustody.governance.identity.principal import check_identifier, check_tenant_name
from kvcustody.governance.service.access.jwks import KeySet
from kvcustody.governance.service.access.roles import OF_TENANTS, Role, check_roles
from kvcustody.governance.service.settings import Issuer

CHARACTERS_MAX = 8_192


class VerifiedClaims(NamedTuple):
    """What a verified token says."""

    principal: str
    roles: frozenset[Role]
    tenant: str | None


class OidcTokens:
    """Verifies the tokens of the configured issuers; thread-safe."""

    def __init__(self, issuers: tuple[Issuer, ...], clock: Clock) -> None:
        self._clock = clock
        self._issuers = {entry.issuer: (entry, KeySet(entry, clock)) for entry in issuers}

    def verify(self, token: str, certificate: str | None = None) -> VerifiedClaims:
        """What the token proves; raises `IdentityError` for one that proves nothing.

        `certificate`: the thumbprint of the client certificate that came with it.
        """
        from joserfc.errors import JoseError

        if len(token) > CHARACTERS_MAX or token.count(".") != 2:
            raise _refused("not a signed token")
        try:
            header, claims = (_part(part) for part in token.split(".")[:2])
            issuer = claims.get("iss")
            found = self._issuers.get(issuer) if isinstance(issuer, str) else None
            if found is None:
                raise _refused("unknown issuer")
            entry, keys = found
            verified = _verified(token, header, entry, keys)
        except (JoseError, ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
            raise _refused(f"token does not verify ({type(error).__name__})") from None
        self._check(verified, entry)
        _check_bound(verified, certificate)
        return _proven(verified, entry)

    def _check(self, claims: dict[str, Any], entry: Issuer) -> None:
        audience = claims.get("aud")
        named = audience if isinstance(audience, list) else [audience]
        if entry.audience not in [item for item in named if isinstance(item, str)]:
            raise _refused("token is for another audience")
        if claims.get("iss") != entry.issuer:
            raise _refused("token of another issuer")
        now_s, leeway_s = self._clock.utc_us() / MICROSECONDS, entry.leeway_seconds
        times = {}
        for name in ("exp", "nbf", "iat"):
            value = claims.get(name)
            if value is None and name != "exp":
                continue
            if type(value) not in (int, float) or not abs(value) < 1 << 53:  # type: ignore[arg-type]
                raise _refused(f"claim `{name}` is not a time")
            times[name] = value
        if now_s >= times["exp"] + leeway_s:  # type: ignore[operator]
            raise _refused("token expired")
        if any(now_s < times[name] - leeway_s for name in ("nbf", "iat") if name in times):  # type: ignore[operator]
            raise _refused("token not valid yet")


def _check_bound(claims: dict[str, Any], certificate: str | None) -> None:
    """A token that is bound to somebody's key is no bearer's: only a certificate can be checked here (RFC 8705)."""
    if "cnf" not in claims:
        return
    bound = claims["cnf"]
    stated = bound.get("x5t#S256") if isinstance(bound, dict) and len(bound) == 1 else None
    if not isinstance(stated, str) or certificate is None:
        raise _refused("token is bound to a key that was not shown")
    if not hmac.compare_digest(stated.encode(), certificate.encode()):
        raise _refused("token is bound to another certificate")


def _verified(token: str, header: dict[str, Any], entry: Issuer, keys: KeySet) -> dict[str, Any]:
    """The claims, once the signature is right under the one key that the token may mean."""
    from joserfc import jws

    if "crit" in header or "b64" in header:
        raise _refused("token with critical extensions")
    kid, algorithm = header.get("kid"), header.get("alg")
    if kid is not None and not isinstance(kid, str):
        raise _refused("token's key has no name")
    if algorithm not in entry.algorithms:
        raise _refused("token's algorithm is not allowed")
    found = [key for key in keys.find(kid) if algorithm in key.algorithms]
    if len(found) != 1:
        raise _refused("token names no key of its issuer")
    opened = jws.deserialize_compact(token, found[0].key, algorithms=[algorithm])
    claims = json.loads(opened.payload)
    if not isinstance(claims, dict):
        raise _refused("token has no claims")
    return claims


def _proven(claims: dict[str, Any], entry: Issuer) -> VerifiedClaims:
    who = check_identifier("principal", claims.get(entry.principal_claim))
    stated = claims.get(entry.roles_claim, [])
    names = stated.split() if isinstance(stated, str) else stated
    if not isinstance(names, list):
        raise _refused("claim of roles is not a list")
    roles = {entry.roles[name] for name in names if isinstance(name, str) and name in entry.roles}
    tenant = claims.get(entry.tenant_claim) if roles & OF_TENANTS else None
    if tenant is not None:
        check_tenant_name(tenant)
    return VerifiedClaims(f"{entry.name}:{who}", check_roles(roles, tenant), tenant)


def _part(text: str) -> dict[str, Any]:
    found = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    if not isinstance(found, dict):
        raise _refused("token is malformed")
    return found


def _refused(reason: str) -> IdentityError:
    return IdentityError(f"token: {reason}", field="token", reason=reason)
