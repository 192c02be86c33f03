"""Every way to write a policy wrongly, and the exact line reported for it (`golden_errors.txt`).

A change of a message is a change of that file, seen in review. `KVCUSTODY_WRITE_GOLDEN=1` writes it anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from kvcustody.errors import ConfigError, PolicyError
from kvcustody.policies.document import yaml_nodes as document
from kvcustody.policies.document.problem_codes import CODES, LINT_CODES
from kvcustody.policies.document.problems import PROBLEMS_MAX, PolicyRejected
from kvcustody.policies.reading.load_policy import load_policy

HERE = Path(__file__).parents[1]
BASE = (HERE / "base.yaml").read_text()
LRU = "eviction: {policy: lru}"
STRICT = (HERE / "strict.yaml").read_text()
GOLDEN = HERE / "golden_errors.txt"
TWICE = BASE.replace("  globex:", "  acme^corp:")
LABS = "labs: {quota: {guaranteed: 10%, cap: 10%}}"
SEALED = "tiers: [host, nvme], encrypt: required"
TABLE = "tiers: {host: {}, nvme: {absolute: 9h}}, encrypt: required"
LIMITED = BASE.replace(SEALED, f"{SEALED}, absolute: 2h, within: 5m", 1)
GRANT = "{id: g, owner: acme, reader: labs, at_most: low, until: 2027-01-01, reason: r}"
SEGMENT = (
    "  - {{id: s{0}, owner: acme, tenants: [acme], digest: hmac:" + "2" * 64 + ","
    " tokens: 16, classification: low, expires: 2027-01-01}}\n"
)


class Case(NamedTuple):
    name: str
    document: str | bytes


def case(name, old=None, new=None, *, whole=None, base=BASE):
    if whole is not None:
        return Case(name, whole)
    assert old in base, name
    return Case(name, base.replace(old, new, 1))


CASES = [
    case("bytes-not-utf8", whole=b"schema: \xff\n"),
    case("lone-surrogate", whole="schema: \udc80\n"),
    case("too-large", whole="#" * (1 << 20) + "\n"),
    case("broken-flow", whole="a: [1, 2\nb: 3\n"),
    case("tab-indent", whole="a:\n\tb: 1\n"),
    case("control-character", "name: base\n", "name: ba\x07se\n"),
    case("bidi-in-name", "id: agent\n", "id: ag\u202eent\n"),
    case("bidi-in-comment", "eviction: {policy: lru}", "eviction: {policy: lru} # \u2066x"),
    *(
        case(f"tenant-that-reads-like-{name}", "  globex:", f"  {name}: {{}}\n  globex:")
        for name in ("defualt", "defaults", "Default", "defalt")
    ),
    case("zero-width", "name: base\n", "name: ba\u200bse\n"),
    case("escaped-bidi", "id: agent\n", 'id: "ag\\u202eent"\n'),
    case("escaped-bidi-in-text", "reason: joint evaluation", 'reason: "joint \\u202e evaluation"'),
    case("escaped-tab-in-name", "name: base\n", 'name: "ba\\tse"\n'),
    case("second-document", "eviction: {policy: lru}\n", "eviction: {policy: lru}\n---\na: 1\n"),
    case("empty", whole=""),
    case("only-comments", whole="# nothing\n"),
    case("null-document", whole="~\n"),
    case("anchor", "name: base\n", "name: &n base\n"),
    case("alias", "name: base\n", "name: &n base\ndescription: *n\n"),
    case("tag", "name: base\n", "name: !!str base\n"),
    case("python-tag", "name: base\n", "name: !!python/object/apply:os.system [ls]\n"),
    case(
        "merge-key",
        "  low: {idle: 1d, absolute: 7d, active_max: 2h}\n",
        "  low: {<<: {idle: 1d}, absolute: 7d, active_max: 2h}\n",
    ),
    case("duplicate-key", "name: base\n", "name: base\nname: other\n"),
    case(
        "duplicate-tenant",
        "  labs: {group: family, quota: {guaranteed: 5%, cap: 30%}}\n",
        "  labs: {group: family, quota: {guaranteed: 5%, cap: 30%}}\n  acme: {}\n",
    ),
    case("too-many-nodes", whole="[" + "a," * 200_001 + "]\n"),
    case("too-deep", whole="[" * 40 + "]" * 40 + "\n"),
    case("list-as-key", "name: base\n", "? [a]\n: base\n"),
    case("integer-key", "  globex:", "  17:"),
    case("root-is-list", whole="- a\n"),
    case("norway", "[acme, labs]", "[acme, no]"),
    case("yes-as-boolean", "share: true", "share: yes"),
    case("on-as-key", "  globex:", "  on:"),
    case("sexagesimal", "idle: 30m", "idle: 22:30"),
    case("float", "residencies: 100", "residencies: 1.5"),
    case("exponent", "residencies: 100", "residencies: 1e3"),
    case("nan", "residencies: 100", "residencies: .nan"),
    case("octal", "tokens: 512", "tokens: 0777"),
    case("underscored", "tokens: 512", "tokens: 1_000"),
    case("hexadecimal", "tokens: 512", "tokens: 0x20"),
    case("text-for-integer", "tokens: 512", "tokens: many"),
    case("quoted-integer", "tokens: 512", 'tokens: "512"'),
    case("null-for-name", "name: base\n", "name:\n"),
    case("boolean-for-name", "name: base\n", "name: true\n"),
    case("integer-for-tenant", "reader: labs", "reader: 7"),
    case("string-for-boolean", "share: true", 'share: "true"'),
    case("list-for-mapping", "retention:\n", "retention: [a]\nretention_:\n"),
    case("mapping-for-list", "grants:\n", "grants: {a: b}\ngrants_:\n"),
    case("name-with-space", "id: agent\n", "id: my agent\n"),
    case("name-cyrillic", "id: agent\n", "id: \u0430gent\n"),
    case("tenant-with-space", "  globex:", '  "glo bex":'),
    case("reserved-tenant", "  globex:", "  owner:"),
    case("unknown-profile", "profile: shared", "profile: shard"),
    case("unknown-action", "action: reuse,", "action: read,"),
    case("unknown-scope", "scope: session", "scope: group"),
    case("duration-without-unit", "idle: 30m", "idle: 30"),
    case("duration-unit", "idle: 30m", "idle: 30min"),
    case("duration-too-long", "absolute: 7d", "absolute: 4000d"),
    case("percent-over", "cap: 60%", "cap: 160%"),
    case("percent-missing", "cap: 60%", "cap: 60"),
    case("share-over-one", "verify: 1/64", "verify: 3/2"),
    case("share-percent", "verify: 1/64", "verify: 10%"),
    case("date-impossible", "expires: 2027-03-31", "expires: 2027-02-30"),
    case("date-with-time", "expires: 2027-03-31", "expires: 2027-03-31T10:00Z"),
    case("digest-short", "digest: hmac:11", "digest: hmac:1"),
    case("digest-scheme", "digest: hmac:1", "digest: sha256:1"),
    case("integer-range", "residencies: 100", "residencies: 0"),
    case("integer-huge", "tokens: 512", "tokens: 99999999999999999999999999"),
    case("text-empty", "reason: joint evaluation", 'reason: " "'),
    case("route-relative", "route: /v1/hr/*", "route: v1/hr"),
    case("route-dots", "route: /v1/hr/*", "route: /v1/../hr"),
    case("route-star-inside", "route: /v1/hr/*", "route: /v1/h*"),
    case("unknown-field", "retention:\n", "retension:\n"),
    case("unknown-nested", "at_most: mid", "at_mots: mid"),
    case("unknown-far", "name: base\n", "name: base\nzzz: 1\n"),
    case("several-issuers", "name: base\n", "name: base\nissuers: [corp, partner]\n"),
    case("unlisted-issuer", "  globex:", "  globex^partner:"),
    case("tenant-twice-by-its-issuer", "name: base\n", "name: base\nissuers: [corp]\n", base=TWICE),
    case("own-issuer", "name: base\n", "name: base\nissuers: [kvcustody]\n"),
    case("missing-field", "    reason: joint evaluation\n", ""),
    case(
        "missing-section",
        "audit:\n  on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}\n",
        "",
    ),
    case("schema-version", "policy@1", "policy@2"),
    case("id-twice", "{id: no-high,", "{id: own,"),
    case("id-across-sections", "{id: no-high,", "{id: agent,"),
    case("list-empty", "tenants: [acme, labs]", "tenants: []"),
    case("list-repeats", "tenants: [acme, labs]", "tenants: [acme, acme]"),
    case("classification-twice", "[low, mid, high]", "[low, mid, mid, high]"),
    case("empty-range", "{at_least: high}", "{at_least: high, at_most: low}"),
    case(
        "default-classification-twice",
        "  - {tenant: acme, route: /v1/hr/*, as: high}\n",
        '  - {tenant: "*", as: high}\n',
    ),
    case("parameter-of-another", "{policy: lru}", "{policy: lru, priority: 5}"),
    case("tenants-max-on-listed", "residencies: 100,", "tenants_max: 3,"),
    case("period-without-sharing", "{share: true, at_most: low}", "{share: false, at_most: low}"),
    case(
        "too-many-classifications",
        "[low, mid, high]",
        f"[low, mid, high, {', '.join(f'c{i}' for i in range(14))}]",
    ),
    case("classify-says-nothing", '{tenant: "*", as: mid}', '{tenant: "*"}'),
    case("unknown-tenant-in-grant", "reader: labs", "reader: labz"),
    case("unknown-tenant-in-segment", "tenants: [acme, labs]", "tenants: [acme, initech]"),
    case("unknown-tenant-in-classify", "tenant: acme,", "tenant: acmee,"),
    case("unknown-tenant-in-rule", "when: {reader: owner}", "when: {reader: [ghost]}"),
    case("unknown-classification", "at_most: mid", "at_most: mit"),
    case("unknown-classification-key", "  high: never", "  high: never\n  higher: never"),
    case("unknown-label", "labels: {region: eu}", "labels: {regoin: eu}"),
    case("unknown-label-value", "labels: {region: eu}", "labels: {region: uk}"),
    case("wildcard-reader", "reader: labs", 'reader: "*"'),
    case("wildcard-owner", "    owner: acme\n    reader", "    owner: default\n    reader"),
    case("self-grant", "reader: labs", "reader: acme"),
    case("dates-reversed", "from: 2026-01-01", "from: 2027-03-31"),
    case(
        "group-without-member",
        "  family: {share: true, at_most: low}",
        "  family: {share: true, at_most: low}\n  famly: {share: false}",
    ),
    case("group-undeclared", "labs: {group: family,", "labs: {group: familly,"),
    case("permit-admit", "permit, action: reuse,", "permit, action: admit,"),
    case("permit-by-grant", "when: {reader: owner}}", "when: {via: grant}}"),
    case("permit-same-group", "when: {reader: owner}}", "when: {reader: same-group}}"),
    case("permit-across", "when: {reader: owner}}", "when: {reader: labs, owner: acme}}"),
    case("group-on-default", "default: {quota:", "default: {group: family, quota:"),
    case("segment-without-end", "    expires: 2027-03-31\n", ""),
    case("kind-undeclared", "    tokens: 512\n", "    tokens: 512\n    kind: system_prompt\n"),
    case(
        "kind-misspelt",
        "    tokens: 512\n",
        "    tokens: 512\n    kind: system_promt\n",
        base=BASE.replace(LRU, "eviction: {policy: cost, kinds: {system_prompt: 90}}"),
    ),
    case("kind-named-badly", LRU, "eviction: {policy: priority, kinds: {-x: 90}}"),
    case("kind-priority", LRU, "eviction: {policy: priority, kinds: {log: 101}}"),
    case("signal-unknown", LRU, "eviction: {policy: value, signals: [next-turn, think-time]}"),
    case("signal-twice", LRU, "eviction: {policy: value, signals: [reuse, reuse]}"),
    case("signals-elsewhere", LRU, "eviction: {policy: cost, signals: [reuse]}"),
    case(
        "learned-from-everybody",
        "labs: {}",
        f"{LABS}\neviction: {{policy: value, learned: pool}}",
        base=STRICT,
    ),
    case("kinds-elsewhere", LRU, "eviction: {policy: lru, kinds: {log: 1}}"),
    case("missing-retention", "  mid: {idle: 30m, absolute: 8h, active_max: 2h}\n", ""),
    case("missing-scrub", "  default: {within: 1s, verify: 1/64}\n", "  low: {within: 1s, verify: none}\n"),
    case("missing-offload", "  high: never\n", ""),
    case("missing-integrity", "audit:\n", "integrity: {low: {verify: all}}\naudit:\n"),
    case("idle-over-absolute", "idle: 30m, absolute: 8h", "idle: 9h, absolute: 8h"),
    case("active-zero", "active_max: 15m", "active_max: 0s"),
    case("scrub-zero", "within: 250ms", "within: 0s"),
    case("outage-weaker", "lifecycle: spill", "lifecycle: aggregate"),
    case("outage-decisions", "decisions: deny", "decisions: spill"),
    case(
        "tenant-looser",
        "{idle: 1h, absolute: 1d, active_max: 1h}",
        "{idle: 2d, absolute: 3d, active_max: 1h}",
    ),
    case("media-plain", "{tiers: [host], encrypt: none}", "{tiers: [host, remote], encrypt: none}"),
    case("media-plain-in-a-table", "{tiers: [host], encrypt: none}", "{tiers: {nvme: {}}, encrypt: none}"),
    case("tiers-empty", "{tiers: [host], encrypt: none}", "{tiers: {}, encrypt: none}"),
    case("tier-unknown", "{tiers: [host], encrypt: none}", "{tiers: {tape: {}}, encrypt: none}"),
    case("tier-of-no-time", "{tiers: [host], encrypt: none}", "{tiers: [host], encrypt: none, absolute: 0s}"),
    case("tier-over-retention", "{tiers: [host], encrypt: none}", f"{{{SEALED}, absolute: 9h}}"),
    case("one-tier-over-retention", "{tiers: [host], encrypt: none}", f"{{{TABLE}, absolute: 2h}}"),
    case(
        "tier-over-a-tenants-retention",
        "globex: {scope",
        f"globex: {{offload: {{low: {{{SEALED}, absolute: 2d}}}}, scope",
    ),
    case(
        "tenant-tier-looser",
        f"{SEALED}, absolute: 2h",
        f"{SEALED}, absolute: 2h",
        base=LIMITED.replace("globex: {scope", f"globex: {{offload: {{low: {{{SEALED}, absolute: 3h}}}}, scope"),
    ),
    case(
        "tenant-within-looser",
        f"{SEALED}, absolute: 2h",
        f"{SEALED}, absolute: 2h",
        base=LIMITED.replace("globex: {scope", f"globex: {{offload: {{low: {{{SEALED}, within: 8m}}}}, scope"),
    ),
    case("match-unknown", "{tiers: [host], encrypt: none}", "{tiers: remote, encrypt: required, match: zone}"),
    case("match-nothing", "{tiers: [host], encrypt: none}", "{tiers: [host], encrypt: none, match: region}"),
    case("strict-plain", "{low: never}", "{low: {tiers: [host], encrypt: none}}", base=STRICT),
    case("sum-over", "guaranteed: 20%, cap: 60%", "guaranteed: 80%, cap: 80%"),
    case("too-many-segments", "grants:\n", "".join(SEGMENT.format(i) for i in range(16)) + "grants:\n"),
    case("strict-quota", "labs: {}", "labs: {quota: {guaranteed: 10%, cap: 20%}}", base=STRICT),
    case("strict-no-quota", "labs: {}", "labs: {}", base=STRICT),
    case("strict-borrow", "labs: {}", "labs: {quota: {guaranteed: 10%, cap: 10%, borrow: true}}", base=STRICT),
    case(
        "strict-grant",
        "labs: {}",
        f"{LABS}\ngrants: [{GRANT}]",
        base=STRICT,
    ),
    case(
        "strict-segment",
        "labs: {}",
        f"{LABS}\nsegments:\n" + SEGMENT.format(0).replace("[acme]", '"*"'),
        base=STRICT,
    ),
    case(
        "strict-group",
        "labs: {}",
        "labs: {group: f, quota: {guaranteed: 10%, cap: 10%}}\ngroups: {f: {share: true, at_most: low}}",
        base=STRICT,
    ),
    case(
        "dedicated-borrow",
        "labs: {}",
        "labs: {quota: {guaranteed: 10%, cap: 10%, borrow: true}}",
        base=STRICT.replace("strict", "dedicated"),
    ),
    case("guaranteed-over-cap", "guaranteed: 20%, cap: 60%", "guaranteed: 20%, cap: 10%"),
    case("default-unbounded", ", tenants_max: 20", ""),
    case("one-tenant-for-a-list", "tenants: [acme, labs]", "tenants: acme"),
    case(
        "audit-unknown-field",
        "own_hits: aggregate}\n",
        "own_hits: aggregate}\n  by_classification: {high: {own_hit: deny}}\n",
    ),
    case(
        "a-broken-share-has-no-consequence",
        "labs: {}",
        "labs: {quota: {guaranteed: 10%, cap: 1:30}}",
        base=STRICT,
    ),
    case(
        "two-in-one-grant",
        "reader: labs\n    at_most: mid",
        'reader: "*"\n    at_mots: mid\n    at_most: mit',
    ),
    case("label-of-another-type", "labels: {region: eu}", "labels: {region: [eu]}"),
    case("rule-term-unknown", "{reader: owner}", "{raeder: owner}"),
]


def rejected(text) -> PolicyRejected:
    with pytest.raises(PolicyRejected) as caught:
        load_policy(text, name="p.yaml")
    return caught.value


def golden() -> dict[str, str]:
    sections = GOLDEN.read_text().split("## ")[1:]
    return {name: lines.rstrip("\n") for name, lines in (section.split("\n", 1) for section in sections)}


def test_bases_load():
    assert load_policy(BASE, name="base.yaml").name == "base"
    load_policy(STRICT.replace("labs: {}", LABS), name="strict.yaml")


@pytest.mark.skipif(not os.environ.get("KVCUSTODY_WRITE_GOLDEN"), reason="writes the golden file")
def test_write_golden():
    GOLDEN.write_text("".join(f"## {name}\n{rejected(text)}\n" for name, text in CASES))


@pytest.mark.parametrize("this", CASES, ids=lambda c: c.name)
def test_message(this):
    assert str(rejected(this.document)) == golden()[this.name]


@pytest.mark.parametrize("this", CASES, ids=lambda c: c.name)
def test_the_python_parser_gives_the_same_places(this, monkeypatch):
    """Without libyaml, PyYAML's own parser is used; only its messages for broken YAML differ."""
    if len(this.document) > 100_000:
        pytest.skip("slow in the Python parser")
    fast = rejected(this.document).problems
    monkeypatch.setattr(document, "_LOADER", yaml.SafeLoader)
    slow = rejected(this.document).problems
    if "KVP103" in {problem.code for problem in fast}:
        assert {problem.code for problem in slow} == {"KVP103"}
    else:
        assert slow == fast


