"""A request's identity from its headers: whether it may pass, and as whom. Independent of ASGI.

1. Nothing passes without identity but the paths that the identity document opens. Nothing reaches a path that is not
   listed, whoever asks, unless the credential is an operator's.
2. Identity is established from the headers alone, before a byte of the body is read.
3. What a tenant asserts (subject, session) and hints (classification, salt) can only narrow. A malformed one is a
   400, not a missing one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from kvcustody.clock import Clock
from kvcustody.errors import IdentityError
from kvcustody.governance.credentials.owner_tags import OwnerTags
from kvcustody.governance.edge.current_namespaces import (
    NAMESPACE_DAYS,
    CurrentNamespaces,
    EpochsSource,
    FollowedNamespaces,
)
from kvcustody.governance.edge.door_token import PresentedToken
from kvcustody.governance.edge.router_namespace import NAMESPACE_HEADER, RouterNamespaces
from kvcustody.governance.identity.principal import Principal, check_identifier, identify
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.integrations.identity.authentication import Authenticated, Authenticator
from kvcustody.integrations.identity.authenticators import (
    ApiKeyAuthenticator,
    DoorTokenAuthenticator,
    TokenAuthenticator,
)
from kvcustody.integrations.identity.identity_document import OWN_HEADERS, IdentityDocument
from kvcustody.integrations.identity.refusal import RequestRefused, malformed, not_found, unauthenticated
from kvcustody.integrations.identity.request_body import (
    bound_session,
    check_id,
    owns_response,
)
from kvcustody.integrations.identity.request_headers import REQUEST_ID, SESSION_ID, RequestHeaders
from kvcustody.integrations.identity.routes import (
    PLAIN,
    STORED_RESPONSE,
    VLLM_SERVER,
    EngineServer,
    Scoped,
)

CLASSIFICATION: Final = f"{OWN_HEADERS}classification"


class AdmittedRequest(NamedTuple):
    """A request that may pass: its principal, ids in headers, scope for the engine, and trace.

    `ids`: headers with an id that the client chose, bound to its owner; None where it sent none. Among them is the
    namespace that a router behind the door looks in: the tenant's, whatever the client sent.
    `token`: of a door before a router, which vouches for the principal.
    """

    principal: Principal
    owner: str
    hint: str | None
    ids: dict[str, str | None]
    scoped: Scoped | None
    trace: str = ""
    token: PresentedToken | None = None


class Authentication:
    """Establishes identity under one identity document; `secret` keys the bindings of ids and namespaces."""

    def __init__(
        self,
        document: IdentityDocument,
        directory: Path,
        secret: KeyBuffer,
        clock: Clock,
        *,
        server: EngineServer = VLLM_SERVER,
        namespace_days: int = NAMESPACE_DAYS,
        epochs: EpochsSource | None = None,
    ) -> None:
        """Prepare the check. `epochs`: the current ones, None past the lease; without it no epoch is ever raised."""
        self._document = document
        self._server = server
        self._open = frozenset(document.open_paths)
        self._plain = PLAIN | frozenset(document.served_paths)
        self._authenticators = tuple(_authenticators(document, directory, clock))
        self.door_tokens = next(
            (one.tokens for one in self._authenticators if isinstance(one, DoorTokenAuthenticator)), None
        )
        self._tags = OwnerTags(secret)
        names = CurrentNamespaces(RouterNamespaces(secret), clock, days=namespace_days)
        self._namespaces = FollowedNamespaces(names, epochs)

    def is_open(self, path: str) -> bool:
        """Return whether `path` needs no identity."""
        return path in self._open

    def authenticate(self, method: str, path: str, headers: RequestHeaders) -> AdmittedRequest:
        """Return who a request is from.

        Raises:
            RequestRefused: the request may not pass.
        """
        proven = self._authenticate(headers)
        scoped = self._server.scoped.get(path) if method == "POST" else None
        stored = STORED_RESPONSE.fullmatch(path)
        if scoped is None and stored is None and path not in self._plain and not proven.operator:
            raise RequestRefused(403, "this path is not served to tenants")
        if proven.token is not None:
            principal, hint = proven.token.claims.principal, proven.token.claims.hints.classification
        else:
            route = proven.route or (None if scoped is None else self._document.routes.get(path, path))
            principal, hint = _principal(proven, route, headers), _hint(headers)
        owner = self._tags.tag(principal)
        if stored is not None and not owns_response(owner, stored[1]) and not proven.operator:
            raise not_found()
        ids = {
            REQUEST_ID: _request_id(proven, headers, owner),
            SESSION_ID: bound_session(SESSION_ID, headers.one(SESSION_ID), owner),
            NAMESPACE_HEADER: self._namespaces.tenant(principal.issuer, principal.tenant).namespace,
        }
        if scoped is not None and (headers.one("content-encoding") or "identity") != "identity":
            raise malformed("content-encoding", "must be absent")
        return AdmittedRequest(principal, owner, hint, ids, scoped, headers.trace, proven.token)

    def _authenticate(self, headers: RequestHeaders) -> Authenticated:
        """Return what the single credential proves; every other case is the one 401."""
        try:
            credential = _credential(headers)
            for authenticator in self._authenticators:
                if authenticator.accepts(credential):
                    return authenticator.authenticate(credential)
        except IdentityError as error:
            raise unauthenticated(error.operands.get("reason", "malformed credential")) from None
        raise unauthenticated("no authenticator accepts this kind of credential")


def _request_id(proven: Authenticated, headers: RequestHeaders, owner: str) -> str | None:
    """Return the request's id: the one in a door's token, whatever a router made of the header, else the client's."""
    if proven.token is not None:
        return proven.token.claims.request_id
    given = headers.one(REQUEST_ID)
    return None if given is None else f"{owner}-{check_id(REQUEST_ID, given)}"


