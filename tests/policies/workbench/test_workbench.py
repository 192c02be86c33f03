# ruff: noqa: E501 (one case a line reads as the table it is)
"""The workbench for authors and reviewers: differences, findings, layout, schema, starts, cases, explanations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from kvcustody.policies import library
from kvcustody.policies.document.digest import digest
from kvcustody.policies.document.model import Action, Effect, Scope, Via
from kvcustody.policies.document.problem_codes import LINT_CODES
from kvcustody.policies.document.problems import PolicyRejected
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.model import AccessRequest
from kvcustody.policies.workbench.diff.model import DiffVerdict
from kvcustody.policies.workbench.diff.semantic_diff import diff
from kvcustody.policies.workbench.explain import explain
from kvcustody.policies.workbench.format import fmt
from kvcustody.policies.workbench.init_policy import start
from kvcustody.policies.workbench.json_schema import schema
from kvcustody.policies.workbench.lint.lint import ERRORS, ScrubRate, confused, lint
from kvcustody.policies.workbench.lint.without_effect import PoolOwner
from kvcustody.policies.workbench.prove.route_examples import RouteExamples
from kvcustody.policies.workbench.request import Request
from kvcustody.policies.workbench.run_test_cases import run_cases
from kvcustody.policies.workbench.simulate import Recorded, RecordedDenials, simulate
from kvcustody.policies.workbench.test_case_model import load_cases

HERE = Path(__file__).parents[1]
NOW = 1_790_000_000_000_000  # within 2026
DEFAULT = "  default: {quota: {guaranteed: 1%, cap: 10%}, tenants_max: 20}\n"
RULE = "rules:\n"


# Differences


@pytest.mark.parametrize(
    ("edits", "verdict"),
    [
        ([], "equivalent"),
        ([("name: base", "name: other")], "equivalent"),
        ([("guaranteed: 20%", "guaranteed: 10%")], "equivalent"),
        ([("reason: joint evaluation", "reason: renewed")], "equivalent"),
        ([("at_most: mid", "at_most: high")], "equivalent"),  # no-high forbids what it would open
        ([("until: 2027-03-31", "until: 2027-04-01")], "wider"),
        ([("until: 2027-03-31", "until: 2027-03-30")], "narrower"),
        ([("at_most: low}", "at_most: mid}")], "wider"),
        ([("reader: labs", "reader: globex")], "incomparable"),
        ([("crosses: [region], share: true, at_most: low", "share: false")], "narrower"),
        ([("tenants: [acme, labs]", 'tenants: "*"')], "wider"),
        ([("tokens: 512", "tokens: 256")], "incomparable"),  # the segment shares something else now
        ([("classification: {at_least: high}", "classification: {at_least: mid}")], "narrower"),
        ([("scope: session, ", "scope: tenant, ")], "wider"),
        ([('"*", as: mid', '"*", as: low')], "wider"),
        ([("idle: 30m", "idle: 31m")], "wider"),
        ([("verify: 1/64", "verify: 1/32")], "narrower"),
        ([("  mid: {tiers: [host]", "  mid: {tiers: [host, nvme]"), ("encrypt: none", "encrypt: required")], "incomparable"),
        ([("labels: {region: eu}}", "labels: {}}")], "wider"),
        ([(DEFAULT, "")], "narrower"),
        ([("eviction: {policy: lru}", "erasure: {within: 2h}")], "wider"),
    ],
)  # fmt: skip
def test_verdicts(compiled, edits, verdict):
    old, new = compiled(), compiled(*edits)
    found, back = diff(old, new), diff(new, old)
    assert found.verdict == verdict
    opposite = {"wider": "narrower", "narrower": "wider"}
    assert back.verdict == opposite.get(verdict, verdict)
    assert len(found.cells) == len(back.cells) and found.openings == back.closings
    assert json.dumps(found.data()) == json.dumps(diff(old, new).data())


@pytest.mark.parametrize("where", ["policy", "tenant"])
def test_one_name_for_a_tenants_requests_is_a_placement_channel_that_somebody_approves(compiled, where):
    line = "scope: session, "
    edit = (line, line + "affinity: segment, ") if where == "tenant" else ("classify:", "affinity: segment\nclassify:")
    found = diff(compiled(), compiled(edit))
    assert found.verdict is DiffVerdict.WIDER and found.approval_digest and not found.cells
    assert {duty[1:] for duty in found.duties} == {
        ("placement channel inside the tenant", "affinity", "private", "segment", True)
    }
    assert len(found.duties) == (1 if where == "tenant" else 4), "the listed tenants, and one that is not"
    assert diff(compiled(edit), compiled()).verdict is DiffVerdict.NARROWER
    one_new = diff(compiled((DEFAULT, "")), compiled((DEFAULT, DEFAULT.replace("{", "{affinity: segment, ", 1))))
    assert "affinity" in {duty.field for duty in one_new.duties}, "of a tenant that comes, too"


def test_a_difference_is_exact(compiled):
    """Every changed cell is changed, and between the cells nothing else is."""
    old, new = (
        compiled(),
        compiled(("until: 2027-03-31", "until: 2027-06-01"), ("reader: owner", "reader: [acme]")),
    )
    found = diff(old, new)
    assert found.verdict is DiffVerdict.INCOMPARABLE
    (opening,) = found.consents
    assert (opening.id, opening.owner, opening.reader) == ("labs-reads-acme", "acme", "labs")
    told_cells = {(c.action, c.reader, c.owner, c.classification, c.scope, c.via): c for c in found.cells}
    for action in Action:
        for reader in ("acme", "labs", "globex", "~unlisted-1"):
            for owner in ("acme", "labs", "globex"):
                for level, name in enumerate(old.policy.classifications):
                    for scope in Scope:
                        for via in Via:
                            at = 1_806_000_000_000_000  # April 2027: the old grant is over, the new one is not
                            before, after = (
                                t.decide(AccessRequest(action, reader, owner, level, scope, via), at)
                                for t in (old, new)
                            )
                            cell = told_cells.get((action, reader, owner, name, scope, via))
                            assert (before.permitted != after.permitted) == (
                                cell is not None and cell.start_us <= at < cell.end_us
                            )


def test_a_change_of_what_content_is_worth_is_a_change_of_settings(compiled):
    kinds = (LRU, "eviction: {policy: cost, kinds: {log: 1}}")
    one, two = compiled(kinds), compiled((LRU, "eviction: {policy: cost, kinds: {log: 2}}"))
    (change,) = diff(one, two).settings
    assert change.field == "eviction" and "priority=1" in change.before and "priority=2" in change.after
    of_a_kind = compiled(kinds, ("tokens: 512", "tokens: 512\n    kind: log"))
    assert [(each.subject, each.after) for each in diff(one, of_a_kind).settings] == [("segments", "edited")]


SEALED = "low: {tiers: [host, nvme], encrypt: required}"


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("", ", absolute: 2h", {("tier_absolute_us", False), ("tier_within_us", False)}),
        (", absolute: 2h, within: 1m", ", absolute: 3h, within: 1m", {("tier_absolute_us", True)}),
        (", within: 1m", ", within: 2m", {("tier_within_us", True)}),
        (", absolute: 2h, within: 2m", ", absolute: 3h, within: 1m",
         {("tier_absolute_us", True), ("tier_within_us", False)}),
    ],
)  # fmt: skip
def test_limits_of_tiers_are_compared(compiled, before, after, changes):
    """By each tenant whose copies they are of, and by no other classification."""
    edits = [(SEALED, SEALED[:-1] + said + "}") for said in (before, after)]
    found = diff(compiled(edits[0]), compiled(edits[1]))
    assert {(duty.field, duty.loosens) for duty in found.duties} == changes
    assert {duty.tenant for duty in found.duties} == {"acme", "labs", "globex", "~unlisted-1"}
    assert {duty.subject for duty in found.duties} == {"low"} and not found.cells
    shown = next(duty for duty in found.duties if duty.field == sorted(changes)[0][0] and duty.tenant == "acme")
    assert shown.after.startswith("host ") and ", nvme " in shown.after


def test_a_tier_more_or_less_is_told_once(compiled):
    """Where limits follow from tiers and retention they are not told again; a place that opens is wider."""
    more = compiled((SEALED, "low: {tiers: [host, nvme, remote], encrypt: required}"))
    found = diff(compiled(), more)
    assert found.verdict is DiffVerdict.WIDER
    assert {(duty.field, duty.before, duty.after) for duty in found.duties} == {
        ("tiers", "host, nvme", "host, nvme, remote"),
        ("match", "none", "region"),
    }
    assert diff(more, compiled()).verdict is DiffVerdict.NARROWER
    free = compiled((SEALED, "low: {tiers: [host, nvme, remote], encrypt: required, match: none}"))
    (change,) = {(duty.field, duty.before, duty.after, duty.loosens) for duty in diff(more, free).duties}
    assert change == ("match", "region", "none", True)
    longer = diff(
        compiled(),
        compiled(("absolute: 7d", "absolute: 8d"), ("absolute: 1d, active", "absolute: 1d, active")),
    )
    assert {duty.field for duty in longer.duties} == {"absolute_us"}


def test_what_an_approver_signs_names_what_widens(compiled):
    one, wide, wider = compiled(), compiled(("idle: 30m", "idle: 31m")), compiled(("idle: 30m", "idle: 32m"))
    assert diff(one, wide).cells_digest == diff(one, wide).cells_digest != diff(one, wider).cells_digest


def test_how_much_widens_is_said_without_what_does_not(compiled):
    def widening(*edits):
        return diff(compiled(), compiled(*edits)).widening_text()

    assert widening(("idle: 30m", "idle: 31m")) == "loosens 4 obligations"
    assert widening(("at_most: low}", "at_most: mid}")) == "widens 9 cells and opens 2 ways"
    assert widening() == ""


def test_a_new_source_is_an_opening_even_where_another_had_opened_the_cell(compiled):
    again = "{id: again, owner: acme, reader: labs, at_most: low, until: 2027-01-01, reason: x, crosses: [region]}"
    more = f"grants:\n  - {again}\n"
    found = diff(compiled(), compiled(("grants:\n", more)))
    assert found.verdict is DiffVerdict.WIDER and found.cells == ()
    assert [opening.id for opening in found.consents] == ["again"]


# Lint


PLAIN = (
    "mid: {tiers: [host], encrypt: none}",
    "mid: {tiers: [host], encrypt: required}",
)
OPEN = (  # so that its grant, group and segment open something
    ("labels: {region: eu}}", "labels: {region: eu}, scope: tenant}"),
    ("cap: 30%}}", "cap: 30%}, labels: {region: eu}, scope: tenant}"),
)
LRU = "eviction: {policy: lru}"


def lint_codes(compiled, *edits, **settings):
    return sorted({finding.code for finding in lint(compiled(PLAIN, *OPEN, *edits), now_us=NOW, **settings)})


LINT = {
    "KVP701": [(RULE, RULE + "  - {id: r, effect: forbid, action: admit, when: {via: grant}}\n")],
    "KVP702": [(RULE, RULE + "  - {id: r, effect: forbid, action: reuse, when: {reader: labs, classification: high}}\n")],
    "KVP703": [(RULE, RULE + "  - {id: r, effect: permit, action: reuse, when: {reader: acme, classification: high}}\n")],
    "KVP704": [
        ("reader: owner", "reader: [acme, labs]"),
        (RULE, RULE + "  - {id: r, effect: permit, action: reuse, when: {reader: [acme, globex]}}\n"
         "  - {id: s, effect: permit, action: reuse, when: {reader: [labs, globex]}}\n"
         "  - {id: t, effect: permit, action: reuse, when: {reader: [globex, acme], classification: low}}\n"),
    ],
    "KVP705": [("action: reuse, when: {reader: owner}", "action: export, when: {reader: owner}")],
    "KVP711": [("until: 2027-03-31", "until: 2026-03-31")],
    "KVP712": [("until: 2027-03-31", "until: 2026-10-01")],
    "KVP713": [(RULE, RULE + "  - {id: r, effect: forbid, action: reuse, when: {reader: labs, owner: acme, via: grant}}\n")],
    "KVP714": [("grants:\n", "grants:\n  - {id: a, owner: acme, reader: labs, at_most: low, from: 2026-06-01, "
                "until: 2026-12-01, reason: x}\n")],
    "KVP716": [],  # the base as it is
    "KVP722": [("  globex:", "  1abs: {}\n  globex:")],
    "KVP731": [("low: {idle: 1d, absolute: 7d", "low: {idle: 1h, absolute: 2h"), ("{idle: 1h, absolute: 1d, active_max: 1h}",
               "{idle: 1h, absolute: 1h, active_max: 1h}")],
    "KVP732": [("high: {idle: 0s, absolute: 0s", "high: {idle: 1h, absolute: 9h")],
    "KVP741": [("guaranteed: 20%, cap: 60%", "guaranteed: 75%, cap: 80%")],
    "KVP752": [],  # the base as it is
    "KVP761": [("high: never", "high: {tiers: [nvme], encrypt: required}")],
}  # fmt: skip


def test_the_base_has_no_finding(compiled):
    assert lint_codes(compiled) == []


@pytest.mark.parametrize("code", LINT)
def test_each_finding(compiled, code):
    found = lint(compiled(*(() if code == "KVP716" else OPEN), *LINT[code]), now_us=NOW)
    mine = [finding for finding in found if finding.code == code]
    assert mine and all(finding.line > 1 or code == "KVP705" for finding in mine)
    assert mine[0].hint == LINT_CODES[code].advice


def test_findings_that_need_to_be_told_something(compiled):
    assert lint_codes(compiled, used={"agent"}) == ["KVP715"]
    assert lint_codes(compiled, used={"agent", "labs-reads-acme"}) == []
    assert lint_codes(compiled, known_tenants={"acme", "labs"}) == ["KVP721"]
    slow, fast = ScrubRate(1e9, 1e9, 64 << 30), ScrubRate(1e12, 1e12, 1 << 30)
    assert lint_codes(compiled, rate=slow) == ["KVP751"] and lint_codes(compiled, rate=fast) == []


def test_every_lint_code_is_shown():
    assert {*LINT, "KVP715", "KVP721", "KVP751", "KVP771", "KVP772", "KVP773", "KVP774", "KVP775"} == set(LINT_CODES)


def test_lint_leaves_the_library_alone():
    """Lint reports nothing for the library except about dates: a guard for later edits is no finding."""
    for name in library.names():
        assert lint(compile_policy(library.load(name), revision=1), now_us=NOW) == ()


def test_what_does_nothing_is_told_until_it_works(compiled):
    """Beside any engine, and more beside one that allocates by itself."""

    def told(*edits, owner=None, tiers=None):
        found = lint(compiled(*edits), now_us=NOW, owner=owner, tiers=tiers)
        return [str(f.message) for f in found if f.code == "KVP761"]

    assert told() == [], "the base is honest"
    assert told((LRU, "eviction: {policy: slru, hits: 3}")) == [], "control: what works is not told"
    for works in ("{policy: slru, protected: 80%}", "{policy: priority, priority: 40}", "{policy: cost}"):
        assert not [one for one in told((LRU, f"eviction: {works}"), owner=PoolOwner.ENGINE) if "eviction" in one]


def test_a_tier_that_nobody_has_is_told(compiled):
    """A worker's missing tiers are reported, and beside vLLM its connector's; for a document by itself nothing is."""

    def told(*edits, owner=PoolOwner.KVCUSTODY, tiers=()):
        found = lint(compiled(*edits), now_us=NOW, owner=owner, tiers=tiers)
        return [str(f.message) for f in found if f.code == "KVP761"]

    (low,) = told()
    assert (
        low.startswith("offload of `low`: nothing is offloaded to `host`, `nvme`")
        and "`host_tier_bytes`, `nvme_tier_path`" in low
    )
    (low,) = told(tiers=("host",))
    assert "nothing is offloaded to `nvme`: no such tier is configured (set `nvme_tier_path`)" in low
    assert told(tiers=("host", "nvme")) == [] == told(owner=None, tiers=None)
    own = ("globex: {scope", "globex: {offload: {low: {tiers: [nvme], encrypt: required}}, scope")
    assert [one.split(":")[0] for one in told(own, tiers=("host",))] == [
        "tenant `globex`",
        "offload of `low`",
    ]
    low, mid = told(owner=PoolOwner.ENGINE, tiers=None)
    assert "`host`, `nvme` beside this engine" in low and "offload of `mid`: nothing is offloaded to `host`" in mid
    assert told(owner=PoolOwner.ENGINE, tiers=("host", "nvme")) == []


def test_copies_that_only_a_store_could_take_are_an_error_where_there_is_none(compiled):
    def told(*edits, tiers):
        found = lint(compiled(*edits), now_us=NOW, tiers=tiers)
        return [(f.code, str(f.message)) for f in found if "remote" in f.message]

    alone = ("high: never", "high: {tiers: [remote], encrypt: required}")
    ((code, message),) = told(alone, tiers=("host", "nvme"))
    assert code in ERRORS and message.startswith("offload of `high`: copies may only go to `remote`")
    assert told(alone, tiers=("host", "nvme", "remote")) == [] == told(alone, tiers=None)
    beside = ("high: never", "high: {tiers: [host, remote], encrypt: required}")
    ((code, _),) = told(beside, tiers=("host", "nvme"))
    assert code == "KVP761" and code not in ERRORS, "control: another tier takes them"


def test_copies_of_what_is_never_kept_are_told(compiled):
    (only,) = lint(compiled(PLAIN, *OPEN, ("high: never", "high: {tiers: [host], encrypt: required}")), now_us=NOW)
    assert only.code == "KVP761" and "no block outlives its request" in only.message


def test_confusable_names():
    names = ["acme-labs", "acme-1abs", "acmelabs", "globex", "gIobex", "modern", "rnodern", "acme", "beta"]
    assert confused(names) == [
        ("acme-1abs", "acme-labs"), ("acmelabs", "acme-labs"), ("gIobex", "globex"), ("rnodern", "modern"),
    ]  # fmt: skip


# Layout


def comments(text):
    return sorted(line.split("#", 1)[1].strip() for line in text.splitlines() if "#" in line)


@pytest.mark.parametrize("name", library.names())
def test_fmt_keeps_meaning_and_comments_and_settles(name):
    text = library.source(name)
    done = fmt(text, name=name)
    assert done.changed and not done.left and comments(done.text) == comments(text)
    assert digest(load_policy(done.text, name=name)) == digest(library.load(name))
    assert not fmt(done.text, name=name).changed


def test_fmt_refuses_what_is_not_sound(base):
    with pytest.raises(PolicyRejected):
        fmt(base.replace("at_most: mid", "at_most: nowhere"), name="p.yaml")


# Schema

jsonschema = pytest.importorskip("jsonschema")


def fits(text):
    document = YAML(typ="safe", pure=True).load(text)
    dates = json.loads(json.dumps(document, default=str))
    return [error.json_path for error in jsonschema.Draft202012Validator(schema()).iter_errors(dates)]


def test_every_document_of_ours_fits_the_schema(base):
    jsonschema.Draft202012Validator.check_schema(schema())
    page = (HERE.parents[1] / "docs" / "reference" / "policy-language.md").read_text()
    whole = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]
    for text in (base, (HERE / "strict.yaml").read_text(), whole, *map(library.source, library.names())):
        assert fits(text) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [("profile: shared", "profile: open"), ("cap: 60%", "cap: 60"), ("action: reuse", "action: admit"),
     ("tokens: 512", "tokens: 0"), ("idle: 1d", "idle: 1 day"), ("eviction: {policy: lru}", "evict: {}")],
)  # fmt: skip
def test_the_schema_refuses(base, old, new):
    assert old in base and fits(base.replace(old, new, 1))


def test_what_loads_without_being_written_by_us_fits_too(base):
    """One word for a list of one, and every other form that the loader takes."""
    text = base.replace("name: base\n", "name: base\nissuers: corp\n").replace("{at_least: high}", "[mid, high]")
    text = text.replace("tenants: [acme, labs]", 'tenants: "*"').replace("{reader: owner}", "{reader: acme}")
    load_policy(text, name="p.yaml")
    assert fits(text) == []
    for tiers in (
        "tiers: remote, encrypt: required, match: none",
        "tiers: {nvme: {absolute: 1h}, remote: {}}, encrypt: required, within: 1m, match: [region]",
    ):
        changed = text.replace("tiers: [host, nvme], encrypt: required", tiers)
        load_policy(changed, name="p.yaml")
        assert changed != text and fits(changed) == []


def test_the_schema_describes_every_field():
    """An editor shows what each is for: of itself, or of the section that it holds."""
    sections = schema()["$defs"] | {"the policy": schema()}
    assert all(part["description"] for part in sections.values())
    fields = [(name, field, told) for name, part in sections.items() for field, told in part["properties"].items()]
    assert len(fields) > 60
    assert [(name, field) for name, field, told in fields if not told.keys() & {"description", "$ref"}] == []


# Starts


@pytest.mark.parametrize("name", library.names())
@pytest.mark.parametrize("tenants", [(), ("alpha",), ("no", "1", "issuer.example/a:b", "on")])
def test_a_start_is_sound(name, tenants):
    text = start(name, name="mine", tenants=tenants)
    policy = load_policy(text, name="mine.yaml")
    assert policy.name == "mine" and not fmt(text, name="mine.yaml").changed
    assert {t.id for t in policy.tenants} == set(tenants or {t.id for t in library.load(name).tenants})
    assert not tenants or not (policy.grants or policy.segments)
    assert text.count("#") >= 10, "the rationale is kept"


def test_a_start_refuses_what_the_language_refuses():
    with pytest.raises(PolicyRejected):
        start("single-org", name="bad name")


# Cases

CASES = """\
schema: kvcustody/policy-tests@1
cases:
  - name: labs reads
    ask: {reader: labs, owner: acme, classification: [low, mid], via: grant, at: 2026-06-01}
    expect: permit
  - name: and by which grant
    ask: {reader: labs, owner: acme, classification: mid, via: grant, at: 2026-06-01}
    expect: permit
    because: [labs-reads-acme]
  - name: own
    ask: {reader: [acme, globex], classification: low}
    expect: permit
    because: own
  - name: nothing high
    ask: {reader: acme, classification: high, action: [reuse, publish]}
    expect: deny
  - name: personnel is high
    classify: {tenant: acme, route: /v1/hr/people, hint: [low, mid]}
    expect: high