def test_golden_has_no_stale_case():
    assert list(golden()) == [this.name for this in CASES]


def test_every_code_is_shown_by_a_case():
    shown = {code for lines in golden().values() for code in re.findall(r"\bKVP\d+\b", lines)}
    assert shown == CODES.keys() - LINT_CODES.keys()


def test_error_is_in_the_tree_and_carries_its_problems():
    error = rejected(BASE.replace("reader: labs", "reader: labz"))
    assert isinstance(error, PolicyError) and isinstance(error, ConfigError) and error.code == "KVC110"
    (problem,) = error.problems
    assert (problem.file, problem.line, problem.column, problem.code) == ("p.yaml", 27, 13, "KVP401")
    assert str(error).count("\n") == 0


def test_all_problems_are_collected_and_ordered():
    text = BASE.replace("cap: 60%", "cap: 60").replace("tokens: 512", "tokens: x").replace("idle: 30m", "idle: 5x")
    places = [(p.line, p.column) for p in rejected(text).problems]
    assert len(places) == 3 and places == sorted(places)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("cap: 60%", "cup: 60%", "KVP302"),
        ("tokens: 512", "tokens: 0777", "KVP204"),
        ("reader: labs", "reader: 7", "KVP205"),
        ("policy: lru", "policy: lur", "KVP208"),
    ],
)
def test_one_problem_hides_no_other(old, new, code):
    """A problem hides none in its own section or in another, and its placeholder causes no complaint."""
    alone = rejected(BASE.replace(old, new)).problems
    text = BASE.replace(old, new).replace("at_most: mid", "at_most: mit").replace("idle: 30m", "idle: 9h")
    text = text.replace("name: base\n", "name: base\nissuers: [corp, partner]\n")
    found = rejected(text)
    codes = {problem.code for problem in found.problems}
    assert code in {problem.code for problem in alone} and {problem.code for problem in alone} <= codes
    assert {"KVP402", "KVP413", "KVP505"} <= codes and "``" not in str(found)


