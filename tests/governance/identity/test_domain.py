"""Domains D1-D4; red-team cases A5 (domain separation) and A6 (identity omission), each with its control."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvcustody.errors import IdentityError
from kvcustody.governance.identity import tlv
from kvcustody.governance.identity.domain_spec import (
    PUBLIC_OWNER,
    DomainSpec,
    ScopeKind,
    group_owner,
    own_domain,
    tenant_owner,
)
from kvcustody.governance.identity.extra_content import Media, Positions, PromptEmbeddings, frame
from kvcustody.governance.identity.principal import Principal, identify

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "domain.json").read_text())
MODEL = bytes(range(32))
BASE: dict[str, Any] = {
    "scope": ScopeKind.SESSION,
    "issuer": "idp",
    "tenant": "acme",
    "subject": "ann",
    "session": "s1",
    "classification": "internal",
    "labels": (("purpose", "support"), ("region", "eu")),
    "model": MODEL,
    "key_epoch": 1,
    "salt": "pepper",
}
CHANGES: list[tuple[str, Any]] = [
    ("issuer", "idp2"),
    ("tenant", "acme2"),
    ("subject", "bob"),
    ("subject", None),
    ("session", "s2"),
    ("classification", "public"),
    ("labels", (("purpose", "support"), ("region", "us"))),
    ("labels", (("purpose", "sales"), ("region", "eu"))),
    ("labels", (("region", "eu"),)),
    ("labels", ()),
    ("model", bytes(32)),
    ("key_epoch", 2),
    ("salt", "paprika"),
    ("salt", None),
]
REQUIRED_IDS = {
    ScopeKind.PUBLIC: {},
    ScopeKind.GROUP: {"group": "x"},
    ScopeKind.SEGMENT: {"issuer": "x", "tenant": "x", "segment": "x"},
    ScopeKind.TENANT: {"issuer": "x", "tenant": "x"},
    ScopeKind.SUBJECT: {"issuer": "x", "tenant": "x", "subject": "x"},
    ScopeKind.SESSION: {"issuer": "x", "tenant": "x", "session": "x"},
}


def _spec(scope: ScopeKind, **ids: Any) -> DomainSpec:
    return DomainSpec(scope=scope, classification="internal", model=MODEL, key_epoch=1, **ids)


@pytest.mark.parametrize(("name", "value"), CHANGES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CHANGES)])
def test_each_field_makes_another_domain(name: str, value: Any) -> None:
    """One flipped field, another domain; with that field dropped from the encoding, the same one."""
    base, changed = DomainSpec(**BASE), DomainSpec(**{**BASE, name: value})
    assert base.info != changed.info and base != changed
    tags = [tag for tag, field in base.encoded_fields().items() if field != changed.encoded_fields()[tag]]
    assert len(tags) == 1
    assert _without(base, tags[0]) == _without(changed, tags[0])


def _without(spec: DomainSpec, tag: int) -> bytes:
    return tlv.encode("control", 1, {t: v for t, v in spec.encoded_fields().items() if t != tag})


def test_scopes_with_the_same_identifiers_are_different_domains() -> None:
    infos = {_spec(scope, **ids).info for scope, ids in REQUIRED_IDS.items()}
    assert len(infos) == len(REQUIRED_IDS)


def test_no_value_can_pose_in_another_field() -> None:
    """Every ordered pair of text fields, 50 values each; an untagged tuple confuses every pair."""
    tags = [2, 3, 4, 5, 6, 7, 8, 12]
    template = dict.fromkeys(range(1, 13))
    values = [f"v{i}" for i in range(48)] + ["", "None"]
    cross, untagged = 0, 0
    for one, other in itertools.permutations(tags, 2):
        hits = 0
        for value in values:
            a = {**template, one: value}
            b = {**template, other: value}
            cross += tlv.encode("kvcustody/domain", 1, a) == tlv.encode("kvcustody/domain", 1, b)
            hits += [v for v in a.values() if v is not None] == [v for v in b.values() if v is not None]
        untagged += hits > 0
    assert cross == 0
    assert untagged == len(tags) * (len(tags) - 1)


def test_extra_content_cannot_pose_as_tokens_or_as_other_extra_content() -> None:
    """A media digest, the same bytes as embeddings, and the frame's own bytes given as token ids."""
    digest = hashlib.sha256(b"image").digest()
    media = frame(Media(digest, (3, 224, 224), "uint8"))
    others = [
        frame(PromptEmbeddings(digest, (3, 224, 224), "uint8")),
        frame(Media(digest, (3, 224, 223), "uint8")),
        frame(Media(digest, (3, 224, 224), "int8")),
        frame(Media(digest, (3, 224, 224), "uint8", b"\x00")),
        frame(Media(digest[:-1] + b"\x00", (3, 224, 224), "uint8")),
        frame(Positions(0, digest)),
        frame(Positions(1, digest)),
    ]
    assert media not in others and len(set(others)) == len(others)
    assert len(media) % 4 == 0
    words = struct.unpack(f"<{len(media) // 4}i", media)
    assert words[0] < 0  # no run of token ids, which are never negative, begins like a frame
    naked = struct.unpack("<8i", digest)
    assert struct.pack("<8i", *naked) == digest  # the control: an unframed digest is a token run


