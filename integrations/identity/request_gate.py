"""The decision about a request in front of the engine: whether it may pass, as whom, and with which token.

`RequestGate.authenticate` reads headers, `scope` puts a scope token into the body. Knows headers, not ASGI.
"""

from __future__ import annotations

from pathlib import Path

from kvcustody.clock import Clock
from kvcustody.errors import IdentityError
from kvcustody.governance.credentials.scope_token import Carried, ScopeTokens
from kvcustody.governance.edge.current_namespaces import NAMESPACE_DAYS, EpochsSource
from kvcustody.governance.edge.door_token import PresentedToken
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.integrations.identity.authenticate_request import AdmittedRequest, Authentication
from kvcustody.integrations.identity.engine_requests import engine_requests
from kvcustody.integrations.identity.identity_document import IdentityDocument
from kvcustody.integrations.identity.refusal import malformed, unauthenticated
from kvcustody.integrations.identity.request_body import (
    bind_ids,
    check_transfer,
    parse_body,
    put_kinds,
    put_latency,
    put_token,
    put_trace,
    refuse_fields,
    take_client_salt,
    take_kinds,
    take_latency,
    write_body,
)
from kvcustody.integrations.identity.request_headers import RequestHeaders
from kvcustody.integrations.identity.routes import VLLM_SERVER, Body, EngineServer


class RequestGate:
    """Admits requests under one identity document and one scope token secret."""

    def __init__(
        self,
        document: IdentityDocument,
        directory: Path,
        secret: KeyBuffer,
        clock: Clock,
        *,
        token_seconds: int = 60,
        server: EngineServer = VLLM_SERVER,
        namespace_days: int = NAMESPACE_DAYS,
        epochs: EpochsSource | None = None,
        worker: str = "",
    ) -> None:
        """Admit under a document and a secret.

        `epochs`: those of now, None past the lease; without it no epoch is ever raised. `worker`: the name that answers
        tell a door before the router; empty: none.
        """
        days = namespace_days
        self._authentication = Authentication(
            document, directory, secret, clock, server=server, namespace_days=days, epochs=epochs
        )
        self._document = document
        self.worker = worker
        self._server = server
        self._tokens = ScopeTokens(secret, clock)
        self._token_seconds = token_seconds
        self.message_kinds = document.message_kinds  # what a server that renders messages marks tokens with

    def is_open(self, path: str) -> bool:
        """Return whether `path` needs no identity."""
        return self._authentication.is_open(path)

    def authenticate(self, method: str, path: str, headers: RequestHeaders) -> AdmittedRequest:
        """Return who a request is from.

        Raises:
            RequestRefused: the request may not pass.
        """
        return self._authentication.authenticate(method, path, headers)

    def scope(self, admitted: AdmittedRequest, data: bytes) -> bytes:
        """Return the admitted request's body with a scope token.

        Raises:
            RequestRefused: it is malformed.
        """
        assert admitted.scoped is not None, "only requests for the engine are scoped"
        body = parse_body(data)
        client_salt = take_client_salt(body)
        kinds, latency = take_kinds(body), take_latency(body)
        check_transfer(body, allowed=self._document.allow_transfer_parameters)
        server = self._server
        refuse_fields(body, server.refused_fields)
        if admitted.token is not None and admitted.scoped.body is not Body.RESPONSES:
            body.pop("request_id", None)  # the token's, in the header, is the only one
        bind_ids(body, admitted.scoped.body, admitted.owner, server.id_fields)
        uses = engine_requests(admitted.scoped.body, body, prefix_requests=server.prefix_requests)
        if admitted.token is not None:
            client_salt = self._spend(admitted.token, client_salt, uses)
        try:
            token = self._tokens.issue(
                admitted.principal,
                classification=admitted.hint,
                client_salt=client_salt,  # type: ignore[arg-type]  # checked there
                uses=uses,
                ttl_seconds=self._token_seconds,
                epochs=None if admitted.token is None else admitted.token.claims.epochs,
                receipt=None if admitted.token is None else admitted.token.receipt,
            )
        except IdentityError as error:
            raise malformed(error.operands["field"], error.operands["reason"]) from None
        carried = Carried(token, None) if server.whole_tokens else self._tokens.carry(token)
        put_token(body, carried, admitted.scoped)
        put_trace(body, admitted.trace, admitted.scoped)
        put_kinds(body, kinds, admitted.scoped)
        put_latency(body, latency, admitted.scoped)
        return write_body(body)

    def _spend(self, token: PresentedToken, salt: object, uses: int) -> str | None:
        """Spend uses of a door's token; return the client's own salt as the door forwarded it.

        `RequestRefused` where they are spent, or the body's salt is not the namespace that the door wrote.
        """
        if salt not in (None, token.claims.namespace):
            raise malformed("cache_salt", "is not the namespace of the door's token")
        assert self._authentication.door_tokens is not None, "a token was presented, so doors are trusted"
        refusal = self._authentication.door_tokens.spend(token, uses)
        if refusal is not None:
            raise unauthenticated(f"door token: {refusal.reason}")
        return token.claims.hints.salt
