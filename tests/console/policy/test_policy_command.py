"""`kvcustody policy`: every command of authors and reviewers, its exit codes and its machine-readable forms."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.console.policy import init_fmt_schema as write
from kvcustody.console.policy.validate import shown_at
from kvcustody.policies import library
from kvcustody.policies.document.model import EvictionKind
from kvcustody.policies.document.problems import Problem
from kvcustody.policies.reading.load_policy import load_policy

CASES = """\
schema: kvcustody/policy-tests@1
cases:
  - name: own reuse
    ask: {reader: acme, classification: internal}
    expect: permit
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = library.source("regulated-saas")
    Path("a.yaml").write_text(text)
    Path("wider.yaml").write_text(text.replace("until: 2027-03-31", "until: 2028-03-31"))
    Path("broken.yaml").write_text(text.replace("reader: acme-labs", "reader: acme-labz"))
    Path("cases.yaml").write_text(CASES)
    return tmp_path


def policy(*arguments, code=0, stdin=None):
    result = CliRunner().invoke(app, ["policy", *arguments], input=stdin)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output if code else result.stdout


def test_validate(files):
    assert "sound, sha256:" in policy("validate", "a.yaml")
    assert "broken.yaml:60:13: KVP401" in policy("validate", "a.yaml", "broken.yaml", code=1)
    (one, two) = json.loads(policy("validate", "a.yaml", "broken.yaml", "--json", code=1))
    assert one["sound"] and two["problems"][0]["help"] == "docs/reference/policy-codes.md#kvp401"
    sarif = json.loads(policy("validate", "broken.yaml", "--format", "sarif", code=1))
    (result,) = sarif["runs"][0]["results"]
    region = result["locations"][0]["physicalLocation"]["region"]
    assert result["ruleId"] == "KVP401" and region == {"startLine": 60, "startColumn": 13}
    suite = ElementTree.fromstring(policy("validate", "a.yaml", "broken.yaml", "--format", "junit", code=1))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert "cannot be read" in policy("validate", "absent.yaml", code=2)


def test_validate_reports_on_every_file_and_shows_the_place(files):
    Path("star.yaml").write_text("name: a\nreaders: [*]\n")
    Path("brace.yaml").write_text("name: {b: 1\nc: 2\n")
    printed = policy("validate", "absent.yaml", "star.yaml", "gone.yaml", "brace.yaml", "a.yaml", code=2)
    assert "absent.yaml` cannot be read" in printed and "gone.yaml` cannot be read" in printed
    assert "star.yaml:2:11: KVP103" in printed and 'quote it: `"*"`' in printed
    assert "    2 | readers: [*]\n      |           ^\n" in printed
    assert "close the `{` that opens on line 1" in printed
    assert "a.yaml: sound" in printed


@pytest.mark.parametrize(
    ("line", "column", "shown"),
    [
        ("a\x1b[31mb", 1, ["    1 | a?[31mb", "      | ^"]),
        ("\tb", 2, ["    1 |  b", "      |  ^"]),
        ("x" * 300, 200, ["    1 | " + "x" * 110, "      | " + " " * 55 + "^"]),
        ("   ", 1, []),
    ],
)
def test_a_place_is_shown_in_a_line_of_its_own(line: str, column: int, shown: list[str]) -> None:
    assert shown_at([line], Problem("p", 1, column, "KVP101", "m", "h")) == shown
    assert shown_at([line], Problem("p", 9, column, "KVP101", "m", "h")) == []


def test_lint(files):
    assert "0 findings" in policy("lint", "a.yaml", "--at", "2026-10-01")
    found = policy("lint", "a.yaml", "--at", "2027-03-15", "--fail", code=1)
    assert "KVP712" in found and "in 16 days" in found
    assert json.loads(policy("lint", "a.yaml", "--at", "2028-01-01", "--json"))[0]["code"] == "KVP711"
    assert json.loads(policy("lint", "a.yaml", "--format", "sarif"))["version"] == "2.1.0"
    policy("lint", "a.yaml", "--pool", "1GiB", code=2)


def test_fmt_and_schema(files):
    policy("fmt", "a.yaml", "--check", code=1)
    policy("fmt", "a.yaml", "--write")
    assert "unchanged" in policy("fmt", "a.yaml", "--check")
    policy("schema", "--out", "schema.json")
    assert json.loads(Path("schema.json").read_text()) == json.loads(policy("schema"))


def test_init(files):
    policy("init", "mine.yaml", "--from", "public-api", "--name", "mine", "--tenant", "alpha")
    assert "sound" in policy("validate", "mine.yaml")
    policy("init", "mine.yaml", "--from", "public-api", code=2)
    assert "`--from` is missing" in policy("init", "other.yaml", code=2)
    policy("init", "other.yaml", "--from", "publik-api", code=2)


