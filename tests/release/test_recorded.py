"""What was signed and stored once still verifies and is written the same, byte for byte: `recorded/`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcustody.errors import PolicyError
from kvcustody.governance.release.record import ReleaseAction, ReleaseError, read_record
from kvcustody.governance.release.replay_records import fold
from kvcustody.governance.release.trust import read_trust
from kvcustody.policies.bundle.bundle import read_bundle, verify, write_bundle

PLACE = Path(__file__).parent / "recorded"
BUNDLE = (PLACE / "policy.bundle").read_bytes()
RECORDS = (PLACE / "release.ndjson").read_bytes().splitlines()
TRUST = read_trust(PLACE / "trust.toml")
AT_US = 1_767_225_600_000_000


def test_a_recorded_bundle_verifies_and_is_written_the_same() -> None:
    found = verify(BUNDLE, TRUST, now_utc_us=AT_US)
    assert (found.signers, found.bundle.manifest.revision) == (("ada", "grace"), 2)
    assert write_bundle(read_bundle(BUNDLE)) == BUNDLE
    with pytest.raises(PolicyError, match="does not fit"):
        verify(BUNDLE.replace(b'"revision":2', b'"revision":3'), TRUST, now_utc_us=AT_US)


def test_recorded_steps_verify_and_are_written_the_same() -> None:
    state = fold(RECORDS, TRUST)
    assert [record.to_bytes() for record in state.records] == RECORDS
    assert {record.action for record in state.records} == set(ReleaseAction)
    assert state.active is not None and state.active.is_break_glass
    with pytest.raises(ReleaseError, match="does not fit"):
        fold([RECORDS[0].replace(b"first", b"other")], TRUST)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (rb',"schema":"kvcustody/policy-release@1"', b"", "leaves its schema out"),
        (rb"policy-release@1", b"policy-release@2", r"release record: Invalid enum value .*\$.schema"),
        (rb'"at_us":1', b'"at_us":true,"at":1', "not in canonical form"),
        (rb'"number":1', b'"number":"1"', r"release record: Expected `int`, got `str` - at `\$.number`"),
        (rb'"key":"ada"(?=[^{]*}}$)', b'"key":"a+a"', r"matching regex .* at `\$.signature.key`"),
        (rb'[AQgw]=="}}$', b'x=="}}', "spells its signature otherwise"),
    ],
    ids=["schema", "another schema", "unsorted", "type", "key name", "stray bits"],
)
def test_a_record_of_another_form_is_refused_with_the_place(before: bytes, after: bytes, problem: str) -> None:
    assert read_record(RECORDS[0]).number == 1, "control"
    data = re.sub(before, after, RECORDS[0], count=1)
    assert data != RECORDS[0], "void: nothing was changed"
    with pytest.raises(ReleaseError, match=problem):
        read_record(data)


def test_stray_bits_in_a_signature_of_a_bundle_are_refused() -> None:
    signed = re.sub(rb'[AQgw]=="}]}$', b'x=="}]}', BUNDLE)
    assert signed != BUNDLE
    with pytest.raises(PolicyError, match="the one spelling of base64"):
        read_bundle(signed)
