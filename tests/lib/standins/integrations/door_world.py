"""A deployment with two tenants' API keys and one issuer, and an application that records what reaches it."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.governance.credentials.scope_token import Rejected, ScopeTokens, VerifiedToken
from kvcustody.governance.edge.current_namespaces import EpochsSource
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.integrations.identity.identity_document import load_identity
from kvcustody.integrations.identity.middleware import IdentityMiddleware
from kvcustody.integrations.identity.request_body import OUR_TRANSFER_FIELD
from kvcustody.integrations.identity.request_gate import RequestGate

ISSUER = "https://idp.example/realm"
DOCUMENT = """\
schema: kvcustody/identity@1
api_keys:
  path: keys.yaml
  asserted: {subject: X-KVCustody-Subject, session: X-KVCustody-Session}
issuers:
  - issuer: https://idp.example/realm
    name: idp
    keys: jwks.json
    audience: kvcustody
    claims: {tenant: org, subject: sub, session: sid, classification: data_class, route: app_route}
    tenants: [acme, globex]
    asserted: {session: X-KVCustody-Session}
routes: {/v1/embeddings: /search}
"""


class Signers(NamedTuple):
    """One private key of each kind; the JWKS holds their public halves under these names."""

    rs: rsa.RSAPrivateKey
    es: ec.EllipticCurvePrivateKey
    ed: ed25519.Ed25519PrivateKey


def secret() -> KeyBuffer:
    buffer = KeyBuffer()
    buffer.writable()[:] = bytes(range(32))
    return buffer


def make_signers() -> Signers:
    return Signers(
        rsa.generate_private_key(65537, 2048),
        ec.generate_private_key(ec.SECP256R1()),
        ed25519.Ed25519PrivateKey.generate(),
    )


def jwk(kid: str, key: Any) -> dict[str, Any]:
    algorithm = {"rs": jwt.algorithms.RSAAlgorithm, "es": jwt.algorithms.ECAlgorithm}.get(
        kid, jwt.algorithms.OKPAlgorithm
    )
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig"}


@functools.cache
def api_keys() -> tuple[bytes, list[str]]:
    """A file of keys and the keys in it, made once: making one is durable, so it waits for the disk."""
    entries: list[dict[str, object]] = [
        {"name": "acme-ci", "tenant": "acme"},
        {"name": "globex-ci", "tenant": "globex"},
        {"name": "alice", "tenant": "acme", "subject": "alice", "classification": "internal"},
        {"name": "ops", "tenant": "platform", "operator": True},
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "keys.yaml"
        keys = [add_key(path, entry) for entry in entries]
        return path.read_bytes(), keys


class Deployment:
    """Files, clock, door and verifier of one deployment."""

    def __init__(
        self,
        directory: Path,
        signers: Signers,
        document: str = DOCUMENT,
        epochs: EpochsSource | None = None,
        *,
        clock: VirtualClock | None = None,
    ) -> None:
        self.directory = directory
        self.signers = signers
        self.clock = clock or VirtualClock()
        content, (self.acme, self.globex, self.alice, self.operator) = api_keys()
        (directory / "keys.yaml").touch(0o600)
        (directory / "keys.yaml").write_bytes(content)
        rows = [jwk(kid, key) for kid, key in signers._asdict().items()]
        (directory / "jwks.json").write_text(json.dumps({"keys": rows}))
        (directory / "identity.yaml").write_text(document)
        self.tokens = ScopeTokens(secret(), self.clock)
        read = load_identity(directory / "identity.yaml")
        self.gate = RequestGate(read, directory, secret(), self.clock, epochs=epochs)

    def token(self, algorithm: str = "EdDSA", kid: str | None = "ed", /, **claims: Any) -> str:
        """A signed token of the issuer for alice of acme; claims given as `None` are left out."""
        key = {"RS256": self.signers.rs, "ES256": self.signers.es}.get(algorithm, self.signers.ed)
        now = self.clock.utc_us() // MICROSECONDS
        full = {"iss": ISSUER, "aud": "kvcustody", "exp": now + 600, "org": "acme", "sub": "alice", **claims}
        payload = {name: value for name, value in full.items() if value is not None}
        data = json.dumps(payload).encode()
        return jwt.api_jws.encode(data, key, algorithm, headers=None if kid is None else {"kid": kid})

    def verify(self, body: dict[str, Any]) -> VerifiedToken | Rejected:
        """What the engine makes of a body that reached the application."""
        transfer = (body.get("kv_transfer_params") or {}).get(OUR_TRANSFER_FIELD)
        return self.tokens.verify(body.get("cache_salt"), transfer)


class Received(NamedTuple):
    """What the application got."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


class Reply(NamedTuple):
    """What the client got, and what the application did, if anything."""

    status: int
    headers: dict[str, str]
    body: bytes
    received: Received | None

    @property
    def passed(self) -> Received:
        assert self.received is not None, (self.status, self.body)
        return self.received


Ask = Callable[..., Reply]


class Recorder:
    """An ASGI application that keeps the last request and answers 200 in two chunks."""

    def __init__(self) -> None:
        self.received: Received | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        assert len(headers) == len(scope["headers"]), "a header reached the application twice"
        self.received = Received(scope["path"], headers, body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-app", b"1")]})
        await send({"type": "http.response.body", "body": b"data: \xff\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def ask(
    gate: RequestGate,
    path: str = "/v1/completions",
    body: bytes | dict[str, Any] | None = None,
    headers: dict[str, str] | list[tuple[bytes, bytes]] | None = None,
    *,
    key: str | None = None,
    method: str = "POST",
    chunks: int = 1,
    root_path: str = "",
    body_bytes_max: int = 1 << 20,
    refused: Callable[[str, str], None] | None = None,
) -> Reply:
    """One request through the middleware in this process."""
    data = body if isinstance(body, bytes) else json.dumps({"prompt": "p"} if body is None else body).encode()
    given = headers if isinstance(headers, list) else [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
    raw = [*given, (b"content-length", b"%d" % len(data)), (b"content-type", b"application/json")]
    if key is not None:
        raw.append((b"authorization", b"Bearer " + key.encode()))
    size = -(-len(data) // chunks) or 1
    parts = [data[at : at + size] for at in range(0, max(1, len(data)), size)]
    inbox = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    inbox[-1]["more_body"] = False
    outbox: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return inbox.pop(0) if inbox else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        outbox.append(dict(message))

    app = Recorder()
    scope = {"type": "http", "method": method, "path": path, "root_path": root_path, "headers": raw}
    scope["client"] = ("203.0.113.77", 4711)
    middleware = IdentityMiddleware(app, gate, body_bytes_max=body_bytes_max, refused=refused)
    asyncio.run(middleware(scope, receive, send))
    start = outbox[0]
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], found, b"".join(m["body"] for m in outbox[1:]), app.received)


def unsigned(token: str) -> list[str]:
    """The three parts of a token."""
    return token.split(".")


def part(value: Any) -> str:
    """A value as one part of a token."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