def test_problems_are_capped_and_the_rest_counted():
    error = rejected(BASE + "".join(f"x{i}: 1\n" for i in range(PROBLEMS_MAX + 7)))
    assert len(error.problems) == PROBLEMS_MAX and error.omitted == 7
    assert str(error).endswith("not shown: 7 more problems")


@pytest.mark.parametrize("value", ["a`b", "a\\u202eb", "a\\nb", "x" * 5000])
def test_a_value_cannot_break_or_reorder_the_line(value):
    text = str(rejected(BASE.replace("profile: shared", f'profile: "{value}"')))
    assert "\n" not in text and "\u202e" not in text and len(text) < 300
    assert text.count("`") % 2 == 0


def test_line_ends():
    assert load_policy(BASE.replace("\n", "\r\n"), name="crlf.yaml") == load_policy(BASE, name="lf.yaml")
    assert load_policy("\ufeff" + BASE, name="bom.yaml") == load_policy(BASE, name="lf.yaml")
    assert "U+000D" in str(rejected(BASE.replace("\n", "\r", 3)))


def test_a_suggested_name_is_quoted_too():
    """Found by the fuzzer: a hint may name what the document itself declares."""
    text = BASE.replace("  labs: {", "  \uf281labs: {")
    assert "did you mean `\\uf281labs`?" in str(rejected(text)) and str(rejected(text)).replace("\n", "").isprintable()
