"""OpenID Connect tokens: what attacks on them come to. Each attack has the honest token beside it as its control."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.credentials import issuer_keys
from kvcustody.governance.credentials.issuer_keys import KeysAtAddress, keys_at
from kvcustody.governance.credentials.verification_keys import parse_verification_keys
from kvcustody.governance.service.access.oidc_token import OidcTokens
from kvcustody.governance.service.service import Service
from kvcustody.governance.service.settings import Issuer
from standins.service.web_signers import Signer, ec_signer, ed25519_signer, rsa_signer

ISSUER, AUDIENCE = "https://id.example", "kvcustody"
RSA, EC, OTHER = rsa_signer("r1"), ec_signer("e1"), rsa_signer("r1")
SECRET = {"kty": "oct", "kid": "r1", "k": base64.urlsafe_b64encode(b"secret" * 8).decode()}
ROLES = {
    "kv-auditors": "auditor",
    "kv-tenant": "tenant-viewer",
    "kv-authors": "author",
    "kv-approvers": "approver",
}


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [RSA.jwk(), EC.jwk()]}))
    return Issuer(issuer=ISSUER, name="id", audience=AUDIENCE, keys=str(path), roles=ROLES)


@pytest.fixture
def tokens(issuer: Issuer) -> OidcTokens:
    return OidcTokens((issuer,), VirtualClock(utc_us=1_790_000_000 * 10**6))


def at_address(clock: VirtualClock) -> KeysAtAddress:
    return KeysAtAddress("https://id.example/keys", "id", 300, clock)


def claims(**more: Any) -> dict[str, Any]:
    honest = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": 1_790_000_300, "roles": ["kv-auditors"]}
    return {name: value for name, value in {**honest, **more}.items() if value is not ...}


def sign(body: dict[str, Any], key: Signer = RSA, **header: Any) -> str:
    return key.sign(body, **header)


def raw(header: dict[str, Any], body: dict[str, Any], signature: bytes = b"") -> str:
    parts = [json.dumps(header).encode(), json.dumps(body).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def hmac_of_public_key() -> str:
    """Key confusion: HS256 under the RSA public key's own PEM."""
    return mac(RSA.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def mac(secret: bytes) -> str:
    signed = raw({"alg": "HS256", "kid": "r1"}, claims()).rpartition(".")[0]
    tag = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{base64.urlsafe_b64encode(tag).rstrip(b'=').decode()}"


def test_the_honest_token_counts(tokens: OidcTokens) -> None:
    found = tokens.verify(sign(claims()))
    assert (found.principal, set(found.roles), found.tenant) == ("id:alice", {"auditor"}, None)
    assert tokens.verify(sign(claims(), EC)).principal == "id:alice"
    of_tenant = tokens.verify(sign(claims(roles=["kv-tenant"], tenant="acme")))
    assert (set(of_tenant.roles), of_tenant.tenant) == ({"tenant-viewer"}, "acme")
    assert tokens.verify(sign(claims(aud=["other", AUDIENCE]))).principal == "id:alice"


ATTACKS: dict[str, Callable[[], str]] = {
    "alg none": lambda: raw({"alg": "none"}, claims()),
    "alg None": lambda: raw({"alg": "None", "kid": "r1"}, claims()),
    "empty signature": lambda: raw({"alg": "RS256", "kid": "r1"}, claims()),
    "key confusion": hmac_of_public_key,
    "symmetric key of one's own": lambda: mac(b"secret" * 8),
    "another key under a known name": lambda: sign(claims(), OTHER),
    "expired": lambda: sign(claims(exp=1_789_999_900)),
    "no expiry": lambda: sign(claims(exp=...)),
    "expiry that is text": lambda: sign(claims(exp="9999999999")),
    "expiry that is a list": lambda: sign(claims(exp=[9999999999])),
    "expiry that is no number": lambda: sign(claims(exp=float("nan"))),
    "not valid yet": lambda: sign(claims(nbf=1_790_000_200)),
    "issued in the future": lambda: sign(claims(iat=1_790_000_200)),
    "wrong audience": lambda: sign(claims(aud="another")),
    "no audience": lambda: sign(claims(aud=...)),
    "audience that contains ours": lambda: sign(claims(aud=f"{AUDIENCE}-dev")),
    "audience in an object": lambda: sign(claims(aud={AUDIENCE: 1})),
    "wrong issuer": lambda: sign(claims(iss="https://evil.example")),
    "no issuer": lambda: sign(claims(iss=...)),
    "kid traversal": lambda: sign(claims(), kid="../../../../dev/null"),
    "kid that is SQL": lambda: sign(claims(), kid="r1' OR '1'='1"),
    "kid that is a list": lambda: raw({"alg": "RS256", "kid": ["r1"]}, claims()),
    "own key in the header": lambda: sign(claims(), OTHER, jwk=OTHER.jwk()),
    "algorithm of another kind of key": lambda: raw({"alg": "ES256", "kid": "r1"}, claims(), b"x" * 64),
    "critical extension": lambda: raw({"alg": "RS256", "kid": "r1", "crit": ["exp"]}, claims(), b"x" * 256),
    "unencoded payload": lambda: raw({"alg": "RS256", "kid": "r1", "b64": False}, claims(), b"x" * 256),
    "author and approver": lambda: sign(claims(roles=["kv-authors", "kv-approvers"])),
    "no role of ours": lambda: sign(claims(roles=["admins", "worker", "bootstrap", "auditor"])),
    "roles that are an object": lambda: sign(claims(roles={"kv-auditors": True})),
    "a tenant's role without a tenant": lambda: sign(claims(roles=["kv-tenant"])),
    "a tenant that is a path": lambda: sign(claims(roles=["kv-tenant"], tenant="../acme")),
    "a subject that is a wildcard": lambda: sign(claims(sub="*")),
    "no subject": lambda: sign(claims(sub=...)),
    "not a token": lambda: "a.b.c",
    "four parts": lambda: sign(claims()) + ".x",
    "too long": lambda: sign(claims(junk="x" * 9000)),
    "claims that are a list": lambda: raw({"alg": "RS256", "kid": "r1"}, [], b"x"),  # type: ignore[arg-type]
    "deep nesting": lambda: "eyJ" + base64.urlsafe_b64encode(b"[" * 3000).decode() + "." + "a.b",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_comes_to_nothing(tokens: OidcTokens, attack: str) -> None:
    with pytest.raises(IdentityError):
        tokens.verify(ATTACKS[attack]())


def test_a_token_without_a_kid_counts_where_one_key_alone_fits(issuer: Issuer, tmp_path: Path) -> None:
    token = sign(claims(), kid=...)
    for signers, counts in (((RSA, EC), True), ((RSA, rsa_signer("r2")), False)):
        Path(issuer.keys).write_text(json.dumps({"keys": [signer.jwk() for signer in signers]}))
        tokens = OidcTokens((issuer,), VirtualClock(utc_us=1_790_000_000 * 10**6))
        if counts:
            assert tokens.verify(token).principal == "id:alice"
        else:
            with pytest.raises(IdentityError, match="names no key"):
                tokens.verify(token)


def test_a_server_of_keys_that_trickles_costs_its_deadline_alone(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the last answer holds: a hostile issuer cannot hold the requests of others."""
    asked: list[dict[str, Any]] = []

    def late(*args: Any, **how: Any) -> None:
        asked.append(how)
        raise TimeoutError

    monkeypatch.setattr(issuer_keys, "exchange", late)
    keys = at_address(VirtualClock())
    assert keys.find("r1") == [] and keys.find("r1") == []
    assert [how["deadline_seconds"] for how in asked] == [5.0]


def test_a_bound_token_counts_with_its_certificate_alone(tokens: OidcTokens) -> None:
    bound = sign(claims(cnf={"x5t#S256": "mine"}))
    assert tokens.verify(bound, "mine") == tokens.verify(sign(claims()))  # control: it is the honest token
    for certificate in (None, "another", "mine2"):
        with pytest.raises(IdentityError, match="token is bound"):
            tokens.verify(bound, certificate)
    for strange in ({"jkt": "mine"}, {"x5t#S256": "mine", "jkt": "x"}, {"x5t#S256": 1}, "mine", None):
        with pytest.raises(IdentityError, match="token is bound"):
            tokens.verify(sign(claims(cnf=strange)), "mine")


def test_every_changed_character_of_a_token_is_refused(tokens: OidcTokens) -> None:
    token = sign(claims(), EC)
    for place in range(0, len(token), 3):
        changed = "A" if token[place] != "A" else "B"
        forged = token[:place] + changed + token[place + 1 :]
        if place == len(token) - 1:
            continue  # the last character has bits that mean nothing
        with pytest.raises(IdentityError):
            tokens.verify(forged)


def test_a_token_is_a_credential_of_the_service_and_no_session(
    make_service: Callable[..., Service], make_client: Any, tmp_path: Path
) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [RSA.jwk()]}))
    issuer = {"issuer": ISSUER, "name": "id", "audience": AUDIENCE, "keys": str(path), "roles": ROLES}
    client = make_client(make_service(issuers=[issuer]))
    token = sign(claims(exp=int(time.time()) + 60))
    who = client("GET", "/v1/whoami", token).json()
    assert (who["name"], who["by"], who["roles"]) == ("id:alice", "token", ["auditor"])
    assert client("POST", "/v1/session", token).status_code == 409
    assert client("POST", "/v1/keys:rotate", token, json={}).status_code == 409
    assert client("GET", "/v1/whoami", sign(claims(exp=1))).content == client("GET", "/v1/whoami").content


@pytest.mark.parametrize(
    "keys",
    [
        [SECRET],
        [RSA.jwk(private=True)],
        [EC.jwk(), SECRET],
        [EC.jwk(), RSA.jwk(private=True)],
        [EC.jwk(), {"kty": "AKP", "alg": "ML-DSA-44", "priv": "AA"}],
        [rsa_signer("r1", 1024).jwk()],
        [ec_signer("e1", ec.SECP521R1()).jwk()],
        [RSA.jwk(), OTHER.jwk()],
        [{"kty": "RSA"}],
        [],
    ],
)
def test_key_sets_with_no_usable_key_or_with_a_secret_are_refused(keys: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError):
        parse_verification_keys(json.dumps({"keys": keys}).encode(), "jwks")


LEFT_OUT: dict[str, dict[str, Any]] = {
    "AKP/ML-DSA-44 is not understood": {"kty": "AKP", "alg": "ML-DSA-44", "pub": "AAAA", "kid": "new"},
    "curve secp384r1 is not verified here": ec_signer("new", ec.SECP384R1()).jwk(),
    "OKP/Ed448 is not understood": {
        **jwt.algorithms.OKPAlgorithm.to_jwk(ed448.Ed448PrivateKey.generate().public_key(), as_dict=True),
        "kid": "new",
    },
    "RSA of 1024 bits is too short": rsa_signer("new", 1024).jwk(),
    "algorithm `RS512` is not verified here": {**rsa_signer("new").jwk(), "alg": "RS512"},
    "a `kid` must be text": {**rsa_signer("new").jwk(), "kid": 7},
    "no `kty` is not understood": {"kid": "new"},
}


@pytest.mark.parametrize("reason", LEFT_OUT)
def test_a_key_that_is_not_understood_is_left_out_and_named(issuer: Issuer, reason: str) -> None:
    row = LEFT_OUT[reason]
    content = json.dumps({"keys": [row, RSA.jwk()]})
    keys, left_out = parse_verification_keys(content.encode(), "jwks")
    assert [key.kid for key in keys] == ["r1"]
    assert left_out == (f"key `{row['kid']}`: {reason}",)
    Path(issuer.keys).write_text(content)
    tokens = OidcTokens((issuer,), VirtualClock(utc_us=1_790_000_000 * 10**6))
    assert tokens.verify(sign(claims())).principal == "id:alice"


def test_keys_that_share_a_kid_are_left_out_unless_a_token_still_names_one() -> None:
    def kids(*rows: dict[str, Any]) -> tuple[list[str | None], int]:
        keys, left_out = parse_verification_keys(json.dumps({"keys": rows}).encode(), "jwks")
        return [key.kid for key in keys], len(left_out)

    assert kids(RSA.jwk(), OTHER.jwk(), EC.jwk()) == (["e1"], 1)
    assert kids(RSA.jwk(), RSA.jwk()) == (["r1"], 0), "the same key twice is one key"
    assert kids(RSA.jwk(), {**EC.jwk(), "kid": "r1"}) == (["r1", "r1"], 0), "the algorithm tells them apart"


class SlowIssuer:
    """An issuer's address that answers when it is let go, and counts the questions."""

    def __init__(self, *signers: Signer) -> None:
        self.body = json.dumps({"keys": [signer.jwk() for signer in signers]}).encode()
        self.asked = threading.Event()
        self.let_go = threading.Event()
        self.questions = 0

    def __call__(self, *args: Any, **how: Any) -> SimpleNamespace:
        self.questions += 1
        self.asked.set()
        assert self.let_go.wait(60)
        return SimpleNamespace(status=200, body=self.body)


def test_a_slow_issuer_and_an_unsigned_token_stall_no_good_token(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the unsigned token does make the service ask, and is held while the issuer is silent."""
    server = SlowIssuer(RSA)
    server.let_go.set()
    monkeypatch.setattr(issuer_keys, "exchange", server)
    monkeypatch.setattr(issuer_keys, "_ASKING_SECONDS", 60.0)
    clock = VirtualClock()
    keys = at_address(clock)
    assert keys.find("r1"), "the first token waits for the first answer"
    server.let_go.clear()
    server.asked.clear()
    clock.advance(11 * 10**6)
    attackers = [threading.Thread(target=keys.find, args=("unknown",)) for _ in range(12)]
    for attacker in attackers:
        attacker.start()
    try:
        assert server.asked.wait(60) and any(attacker.is_alive() for attacker in attackers)
        good = threading.Thread(target=keys.find, args=("r1",))
        good.start()
        good.join(30)
        assert not good.is_alive(), "a token with a known key waits for nobody"
        clock.advance(301 * 10**6)
        assert keys.find("r1"), "nor when the keys are due"
    finally:
        server.let_go.set()
        for attacker in attackers:
            attacker.join(60)
    assert server.questions == 2


def test_tokens_with_unknown_keys_cannot_take_every_thread(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound every thread of the pool waits, and the last line waits with them."""
    server = SlowIssuer(RSA)
    monkeypatch.setattr(issuer_keys, "exchange", server)
    monkeypatch.setattr(issuer_keys, "_ASKING_SECONDS", 60.0)
    keys = at_address(VirtualClock())
    refused = threading.Semaphore(0)

    def unsigned_token() -> None:
        keys.find("unknown")
        refused.release()

    attackers = [threading.Thread(target=unsigned_token) for _ in range(12)]
    for attacker in attackers:
        attacker.start()
    try:
        for _ in attackers[issuer_keys._WAITING_MAX :]:
            assert refused.acquire(timeout=30)
    finally:
        server.let_go.set()
        for attacker in attackers:
            attacker.join(60)


NESTED: dict[str, dict[str, Any]] = {
    "realm_access.roles": {"realm_access": {"roles": ["kv-auditors"]}},
    "resource_access.kv\\.api.roles": {"resource_access": {"kv.api": {"roles": ["kv-auditors"]}}},
    "https://example.com/roles": {"https://example.com/roles": "kv-auditors"},
    "urn:roles": {"urn:roles": {"kv-auditors": {"org": "example.com"}}},
}


@pytest.mark.parametrize("name", NESTED)
def test_a_claim_of_roles_may_be_nested(issuer: Issuer, name: str) -> None:
    clock = VirtualClock(utc_us=1_790_000_000 * 10**6)
    tokens = OidcTokens((issuer.model_copy(update={"roles_claim": name}),), clock)
    assert set(tokens.verify(sign(claims(roles=..., **NESTED[name]))).roles) == {"auditor"}
    with pytest.raises(IdentityError):
        tokens.verify(sign(claims()))  # control: only the named claim counts


def test_a_tenant_may_be_the_one_organization_of_a_token(issuer: Issuer) -> None:
    clock = VirtualClock(utc_us=1_790_000_000 * 10**6)
    tokens = OidcTokens((issuer.model_copy(update={"tenant_claim": "organization"}),), clock)

    def tenant(organization: object) -> str | None:
        return tokens.verify(sign(claims(roles=["kv-tenant"], organization=organization))).tenant

    assert [tenant(value) for value in ("acme", ["acme"], {"acme": {"id": "7"}})] == ["acme"] * 3
    ambiguous: tuple[object, ...] = ([], ["acme", "globex"], {"acme": {}, "globex": {}}, {"acme": True}, 7)
    for value in ambiguous:
        with pytest.raises(IdentityError):
            tenant(value)


def test_unknown_names_make_us_ask_again_but_not_often(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SlowIssuer(RSA)
    server.let_go.set()
    monkeypatch.setattr(issuer_keys, "exchange", server)
    clock = VirtualClock()
    keys = at_address(clock)
    for _ in range(1000):
        keys.find("unknown")
    assert server.questions == 1
    clock.advance(11 * 10**6)
    keys.find("unknown")
    assert server.questions == 2
    clock.advance(301 * 10**6)
    assert keys.find("r1")
    keys._asker.shutdown()
    assert server.questions == 3


def test_an_address_that_answers_no_more_holds_for_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, server = VirtualClock(), SlowIssuer(RSA)
    server.let_go.set()
    monkeypatch.setattr(issuer_keys, "exchange", server)
    keys = at_address(clock)
    assert [key.kid for key in keys.find("r1")] == ["r1"]
    server.body = b"broken"
    clock.advance(600 * 10**6)
    assert keys.find("r1"), "the last answer holds for a while"
    clock.advance(3700 * 10**6)
    assert keys.find("r1") == [], "and then no more"


def test_rotated_keys_of_a_file_are_taken_over_and_a_broken_file_vouches_for_nobody(issuer: Issuer) -> None:
    clock = VirtualClock()
    find, fresh = keys_at(issuer.keys, "id", 300, clock), ed25519_signer("new")
    assert find("r1"), "void: the key was never there"
    Path(issuer.keys).write_text(json.dumps({"keys": [fresh.jwk()]}))
    clock.advance(10**6)
    assert [key.kid for key in find("new")] == ["new"] and find("r1") == []
    Path(issuer.keys).write_text("broken")
    clock.advance(10**6)
    with pytest.raises(IdentityError):
        find("new")
    Path(issuer.keys).write_text(json.dumps({"keys": [fresh.jwk()]}))
    clock.advance(10**6)
    assert find("new")
