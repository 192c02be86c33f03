"""The decision on a request before a router sees it: whether it may pass, as whom, and what routers and engines get.

`EdgeGate.authenticate` reads headers, `scope` reads the body. Knows headers, not HTTP servers: each skin calls it.

1. Identity is established as at an engine's own door: the same document, the same credentials, the same answers.
2. The client's credential ends here. The engine gets a door's token (`door_token`) in its place, in `Authorization`.
   Every router passes this header on, also to where prompts are rendered.
3. Routers know the requester by a namespace in `cache_salt` (`router_namespace`). It is made from verified identity:
   of the subject, else of the session, else of the tenant; or of the tenant alone (`affinity`). What a client says of
   salts, of transfers and of a router's own fields goes no further.
4. A client's salt can only narrow: its keyed digest travels in the token.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.credentials.scope_token import USES_MAX, SaltDigests
from kvcustody.governance.edge.door_token import GROUP, DoorClaims, DoorTokenIssuer
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.request import Hints
from kvcustody.integrations.identity.authenticate_request import AdmittedRequest, Authentication
from kvcustody.integrations.identity.engine_requests import engine_requests
from kvcustody.integrations.identity.identity_document import IdentityDocument
from kvcustody.integrations.identity.refusal import malformed
from kvcustody.integrations.identity.request_body import parse_body, take_client_salt, write_body
from kvcustody.integrations.identity.request_headers import REQUEST_ID, RequestHeaders
from kvcustody.integrations.identity.routes import VLLM_SERVER, EngineServer

# Fields of bodies that a router or an engine would act on, and that no client may set.
STRIPPED_FIELDS: Final = (
    *("extra_key", "nvext", "kv_transfer_params", "ec_transfer_params", "kv_hints"),
    *("session_id", "session_params", "vllm_xargs"),
)
# Headers that a router would act on; a name that ends with `-` is a prefix.
STRIPPED_HEADERS: Final = (
    *("authorization", "x-api-key", "x-tenant-id", "x-session-id", "x-request-id"),
    *("x-kvcustody-", "x-smg-", "x-llm-d-"),
)
# Prefixes of response headers that say which worker answered.
TOPOLOGY_HEADERS: Final = ("x-smg-", "x-llm-d-", "x-worker-", "x-kvcustody-")
RETRIES_MAX: Final = 16
Affinity = Literal["subject", "tenant"]


class Forwarded(NamedTuple):
    """What goes on to the router: headers in place of those of `STRIPPED_HEADERS`, and the body, if it changes."""

    headers: dict[str, str]
    body: bytes | None


class EdgeGate:
    """Admits requests under one identity document, and signs door tokens under one key."""

    def __init__(
        self,
        document: IdentityDocument,
        directory: Path,
        key: Callable[[], SigningKey],
        secret: KeyBuffer,
        clock: Clock,
        *,
        token_seconds: int = 30,
        retries: int = 2,
        group: str = GROUP,
        affinity: Affinity = "subject",
        server: EngineServer = VLLM_SERVER,
    ) -> None:
        """Admit under a document, a key and a secret.

        `key`: the door's, as it is now. `secret`: what engines make the names in their events under. `retries`: of the
        router, for one request. Raises `ConfigError` where the document trusts doors: only clients come here.
        """
        if document.doors is not None:
            raise ConfigError("identity document: `doors` is for engines, not for the door before a router")
        if not 0 <= retries <= RETRIES_MAX:
            raise ConfigError(f"retries `{retries}` must be 0 to {RETRIES_MAX}", retries=retries)
        self._authentication = Authentication(document, directory, secret, clock, server=server)
        self._issuer = DoorTokenIssuer(key, clock)
        self._namespaces = RouterNamespaces(secret)
        self._salts = SaltDigests(secret)
        self._server = server
        self._token_seconds = token_seconds
        self._presentations = 1 + retries
        self._group = group
        self._affinity = affinity

    def is_open(self, path: str) -> bool:
        """Whether `path` needs no identity."""
        return self._authentication.is_open(path)

    def authenticate(self, method: str, path: str, headers: RequestHeaders) -> AdmittedRequest:
        """Who a request is from; `RequestRefused` if the request may not pass."""
        return self._authentication.authenticate(method, path, headers)

    def plain(self, admitted: AdmittedRequest) -> Forwarded:
        """What goes on of an admitted request that reaches no engine block."""
        return Forwarded(self._headers(admitted, Hints(admitted.hint), b"", 1), None)

    def scope(self, admitted: AdmittedRequest, data: bytes) -> Forwarded:
        """What goes on of an admitted request for the engine; `RequestRefused` if its body is malformed."""
        assert admitted.scoped is not None, "only requests for the engine are scoped"
        body = parse_body(data)
        salt = self._salt(take_client_salt(body))
        _strip(body)
        requests = engine_requests(admitted.scoped.body, body, prefix_requests=self._server.prefix_requests)
        uses = min(requests * self._presentations, USES_MAX)
        headers = self._headers(admitted, Hints(admitted.hint), salt, uses)
        body["cache_salt"] = self._namespace(admitted)
        return Forwarded(headers, write_body(body))

    def _namespace(self, admitted: AdmittedRequest) -> str:
        of = admitted.principal
        if self._affinity == "tenant":
            return self._namespaces.of(of.issuer, of.tenant)
        return self._namespaces.of(
            of.issuer, of.tenant, of.subject, of.session if of.subject is None else None
        )

    def _headers(self, admitted: AdmittedRequest, hints: Hints, salt: bytes, uses: int) -> dict[str, str]:
        request_id = admitted.ids[REQUEST_ID] or f"{admitted.owner}-{secrets.token_hex(16)}"
        claims = DoorClaims(
            admitted.principal, hints, self._namespace(admitted), self._group, request_id, uses
        )
        token = self._issuer.issue(claims, ttl_seconds=self._token_seconds, salt=salt)
        return {"authorization": f"Bearer {token}", REQUEST_ID: request_id}

    def _salt(self, given: object) -> bytes:
        """The digest of a client's own salt; nothing where there is none."""
        if given is None:
            return b""
        try:
            return self._salts.of(given)
        except IdentityError as error:
            raise malformed(error.operands["field"], error.operands["reason"]) from None


def is_stripped(header: str) -> bool:
    """Whether a client's header goes no further; `_` counts as `-`, as some servers read it."""
    name = header.lower().replace("_", "-")
    return any(name.startswith(each) if each.endswith("-") else name == each for each in STRIPPED_HEADERS)


def _strip(body: dict[str, Any]) -> None:
    """Remove every field of `STRIPPED_FIELDS`, also from sampling parameters, and their `extra_args`."""
    sampling = body.get("sampling_params")
    of_prompts = sampling if isinstance(sampling, list) else [sampling]
    for holder in (body, *(each for each in of_prompts if isinstance(each, dict))):
        for field in (*STRIPPED_FIELDS, "extra_args"):
            holder.pop(field, None)