@pytest.fixture
def terminal(monkeypatch):
    """Somebody to ask: the runner's stdin is a pipe, and says so."""
    monkeypatch.setattr(write, "_somebody_to_ask", lambda: True)


def test_init_asks_for_what_is_not_given(files, terminal):
    shown = policy("init", "mine.yaml", stdin="public-api\nmine\nalpha beta\n")
    assert all(f"{name}: " in shown for name in library.names()), "the choice is explained"
    mine = load_policy(Path("mine.yaml").read_text(), name="mine.yaml")
    assert mine.name == "mine" and [tenant.id for tenant in mine.tenants] == ["alpha", "beta"]
    policy("init", "plain.yaml", stdin="\n\n\n")
    plain = load_policy(Path("plain.yaml").read_text(), name="plain.yaml")
    assert plain.tenants == library.load("single-org").tenants and plain.name == "single-org"


def test_init_asks_again_and_leaves_nothing_behind(files, terminal):
    shown = policy("init", "mine.yaml", stdin="publik-api\npublic-api\n\nalpha alpha\n", code=2)
    assert "publik-api" in shown and "given twice" in shown and not Path("mine.yaml").exists()
    policy("init", "mine.yaml", stdin="public-api\n", code=1)
    assert not Path("mine.yaml").exists(), "an end of input in the middle of the questions"
    policy("init", "mine.yaml", "--name", "mine", "--tenant", "alpha", stdin="public-api\n")
    assert "sound" in policy("validate", "mine.yaml")


def test_explain_and_test(files):
    assert "permitted by labs-reads-acme" in policy(
        "explain",
        "a.yaml",
        "--reader",
        "acme-labs",
        "--owner",
        "acme",
        "-c",
        "internal",
        "--at",
        "2026-06-01",
    )
    denied = policy("explain", "a.yaml", "--reader", "acme-labs", "--owner", "acme", "-c", "internal", "--at",
                    "2028-06-01", code=1)  # fmt: skip
    assert "fails by until" in denied and "nearest permit: at 2027-03-30T23:59:59.999999Z" in denied
    policy("explain", "a.yaml", "--reader", "acme", "-c", "internl", code=2)
    assert "1 of 1 cases pass" in policy("test", "a.yaml", "cases.yaml")
    policy("test", "a.yaml", "cases.yaml", "--min-named", "100", code=1)
    assert json.loads(policy("test", "a.yaml", "cases.yaml", "--json"))["passed"]
    Path("cases.yaml").write_text(CASES.replace("permit", "deny"))
    suite = ElementTree.fromstring(policy("test", "a.yaml", "cases.yaml", "--format", "junit", code=1))
    assert suite.get("failures") == "1"


TIERS = ("  internal:     never", "  internal:     {tiers: [host, nvme], encrypt: required, absolute: 30m}")


def tiered(*edits, name="tiers.yaml"):
    text = Path("a.yaml").read_text()
    for old, new in (TIERS, *edits):
        assert old in text
        text = text.replace(old, new, 1)
    Path(name).write_text(text)


def test_explain_tells_where_copies_may_be(files):
    """Each tier with the lines that bound it; with --tier the exit code is of that tier."""
    tiered()
    asked = ("explain", "tiers.yaml", "--reader", "acme", "-c", "internal", "--action", "offload")
    told = policy(*asked)
    assert "host: copies at most 30m" in told and "gone within" in told and "remote: not at all" in told
    assert "offload of `internal`: at most 30m" in told and "retention of `internal`" in told
    assert "host:" not in policy(*asked, "--tier", "nvme")
    assert "not at all, by offload:internal" in policy(*asked, "--tier", "remote", code=1)
    found = json.loads(policy(*asked, "--json"))
    assert [(one["tier"], one["permitted"]) for one in found["tiers"]] == [
        ("host", True),
        ("nvme", True),
        ("remote", False),
    ]
    assert "did you mean" in policy(*asked, "--tier", "remot", code=2)
    assert "goes with" in policy(
        "explain", "tiers.yaml", "--reader", "acme", "-c", "internal", "--tier", "host", code=2
    )
    policy("explain", "a.yaml", *asked[2:], code=1)