never:
  - {reader: globex, owner: acme}
"""


def test_cases_pass_and_are_measured(compiled):
    table = compiled()
    report = run_cases(table, load_cases(CASES, name="c.yaml", policy=table.policy))
    assert report.passed and len(report.results) == 10, report.failures
    assert report.coverage.not_named == ("agent",)
    assert 0 < report.coverage.cells < report.coverage.cells_total


@pytest.mark.parametrize(
    ("edits", "failing"),
    [
        ([("until: 2027-03-31", "until: 2026-05-31")], {"labs reads", "and by which grant"}),
        ([("reader: labs", "reader: globex")], {"labs reads", "and by which grant", "never"}),
        ([("route: /v1/hr/*", "route: /v1/legal/*")], {"personnel is high"}),
        ([("id: own,", "id: mine,")], {"own"}),
    ],
)
def test_cases_fail_where_the_policy_says_otherwise(compiled, edits, failing):
    table = compiled(*edits)
    report = run_cases(table, load_cases(CASES, name="c.yaml", policy=table.policy))
    assert {failure.name for failure in report.failures} == failing


def test_no_cases_is_a_failure(compiled):
    table = compiled()
    empty = load_cases("schema: kvcustody/policy-tests@1\n", name="c.yaml", policy=table.policy)
    assert not run_cases(table, empty).passed


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("expect: permit", "expect: perhaps", "KVP208"),
        ("[low, mid], via", "[low, middle], via", "KVP402"),
        (", at: 2026-06-01}", "}", "KVP302"),
        ("because: own", "becuse: own", "KVP301"),
        ("policy-tests@1", "policy-tests@2", "KVP303"),
        ("name: own", "name: own\n    name: own", "KVP111"),
    ],
)
def test_a_wrong_cases_file_is_refused_with_its_place(compiled, old, new, code):
    with pytest.raises(PolicyRejected) as caught:
        load_cases(CASES.replace(old, new, 1), name="c.yaml", policy=compiled().policy)
    assert code in {problem.code for problem in caught.value.problems}


# Explanations


def ask(reader="labs", owner="acme", level=1, scope=Scope.TENANT, via=Via.GRANT, now=NOW, action=Action.REUSE):
    return Request(action, reader, owner, level, scope, via, now)


@pytest.mark.parametrize(
    ("request_", "term", "reasons"),
    [
        (ask(now=1_900_000_000_000_000), "classification", ("family~acme~labs",)),
        (ask(level=2), "classification", ("labs-reads-acme",)),
        (ask(scope=Scope.SESSION), "scope", ("labs-reads-acme",)),
        (ask(action=Action.EXPORT), "action", ("labs-reads-acme",)),
        (ask("acme", level=0, via=Via.OWN), "scope", ("own",)),
        (ask(level=0, via=Via.OWN), "via", ("family~acme~labs", "labs-reads-acme")),
    ],
)
def test_a_deny_names_the_nearest_permit_and_the_term_that_failed(compiled, request_, term, reasons):
    table = compiled()
    found = explain(table, request_)
    assert found.decision.effect is Effect.DENY
    assert [change[0] for change in found.nearest.changed] == [term] and found.nearest.reasons == reasons
    assert found.nearest.request.decide(table).permitted


def test_a_deny_after_the_end_names_the_last_instant(compiled):
    found = explain(
        compiled(("crosses: [region], share: true, at_most: low", "share: false")),
        ask(now=1_900_000_000_000_000),
    )
    (change,) = found.nearest.changed
    assert change == ("at", "2030-03-17T17:46:40Z", "2027-03-30T23:59:59.999999Z")


def test_an_explanation_of_offload_tells_each_tier_and_who_says_so(compiled):
    table = compiled(("globex: {scope", "globex: {offload: {low: {tiers: [nvme], encrypt: required}}, scope"))
    asked = Request(Action.OFFLOAD, "globex", "globex", 0, Scope.SESSION, Via.OWN, NOW)
    explanation = explain(table, asked)
    host, nvme, remote = explanation.tiers
    assert (host.permitted, nvme.permitted, remote.permitted) == (False, True, False)
    assert str(host) == "host: not at all, by offload:low"
    assert "copies at most 1d" in str(nvme) and "encrypted" in str(nvme)
    said = {source.what: source.says for source in host.sources}
    assert said["tenant `globex`: offload of `low`"] == "not to host"
    assert said["offload of `low`"].startswith("at most 7d") and all(source.line > 1 for source in host.sources)
    assert [tier["tier"] for tier in explanation.data()["tiers"]] == ["host", "nvme", "remote"]
    plain = explain(table, asked._replace(level=1)).tiers[0]
    assert "plain memory allowed" in str(plain)
    assert "tiers" not in explain(table, asked._replace(action=Action.REUSE)).data()


def test_cases_ask_for_tiers(compiled):
    text = """\
