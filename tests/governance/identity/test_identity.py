"""Identity rules P1-P5 of kvcustody.governance.identity.principal; red-team case A8 (malformed scope)."""

from __future__ import annotations

import random
import unicodedata

import pytest

from kvcustody.errors import IdentityError
from kvcustody.governance.identity.principal import Principal, check_identifier, identify

MALFORMED = {
    "empty": "",
    "space": " ",
    "inner-space": "ac me",
    "leading-space": " acme",
    "newline": "acme\n",
    "carriage-return": "acme\rx",
    "nul": "acme\x00",
    "escape": "\x1b[31macme",
    "delete": "acme\x7f",
    "c1-control": "acme\x85",
    "bidi-override": "acme\u202eemca",
    "bidi-isolate": "acme\u2066",
    "zero-width-space": "ac\u200bme",
    "zero-width-joiner": "ac\u200dme",
    "byte-order-mark": "\ufeffacme",
    "soft-hyphen": "ac\u00adme",
    "hangul-filler": "acme\u3164",
    "variation-selector": "acme\ufe0f",
    "grapheme-joiner": "ac\u034fme",
    "no-break-space": "ac\u00a0me",
    "line-separator": "ac\u2028me",
    "emoji": "acme\U0001f600",
    "flag": "\U0001f1eb\U0001f1f7",
    "private-use": "acme\ue000",
    "unassigned": "acme\U000e0fff",
    "surrogate": "acme\ud800",
    "nfd": unicodedata.normalize("NFD", "café"),
    "combining-first": "\u0301acme",
    "parent-directory": "../acme",
    "inner-parent": "acme/../globex",
    "trailing-parent": "acme/..",
    "current-directory": "./acme",
    "dot": ".",
    "dot-dot": "..",
    "backslash": "..\\acme",
    "wildcard": "*",
    "inner-wildcard": "acme*",
    "quote": 'ac"me',
    "backtick": "ac`me",
    "percent": "acme%2e%2e",
    "semicolon": "acme;drop",
    "angle": "<acme>",
    "template": "${acme}",
    "129-characters": "a" * 129,
    "129-letters": "é" * 129,
    "a-mebibyte": "a" * (1 << 20),
    "int": 2345,
    "zero": 0,
    "bool": True,
    "float": 1.0,
    "bytes": b"acme",
    "list": ["acme"],
    "duplicate-header": ["acme", "globex"],
    "mapping": {"id": "acme"},
}
WELL_FORMED = [
    "acme",
    "ACME",
    "0123",
    "https://issuer.example/realm",
    "auth0|5f7c",
    "o'brien@example.org",
    "café",
    "東京",
    "a" * 128,
    "...",
    "a..b",
    "-_.:@+=~,/!|'",
]


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("field", ["issuer", "tenant", "subject", "session", "classification", "route"])
def test_malformed_identifiers_are_refused_before_admission(field: str, value: object) -> None:
    arguments: dict[str, object] = {"issuer": "idp", "tenant": "acme", "verified": {}}
    if field in arguments or field == "route":
        arguments[field] = value
    else:
        arguments["verified"] = {field: value}
    with pytest.raises(IdentityError) as caught:
        identify(**arguments)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    if isinstance(value, str) and len(value.strip("./ *")) > 1:
        assert value not in str(caught.value)  # a refused value is not echoed


@pytest.mark.parametrize("value", WELL_FORMED)
def test_well_formed_identifiers_pass_unchanged(value: str) -> None:
    assert check_identifier("tenant", value) is value


def test_no_tenant_no_principal() -> None:
    with pytest.raises(IdentityError, match="tenant: missing"):
        identify(issuer="idp", tenant=None)
    with pytest.raises(IdentityError, match="issuer: missing"):
        identify(issuer=None, tenant="acme")


def test_asserted_values_are_marked_and_cannot_contradict_verified_ones() -> None:
    principal = identify(issuer="i", tenant="t", verified={"subject": "s"}, asserted={"session": "x"})
    assert (principal.subject_asserted, principal.session_asserted) == (False, True)
    agreed = identify(issuer="i", tenant="t", verified={"subject": "s"}, asserted={"subject": "s"})
    assert not agreed.subject_asserted
    with pytest.raises(IdentityError, match="contradicts"):
        identify(issuer="i", tenant="t", verified={"subject": "s"}, asserted={"subject": "other"})


def test_a_classification_can_not_be_asserted() -> None:
    assert identify(issuer="i", tenant="t", asserted={"classification": "public"}).classification is None


def test_a_principal_built_directly_is_checked_too() -> None:
    with pytest.raises(IdentityError):
        Principal("idp", "ac me")  # type: ignore[arg-type]
    with pytest.raises(IdentityError, match="must begin with `/`"):
        identify(issuer="idp", tenant="acme", route="v1/chat")


def _fuzzed(random_: random.Random) -> str:
    alphabet = "aA1:/.\x00\n é\u0301\u202e\u200b*東😀\ud800%"
    return "".join(random_.choice(alphabet) for _ in range(random_.randrange(5)))


def test_fuzzed_identifiers_are_refused_or_kept_as_they_are() -> None:
    """No two texts become one tenant; the control, a repairing build, merges some."""
    random_ = random.Random(8)
    kept: dict[str, str] = {}
    repaired: dict[str, set[str]] = {}
    for _ in range(20_000):
        value = _fuzzed(random_)
        repaired.setdefault(unicodedata.normalize("NFC", value).strip().casefold(), set()).add(value)
        try:
            kept[value] = identify(issuer="idp", tenant=value).tenant
        except IdentityError:
            continue
    assert len(kept) > 20
    assert all(tenant == value for value, tenant in kept.items())
    assert any(len(sources) > 1 for sources in repaired.values())
