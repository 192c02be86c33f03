"""Only the signed bundle is accepted: with the required signers, for this audience, and now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kvcustody.errors import PolicyError
from kvcustody.policies.bundle.bundle import (
    SKEW_US,
    Bundle,
    manifest_of,
    read_bundle,
    sign_manifest,
    verify,
    write_bundle,
)
from kvcustody.policies.bundle.trust import KeyRole, Trust, TrustedKey
from kvcustody.signed_document import DocumentRejected, DocumentSignature, encode

POLICY = (Path(__file__).parents[1] / "base.yaml").read_text(encoding="utf-8")
NOW, LATER = 1_800_000_000_000_000, 1_900_000_000_000_000


class Key:
    """A signer in memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._key = Ed25519PrivateKey.generate()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def trusted(self, *roles: KeyRole) -> TrustedKey:
        return TrustedKey(self.name, self._key.public_key().public_bytes_raw(), frozenset(roles))


ADA, GRACE, EVE = Key("ada"), Key("grace"), Key("eve")
TRUST = Trust("prod", {"ada": ADA.trusted(KeyRole.AUTHOR), "grace": GRACE.trusted(KeyRole.APPROVER)})


def made(*signers: Key, document: str = POLICY, **fields: Any) -> bytes:
    fields = {"audience": "prod", "revision": 7, "issued_us": NOW, "expires_us": LATER} | fields
    manifest, _ = manifest_of(document, **fields)
    return write_bundle(Bundle(manifest, document, tuple(sign_manifest(manifest, key) for key in signers)))


GOOD = made(ADA, GRACE)


def accepted(data: bytes, trust: Trust = TRUST, now: int = NOW, revision_min: int = 7) -> bool:
    try:
        verify(data, trust, now_utc_us=now, revision_min=revision_min)
    except PolicyError:
        return False
    return True


def test_what_was_signed_is_accepted() -> None:
    verified = verify(GOOD, TRUST, now_utc_us=NOW, revision_min=7)
    assert verified.signers == ("ada", "grace") and verified.policy.name == verified.bundle.manifest.name
    assert write_bundle(read_bundle(GOOD)) == GOOD


def resigned(document: str, signatures: tuple[DocumentSignature, ...]) -> bytes:
    """Return a consistent forgery: every digest is right, but the signatures cover something else."""
    manifest, _ = manifest_of(document, audience="prod", revision=8, issued_us=NOW, expires_us=LATER)
    return write_bundle(Bundle(manifest, document, signatures))