schema: kvcustody/policy-tests@1
cases:
  - name: low goes to both
    ask: {action: offload, reader: [acme, labs], classification: low, tier: [host, nvme]}
    expect: permit
    because: ["offload:low"]
  - name: mid stays in memory
    ask: {action: offload, reader: acme, classification: mid, tier: nvme}
    expect: deny
never:
  - {classification: high, tier: host}
  - {tier: remote}
"""
    table = compiled()

    def results(written):
        return run_cases(table, load_cases(written, name="c.yaml", policy=table.policy)).results

    assert [result.passed for result in results(text)] == [True] * 7
    wrong = text.replace("tier: nvme", "tier: host").replace("{tier: remote}", "{tier: nvme}")
    failed = [result for result in results(wrong) if not result.passed]
    assert [(one.name, one.expected) for one in failed] == [
        ("mid stays in memory", "deny"),
        ("never", "no permit"),
    ]
    assert "classification low, tier nvme" in failed[1].got and failed[0].asked.endswith("in host")
    with pytest.raises(PolicyRejected, match="KVP306 `tier` does not apply"):
        results(text.replace("{action: offload, reader: acme,", "{reader: acme,"))


def test_an_explanation_names_what_decided(compiled):
    found = explain(compiled(), ask(level=2))
    fitting = {entry.id for entry in found.considered if entry.fits}
    assert "no-high" in fitting and json.dumps(found.data())
    assert explain(compiled(*OPEN), ask()).summary == "permitted by labs-reads-acme"
    assert (
        explain(compiled(), ask("acme", level=2, scope=Scope.SUBJECT, via=Via.OWN)).summary
        == "denied: forbidden by no-high"
    )
    assert "nothing opens" in explain(compiled(), ask("globex")).summary
    assert "not in the policy" in explain(compiled((DEFAULT, "")), ask("stranger")).summary


# Simulation


def test_recorded_requests_are_decided_again(compiled):
    old = compiled()
    recorded = [
        Recorded("labs", "mid", NOW, ("own", "labs-reads-acme"), 10, 5),
        Recorded("labs", "mid", NOW, ("own",), 7, 5),
        Recorded("acme", "low", NOW, ("own", "agent"), 4, 0),
        Recorded("stranger", "low", NOW, ("own",), 3, 0),
    ]
    denials = [RecordedDenials("labs", "labs", "no-high", 6)]
    same = simulate(old, old, recorded, denials)
    assert same.lost_blocks == 0 and sum(change.requests for change in same.tenants) == 4
    new = compiled(("until: 2027-03-31", "until: 2026-06-01"), (DEFAULT, ""), ("idle: 30m", "idle: 10m"))
    changes = {change.tenant: change for change in simulate(old, new, recorded, denials).tenants}
    assert changes["labs"].lost_by == {"without labs-reads-acme": 10} and changes["labs"].denied_requests == 6
    assert changes["stranger"].refused == 1 and changes["stranger"].lost_blocks == 3
    assert changes["acme"].lost_blocks == 0
    assert changes["labs"].kept_after_us * 3 == changes["labs"].kept_before_us


def test_recorded_requests_say_whose_copies_could_be_where(compiled):
    recorded = [Recorded(tenant, "low", NOW, ("own",), 1, 1) for tenant in ("labs", "labs", "globex")]
    new = compiled((SEALED, "low: {tiers: [host], encrypt: required, absolute: 2h}"), (DEFAULT, ""))
    changes = {change.tenant: change.data(16)["tiers"] for change in simulate(compiled(), new, recorded).tenants}
    day = 86_400_000_000
    assert changes["labs"]["host"] == {
        "requests_before": 2,
        "requests_after": 2,
        "mean_absolute_before_us": 7 * day,
        "mean_absolute_after_us": day // 12,
    }
    assert (changes["labs"]["nvme"]["requests_before"], changes["labs"]["nvme"]["requests_after"]) == (2, 0)
    assert changes["globex"]["nvme"]["mean_absolute_before_us"] == day
    assert set(changes["labs"]["remote"].values()) == {0}


def test_routes_are_told_apart(compiled):
    policy = compiled(("route: /v1/hr/*", "route: /v1/*/files")).policy
    found = RouteExamples((policy, compiled().policy)).of("acme")
    assert None in found and {"/v1/hr", "/v1/hr/files", "/v1/~other/files", "/~other"} <= set(found)
