"""A fleet's edge in one process: a door before a router, and two workers' own doors that trust it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.credentials.scope_token import Rejected, ScopeTokens, VerifiedToken
from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.integrations.door.edge_gate import EdgeGate, Forwarded
from kvcustody.integrations.identity.authenticate_request import AdmittedRequest
from kvcustody.integrations.identity.identity_document import load_identity
from kvcustody.integrations.identity.request_body import OUR_TRANSFER_FIELD
from kvcustody.integrations.identity.request_gate import RequestGate
from kvcustody.integrations.identity.request_headers import RequestHeaders
from kvcustody.policies.document.model import Scope
from standins.integrations.door_world import Deployment, Reply, Signers, ask, secret

TRUSTS_DOORS = "schema: kvcustody/identity@1\ndoors: {keys: doors.vkeys}\n"
BY_SUBJECT = NameScopes(Scope.SUBJECT, placement=())
COMPLETIONS = "/v1/completions"


def door_key(number: int = 1) -> SigningKey:
    """A door's key, the same for the same number."""
    return SigningKey.from_seed(f"door-{number}.example", KeyKind.ED25519, bytes([number]) * 32)


class WorkerDoor:
    """An engine's own door and the verifier of its engine."""

    def __init__(self, folder: Path, document: str, clock: VirtualClock) -> None:
        (folder / "worker.yaml").write_text(document)
        self.gate = RequestGate(load_identity(folder / "worker.yaml"), folder, secret(), clock)
        self.tokens = ScopeTokens(secret(), clock)

    def ask(self, forwarded: Forwarded, path: str = COMPLETIONS, **more: Any) -> Reply:
        """Present what a door forwarded, as a router would."""
        headers = [(name.encode(), value.encode()) for name, value in forwarded.headers.items()]
        return ask(self.gate, path, forwarded.body, headers, **more)

    def verify(self, body: dict[str, Any]) -> VerifiedToken | Rejected:
        """What the engine makes of a body that reached the application."""
        transfer = (body.get("kv_transfer_params") or {}).get(OUR_TRANSFER_FIELD)
        return self.tokens.verify(body.get("cache_salt"), transfer)


class Sent(NamedTuple):
    """What a door was sent and what it forwarded."""

    forwarded: Forwarded
    kept: dict[str, str]  # headers of the client that go on beside the forwarded ones

    @property
    def json(self) -> dict[str, Any]:
        assert self.forwarded.body is not None
        found = json.loads(self.forwarded.body)
        assert isinstance(found, dict)
        return found


class FleetEdge:
    """One clock, one secret, one identity document with clients' keys, and the doors' public keys in one file.

    `more` goes to the gate. Requests are named by subject unless it says otherwise.
    """

    def __init__(
        self,
        folder: Path,
        signers: Signers,
        *,
        doors: str = TRUSTS_DOORS,
        retries: int = 0,
        clock: VirtualClock | None = None,
        **more: Any,
    ) -> None:
        more.setdefault("scopes", lambda: BY_SUBJECT)
        self.folder = folder
        self.clients = Deployment(folder, signers, clock=clock)
        self.clock = self.clients.clock
        self.key = door_key()
        self.trust(self.key)
        document = load_identity(folder / "identity.yaml")
        self.edge = EdgeGate(document, folder, lambda: self.key, secret(), self.clock, retries=retries, **more)
        self.clock.advance(MICROSECONDS)
        self.workers = [WorkerDoor(folder, doors, self.clock) for _ in range(2)]

    def trust(self, *keys: SigningKey) -> None:
        """Write the file of the doors' public keys, whose change workers notice within a second."""
        self.clock.advance(2 * MICROSECONDS)
        text = "".join(f"{key.verifier}\n" for key in keys)
        (self.folder / "doors.vkeys").write_text(f"# doors\n{text}")

    def send(
        self,
        key: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        path: str = COMPLETIONS,
    ) -> Sent:
        """A client's request through the door; raises `RequestRefused`."""
        given = {"authorization": f"Bearer {key}", **(headers or {})}
        admitted = self.admit(key, headers, path)
        data = json.dumps({"prompt": "p"} if body is None else body).encode()
        kept = {name: value for name, value in given.items() if self.edge.passes(name)}
        return Sent(self.edge.scope(admitted, data), kept)

    def admit(self, key: str, headers: dict[str, str] | None = None, path: str = COMPLETIONS) -> AdmittedRequest:
        """A client's request once its headers passed; raises `RequestRefused`."""
        given = {"authorization": f"Bearer {key}", **(headers or {})}
        raw = RequestHeaders((name.encode(), value.encode()) for name, value in given.items())
        return self.edge.authenticate("POST", path, raw)
