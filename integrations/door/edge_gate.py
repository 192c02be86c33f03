"""The decision about a request in front of a router: whether it may pass, as whom, and what routers and engines get.

`EdgeGate.authenticate` reads headers, `scope` reads the body. Knows headers, not HTTP servers: each skin calls it.

1. Identity is established as at an engine's own door: the same document, the same credentials, the same answers.
2. The client's credential ends here. The engine gets a door's token (`door_token`) in its place, in `Authorization`.
   Every router passes this header on, also to where prompts are rendered.
3. Routers know the requester by a namespace in `cache_salt` (`current_namespaces`). It is made from verified identity,
   of the scope that the policies in effect say (`name_scopes`): of the tenant, the subject or the session. It ends with
   each erase epoch of its scope. A request of whom a policy reuses nothing has a name of its own, and so has each
   request past the door's lease on epochs: nothing is found.
4. Of a client's fields and headers, those go on that are listed (`passed_fields`), and hints within the operator's
   bounds (`client_hints`).
5. A client's salt can only narrow: its keyed digest travels in the token.
6. Where there are placement groups, each request goes to one of them (`placement_groups`), which its token names, and
   which policy lets serve it. Where there is no such group, or no policy is known yet, the request goes nowhere. A door
   without groups is of one, and refuses what policy does not let that one serve.
7. For front ends that pass by an engine's door, a token that is stable within a window stands in place of the
   namespace (`windowed_token`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import Clock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.credentials.scope_token import USES_MAX, SaltDigests
from kvcustody.governance.edge.current_namespaces import (
    NAMESPACE_DAYS,
    CurrentNamespaces,
    EpochsSource,
    FollowedNamespaces,
    Named,
    ScopesSource,
)
from kvcustody.governance.edge.door_token import GROUP, DoorClaims, DoorTokenIssuer
from kvcustody.governance.edge.placement_document import PlacementDocument
from kvcustody.governance.edge.route_receipt import NONCE_BYTES, RouteReceipt, is_drawn
from kvcustody.governance.edge.router_namespace import RouterNamespaces
from kvcustody.governance.edge.windowed_token import WindowedClaims, WindowedTokenIssuer
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.request import Hints
from kvcustody.integrations.door.client_hints import ClippedHint, HintBounds, clip_hints
from kvcustody.integrations.door.door_metrics import DoorMetrics
from kvcustody.integrations.door.passed_fields import PassedFields
from kvcustody.integrations.door.placement_groups import (
    PLACEMENT_HEADER,
    PlacementGroups,
)
from kvcustody.integrations.door.route_receipts import DoorReceipts, OpenReceipt, SentRequest
from kvcustody.integrations.identity.authenticate_request import AdmittedRequest, Authentication
from kvcustody.integrations.identity.engine_requests import engine_requests
from kvcustody.integrations.identity.identity_document import IdentityDocument
from kvcustody.integrations.identity.refusal import RequestRefused, malformed, misplaced, not_found
from kvcustody.integrations.identity.request_body import (
    check_id,
    owns_response,
    parse_body,
    take_client_salt,
    write_body,
)
from kvcustody.integrations.identity.request_headers import REQUEST_ID, RequestHeaders
from kvcustody.integrations.identity.routes import VLLM_SERVER, Body, EngineServer
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import NAME_PATTERN
from kvcustody.policies.table.placement import ANYWHERE, Demand

RETRIES_MAX: Final = 16
_LOG = get_logger("kvcustody.door")


class Forwarded(NamedTuple):
    """The forwarded parts of a request: headers besides the client's permitted ones, and the body, if it changes.

    `group`: the placement group whose router it is; empty where there are none, or for who needs no identity.
    `receipt`: to be told of the answer's headers, and closed when the request ended.
    """

    headers: dict[str, str]
    body: bytes | None
    group: str = ""
    receipt: OpenReceipt | None = None


class _Placed(NamedTuple):
    """The destination of a request: its name for routers, its group of workers, and the policy's demand."""

    named: Named
    group: str
    demand: Demand


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
        placement: PlacementDocument | None = None,
        scopes: ScopesSource | None = None,
        namespace_days: int = NAMESPACE_DAYS,
        window_seconds: int = 0,
        epochs: EpochsSource | None = None,
        passed: PassedFields | None = None,
        hints: HintBounds | None = None,
        receipts: DoorReceipts | None = None,
        metrics: DoorMetrics | None = None,
        record_hints: Callable[[Sequence[ClippedHint]], None] = lambda _: None,
        server: EngineServer = VLLM_SERVER,
    ) -> None:
        """Admit under a document, a key and a secret.

        `key`: the door's, as it is now. `secret`: what engines make the names in their events under. `retries`: of the
        router, for one request. `epochs`: those of now, None past the lease; without it no epoch is ever raised.
        `scopes`: of a policy that the door reads itself; without it those that come with epochs. `placement`: the
        groups of workers that requests are spread over, in place of the one `group`. `record_hints`: takes a request's
        hints where one was clipped.
        `receipts`: where the door's half of route receipts is written.
        Raises `ConfigError` where the document trusts doors, as only clients come here, and for a group's name that is
        none.
        """
        if document.doors is not None:
            raise ConfigError("identity document: `doors` is for engines, not for the door before a router")
        if re.fullmatch(NAME_PATTERN, group) is None:
            raise ConfigError(f"`{group}` is no name of a placement group", group=group)
        if not 0 <= retries <= RETRIES_MAX:
            raise ConfigError(f"retries `{retries}` must be 0 to {RETRIES_MAX}", retries=retries)
        self.metrics = DoorMetrics() if metrics is None else metrics
        self._authentication = Authentication(document, directory, secret, clock, server=server)
        self._issuer = DoorTokenIssuer(key, clock)
        names = CurrentNamespaces(RouterNamespaces(secret), clock, days=namespace_days)
        self._names = FollowedNamespaces(names, epochs, scopes)
        self._salts = SaltDigests(secret)
        self._windowed = None
        if window_seconds:
            self._windowed = WindowedTokenIssuer(key, clock, window_seconds=window_seconds)
        self._server = server
        self._token_seconds = token_seconds
        self._presentations = 1 + retries
        self._group = group
        self._placement = None if placement is None else PlacementGroups(placement, secret)
        self._passed = PassedFields() if passed is None else passed
        self._hints = HintBounds() if hints is None else hints
        self._record_hints = record_hints
        self._receipts = receipts

    def is_open(self, path: str) -> bool:
        """Return whether `path` needs no identity."""
        return self._authentication.is_open(path)

    def lacks(self) -> tuple[str, ...]:
        """Return what the door lacks at this moment; it serves all the same (rule 3)."""
        if self._names.is_past_lease:
            return ("current erase epochs: until the control plane answers, no request finds cached blocks",)
        if self._names.has_scopes:
            return ()
        return ("the policy's scopes: until it knows them, each session has its own name",)

    def is_returned(self, header: str) -> bool:
        """Return whether an answer's header is returned to the client."""
        return self._passed.is_returned(header)

    def passes(self, header: str) -> bool:
        """Return whether a client's header is forwarded to the router."""
        return self._passed.header(header)

    def authenticate(self, method: str, path: str, headers: RequestHeaders) -> AdmittedRequest:
        """Return who a request is from.

        Raises:
            RequestRefused: the request may not pass.
        """
        return self._authentication.authenticate(method, path, headers)

    def plain(self, admitted: AdmittedRequest) -> Forwarded:
        """Return the forwarded parts of an admitted request that reaches no engine block."""
        request_id, placed = admitted.ids[REQUEST_ID] or _made_id(admitted), self._placed(admitted)
        return self._forwarded(placed.group, self._headers(admitted, placed, request_id, b"", 1), None)

    def placed_in(self, admitted: AdmittedRequest) -> Forwarded:
        """Return the headers that choose an admitted request's group before its body arrives; none without placement
        groups.
        """
        group, _ = self._group_of(admitted)
        return Forwarded({}, None) if self._placement is None else self._forwarded(group, {}, None)

    def scope(self, admitted: AdmittedRequest, data: bytes) -> Forwarded:
        """Return the forwarded parts of an admitted request for the engine.

        Raises:
            RequestRefused: its body is malformed.
        """
        assert admitted.scoped is not None, "only requests to the engine have a scope"
        kind, body = admitted.scoped.body, parse_body(data)
        salt = self._salt(take_client_salt(body))
        hints, clipped = clip_hints(body, self._hints)
        self._passed.check(kind, body)
        _check_previous(admitted, body)
        request_id = _request_id(admitted, kind, body)
        for hint in clipped:
            _LOG.info("hint", request=request_id, hint=hint.name, asked=hint.asked, passed=hint.passed)
            if hint.is_less:
                self.metrics.clipped(hint.name)
        if any(hint.is_less for hint in clipped):
            self._record_hints(clipped)
        requests = engine_requests(kind, body, prefix_requests=self._server.prefix_requests)
        placed = self._placed(admitted)
        uses = min(requests * (self._presentations if placed.demand.is_retried else 1), USES_MAX)
        nonce = secrets.token_bytes(NONCE_BYTES)
        receipt = self._receipt(admitted, placed, request_id, nonce, requests, uses)
        headers = self._headers(admitted, placed, request_id, salt, uses, nonce, is_receipted=receipt is not None)
        name = self._salted(admitted, placed, salt)
        passed = {**body, **hints, "cache_salt": name}
        if self._placement is not None:
            passed |= self._placement.fields(placed.group, passed)
        data = write_body(passed)
        return self._forwarded(placed.group, headers, data)._replace(receipt=receipt)

    def _salted(self, admitted: AdmittedRequest, placed: _Placed, salt: bytes) -> str:
        """Return the request's name for routers: its namespace, or a token of its scope where windows are on
        (rule 7).
        """
        named = placed.named
        if self._windowed is None:
            return named.namespace
        claims = WindowedClaims(admitted.principal, admitted.hint, named.namespace, placed.group, named.epochs)
        return self._windowed.issue(claims, salt=salt)

    def _forwarded(self, group: str, headers: dict[str, str], body: bytes | None) -> Forwarded:
        if self._placement is None:
            return Forwarded(headers, body)
        return Forwarded(headers | {PLACEMENT_HEADER: group}, body, group)

    def _receipt(
        self,
        admitted: AdmittedRequest,
        placed: _Placed,
        request_id: str,
        nonce: bytes,
        requests: int,
        uses: int,
    ) -> OpenReceipt | None:
        """Return the door's half of the request's route receipt, where it has one."""
        of = admitted.principal
        if self._receipts is None or self._windowed is not None:
            return None  # a windowed token is of many requests, and names none
        if not is_drawn(nonce, placed.demand.receipt_share):
            return None
        name = RouteReceipt.of(request_id, nonce, is_asked=True).name
        sent = SentRequest(of.issuer, of.tenant, name, placed.named.scope, placed.named.epochs, requests, uses)
        return self._receipts.open(sent)

    def _placed(self, admitted: AdmittedRequest) -> _Placed:
        """Return the request's destination and its name there (rule 3)."""
        group, demand = self._group_of(admitted)
        named = self._names.of(admitted.principal)
        if named.is_past_lease:
            self.metrics.past_lease()
        return _Placed(named, group, demand)

    def _group_of(self, admitted: AdmittedRequest) -> tuple[str, Demand]:
        """Return the request's group of workers.

        Raises:
            RequestRefused: no group may serve it (rule 6).

        And what policies demand of it, or where none is known what a policy that says nothing does.
        """
        demand = self._names.demand(admitted.principal, admitted.hint)
        if self._placement is None:
            if demand is not None and not demand.allows(self._group):
                raise self._misplaced(misplaced())
            return self._group, demand or ANYWHERE
        if demand is None:
            raise self._misplaced(misplaced(is_known=False))
        group = self._placement.of(admitted.principal, demand)
        if group is None:
            raise self._misplaced(misplaced())
        return group, demand

    def _misplaced(self, refusal: RequestRefused) -> RequestRefused:
        self.metrics.misplaced(refusal.client_code or "")
        return refusal

    def _headers(
        self,
        admitted: AdmittedRequest,
        placed: _Placed,
        request_id: str,
        salt: bytes,
        uses: int,
        nonce: bytes = b"",
        *,
        is_receipted: bool = False,
    ) -> dict[str, str]:
        claims = DoorClaims(
            admitted.principal,
            Hints(admitted.hint),
            placed.named.namespace,
            placed.group,
            request_id,
            uses,
            placed.named.epochs,
            is_receipted,
        )
        token = self._issuer.issue(claims, ttl_seconds=self._token_seconds, salt=salt, nonce=nonce)
        return {"authorization": f"Bearer {token}", REQUEST_ID: request_id}

    def _salt(self, given: object) -> bytes:
        """Return the digest of a client's own salt; nothing without one."""
        if given is None:
            return b""
        try:
            return self._salts.of(given)
        except IdentityError as error:
            raise malformed(error.operands["field"], error.operands["reason"]) from None


def _made_id(admitted: AdmittedRequest) -> str:
    return f"{admitted.owner}-{secrets.token_hex(16)}"


def _request_id(admitted: AdmittedRequest, kind: Body, body: dict[str, Any]) -> str:
    """Return the request's one id, prefixed with its owner's tag: from the header, else the body, else a new one.

    It leaves the body, or an engine would take it for the token's; of a stored response it is the response's name.
    """
    given = None if kind is Body.RESPONSES else body.pop("request_id", None)
    if admitted.ids[REQUEST_ID] is not None or given is None:
        return admitted.ids[REQUEST_ID] or _made_id(admitted)
    return f"{admitted.owner}-{check_id('request_id', given)}"


def _check_previous(admitted: AdmittedRequest, body: dict[str, Any]) -> None:
    """Refuse another owner's stored response, because a router that stores responses would return it."""
    previous = body.get("previous_response_id")
    if previous is not None and not owns_response(admitted.owner, previous):
        raise not_found()
