"""The identity document M1-M2 and D1-D2: every mistake with its place, nothing believed by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcustody.errors import ConfigError
from kvcustody.governance.credentials.api_key_file import add_key
from kvcustody.governance.settings import Settings
from kvcustody.integrations.identity.from_settings import check_issuers
from kvcustody.integrations.identity.identity_document import IdentityDocument
from kvcustody.policies.document.yaml_document import parse_model
from kvcustody.tenants import OWN
from standins.integrations.door_world import DOCUMENT

MISTAKES = [
    ("audience: kvcustody", "audience: 7", "9:5: `issuers.0.audience` input should be a valid string"),
    ("audience: kvcustody", "audiance: kvcustody", "9:5: `issuers.0.audiance` unknown field"),
    ("    audience: kvcustody\n", "", "6:5: `issuers.0.audience` is missing"),
    ("{tenant: org, ", "{", "10:5: `issuers.0.claims.tenant` is missing"),
    ("tenants: [acme, globex]", 'tenants: ["*"]', "11:15: `issuers.0.tenants.0` has the character U+002A"),
    ("name: idp", "name: api keys", "7:5: `issuers.0.name` has the character U+0020"),
    ("subject: X-KVCustody-Subject", "subject: X-Forwarded-User", "4:14: `api_keys.asserted.subject` must be a header"),
    (
        "subject: X-KVCustody-Subject",
        "subject: X-KVCustody-Classification",
        "4:14: `api_keys.asserted.subject` must be a header",
    ),
    ("/search", "search", "13:10: `routes./v1/embeddings` must begin with `/`"),
    ("schema: kvcustody/identity@1", "schema: kvcustody/identity@2", "1:1: `schema` input should be"),
    ("audience: kvcustody", "audience: kvcustody\n    algorithms: [HS256]", "10:18: `issuers.0.algorithms.0` input"),
    ("audience: kvcustody", "audience: kvcustody\n    algorithms: [none]", "10:18: `issuers.0.algorithms.0` input"),
    ("audience: kvcustody", "audience: kvcustody\n    leeway_seconds: 301", "10:5: `issuers.0.leeway_seconds` input"),
    ("audience: kvcustody", "audience: &a kvcustody", "9:15: KVP107 anchor"),
    ("routes:", "issuers:", "13:1: KVP111 key `issuers` is already on line 5"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), MISTAKES)
def test_a_mistake_is_reported_with_its_place(old: str, new: str, expected: str) -> None:
    assert DOCUMENT.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        parse_model(IdentityDocument, DOCUMENT.replace(old, new).encode(), "identity.yaml")
    assert f"identity.yaml:{expected}" in caught.value.message


def test_every_mistake_is_reported_at_once_and_no_value_is_quoted() -> None:
    text = DOCUMENT.replace("path: keys.yaml", "path: {s3cret: 1}").replace("audience: kvcustody", "audience: [s3cret]")
    with pytest.raises(ConfigError) as caught:
        parse_model(IdentityDocument, text.encode(), "identity.yaml")
    assert len(caught.value.message.splitlines()) == 2
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize(
    ("digits", "says"), [(3, "input should be less"), (19, "a number of 19"), (5000, "a number of 5000")]
)
def test_a_number_however_long_is_reported_with_its_place(digits: int, says: str) -> None:
    """Python itself reads no number of more than 4,300 digits, and says so without a place."""
    text = DOCUMENT.replace("audience: kvcustody", f"audience: kvcustody\n    leeway_seconds: {'9' * digits}")
    text = text.replace("name: idp", "name: api keys")
    with pytest.raises(ConfigError) as caught:
        parse_model(IdentityDocument, text.encode(), "identity.yaml")
    lines = caught.value.message.splitlines()
    assert lines[0].startswith("identity.yaml:7:5: ")  # and the other mistake with it
    assert len(lines) == 2 and lines[1].startswith("identity.yaml:10:") and says in lines[1]


def test_a_document_that_lets_nobody_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="every request would be refused"):
        parse_model(IdentityDocument, b"schema: kvcustody/identity@1\n", "identity.yaml")


@pytest.mark.parametrize("field", ["open_paths", "served_paths"])
def test_a_path_to_the_engine_cannot_be_opened(field: str) -> None:
    text = f"{DOCUMENT}{field}: [/health, /v1/completions]\n"
    with pytest.raises(ConfigError, match="may not name a path to the engine"):
        parse_model(IdentityDocument, text.encode(), "identity.yaml")
    parse_model(IdentityDocument, text.replace(", /v1/completions", "").encode(), "identity.yaml")


def test_two_issuers_of_one_name_are_refused() -> None:
    entry = DOCUMENT[DOCUMENT.index("  - issuer") : DOCUMENT.index("routes:")]
    for second in (entry, entry.replace("realm", "other")):
        text = DOCUMENT.replace("routes:", second + "routes:")
        with pytest.raises(ConfigError, match="two entries are equal"):
            parse_model(IdentityDocument, text.encode(), "identity.yaml")


def test_an_issuer_that_is_no_identifier_needs_a_name() -> None:
    text = DOCUMENT.replace("    name: idp\n", "").replace("example/realm", "example/realm?x=1")
    with pytest.raises(ConfigError, match="give it a `name`"):
        parse_model(IdentityDocument, text.encode(), "identity.yaml")


def test_what_is_nobodys_has_an_issuer_that_nobody_else_is(tmp_path: Path) -> None:
    """Else a tenant `anonymous` of that issuer would be whoever reached transformers without an identity."""
    text = DOCUMENT.replace("name: idp", f"name: {OWN}")
    with pytest.raises(ConfigError, match="reserved for requests without an owner"):
        parse_model(IdentityDocument, text.encode(), "identity.yaml")
    with pytest.raises(ConfigError, match="the issuer of what is nobody's"):
        add_key(tmp_path / "keys.yaml", {"name": "nobody", "tenant": "anonymous", "issuer": OWN})


def test_a_door_for_two_issuers_needs_a_policy_that_lists_them(tmp_path: Path) -> None:
    """The engine's process looks: else the first request would decide whose the bare ids are."""
    settings = Settings(policy_path=tmp_path / "policy.yaml", identity_path=tmp_path / "identity.yaml")
    check_issuers(settings, ())  # the document is on another machine
    (tmp_path / "identity.yaml").write_text(DOCUMENT)
    check_issuers(settings, ())  # its keys are not made yet: there is one issuer
    add_key(tmp_path / "keys.yaml", {"name": "ci", "tenant": "acme", "issuer": "idp"})
    check_issuers(settings, ())
    add_key(tmp_path / "keys.yaml", {"name": "other", "tenant": "acme"})
    with pytest.raises(ConfigError, match="`api-keys`, `idp` name tenants, and the policy lists no `issuers`"):
        check_issuers(settings, ())
    check_issuers(settings, ("idp", "api-keys"))


def test_the_documented_example_is_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "operate" / "set-up-identity.md").read_text()
    example = page.split("```yaml\n")[1].split("```")[0]
    document = parse_model(IdentityDocument, example.encode(), "docs/how-to/operate/set-up-identity.md")
    assert document.issuers and document.api_keys is not None