@pytest.mark.parametrize("extra", [Media(b"x", (1.0,), "u8"), Media("x", (), object())])  # type: ignore
def test_malformed_extra_content(extra: Any) -> None:
    if isinstance(extra.shape, tuple) and extra.shape == (1.0,):
        assert frame(extra) != frame(extra._replace(shape=(1,)))
    else:
        with pytest.raises(IdentityError):
            frame(extra)


@pytest.mark.parametrize("scope", list(ScopeKind))
def test_a_scope_takes_exactly_its_identifiers(scope: ScopeKind) -> None:
    needed = REQUIRED_IDS[scope]
    _spec(scope, **needed)
    for name in needed:
        with pytest.raises(IdentityError, match="needs a"):
            _spec(scope, **{k: v for k, v in needed.items() if k != name})
    for name in ("issuer", "tenant", "group", "segment", "subject", "session"):
        if name not in needed and not (name == "subject" and scope is ScopeKind.SESSION):
            with pytest.raises(IdentityError, match="takes no"):
                _spec(scope, **needed, **{name: "x"})


def test_key_owners() -> None:
    """No tenant's secret reaches outside the tenant, and the issuer is part of the tenant."""
    assert _spec(ScopeKind.PUBLIC).owner == PUBLIC_OWNER
    assert _spec(ScopeKind.GROUP, group="family").owner == group_owner("family")
    for scope in (ScopeKind.SEGMENT, ScopeKind.TENANT, ScopeKind.SUBJECT, ScopeKind.SESSION):
        assert _spec(scope, **REQUIRED_IDS[scope]).owner == tenant_owner("x", "x")
    owners = {PUBLIC_OWNER, group_owner("public"), tenant_owner("a", "b"), tenant_owner("b", "a")}
    assert len(owners) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"classification": ""},
        {"tenant": "ac me"},
        {"salt": ""},
        {"salt": "a\x00"},
        {"model": b"short"},
        {"model": "x" * 32},
        {"key_epoch": 0},
        {"key_epoch": True},
        {"labels": (("region", "eu"), ("region", "us"))},
        {"labels": (("region", 1),)},
    ],
)
def test_malformed_domains_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(IdentityError):
        DomainSpec(**{**BASE, **change})


def test_labels_are_a_set() -> None:
    turned = DomainSpec(**{**BASE, "labels": tuple(reversed(BASE["labels"]))})
    assert turned == DomainSpec(**BASE) and hash(turned) == hash(DomainSpec(**BASE))


def _own(principal: Principal, scope: ScopeKind) -> DomainSpec | None:
    return own_domain(principal, scope=scope, classification="internal", model=MODEL, key_epoch=1)


def test_a_missing_identifier_narrows_the_own_domain() -> None:
    both = identify(issuer="i", tenant="t", verified={"subject": "a", "session": "s"})
    session = identify(issuer="i", tenant="t", verified={"session": "s"})
    neither = identify(issuer="i", tenant="t")
    narrowed = _own(session, ScopeKind.SUBJECT)
    assert narrowed is not None and narrowed.scope is ScopeKind.SESSION
    subject = _own(both, ScopeKind.SUBJECT)
    assert subject is not None and (subject.subject, subject.session) == ("a", None)
    assert _own(neither, ScopeKind.SUBJECT) is None and _own(neither, ScopeKind.SESSION) is None
    assert _own(neither, ScopeKind.TENANT) is not None
    with pytest.raises(IdentityError, match="not a principal's own scope"):
        _own(both, ScopeKind.PUBLIC)


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_committed_vectors(vector: dict[str, Any]) -> None:
    assert _from_vector(vector["spec"]).info.hex() == vector["info"]


def _from_vector(spec: dict[str, Any]) -> DomainSpec:
    fields = {**spec, "scope": ScopeKind(spec["scope"]), "model": bytes.fromhex(spec["model"])}
    return DomainSpec(**{**fields, "labels": tuple(map(tuple, spec.get("labels", ())))})
