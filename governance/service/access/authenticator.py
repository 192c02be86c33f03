"""Authenticates a request's credential: a caller, or one uniform refusal.

1. There is one refusal, whatever was wrong: the reason goes to the log, never to the requester.
2. Exactly one credential a request. A key, a token and a session are told apart by their form alone.
3. A credential is checked before anything is counted. A valid one is never refused because of what others sent, from
   its own address or under its own prefix. Failures are counted by address and by prefix, and their senders are asked
   to wait.
4. A key or token that is bound to a client certificate is invalid over a connection with another certificate or none.
5. A disabled principal is refused, whatever it presents. An answer that is held open is not given once its credential
   (key, session or token) has ended.
6. A key that was found valid is not looked up again for a second. What this process narrows still takes effect at once.
   What another process narrows (`kvcustody apikey revoke` beside a server) takes effect within that second. A key that
   ends with a session is looked up every time. A key of a worker or door is not looked up again for a minute, while no
   key and no principal changes in the database. This is checked every two seconds, so another process's changes are
   seen by then.
7. While the database does not answer, only metrics are given, and only for keys that were found valid within the hour.
   What another process narrows meanwhile cannot be known.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Hashable
from typing import NamedTuple

from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.errors import credential_refused as refused
from kvcustody.governance.credentials.api_key import SERVICE_MARK, prefix_of
from kvcustody.governance.observability.attempts import network_of, reason_of
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.oidc_token import OidcTokens, VerifiedClaims
from kvcustody.governance.service.access.principal_table import KeySource, PrincipalRecord
from kvcustody.governance.service.access.principals import Principals
from kvcustody.governance.service.access.rate_limiter import RateLimiter, too_many
from kvcustody.governance.service.access.roles import PROCESSES
from kvcustody.governance.service.access.sessions import Sessions
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.logger import get_logger

_log = get_logger(__name__)
_CHARACTERS_MAX = 8_192
_KNOWN_US, _UNCHANGED_US, _REMEMBERED_US = MICROSECONDS, 60 * MICROSECONDS, 3600 * MICROSECONDS
_KNOWN_MAX = 4096


class ServiceAuthenticator:
    """Checks credentials; thread-safe. It asks the database for one that it has not seen."""

    def __init__(
        self,
        principals: Principals,
        tokens: OidcTokens,
        sessions: Sessions,
        failures: RateLimiter,
        key_failures: RateLimiter,
        tell: Callable[[str, str], None],
        clock: Clock,
        credentials_seen: Callable[[], Hashable] = lambda: None,
    ) -> None:
        """`failures` by address, `key_failures` by the prefix of a key; `told` is told each reason and network.

        `credentials_seen`: what a look into the database saw of all keys and principals a moment ago; else None.
        """
        self._credentials_seen = credentials_seen
        self._tell = tell
        self._clock = clock
        self._principals = principals
        self._tokens = tokens
        self._sessions = sessions
        self._failures = failures
        self._key_failures = key_failures
        self._process_key = secrets.token_bytes(32)
        self._known: dict[bytes, KnownCaller] = {}  # by what was shown (rule 6)

    def caller(
        self, authorization: str | None, cookie: str | None, address: str, certificate: str | None = None
    ) -> Caller:
        """Return the caller; raises `unauthenticated`, or `too-many-requests` after too many failures.

        `certificate`: the thumbprint of the client certificate that TLS verified (rule 4).
        """
        try:
            return self._proven(authorization, cookie, certificate)
        except IdentityError as error:
            reason = error.operands.get("reason", "malformed")
        self._tell(reason_of(reason), network_of(address))
        wait_seconds = self._failures.take(address)
        prefix = prefix_of((authorization or "").partition(" ")[2])
        if prefix is not None:
            wait_seconds = max(wait_seconds, self._key_failures.take(prefix))
        if wait_seconds:
            raise too_many(wait_seconds)
        _log.warning("credential refused", reason=reason)
        raise unauthenticated()

    def known(self, authorization: str | None, certificate: str | None = None) -> Caller | None:
        """Return a caller that was verified a moment ago (rule 6); None: ask `caller`. No I/O."""
        if authorization is None:
            return None
        remembered = self._known.get(self._digest(authorization, certificate))
        if remembered is None or remembered.narrowings != self._principals.narrowings:
            return None
        now_us = self._clock.now_us()
        if now_us < remembered.until_us:
            return remembered.caller
        unchanged = now_us < remembered.unchanged_until_us and remembered.seen == self._credentials_seen()
        return remembered.caller if unchanged and remembered.seen is not None else None

    def remembered(self, authorization: str | None, certificate: str | None = None) -> Caller | None:
        """Return a caller that was verified within the hour and whose key has not ended (rule 7). No I/O."""
        found = None if authorization is None else self._known.get(self._digest(authorization, certificate))
        if found is None or found.narrowings != self._principals.narrowings:
            return None
        return found.caller if self._clock.now_us() < found.remembered_until_us else None

    def of_session(self, cookie: str) -> Caller | None:
        """Return the principal of a session's cookie; None where the session is over or unknown."""
        session = self._sessions.find(cookie)
        found = None if session is None else self._principals.find(session.principal)
        if session is None or found is None or found.disabled_us is not None or found.unread:
            return None
        return _caller(found, "session")._replace(key=session.key, session=session.digest)

    def check_still_valid(self, caller: Caller) -> None:
        """Raise `unauthenticated` where a caller was disabled after its request began (rule 5)."""
        if caller.by == "local":
            return
        over = caller.until_us is not None and self._clock.utc_us() >= caller.until_us
        left = bool(caller.session) and not self._sessions.stands(caller.session, caller.key)
        if over or left or self._principals.ended(caller.name, caller.key):
            raise unauthenticated()

    def source_of(self, caller: Caller) -> KeySource:
        """Return the credential that a caller's new key depends on; raises `unauthenticated` where that has ended."""
        if caller.by != "session":
            return KeySource(caller.key, None)
        until_us = self._sessions.expiry(caller.session)
        of_key_us = self._principals.expiry(caller.key) if caller.key else until_us
        if until_us is None or of_key_us is None:
            raise unauthenticated()
        return KeySource(caller.key, min(until_us, of_key_us), caller.session)

    def _proven(self, authorization: str | None, cookie: str | None, certificate: str | None) -> Caller:
        if authorization is None:
            if cookie is None:
                raise refused("no credential")
            found = self.of_session(cookie)
            if found is None:
                raise refused("no such session")
            return found
        scheme, _, credential = authorization.partition(" ")
        if scheme.lower() != "bearer" or not credential or len(credential) > _CHARACTERS_MAX:
            raise refused("not a bearer credential")
        if credential.startswith(f"{SERVICE_MARK}_"):
            return self._by_key(authorization, credential, certificate)
        proven = self._tokens.verify(credential, certificate)
        if self._principals.ended(proven.principal):
            raise refused("principal is disabled")
        tenant = self._tenant_of(proven)
        return Caller(proven.principal, proven.roles, tenant, "token", until_us=proven.until_us)

    def _tenant_of(self, proven: VerifiedClaims) -> str | None:
        """The tenant that a token names: whoever issues tokens for people says whose an id is, like everybody."""
        try:
            return None if proven.tenant is None else self._principals.named(proven.tenant)
        except ConfigError:
            raise refused("several issuers could have issued the token's tenant") from None

    def _by_key(self, authorization: str, key: str, certificate: str | None) -> Caller:
        prefix = prefix_of(key)
        if prefix is None:
            raise refused("malformed API key")  # its checksum is wrong: known to whoever sent it
        narrowings, now_us = self._principals.narrowings, self._clock.now_us()  # of before the look-up
        seen = self._credentials_seen()
        found = self._principals.by_key(prefix, key, certificate)
        if found is None:
            raise refused("unknown API key, or bound to another certificate")
        caller = _caller(found.principal, "key")._replace(key=found.prefix)
        if found.expires_us is not None:
            left_us = found.expires_us - self._clock.utc_us()
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            is_process = not PROCESSES.isdisjoint(caller.roles)
            self._known[self._digest(authorization, certificate)] = KnownCaller(
                caller,
                now_us + min(_KNOWN_US, left_us),
                now_us + min(_UNCHANGED_US, left_us),
                now_us + min(_REMEMBERED_US, left_us),
                narrowings,
                seen if is_process else None,
            )
        return caller

    def _digest(self, authorization: str, certificate: str | None) -> bytes:
        """What stands for a credential and the certificate that it was shown with, in this process alone."""
        shown = f"{certificate or ''} {authorization}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(shown, digest_size=32, key=self._process_key).digest()


class KnownCaller(NamedTuple):
    """A caller whose key was verified."""

    caller: Caller
    until_us: int  # by the boot clock
    unchanged_until_us: int  # the same, while no key and no principal is seen to change
    remembered_until_us: int  # the same, where the database does not answer (rule 7)
    narrowings: int  # of the principals, before the key was looked up
    seen: Hashable  # of all keys and principals, before that; None: they were not looked at, or it is a person


def unauthenticated() -> ProblemError:
    """Return the uniform refusal (rule 1)."""
    return ProblemError("unauthenticated", headers={"WWW-Authenticate": "Bearer"})


def _caller(principal: PrincipalRecord, by: str) -> Caller:
    return Caller(principal.name, principal.roles, principal.tenant, by)
