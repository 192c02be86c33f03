"""Load a policy document: text in, a complete typed `Policy` out, or every problem with its place.

1. `load_policy` returns a policy only when its document had no problem at all; otherwise it raises `PolicyRejected`.
2. It reads no clock, file or environment: equal text gives an equal policy with an equal digest.
"""

from __future__ import annotations

from dataclasses import replace

from kvcustody.policies.document.model import (
    SCHEMA,
    ErasureDuty,
    Eviction,
    EvictionKind,
    Policy,
    Profile,
    Scope,
)
from kvcustody.policies.document.problems import Problems, SourceMark, quote
from kvcustody.policies.document.yaml_nodes import Node, parse
from kvcustody.policies.reading.eviction import read_eviction
from kvcustody.policies.reading.fields import FieldReader
from kvcustody.policies.reading.names import DeclaredNames
from kvcustody.policies.reading.obligations import (
    read_audit,
    read_erasure,
    read_offload,
    read_retention,
    read_scrub,
)
from kvcustody.policies.reading.sharing import read_grants, read_rules, read_segments
from kvcustody.policies.reading.tenants import (
    PRIVATE_SCOPES,
    TenantObligations,
    read_classify,
    read_groups,
    read_tenants,
)

_REQUIRED = (
    "schema",
    "name",
    "profile",
    "classifications",
    "tenants",
    "retention",
    "scrub",
    "offload",
    "audit",
)
_OPTIONAL = (
    "description",
    "issuers",
    "scope",
    "labels",
    "classify",
    "groups",
    "segments",
    "grants",
    "rules",
    "eviction",
    "erasure",
)
_PROFILES = {profile.value: profile for profile in Profile}


def load_policy(text: str | bytes, *, name: str) -> Policy:
    """The policy that `text` holds; `name` is how problems call the document. Raises `PolicyRejected`."""
    problems = Problems(name)
    root = parse(text, problems)
    policy = None if root is None else _policy(FieldReader(problems), root, name)
    problems.raise_if_any()
    assert policy is not None, "a document without a root has a problem"
    return replace(policy, source=text if isinstance(text, str) else text.decode())


def _policy(fields: FieldReader, root: Node, file: str) -> Policy:
    found = fields.mapping(root, "the policy", _REQUIRED, _OPTIONAL)
    if "schema" in found:
        _check_schema(fields, found["schema"])
    names = DeclaredNames(fields)
    names.declare(found)
    profile = (
        fields.choice(found["profile"], "`profile`", _PROFILES) if "profile" in found else Profile.SHARED
    )
    scope = fields.choice(found["scope"], "`scope`", PRIVATE_SCOPES) if "scope" in found else Scope.SUBJECT
    before = fields.problems.count
    retention = read_retention(names, found["retention"]) if "retention" in found else ()
    scrub = read_scrub(names, found["scrub"]) if "scrub" in found else ()
    offload = read_offload(names, found["offload"]) if "offload" in found else ()
    sound = fields.problems.count == before
    owed = TenantObligations(profile, scope, *((retention, scrub, offload) if sound else ((), (), ())))
    tenants, default = read_tenants(names, found["tenants"], owed) if "tenants" in found else ((), None)
    return Policy(
        name=fields.identifier(found["name"], "`name`") if "name" in found else "",
        description=fields.text(found["description"], "`description`") if "description" in found else "",
        profile=profile,
        classifications=tuple(names.levels),
        scope=scope,
        labels=tuple(sorted((label, tuple(sorted(values))) for label, values in names.labels.items())),
        classify=read_classify(names, found["classify"]) if "classify" in found else (),
        tenants=tenants,
        default=default,
        groups=read_groups(names, found["groups"], tenants, profile) if "groups" in found else (),
        segments=read_segments(names, found["segments"], profile) if "segments" in found else (),
        grants=read_grants(names, found["grants"], profile) if "grants" in found else (),
        rules=read_rules(names, found["rules"]) if "rules" in found else (),
        retention=retention,
        scrub=scrub,
        offload=offload,
        outage=read_audit(names, found["audit"]) if "audit" in found else (),
        eviction=read_eviction(fields, found["eviction"])
        if "eviction" in found
        else Eviction(EvictionKind.LRU),
        erasure=read_erasure(fields, found["erasure"]) if "erasure" in found else ErasureDuty(),
        issuers=names.issuers,
        file=file,
        mark=SourceMark(1, 1),
    )


def _check_schema(fields: FieldReader, node: Node) -> None:
    text = fields.string(node, "`schema`")
    if text is not None and text != SCHEMA:
        fields.problems.add(node.mark, "KVP303", f"schema {quote(text)} is not `{SCHEMA}`")
