"""The JSON Schema of a policy document, with a description of every field: what editors complete and check from.

1. Every document that the loader accepts fits the schema; the loader alone checks what a schema cannot say
   (references, sums, order of dates).
2. The fields are those that the loader reads; a test compares the two.
"""

from __future__ import annotations

from typing import Any

from kvcustody.policies.document.model import (
    SCHEMA,
    Action,
    EvictionKind,
    OnOutage,
    OnRunning,
    Profile,
    RuleEffect,
    Scope,
    Tier,
    Via,
)
from kvcustody.policies.reading.fields import ISSUER_FORM, TENANT_FORM
from kvcustody.policies.reading.names import CLASSIFICATIONS_MAX, ISSUERS_MAX, LABELS_MAX
from kvcustody.policies.reading.sharing import ENTRIES_MAX, PERMITTED, TOKENS_MAX

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_Field = dict[str, Any]


def schema() -> _Field:
    """The whole schema, as JSON data."""
    return {
        "$schema": DIALECT,
        "$id": "https://kvcustody.invalid/schema/policy-1.json",
        "title": "kvcustody policy",
        **_mapping(
            "A kvcustody policy: who may reuse whose cached blocks, and for how long.", _sections(), _REQUIRED
        ),
        "$defs": _defs(),
    }


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


def _ref(name: str, description: str) -> _Field:
    return {"$ref": f"#/$defs/{name}", "description": description}


def _mapping(description: str, fields: dict[str, _Field], required: tuple[str, ...] = ()) -> _Field:
    shape: _Field = {
        "type": "object",
        "description": description,
        "properties": fields,
        "additionalProperties": False,
    }
    return {**shape, "required": list(required)} if required else shape


def _by_name(description: str, entry: _Field, **more: Any) -> _Field:
    return {"type": "object", "description": description, "additionalProperties": entry, **more}


def _listed(description: str, items: _Field, **more: Any) -> _Field:
    return {"type": "array", "description": description, "items": items, **more}


def _words(description: str, item: _Field) -> _Field:
    """One value, or a list of different ones."""
    return {
        "description": description,
        "oneOf": [item, _listed(description, item, minItems=1, uniqueItems=True)],
    }


def _choice(description: str, words: Any) -> _Field:
    return {"enum": list(words), "description": description}


def _integer(description: str, low: int, high: int) -> _Field:
    return {"type": "integer", "minimum": low, "maximum": high, "description": description}


def _text(pattern: str, description: str, **more: Any) -> _Field:
    return {"type": "string", "pattern": pattern, "description": description, **more}


def _names(enumeration: Any) -> list[str]:
    return [member.name.lower() for member in enumeration]


def _defs() -> dict[str, _Field]:
    return {
        "identifier": _text("^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", "A name: ASCII letters, digits and ._-"),
        "tenant": _text(
            f"^{TENANT_FORM}(\\^{ISSUER_FORM})?$",
            "A tenant's id, compared byte for byte; with several issuers, `^` and its own",
        ),
        "duration": _text("^(0|[1-9][0-9]{0,8})(ms|s|m|h|d)$", "A duration: 0s, 250ms, 30m, 8h, 7d"),
        "percentage": _text("^(0|[1-9][0-9]{0,2})(\\.[0-9]{1,4})?%$", "A percentage: 20%, 12.5%"),
        "share": _text("^(all|none|[1-9][0-9]{0,8}/[1-9][0-9]{0,8})$", "A share: all, none, or such as 1/64"),
        "date": _text("^[0-9]{4}-[0-9]{2}-[0-9]{2}$", "A UTC date; as an end it is exclusive, at 00:00"),
        "reason": _text("^[^\\n\\r\\t]+$", "One line for people", minLength=1, maxLength=500),
        "labels": _by_name(
            "Label values that become part of a domain's identity", _ref("identifier", "A value")
        ),
        "retention": _mapping(
            "How long blocks may exist",
            {
                "idle": _ref("duration", "Since a block's last use; 0s: blocks never outlive their request"),
                "absolute": _ref("duration", "Since a block's birth, however busy it is"),
                "active_max": _ref("duration", "For one running request"),
            },
            ("idle", "absolute", "active_max"),
        ),
        "scrub": _mapping(
            "How a block ends",
            {
                "within": _ref("duration", "Memory is overwritten within this time of a block's end"),
                "verify": _ref("share", "The share of it that is read back"),
            },
            ("within", "verify"),
        ),
        "offload": {
            "description": "Where blocks may go: never, or to tiers",
            "oneOf": [
                {"const": "never"},
                _mapping(
                    "Tiers, and whether they hold ciphertext",
                    {
                        "tiers": _words(
                            "host, nvme, remote", _choice("A tier", [tier.value for tier in Tier])
                        ),
                        "encrypt": _choice("none is for host alone", ["required", "none"]),
                    },
                    ("tiers", "encrypt"),
                ),
            ],
        },
        "outage": _mapping("What happens while the ledger cannot record", _outage()),
    }