def test_lint_and_diff_tell_of_tiers(files):
    tiered()
    assert "0 findings" in policy("lint", "tiers.yaml", "--at", "2026-10-01")
    told = policy("lint", "tiers.yaml", "--at", "2026-10-01", "--tiers", "host", "--fail", code=1)
    assert "KVP761" in told and "`nvme`" in told and "nvme_tier_path" in told
    assert "0 findings" in policy("lint", "tiers.yaml", "--at", "2026-10-01", "--tiers", "host, nvme")
    assert "is no tier" in policy("lint", "tiers.yaml", "--tiers", "disk", code=2)
    tiered(("absolute: 30m}", "absolute: 20m}"), name="shorter.yaml")
    assert "narrower" in policy("diff", "tiers.yaml", "shorter.yaml")
    assert "tier_absolute_us" in policy("check-no-new-access", "shorter.yaml", "tiers.yaml", code=1)
    policy("check-no-new-access", "tiers.yaml", "shorter.yaml")


def test_explain_eviction(files):
    kinds = "{system_prompt: 90, pasted_log: 10}"
    text = library.source("regulated-saas")
    assert text.count("eviction: {policy: lru}") == 1
    ranges = "ranges: [{from: 0, to: 512, priority: 60, for: 5m}]"
    kept = text.replace(
        "eviction: {policy: lru}", f"eviction: {{policy: priority, priority: 40, {ranges}, kinds: {kinds}}}"
    )
    Path("kept.yaml").write_text(kept)
    line = kept[: kept.index("eviction:")].count("\n") + 1
    asked = ("--evict", "--reader", "acme", "-c", "internal", "--tokens", "2048")
    explanation = policy(
        "explain", "kept.yaml", *asked, "--kind", "1024:1536=pasted_log", "--kind", "0:64=system_prompt"
    )
    rows = [row.split(maxsplit=3) for row in explanation.splitlines() if ".." in row]
    assert [row[:2] for row in rows] == [
        ["0..512", "60"],
        ["512..1024", "40"],
        ["1024..1536", "10"],
        ["1536..2048", "40"],
    ]
    assert (
        f"line {line}: the request's kind `pasted_log`, which lowers" in explanation
        and "the base `priority`" in explanation
    )
    found = json.loads(policy("explain", "kept.yaml", *asked, "--json"))
    assert [(each["first"], each["until"], each["for_us"]) for each in found["ranges"]] == [
        (0, 512, 300_000_000), (512, 2048, None),
    ]  # fmt: skip
    assert found["idle_us"] <= found["absolute_us"]
    marked = policy("explain", "kept.yaml", *asked, "--marked", "0:64=system_prompt")
    assert "kind `system_prompt`, which the door marked" in marked
    assert next(row.split()[:2] for row in marked.splitlines() if ".." in row) == ["0..64", "90"]
    plain = policy("explain", "a.yaml", *asked)
    assert "the least recently used first" in plain and "have no part in this order" in plain
    assert "did you mean `pasted_log`" in policy("explain", "kept.yaml", *asked, "--kind", "0:9=pasted_logs", code=2)
    assert "is not FIRST:LAST=KIND" in policy("explain", "kept.yaml", *asked, "--kind", "9:0=pasted_log", code=2)
    assert "`--marked` `9:0=x` is not" in policy("explain", "kept.yaml", *asked, "--marked", "9:0=x", code=2)
    assert "has no segment" in policy("explain", "kept.yaml", *asked, "--segment", "none-such", code=2)


@pytest.mark.parametrize("kind", list(EvictionKind))
def test_explain_says_the_order_of_every_kind(files, kind):
    text = library.source("regulated-saas").replace("eviction: {policy: lru}", f"eviction: {{policy: {kind.value}}}")
    Path("kind.yaml").write_text(text)
    told = policy("explain", "kind.yaml", "--evict", "--reader", "acme", "-c", "internal")
    assert f"eviction `{kind.value}`: " in told and "first" in told.splitlines()[0]


def test_explain_says_each_signal_and_whose_think_times(files):
    text = library.source("regulated-saas").replace(
        "eviction: {policy: lru}", "eviction: {policy: value, signals: [reuse, next-turn]}"
    )
    Path("value.yaml").write_text(text)
    asked = ["--evict", "--reader", "acme", "-c", "internal"]
    told = policy("explain", "value.yaml", *asked)
    assert "signal next-turn: " in told and "signal reuse: uses by later requests" in told
    assert "signal scope" not in told and "learned from the tenant's own requests" in told
    found = json.loads(policy("explain", "value.yaml", *asked, "--json"))
    assert [each["signal"] for each in found["signals"]] == ["next-turn", "reuse"]
    assert found["learned"] == "tenant"
    assert json.loads(policy("explain", "a.yaml", *asked, "--json"))["signals"] == []