_PARSED = read_bundle(GOOD)
_WIDER = POLICY.replace("at_most: mid", "at_most: high")
assert _WIDER != POLICY
_OLD_REVISION = made(ADA, GRACE, revision=6)
FORGED: dict[str, bytes] = {
    "unsigned": made(),
    "stripped of one signature": write_bundle(replace(_PARSED, signatures=_PARSED.signatures[:1])),
    "signed by one person alone": made(ADA),
    "signed by nobody we know": made(ADA, EVE),
    "one signature too many": made(ADA, GRACE, EVE),
    "another's key under a known name": made(ADA, type("Named", (), {"name": "grace", "sign": EVE.sign})()),
    "old signatures on another manifest": resigned(POLICY, _PARSED.signatures),
    "old signatures on another document": write_bundle(replace(_PARSED, document=_WIDER)),
    "rolled back": _OLD_REVISION,
    "of another deployment": made(ADA, GRACE, audience="staging"),
    "future-dated": made(ADA, GRACE, issued_us=NOW + SKEW_US + 1),
    "expired": made(ADA, GRACE, issued_us=NOW - 2, expires_us=NOW),
    "signatures swapped": write_bundle(
        replace(
            _PARSED,
            signatures=tuple(
                DocumentSignature(a.key, b.data)
                for a, b in zip(_PARSED.signatures, _PARSED.signatures[::-1], strict=True)
            ),
        )
    ),
    "signed as another kind of statement": write_bundle(
        replace(
            _PARSED,
            signatures=(DocumentSignature("ada", ADA.sign(b"kvcustody/other@1\n{}")), _PARSED.signatures[1]),
        )
    ),
    "empty": b"",
    "not an object": b"[]",
    "with an algorithm of its own": GOOD.replace(b'"key":"ada"', b'"alg":"none","key":"ada"'),
    "duplicate key": GOOD.replace(b'"revision":7', b'"revision":7,"revision":7'),
    "white space": GOOD + b"\n",
    "a number spelled otherwise": GOOD.replace(b'"revision":7', b'"revision":7.0'),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_bundle_is_refused(how: str) -> None:
    with pytest.raises(PolicyError) as caught:
        verify(FORGED[how], TRUST, now_utc_us=NOW, revision_min=7)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_refused() -> None:
    assert sum(accepted(GOOD[:length]) for length in range(len(GOOD))) == 0


def edits(data: bytes, values: range, at: range) -> int:
    """Return how many single-byte substitutions are accepted."""
    accepted_count = 0
    buffer = bytearray(data)
    for place in at:
        before = buffer[place]
        for value in values:
            if value:
                buffer[place] = before ^ value
                accepted_count += accepted(bytes(buffer))
        buffer[place] = before
    return accepted_count


def test_single_byte_edits_are_refused() -> None:
    """B2, small: one substitution, one deletion and one insertion at every place, and 200 random mutants."""
    assert edits(GOOD, range(1, 2), range(len(GOOD))) == 0
    for place in range(len(GOOD)):
        assert not accepted(GOOD[:place] + GOOD[place + 1 :])
        assert not accepted(GOOD[:place] + GOOD[place : place + 1] + GOOD[place:])
    assert mutants(200) == 0


def mutants(count: int) -> int:
    random = Random(2)
    accepted_count = 0
    for _ in range(count):
        data = bytearray(GOOD)
        for _ in range(random.randrange(1, 5)):
            start = random.randrange(len(data))
            data[start : start + random.randrange(4)] = random.randbytes(random.randrange(4))
        accepted_count += bytes(data) != GOOD and accepted(bytes(data))
    return accepted_count


@pytest.mark.soak
def test_every_single_byte_edit_is_refused() -> None:
    """B2, full: all 255 other values at every place, and 10^4 mutants."""
    assert edits(GOOD, range(256), range(len(GOOD))) == 0
    assert mutants(10_000) == 0


def test_without_the_signature_check_consistent_forgeries_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """B2's control: with verification off, anybody who computes digests is trusted."""
    forgeries = [
        resigned(_WIDER, _PARSED.signatures),
        resigned(POLICY, ()),
        FORGED["signed by nobody we know"],
    ]
    assert not any(map(accepted, forgeries))
    monkeypatch.setattr("kvcustody.policies.bundle.bundle.check_signatures", lambda bundle, trust: ())
    assert all(map(accepted, forgeries)), "void: unverified, a forgery must be believed"


CONTROLS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "needs": (made(ADA), {"trust": replace(TRUST, needs=(KeyRole.AUTHOR,))}),
    "audience": (FORGED["of another deployment"], {"trust": replace(TRUST, audience="staging")}),
    "revision": (FORGED["rolled back"], {"revision_min": 6}),
    "expiry": (FORGED["expired"], {"now": NOW - 1}),
    "issue": (FORGED["future-dated"], {"now": NOW + 1}),
    "key": (
        FORGED["signed by nobody we know"],
        {"trust": replace(TRUST, keys={**TRUST.keys, "eve": EVE.trusted(KeyRole.APPROVER)})},
    ),
}


@pytest.mark.parametrize("defence", CONTROLS)
def test_one_defence_off_accepts_what_it_refuses(defence: str) -> None:
    """B2's controls, one defence each."""
    data, off = CONTROLS[defence]
    assert not accepted(data)
    assert accepted(data, **off), f"void: without `{defence}` this bundle must be accepted"


def test_without_the_canonical_form_a_duplicate_key_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """B2's control for duplicate keys: JSON as Python reads it takes the last one in silence."""
    monkeypatch.setattr(
        "kvcustody.policies.bundle.bundle.decode", lambda data, what, most: __import__("json").loads(data)
    )
    assert accepted(FORGED["duplicate key"]) and accepted(FORGED["white space"])


def test_one_key_under_two_names_is_one_person() -> None:
    alias = type("Alias", (), {"name": "ada2", "sign": ADA.sign})()
    trust = replace(TRUST, keys={**TRUST.keys, "ada2": replace(ADA.trusted(KeyRole.APPROVER), name="ada2")})
    assert not accepted(made(ADA, alias), trust)
    assert accepted(made(ADA, GRACE), trust)


def test_one_person_with_both_roles_does_not_stand_for_two() -> None:
    both = TrustedKey("ada", TRUST.keys["ada"].public, frozenset({KeyRole.AUTHOR, KeyRole.APPROVER}))
    trust = replace(TRUST, keys={**TRUST.keys, "ada": both, "eve": EVE.trusted(KeyRole.OPERATOR)})
    assert not accepted(made(ADA, EVE), trust)
    assert accepted(made(ADA, GRACE), trust)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53) + 1, (1 << 53) - 1) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(max_codepoint=127), max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_the_canonical_form_is_rfc_8785(value: Any) -> None:
    try:
        expected = rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError):
        with pytest.raises(DocumentRejected):
            encode(value)
        return
    assert encode(value) == expected