def _outage() -> dict[str, _Field]:
    words = _names(OnOutage)
    return {
        "decisions": _choice("Widening acts (class A)", words),
        "lifecycle": _choice("Residencies, releases, receipts (class B)", words),
        "own_hits": _choice("Counters of own-scope hits (class C)", words),
    }


def _sections() -> dict[str, _Field]:
    duties = {
        name: _by_name(f"By classification: {name}", _ref(name, name))
        for name in ("retention", "scrub", "offload")
    }
    private = _names((Scope.SESSION, Scope.SUBJECT, Scope.TENANT))
    level = _ref("identifier", "A classification")
    return {
        "schema": {"const": SCHEMA, "description": "The language and its version"},
        "name": _ref("identifier", "What the policy is called"),
        "description": _ref("reason", "What it is for"),
        "issuers": _listed(
            "Whose tenants are admitted, where there are several; the bare ids of a ledger are the first one's",
            _text(f"^{ISSUER_FORM}$", "An issuer, as principals name it"),
            minItems=1,
            maxItems=ISSUERS_MAX,
            uniqueItems=True,
        ),
        "profile": _choice(
            "shared: grants and segments may cross; strict: nothing does; dedicated: own pools",
            [profile.value for profile in Profile],
        ),
        "scope": _choice("The private scope of tenants that set none", private),
        "classifications": _listed(
            "Low to high", level, minItems=1, maxItems=CLASSIFICATIONS_MAX, uniqueItems=True
        ),
        "labels": _by_name(
            "Label names with their values",
            _words("The values", _ref("identifier", "A value")),
            maxProperties=LABELS_MAX,
        ),
        "classify": _listed("Default classifications of tenants, and routes that raise them", _classify()),
        "tenants": _by_name(
            "Who is admitted; `default` is every unlisted tenant", _tenant(), minProperties=1
        ),
        "groups": _by_name("Families of tenants", _group()),
        "segments": _listed("Prompt prefixes declared wider than private", _segment(), maxItems=ENTRIES_MAX),
        "grants": _listed("The only other way across a tenant boundary", _grant(), maxItems=ENTRIES_MAX),
        "rules": _listed("Permits within a tenant, forbids about anything", _rule(), maxItems=ENTRIES_MAX),
        **duties,
        "audit": _audit(),
        "eviction": _eviction(),
        "erasure": _erasure(),
    }


def _classify() -> _Field:
    return _mapping(
        "A tenant's default, or a route that raises",
        {
            "tenant": {
                "oneOf": [{"const": "*"}, _ref("tenant", "A tenant")],
                "description": "A tenant, or * for all",
            },
            "route": _text(
                "^(/[A-Za-z0-9._~@:{}-]+|/\\*)+$", "A path; * is one segment, at the end any", maxLength=256
            ),
            "as": _ref("identifier", "The classification"),
            "labels": _ref("labels", "Labels of the domains"),
        },
        ("tenant",),
    )


def _tenant() -> _Field:
    quota = {
        "guaranteed": _ref("percentage", "Always there for the tenant"),
        "cap": _ref("percentage", "Never more than this"),
        "borrow": {"type": "boolean", "description": "Use others' idle guarantees"},
    }
    fields = {
        "quota": _mapping("Shares of the pool", quota, ("guaranteed", "cap")),
        "group": _ref("identifier", "The tenant's family"),
        "scope": _choice("The tenant's private scope", _names((Scope.SESSION, Scope.SUBJECT, Scope.TENANT))),
        "labels": _ref("labels", "Labels of the tenant's domains"),
        "residencies": _integer("The most residencies alive at once", 1, 10_000_000),
        "tenants_max": _integer("On `default`: how many unlisted tenants hold blocks at once", 1, 100_000),
        "retention": _by_name("Stricter than the policy's", _ref("retention", "By classification")),
        "scrub": _by_name("Stricter than the policy's", _ref("scrub", "By classification")),
        "offload": _by_name("Stricter than the policy's", _ref("offload", "By classification")),
    }
    return _mapping("What the policy says of a tenant", fields)


def _group() -> _Field:
    fields = {
        "share": {
            "type": "boolean",
            "description": "Whether it stands for a grant between each ordered pair",
        },
        "at_most": _ref("identifier", "Up to this classification"),
        "from": _ref("date", "From this day"),
        "until": _ref("date", "Until this day, exclusive"),
        "reason": _ref("reason", "Why they are one family"),
    }
    return _mapping("A family of tenants", fields, ("share",))


