"""Mutated policies: every one is either rejected with problems in place, or loads and compiles."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvcustody.policies import library
from kvcustody.policies.codes import CODES
from kvcustody.policies.compiler import compile_policy
from kvcustody.policies.digest import digest
from kvcustody.policies.loader import load_policy
from kvcustody.policies.problems import PolicyRejected

SPLICES = [
    "no", "~", "&a ", "*a", "!!int ", "<<: ", "{", "}", "[", "]", ": ", "- ", "\n", "\t", "#", '"', "'", "|",
    ">", "%", "---\n", "0s", "99999999999999999999", "1e9", "0x1f", "1:30", "100%", "1/0", "2027-02-30", "*",
    "default", "acme", "\u202e", "\x00", "\ud800", "\xe9", "\U0001f600", "? ", "..", "true", ",", "@", "`",
    "\\", "\r", "\x85",
]  # fmt: skip


def mutate(text, rng):
    """One to three edits: insert, delete, swap, double a line, or move words about."""
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
            one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
            if kind == 3:
                lines.insert(one, lines[two])
            elif kind == 4:
                lines[one], lines[two] = lines[two], lines[one]
            else:
                words = lines[one].split(" ")
                words[rng.randrange(len(words))] = rng.choice(SPLICES)
                lines[one] = " ".join(words)
            text = "\n".join(lines)
    return text


def fuzz(sources, seed, count):
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
            assert compile_policy(policy, revision=1).digest == digest(load_policy(text, name="again.yaml"))
    return outcomes


@pytest.fixture(scope="module")
def sources(base):
    return [base, *map(library.source, library.names())]


def test_no_crash_and_no_half_acceptance(sources):
    outcomes = fuzz(sources, seed=11, count=2_000)
    assert outcomes["rejected"] > 1_000 and outcomes["accepted"] > 50
    assert len(outcomes) > 35, "the mutations reach most of the checks"


@pytest.mark.soak
def test_no_crash_at_full_size(sources):
    outcomes = fuzz(sources, seed=12, count=100_000)
    assert outcomes["rejected"] + outcomes["accepted"] == 100_000


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


def test_ten_thousand_misspelt_names_are_rejected_quickly(base):
    """Suggestions are searched for only while a problem will be shown."""
    names = [f"customer-{i:05d}" for i in range(9_000)]
    text = base.replace("tenants:\n", "tenants:\n" + "".join(f"  {name}: {{}}\n" for name in names), 1)
    missing = ", ".join(f"custom-{i:05d}" for i in range(9_000))
    text = text.replace("when: {reader: owner}", f"when: {{reader: [{missing}]}}", 1)
    with pytest.raises(PolicyRejected) as caught:
        load_policy(text, name="many.yaml")
    assert caught.value.omitted == 9_000 - len(caught.value.problems)


def test_an_alias_bomb_is_not_expanded():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(PolicyRejected) as caught:
        load_policy("\n".join(lines), name="bomb")
    assert {"KVP107", "KVP108"} <= {problem.code for problem in caught.value.problems}