def _principal(proven: Authenticated, route: str | None, headers: RequestHeaders) -> Principal:
    """Return the principal; a wrong claim in the credential is a 401, a wrong header a 400."""
    verified = {
        "subject": proven.subject,
        "session": proven.session,
        "classification": proven.classification,
    }
    try:
        identify(issuer=proven.issuer, tenant=proven.tenant, verified=verified, route=route)
    except IdentityError as error:
        raise unauthenticated(f"claim {error.message}") from None
    asserted = {
        name: headers.one(header)
        for name, header in (("subject", proven.subject_header), ("session", proven.session_header))
        if header is not None
    }
    try:
        return identify(issuer=proven.issuer, tenant=proven.tenant, verified=verified, asserted=asserted, route=route)
    except IdentityError as error:
        raise malformed(error.operands["field"], error.operands["reason"]) from None


def _authenticators(document: IdentityDocument, directory: Path, clock: Clock) -> list[Authenticator]:
    authenticators: list[Authenticator] = []
    if document.doors is not None:
        doors = document.doors
        authenticators.append(DoorTokenAuthenticator(directory / doors.keys, clock, group=doors.group))
    if document.issuers:
        authenticators.append(TokenAuthenticator(document.issuers, directory, clock))
    if document.api_keys is not None:
        keys = document.api_keys
        authenticators.append(ApiKeyAuthenticator(directory / keys.path, keys.asserted, clock))
    return authenticators


def _credential(headers: RequestHeaders) -> str:
    """Return the request's single credential, from `Authorization: Bearer` or `X-Api-Key`."""
    authorization, api_key = headers.one("authorization"), headers.one("x-api-key")
    if authorization is None:
        if api_key is None:
            raise unauthenticated("no credential")
        return api_key
    if api_key is not None:
        raise unauthenticated("two credentials")
    scheme, _, credential = authorization.partition(" ")
    if scheme.lower() != "bearer" or not credential:
        raise unauthenticated("not a bearer credential")
    return credential


def _hint(headers: RequestHeaders) -> str | None:
    hint = headers.one(CLASSIFICATION)
    try:
        return None if hint is None else check_identifier("classification", hint)
    except IdentityError as error:
        raise malformed(CLASSIFICATION, error.operands["reason"]) from None