def test_diff_and_the_gate(files):
    assert "verdict: wider" in policy("diff", "a.yaml", "wider.yaml")
    assert json.loads(policy("diff", "a.yaml", "wider.yaml", "--json"))["verdict"] == "wider"
    assert "its owner has to consent" in policy("check-no-new-access", "a.yaml", "wider.yaml", code=1)
    assert "no new access" in policy("check-no-new-access", "wider.yaml", "a.yaml")
    assert "equivalent" in policy("check-no-new-access", "a.yaml", "wider.yaml", "--revoked", "labs-reads-acme")


def test_prove(files):
    assert "holds: " in policy("prove", "a.yaml", "--out", "proof.json")
    proof = json.loads(Path("proof.json").read_text())
    assert proof["holds"] and proof["schema"] == "kvcustody/proof@1"
    found = policy("prove", "a.yaml", "--never", "acme-labs:acme", code=1)
    assert "ISO-11: acme-labs: reuse acme's public tenant blocks via grant" in found
    policy("prove", "a.yaml", "--never", "nobody", code=2)


def test_export(files):
    assert '@id("labs-reads-acme")' in policy("export", "a.yaml", "--cedar")
    assert "labs-reads-acme" not in policy("export", "a.yaml", "--cedar", "--revoked", "labs-reads-acme")
    policy("export", "a.yaml", code=2)


def test_simulate_on_a_replayed_ledger(files):
    """A small replay is recorded, and its requests are decided again under a policy without the grant."""
    arguments = ["replay", "--policy", "a.yaml", "--limit", "60", "--ledger", "l.db", "--html", "s.html"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    text = Path("a.yaml").read_text()
    Path("less.yaml").write_text(text.replace("until: 2027-03-31\n    reason", "until: 2026-01-02\n    reason"))
    same = json.loads(policy("simulate", "a.yaml", "a.yaml", "--ledger", "l.db", "--json"))["tenants"]
    less = json.loads(policy("simulate", "a.yaml", "less.yaml", "--ledger", "l.db", "--json"))["tenants"]
    assert sum(row["requests"] for row in same) == 60 == sum(row["requests"] for row in less)
    assert sum(row["lost_blocks"] for row in same) == 0
    assert "recorded requests" in policy("simulate", "a.yaml", "less.yaml", "--ledger", "l.db")
    assert sum(row["shortened_blocks"] for row in less) == 0 < sum(row["hit_blocks"] for row in same)
    check_shorter_retention(text)
    policy("simulate", "a.yaml", "less.yaml", code=2)
    assert "copies off the device" not in policy("simulate", "a.yaml", "less.yaml", "--ledger", "l.db")
    tiered()
    more = policy("simulate", "a.yaml", "tiers.yaml", "--ledger", "l.db")
    assert "copies off the device" in more and "nvme" in more and "30m" in more and "remote" not in more
    check_lint_by_ledger()


def check_shorter_retention(text):
    """The ledger cannot say which hits a shorter retention would take: it says how many it may."""
    shorter = re.sub(r"idle: [1-9]\w*", "idle: 1s", text)
    assert shorter != text
    Path("shorter.yaml").write_text(shorter)
    rows = json.loads(policy("simulate", "a.yaml", "shorter.yaml", "--ledger", "l.db", "--json"))["tenants"]
    hits = [row for row in rows if row["hit_blocks"]]
    assert hits and all(row["lost_blocks"] + row["shortened_blocks"] == row["hit_blocks"] for row in hits)
    told = policy("simulate", "a.yaml", "shorter.yaml", "--ledger", "l.db")
    assert "0.0% to 100.0%" in told and "under a retention that gets shorter" in told


def check_lint_by_ledger():
    """What the replay reused through is in use, and what it never met is said."""
    extra = "  - {id: spare, owner: acme, reader: northwind-bank, at_most: internal, until: 2027-03-31, reason: x}"
    Path("spare.yaml").write_text(Path("a.yaml").read_text().replace("grants:\n", f"grants:\n{extra}\n", 1))
    found = json.loads(policy("lint", "spare.yaml", "--ledger", "l.db", "--at", "2026-10-01", "--json"))
    unused = [problem["message"] for problem in found if problem["code"] == "KVP715"]
    assert any("`spare`" in message for message in unused)
    assert not any("`labs-reads-acme`" in message for message in unused)
    Path("used.txt").write_text("spare\n")
    told = policy("lint", "spare.yaml", "--ledger", "l.db", "--used", "used.txt", "--at", "2026-10-01")
    assert "`spare` has not been used" not in told and "`labs-reads-acme` has not been used" in told
    policy("lint", "a.yaml", "--ledger", "absent.db", code=2)
