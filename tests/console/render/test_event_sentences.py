"""Every kind of leaf has a sentence that says what happened, to whose blocks and how many, in every recorded form."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import orjson
import pytest

from kvcustody.audit.kinds.examples import example_of
from kvcustody.audit.leaf import leaves
from kvcustody.audit.leaf.change_items import CHANGED, plain_bodies
from kvcustody.audit.leaf.leaf_schema import DURATIONS, SCHEMA_OF_NAME, SCHEMAS
from kvcustody.console.render.event_sentences import SENTENCES, sentence_of
from kvcustody.console.web.pages.audit import facts_of
from standins.audit.recorded_events import CONTEXT, KIND_OF, WRITTEN, event_of

KINDS = sorted(schema.name for schema in SCHEMAS.values())


def bodies() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for each in WRITTEN:
        made = leaves(event_of(each), CONTEXT, each["sequence"])
        found[each["kind"]] += [orjson.loads(leaf.data) for leaf in made]
    return found


BODIES = bodies()
ENDED = {"at_us": 4_990_000, "residency": 7, "tenant": "acme", "cause": "finish", "written": [], "hold_us": 0}
ZEROED = {
    "at_us": 5_000_000, "launch": 1, "shard": 0, "tenant": "acme", "method": "memset", "device": "cpu:0",
    "bytes": 66 * 4096, "started_us": 4_995_000, "ended_us": 4_996_500, "level": "sampled", "share": 0.1,
    "verified": 6, "result": "ok", "runs": [[3, 0, 0, 1, 66, 1 << 20]],
}  # fmt: skip


def digits(text: str) -> str:
    return re.sub(r"[\s,\u202f\u00a0]", "", text)


def test_every_kind_has_a_sentence_and_nothing_else_has() -> None:
    assert set(SENTENCES) == set(KINDS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hit-counted"])
def test_a_kind_says_what_happened(kind: str) -> None:
    assert BODIES[kind], "void: no leaf of this kind is recorded"
    for body in BODIES[kind]:
        said = sentence_of(body)
        assert said and "–" not in said and "None" not in said and "[" not in said.split(" (")[0], said
        assert kind not in said or " " not in kind, said
        party = body.get("tenant") or body.get("reader")
        if party and kind not in ("case-opened",):
            assert party in said or kind in ("erasure-requested",), said


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hit-counted"])
def test_a_sentence_follows_the_numbers_of_its_leaf(kind: str) -> None:
    """A control for each: with another number of blocks or requests, the sentence says that number."""
    body = BODIES[kind][0]
    for name in {"blocks", "requests", "attempts", "residencies"} & body.keys():
        if name in ("residencies",) and kind in ("erasure-applied", "erasure-completed"):
            continue
        changed = body | {name: 7_654_321, "effect": body.get("effect", "")}
        if kind == "receipt":
            changed["result"] = "ok"
        if (kind, name) in {("residency-released", "residencies"), ("hit-counters", "blocks")}:
            changed["effect"] = "permit"
        assert "7654321" in digits(sentence_of(changed)), (kind, name)


NAMED = {"batch", "epoch", "event", "leaf", "part", "pool", "revision", "sequence", "shard", "status"}  # by a number
UNITS = {"ms", "s", "min", "h", "d", "%"}
NOT_A_NOUN = {"of", "running", "root"}
VERBS = {"are", "were", "have", "stay", "refer", "name"}


def faults(sentence: str) -> list[str]:
    """What a reader stumbles over: names of fields, microseconds, bare numbers, wrong plurals and verbs."""
    wrong = [f"a field: {name}" for name in re.findall(r"\b[a-z]+_[a-z_]+\b|\w=", sentence)]
    wrong += ["microseconds"] * bool(re.search(r"µs|\bus\b|microsec|\d{15}|\.\d{6}Z", sentence))
    words = [word.strip("(),;:") for word in sentence.split()]
    for before, word, after, later, verb in zip(["", *words], words, [*words[1:], ""], [*words[2:], "", ""],
                                                [*words[2:], "", ""], strict=False):  # fmt: skip
        if not re.fullmatch(r"[\d,]+(\.\d+)?", word) or before in NAMED or after in UNITS:
            continue
        noun = later if after in NOT_A_NOUN - {"of"} else after
        if not noun.isalpha():
            wrong.append(f"a bare number: {before} {word} {after}")
        elif noun != "of" and (word == "1") == noun.endswith("s"):
            wrong.append(f"plural: {word} {noun}")
        elif word == "1" and verb in VERBS:
            wrong.append(f"verb: {word} {noun} {verb}")
    return wrong


def examples(kind: str) -> list[dict[str, Any]]:
    """The example of a kind, as it is and with every number that counts something at 0, 1, 2 and many."""
    every = [orjson.loads(leaf.data) for leaf in leaves(example_of(KIND_OF[kind]), CONTEXT, 17)]
    counts = {"blocks", "requests", "attempts", "residencies", "finishing", "copies", "tokens", "rows", "findings",
              "remaining", "added", "duplicates", "late", "checked", "nonzero", "pseudonyms", "epochs", "others",
              "queue", "shards", "allocated", "earlier_blocks", "written_blocks", "part_blocks", "promised_tokens",
              "found_tokens", "prompt_tokens", "reused_tokens", "refused_tokens", "ahead_seconds"}  # fmt: skip
    return every + [
        body | {name: number for name in counts & {*whole} if isinstance(whole[name], int)}
        for body, whole in ((each, SCHEMA_OF_NAME[kind].absent | each) for each in every)
        for number in (0, 1, 2, 7_654_321)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sentence_reads_as_one(kind: str) -> None:
    for body in examples(kind):
        said = sentence_of(body).replace(f" ({body.get('reason')})", "")  # somebody's own words
        assert faults(said) == [], (said, body)


def test_control_what_does_not_read_is_a_fault() -> None:
    """Each fault alone in a sentence that is sound without it."""
    sound = "acme: request ended, 66 blocks zeroed in 1.5 ms, verified by sample, on shard 3"
    assert faults(sound) == []
    for right, wrong in {
        "66 blocks": "66 block",
        "1.5 ms": "1,500 µs",
        "on shard 3": "on 3",
        "request ended": "written_blocks ended",
        "blocks zeroed": "zeroed",
    }.items():
        assert faults(sound.replace(right, wrong)), wrong
    assert faults("1 block were zeroed") and faults("1 blocks zeroed") and not faults("1 block was zeroed")


def test_a_request_that_ended_and_was_zeroed_is_one_sentence() -> None:
    ended = event_of({"kind": "residency-released", "fields": ENDED})
    zeroed = event_of({"kind": "receipt", "fields": ZEROED})
    changed = KIND_OF[CHANGED](at_us=5_000_000, tenant="acme", released=(ended,), scrubbed=(zeroed,))
    [leaf] = leaves(changed, CONTEXT, 1)
    said = sentence_of(orjson.loads(leaf.data))
    assert said == "acme: request ended, 66 blocks zeroed in 1.5 ms, verified by sample"
    again = KIND_OF[CHANGED](at_us=5_000_000, tenant="acme", released=(ended,) * 2, scrubbed=(zeroed,) * 2)
    said = sentence_of(orjson.loads(leaves(again, CONTEXT, 1)[0].data))
    assert said == "acme: 2 requests ended, 132 blocks zeroed in up to 1.5 ms, verified by sample"


def test_a_decision_says_who_was_allowed_what_and_by_which_rule() -> None:
    body = BODIES["decision"][0] | {"reader": "labs", "owner": "acme", "reasons": ["labs-reads-acme"]}
    said = sentence_of(body | {"effect": "permit", "action": "reuse"})
    assert said == "labs was allowed to reuse acme's blocks, by labs-reads-acme"
    denied = sentence_of(body | {"effect": "deny", "action": "reuse", "reasons": []})
    assert denied == "labs was not allowed to reuse acme's blocks, by default-deny, as no rule permits it"


def test_a_length_of_time_is_no_moment() -> None:
    """Whichever kind has one. The control is a moment."""
    tried = set()
    for body in (each for kind in KINDS for each in BODIES[kind]):
        for name in body.keys() & {*DURATIONS}:
            facts = dict(facts_of(body | {name: 90_000_000}))
            assert facts[name.replace("_", " ")] == "1.5 min", (body["kind"], name)
            tried.add(name)
    assert tried == {*DURATIONS}
    assert dict(facts_of(BODIES["case-opened"][0]))["received utc"].endswith("Z")


def test_a_leaf_of_several_events_says_how_many_of_each() -> None:
    several = [body for body in BODIES[CHANGED] if len(list(plain_bodies(body))) > 1]
    assert several, "void: no leaf of several is recorded"
    for body in several:
        said, found = sentence_of(body), Counter[str]()
        for item in plain_bodies(body):
            found[item["kind"]] += 1 if item["kind"] == "residency-released" else int(item["blocks"])
        assert f"custody of {found['custody-ended']:,} block" in said or not found["custody-ended"], said
        assert f"{found['residency-released']:,} request" in said or not found["residency-released"], said
        facts = facts_of(body)
        assert len(facts) == len(list(plain_bodies(body)))
        assert all("[" not in value for _, value in facts), facts
