"""What identity costs: a scope token verified in the engine, a request let in and scoped at the door.

Each figure is the least of many short rounds, so that other work on the machine does not count. Run it from the
repository root: `.venv/bin/python benchmarks/identity.py`.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kvcustody.clock import SystemClock
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.governance.credentials.scope_token import ScopeTokens, VerifiedToken
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.ids import SessionId, SubjectId, TenantId
from kvcustody.integrations.identity.identity_document import load_identity
from kvcustody.integrations.identity.request_gate import RequestGate
from kvcustody.integrations.identity.request_headers import RequestHeaders

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from bench import Bench

ROUNDS, BATCH = 400, 50
SIGNERS = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}
BODIES = {
    "text of 4 KB": {"prompt": "x" * 4_000},
    "text of 128 KB": {"prompt": "x" * 128_000},
    "32,000 token ids": {"prompt": list(range(32_000))},
    "chat of 40 messages": {"messages": [{"role": "user", "content": "y" * 500}] * 40},
}


def least_us(call: Callable[[], object], rounds: int, batch: int = BATCH) -> float:
    """The least mean time of a call over the rounds, in microseconds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(batch):
            call()
        best = min(best, time.perf_counter() - start)
    return best / batch * 1e6


def verification(principal: Principal, salt: str | None, rounds: int) -> float:
    """Microseconds to verify a fresh token."""
    tokens = ScopeTokens(KeyBuffer.random(), SystemClock(), remembered_max=1 << 20, remembered_per_tenant_max=1 << 20)
    fresh = iter([tokens.carry(tokens.issue(principal, client_salt=salt)) for _ in range(rounds * BATCH)])

    def verify() -> None:
        if not isinstance(tokens.verify(*next(fresh)), VerifiedToken):
            raise SystemExit("a fresh token was rejected")

    return least_us(verify, rounds)


def make_gate(directory: Path) -> tuple[RequestGate, dict[str, str]]:
    """A door, and a credential of each kind."""
    clock = SystemClock()
    credentials = {"API key": add_key(directory / "keys.yaml", {"name": "bench", "tenant": "acme"})}
    expiry = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    lines = ["schema: kvcustody/identity@1", "api_keys: {path: keys.yaml}", "issuers:"]
    for name, key in SIGNERS.items():
        pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (directory / f"{name}.pem").write_bytes(pem)
        lines.append(f"- {{issuer: {name}, keys: {name}.pem, audience: a, claims: {{tenant: org, subject: sub}}}}")
        claims = {"iss": name, "aud": "a", "exp": expiry, "org": "acme", "sub": "alice"}
        credentials[name] = jwt.encode(claims, key, name)
    (directory / "identity.yaml").write_text("\n".join(lines) + "\n")
    document = load_identity(directory / "identity.yaml")
    return RequestGate(document, directory, KeyBuffer.random(), clock), credentials


def main() -> None:
    """Print one line for each figure."""
    bench = Bench(__doc__, "kvcustody", "PyJWT", "cryptography", rounds=ROUNDS)
    rounds = bench.parse().rounds
    figures: dict[str, float] = {}

    def shown(what: str, cost: float) -> None:
        figures[what] = round(cost, 2)
        print(f"{what}: {cost:.1f} us", flush=True)

    short = Principal("idp", TenantId("acme"), SubjectId("alice"), route="/v1/completions")
    long = Principal("idp", TenantId("acme"), SubjectId("s" * 90), SessionId("t" * 36), route="/v1/completions")
    for name, principal in (("in the salt", short), ("beside the salt", long)):
        for salt in (None, "mine"):
            shown(f"verify, {name}, client salt {salt}", verification(principal, salt, rounds))
    with tempfile.TemporaryDirectory() as name:
        gate, credentials = make_gate(Path(name))
        for kind, credential in credentials.items():
            headers = [(b"authorization", f"Bearer {credential}".encode())]
            shown(
                f"enter, {kind}",
                least_us(
                    lambda headers=headers: gate.authenticate("POST", "/v1/completions", RequestHeaders(headers)),
                    rounds,
                ),
            )
        admitted = gate.authenticate("POST", "/v1/completions", RequestHeaders(headers))
        for kind, body in BODIES.items():
            data = json.dumps(body).encode()
            shown(f"scope, {kind}", least_us(lambda data=data: gate.scope(admitted, data), rounds, batch=2))
            shown(f"parsing alone, {kind}", least_us(lambda data=data: json.loads(data), rounds, batch=2))
    bench.keep({"rounds": rounds, "us": figures})


if __name__ == "__main__":
    main()
