"""Mutated policies: every one is either rejected with problems in place, or loads and compiles."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from kvcustody.policies import library
from kvcustody.policies.document.digest import digest
from kvcustody.policies.document.problem_codes import CODES
from kvcustody.policies.document.problems import PolicyRejected
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table import compile as compiler
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.workbench.format import fmt

SPLICES = [
    "no", "~", "&a ", "*a", "!!int ", "<<: ", "{", "}", "[", "]", ": ", "- ", "\n", "\t", "#", '"', "'", "|",
    ">", "%", "---\n", "0s", "99999999999999999999", "1e9", "0x1f", "1:30", "100%", "1/0", "2027-02-30", "*",
    "default", "acme", "\u202e", "\x00", "\ud800", "\xe9", "\U0001f600", "? ", "..", "true", ",", "@", "`",
    "\\", "\r", "\x85",
]  # fmt: skip


def mutate(text, rng):
    """Return the lines after one to three edits: insert, delete, swap or double a line, or move words."""
    for _ in range(rng.randint(1, 3)):
        kind, at = rng.randrange(6), rng.randrange(len(text) + 1)
        if kind == 0:
            text = text[:at] + rng.choice(SPLICES) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + rng.randint(1, 12) :]
        elif kind == 2:
            text = text[:at] + chr(rng.choice([rng.randrange(128), rng.randrange(0x11000)])) + text[at + 1 :]
        else:
            lines = text.split("\n")
            first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
            if kind == 3:
                lines.insert(first, lines[second])
            elif kind == 4:
                lines[first], lines[second] = lines[second], lines[first]
            else:
                words = lines[first].split(" ")
                words[rng.randrange(len(words))] = rng.choice(SPLICES)
                lines[first] = " ".join(words)
            text = "\n".join(lines)
    return text


def fuzz(sources, seed, count, laid_out=1.0):
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        text = mutate(rng.choice(sources), rng)
        try:
            policy = load_policy(text, name="fuzz.yaml")
        except PolicyRejected as error:
            outcomes["rejected"] += 1
            lines = text.count("\n") + 2
            for problem in error.problems:
                assert problem.code in CODES and 1 <= problem.line <= lines and problem.column >= 1
                assert str(problem).isprintable()
            outcomes.update({problem.code for problem in error.problems})
        else:
            outcomes["accepted"] += 1
            table = compile_policy(policy, revision=1)
            assert table.digest == digest(load_policy(text, name="again.yaml"))
            if rng.random() < laid_out:
                outcomes.update(formatted(text, table))
    return outcomes


def formatted(text, table, lay_out=fmt):
    """Accepted text is accepted again after `fmt`, and compiles to the same table."""
    done = lay_out(text, name="fuzz.yaml")
    again = compile_policy(load_policy(done.text, name="formatted.yaml"), revision=1)
    assert again.digest == table.digest
    assert again.policy == table.policy
    assert again._tables == table._tables, "every cell, timeline, obligation and edge"
    if done.left:
        assert done.text == text
        return ["left"]
    return ["formatted"]


STRICT = (Path(__file__).parents[1] / "strict.yaml").read_text()
SMALL = """\
schema: kvcustody/policy@1
name: small  # every section, on few lines: laying a document out is what takes the time here
profile: shared
classifications: [low, high]
classify: [{tenant: "*", as: low}, {tenant: a, route: /v1/hr/*, as: high}]
tenants:
  a: {group: fam, quota: {guaranteed: 20%, cap: 60%}}
  b: {group: fam, scope: session}
groups: {fam: {share: true, at_most: low, until: 2027-01-01}}
# who may read what
grants: [{id: g, owner: a, reader: b, at_most: high, until: 2027-03-31, reason: joint evaluation}]
rules:
  - {id: own, effect: permit, action: reuse, when: {reader: owner}}
  - {id: no-high, effect: forbid, action: reuse, when: {classification: high, via: grant}}
retention: {low: {idle: 1d, absolute: 7d, active_max: 2h}, high: {idle: 0s, absolute: 0s, active_max: 15m}}
scrub: {default: {within: 1s, verify: 1/64}}
offload: {low: {tiers: [host], encrypt: required}, high: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""


@pytest.fixture(scope="module")
def sources(base):
    return [base, *map(library.source, library.names())]


def test_no_crash_and_no_half_acceptance(sources):
    outcomes = fuzz(sources, seed=11, count=800, laid_out=0.05)
    assert outcomes["rejected"] > 300 and outcomes["accepted"] > 15
    assert outcomes["left"] <= 0.05 * outcomes["accepted"], "almost everything that is accepted can be laid out"
    assert len(outcomes) > 35, "the mutations reach most of the checks"


@pytest.mark.parametrize(
    ("old", "new"),
    [("at_most: high", "at_most: low"), ("until: 2027-03-31", "until: 2027-03-30"), ("idle: 1d", "idle: 2d")],
)
def test_positive_control_a_layout_that_changes_the_table_is_noticed(monkeypatch, old, new):
    """The tables themselves are compared, because the digest does not see every difference."""
    assert old in SMALL
    table = compile_policy(load_policy(SMALL, name="small.yaml"), revision=1)
    assert formatted(SMALL, table) == ["formatted"]

    def changing(text, name):
        return fmt(text.replace(old, new), name=name)

    with pytest.raises(AssertionError):
        formatted(SMALL, table, changing)
    monkeypatch.setattr(compiler, "digest", lambda policy: table.digest)
    with pytest.raises(AssertionError):
        formatted(SMALL, table, changing)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12, 22))
def test_no_crash_at_full_size(seed):
    """A hundred thousand mutants, in ten parts."""
    outcomes = fuzz([SMALL, STRICT], seed=seed, count=10_000)
    assert outcomes["rejected"] + outcomes["accepted"] == 10_000
    assert outcomes["left"] + outcomes["formatted"] == outcomes["accepted"]


@pytest.mark.parametrize("size", [0, 1, 7, 100, 5_000])
def test_noise(size):
    rng = random.Random(size)
    for _ in range(20):
        with pytest.raises(PolicyRejected):
            load_policy(rng.randbytes(size), name="noise")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "[{a: "])
def test_deep_nesting_is_bounded(opening):
    with pytest.raises(PolicyRejected) as caught:
        load_policy(opening * 100_000, name="deep")
    assert {problem.code for problem in caught.value.problems} <= {"KVP113", "KVP103", "KVP114"}


def test_thousands_of_misspelt_names_are_rejected_quickly(base):
    """Suggestions are searched for only while a problem will be shown."""
    names = [f"customer-{i:05d}" for i in range(1_000)]
    text = base.replace("tenants:\n", "tenants:\n" + "".join(f"  {name}: {{}}\n" for name in names), 1)
    missing = ", ".join(f"custom-{i:05d}" for i in range(1_000))
    text = text.replace("when: {reader: owner}", f"when: {{reader: [{missing}]}}", 1)
    with pytest.raises(PolicyRejected) as caught:
        load_policy(text, name="many.yaml")
    assert caught.value.omitted == 1_000 - len(caught.value.problems)


def test_an_alias_bomb_is_not_expanded():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(PolicyRejected) as caught:
        load_policy("\n".join(lines), name="bomb")
    assert {"KVP107", "KVP108"} <= {problem.code for problem in caught.value.problems}
