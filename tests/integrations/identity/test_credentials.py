"""API keys A1-A3 and web tokens J1-J3: one answer for everything that proves nothing, and no way around a key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcustody.clock import MICROSECONDS
from kvcustody.errors import ConfigError
from kvcustody.governance.credentials import api_key
from kvcustody.governance.credentials.api_key import digest_of
from kvcustody.governance.credentials.api_key_file import add_key, read_keys, revoke_key
from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.governance.credentials.verification_keys import read_verification_keys
from standins.integrations.door_world import ISSUER, Deployment, ask, part, unsigned


def who(deployment: Deployment, key: str) -> VerifiedToken | None:
    """Who the engine believes to be asking, `None` for a 401."""
    reply = ask(deployment.gate, key=key)
    if reply.status == 401:
        assert reply.received is None
        return None
    found = deployment.verify(reply.passed.json)
    assert isinstance(found, VerifiedToken), found
    return found


def test_a_key_speaks_for_its_tenant(deployment: Deployment) -> None:
    for key, tenant, subject in (
        (deployment.acme, "acme", None),
        (deployment.globex, "globex", None),
        (deployment.alice, "acme", "alice"),
    ):
        found = who(deployment, key)
        assert found is not None
        assert (found.principal.tenant, found.principal.subject) == (tenant, subject)
        assert not found.principal.subject_asserted


def test_the_file_holds_no_key_and_a_digest_is_none(deployment: Deployment) -> None:
    path = deployment.directory / "keys.yaml"
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    for key in (deployment.acme, deployment.globex):
        assert key not in text and key[4:20] not in text
        assert hashlib.sha256(key.encode()).hexdigest() not in text
    for entry in read_keys(path).keys:
        assert who(deployment, entry.digest) is None
    assert who(deployment, deployment.acme) is not None


def test_a_revoked_or_added_key_takes_effect_without_a_restart(deployment: Deployment) -> None:
    path = deployment.directory / "keys.yaml"
    revoke_key(path, "acme-ci")
    late = add_key(path, {"name": "late", "tenant": "acme"})
    deployment.clock.advance(MICROSECONDS)
    assert who(deployment, deployment.acme) is None
    assert who(deployment, late) is not None
    assert who(deployment, deployment.globex) is not None
    with pytest.raises(ConfigError, match="is not in"):
        revoke_key(path, "acme-ci")


def test_a_broken_key_file_vouches_for_nobody_until_it_is_whole(deployment: Deployment) -> None:
    path = deployment.directory / "keys.yaml"
    whole = path.read_bytes()
    for broken in (whole + b"keys: []\n", b"", whole.replace(b"schema", b"scheme")):
        path.write_bytes(broken)
        deployment.clock.advance(MICROSECONDS)
        assert who(deployment, deployment.acme) is None
    path.write_bytes(whole)
    path.chmod(0o620)
    deployment.clock.advance(MICROSECONDS)
    path.chmod(0o600)
    deployment.clock.advance(MICROSECONDS)
    path.write_bytes(whole + b"\n")
    deployment.clock.advance(MICROSECONDS)
    assert who(deployment, deployment.acme) is not None


def test_a_key_ends_at_its_date(deployment: Deployment) -> None:
    path = deployment.directory / "keys.yaml"
    key = add_key(path, {"name": "brief", "tenant": "acme", "until": "2026-01-02"})  # the clock is at 2026-01-01
    deployment.clock.advance(MICROSECONDS)
    assert who(deployment, key) is not None
    deployment.clock.advance(86_400 * MICROSECONDS - 2 * MICROSECONDS)
    assert who(deployment, key) is not None
    deployment.clock.advance(MICROSECONDS)
    assert who(deployment, key) is None


def test_an_existing_key_can_be_adopted_and_a_weak_one_cannot(deployment: Deployment) -> None:
    path = deployment.directory / "keys.yaml"
    add_key(path, {"name": "adopted", "tenant": "acme"}, key="sk-0123456789abcdefghij")
    deployment.clock.advance(MICROSECONDS)
    assert who(deployment, "sk-0123456789abcdefghij") is not None
    before = path.read_bytes()
    for entry, key in (
        ({"name": "weak", "tenant": "acme"}, "short"),
        ({"name": "adopted", "tenant": "acme"}, "another-key-of-some-length"),
        ({"name": "bad", "tenant": "a b"}, None),
        ({"name": "bad", "tenant": "acme", "role": "admin"}, None),
        ({"name": "again", "tenant": "globex"}, "sk-0123456789abcdefghij"),
    ):
        with pytest.raises(ConfigError):
            add_key(path, entry, key=key)
    assert path.read_bytes() == before


def test_keys_are_compared_by_digest_in_constant_time(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def watch(one: str, other: str) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(api_key, "hmac", type("Hmac", (), {"compare_digest": staticmethod(watch)}))
    for key in (deployment.acme, deployment.acme[:-1] + "~", "u" * 50):
        who(deployment, key)
    assert len(compared) == 3, "known and unknown keys take one comparison each"
    assert all(len(one) == len(other) == 64 for one, other in compared)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=600))
def test_no_other_text_is_a_key(deployment: Deployment, text: str) -> None:
    assert ask(deployment.gate, headers={"Authorization": f"Bearer {text}"}).status == 401


@pytest.mark.parametrize(("algorithm", "kid"), [("RS256", "rs"), ("ES256", "es"), ("EdDSA", "ed")])
def test_a_token_of_each_kind_is_believed(deployment: Deployment, algorithm: str, kid: str) -> None:
    token = deployment.token(algorithm, kid, sid="s1", data_class="confidential", app_route="/hr")
    found = who(deployment, token)
    assert found is not None
    principal = found.principal
    assert (principal.issuer, principal.tenant, principal.subject) == ("idp", "acme", "alice")
    assert (principal.session, principal.classification, principal.route) == ("s1", "confidential", "/hr")
    assert not principal.subject_asserted and not principal.session_asserted


def _none(deployment: Deployment) -> str:
    _, payload, _ = unsigned(deployment.token())
    return f"{part({'alg': 'none', 'typ': 'JWT'})}.{payload}."


def _none_in_capitals(deployment: Deployment) -> str:
    _, payload, signature = unsigned(deployment.token())
    return f"{part({'alg': 'NoNe'})}.{payload}.{signature}"


def _mac_under_public_key(deployment: Deployment) -> str:
    pem = deployment.signers.rs.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head, payload = part({"alg": "HS256", "kid": "rs"}), unsigned(deployment.token("RS256", "rs"))[1]
    return f"{head}.{payload}.{part(hmac.digest(pem, f'{head}.{payload}'.encode(), 'sha256'))}"


def _key_in_header(deployment: Deployment) -> str:
    own = ec.generate_private_key(ec.SECP256R1())
    public = jwt.algorithms.ECAlgorithm.to_jwk(own.public_key(), as_dict=True)
    payload = json.loads(base64.urlsafe_b64decode(unsigned(deployment.token())[1] + "=="))
    return jwt.encode(payload, own, "ES256", headers={"kid": "es", "jwk": public, "jku": "https://evil"})


def _changed_payload(deployment: Deployment) -> str:
    head, payload, signature = unsigned(deployment.token(org="globex"))
    other = unsigned(deployment.token())[1]
    assert other != payload
    return f"{head}.{other}.{signature}"


def _claims(**claims: Any) -> Callable[[Deployment], str]:
    return lambda deployment: deployment.token(**claims)


PROVE_NOTHING: dict[str, Callable[[Deployment], str]] = {
    "no signature": _none,
    "no signature, other case": _none_in_capitals,
    "public key as a secret": _mac_under_public_key,
    "own key in the header": _key_in_header,
    "changed payload": _changed_payload,
    "another key's name": lambda d: d.token("RS256", "es"),
    "another algorithm's key": lambda d: d.token("EdDSA", "rs"),
    "unknown key": lambda d: d.token("EdDSA", "unknown"),
    "critical extension": lambda d: jwt.encode(
        {"iss": ISSUER, "aud": "kvcustody", "exp": 1 << 40, "org": "acme"},
        d.signers.ed,
        "EdDSA",
        headers={"kid": "ed", "crit": ["b64"], "b64": True},
    ),
    "expired": _claims(exp=1_767_225_600 - 31),
    "not yet valid": _claims(nbf=1_767_225_600 + 31),
    "issued in the future": _claims(iat=1_767_225_600 + 3_600),
    "never expires": _claims(exp=None),
    "expiry is text": _claims(exp="9999999999"),
    "expiry is infinite": _claims(exp=1e300),
    "not before is a list": _claims(nbf=[1]),
    "no audience": _claims(aud=None),
    "another audience": _claims(aud="elsewhere"),
    "no issuer": _claims(iss=None),
    "another issuer": _claims(iss="https://idp.example/realm/"),
    "issuer is a list": _claims(iss=[ISSUER]),
    "no tenant": _claims(org=None),
    "tenant is a number": _claims(org=7),
    "tenant is a list": _claims(org=["acme"]),
    "tenant is malformed": _claims(org="acme "),
    "tenant is empty": _claims(org=""),
    "bound to a certificate": _claims(cnf={"x5t#S256": "mine"}),
    "bound to a key": _claims(cnf={"jkt": "mine"}),
    "tenant of another issuer": _claims(org="initech"),
    "subject is malformed": _claims(sub="a\u200bb"),
    "route is malformed": _claims(app_route="hr"),
    "too long": _claims(extra="x" * 9_000),
    "two parts": lambda d: ".".join(unsigned(d.token())[:2]),
    "four parts": lambda d: d.token() + ".AA",
    "payload is a list": lambda d: f"{unsigned(d.token())[0]}.{part([1])}.{unsigned(d.token())[2]}",
    "payload is deep": lambda d: f"{unsigned(d.token())[0]}.{part(b'[' * 5_000)}.AA",
    "header is not an object": lambda d: f"{part(b'[]')}.{unsigned(d.token())[1]}.AA",
}


@pytest.mark.parametrize("make", PROVE_NOTHING.values(), ids=PROVE_NOTHING.keys())
def test_a_token_that_proves_nothing_gets_the_one_answer(
    deployment: Deployment, make: Callable[[Deployment], str]
) -> None:
    expected = ask(deployment.gate)
    assert expected.status == 401
    reply = ask(deployment.gate, key=make(deployment))
    assert reply == expected
    assert who(deployment, deployment.token()) is not None  # the control: the untouched token is good


def test_times_are_those_of_our_clock(deployment: Deployment) -> None:
    token = deployment.token(exp=1_767_225_600 + 60)
    deployment.clock.advance(89 * MICROSECONDS)
    assert who(deployment, token) is not None
    deployment.clock.advance(MICROSECONDS)
    assert who(deployment, token) is None


def test_every_single_bit_of_a_token_counts(deployment: Deployment) -> None:
    token = deployment.token()
    head, payload, signature = (base64.urlsafe_b64decode(text + "==") for text in unsigned(token))
    for index, data in enumerate((head, payload, signature)):
        for bit in range(0, 8 * len(data), 3):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            parts = [part(head), part(payload), part(signature)]
            parts[index] = part(bytes(changed))
            assert ask(deployment.gate, key=".".join(parts)).status == 401, (index, bit)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"keys": []}',
        '{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "x"}]}',
        "not a key",
        '{"keys": [7]}',
        "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----",
    ],
)
def test_a_bad_file_of_verification_keys_is_refused(deployment: Deployment, content: str) -> None:
    path = deployment.directory / "keys.txt"
    path.write_text(content)
    with pytest.raises(ConfigError):
        read_verification_keys(path)


def test_weak_private_and_foreign_keys_are_refused(deployment: Deployment) -> None:
    path = deployment.directory / "keys.txt"
    weak = rsa.generate_private_key(65537, 1024)
    rs = json.loads((deployment.directory / "jwks.json").read_text())["keys"][0]
    private = jwt.algorithms.RSAAlgorithm.to_jwk(deployment.signers.rs, as_dict=True)
    p384 = ec.generate_private_key(ec.SECP384R1()).public_key()
    bad: list[dict[str, Any]] = [
        dict(jwt.algorithms.RSAAlgorithm.to_jwk(weak.public_key(), as_dict=True)),
        dict(private),
        dict(jwt.algorithms.ECAlgorithm.to_jwk(p384, as_dict=True)),
        {**rs, "alg": "HS256"},
        {**rs, "alg": "RS512"},
    ]
    for row in bad:
        path.write_text(json.dumps({"keys": [row]}))
        with pytest.raises(ConfigError):
            read_verification_keys(path)
    other = rsa.generate_private_key(65537, 2048).public_key()
    doubled = {**jwt.algorithms.RSAAlgorithm.to_jwk(other, as_dict=True), "kid": rs["kid"]}
    path.write_text(json.dumps({"keys": [rs, doubled]}))
    with pytest.raises(ConfigError, match="several different keys"):
        read_verification_keys(path)
    pem = deployment.signers.es.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path.write_bytes(pem)
    assert [set(key.algorithms) for key in read_verification_keys(path).keys] == [{"ES256"}]


def test_a_key_digest_depends_on_the_files_salt() -> None:
    assert digest_of("k" * 20, bytes(32)) != digest_of("k" * 20, bytes(31) + b"\1")