def _segment() -> _Field:
    tenants = _listed("The readers", _ref("tenant", "A reader"), minItems=1, uniqueItems=True)
    fields = {
        "id": _ref("identifier", "The segment's name"),
        "owner": _ref("tenant", "Whose blocks they are"),
        "tenants": {
            "oneOf": [{"const": "*"}, tenants],
            "description": "Who may match it; * is every admitted tenant",
        },
        "digest": _text("^hmac:[0-9a-f]{64}$", "As printed when the segment was declared"),
        "tokens": _integer("The length that the digest covers, in tokens", 1, TOKENS_MAX),
        "classification": _ref("identifier", "The segment's own classification"),
        "model": _text("^sha256:[0-9a-f]{64}$", "Only under this model identity"),
        "expires": _ref("date", "Until this day, exclusive"),
    }
    return _mapping(
        "A declared prompt prefix", fields, ("id", "owner", "tenants", "digest", "tokens", "classification")
    )


def _grant() -> _Field:
    fields = {
        "id": _ref("identifier", "The grant's name, unique for ever: revoked names stay revoked"),
        "owner": _ref("tenant", "Whose blocks are read"),
        "reader": _ref("tenant", "Who reads them"),
        "at_most": _ref("identifier", "Up to this classification"),
        "from": _ref("date", "From this day; at once if left out"),
        "until": _ref("date", "Until this day, exclusive"),
        "reason": _ref("reason", "Why the owner allows it"),
    }
    return _mapping(
        "One tenant's leave to read another's blocks",
        fields,
        ("id", "owner", "reader", "at_most", "until", "reason"),
    )


def _rule() -> _Field:
    bounds = {
        "at_most": _ref("identifier", "This and lower"),
        "at_least": _ref("identifier", "This and higher"),
    }
    level = _words("One or several", _ref("identifier", "A classification"))
    reader = _words("owner (itself), same-group, or tenants", _ref("tenant", "A tenant"))
    when = {
        "reader": reader,
        "owner": _words("Whose blocks", _ref("tenant", "A tenant")),
        "classification": {
            "oneOf": [*level["oneOf"], _mapping("A range", bounds)],
            "description": "Which levels",
        },
        "via": _words("By which way", _choice("A way", _names(Via))),
    }
    actions = _words("What is decided", _choice("An action", _names(Action)))
    permitted = _words("What a permit can give", _choice("An action", _names(PERMITTED)))
    fields = {
        "id": _ref("identifier", "The rule's name, as decisions give it"),
        "effect": _choice("permit or forbid; a forbid overrides every permit", [e.value for e in RuleEffect]),
        "action": actions,
        "when": _mapping("All terms must match; one left out matches everything", when),
        "reason": _ref("reason", "A line for people"),
    }
    only_permits = {"if": {"properties": {"effect": {"const": "permit"}}, "required": ["effect"]},
                    "then": {"properties": {"action": permitted}}}  # fmt: skip
    return {**_mapping("A permit or a forbid", fields, ("id", "effect", "action")), **only_permits}


def _audit() -> _Field:
    floor = {
        **_ref("outage", "The floor for every classification"),
        "required": ["decisions", "lifecycle", "own_hits"],
    }
    stricter = _by_name("Stricter behaviour for some", _ref("outage", "Only what is stricter"))
    fields = {"on_outage": floor, "by_classification": stricter}
    return _mapping("Behaviour during a ledger outage", fields, ("on_outage",))


def _erasure() -> _Field:
    fields = {
        "within": _ref("duration", "The deadline of an erasure"),
        "running": _choice("Abort running requests, or let them finish", [word.value for word in OnRunning]),
    }
    return _mapping("By when an erasure is done, and what becomes of running requests", fields)


def _eviction() -> _Field:
    span = {
        "from": _integer("First token", 0, TOKENS_MAX),
        "to": _integer("Last token, exclusive", 1, TOKENS_MAX + 1),
        "priority": _integer("0 leaves first", 0, 100),
        "for": _ref("duration", "For how long"),
    }
    fields = {
        "policy": _choice("Which cached block leaves first", [kind.value for kind in EvictionKind]),
        "priority": _integer("Of tokens in no range (priority)", 0, 100),
        "ranges": _listed("Priorities for spans of a prompt", _mapping("A span", span, ("from", "priority"))),
        "protected": _ref("percentage", "The protected share (slru)"),
        "hits": _integer("Uses before a block is protected (slru)", 1, 1_000),
    }
    return _mapping("Eviction under pressure; it never extends a deadline", fields, ("policy",))
