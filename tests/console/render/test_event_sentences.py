"""Every kind of leaf has a sentence that says what happened, to whose blocks and how many, in every recorded form."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import orjson
import pytest

from kvcustody.audit.leaf import leaves
from kvcustody.audit.leaf.change_items import CHANGED, plain_bodies
from kvcustody.audit.leaf.leaf_schema import DURATIONS, SCHEMAS
from kvcustody.console.render.event_sentences import SENTENCES, sentence_of
from kvcustody.console.web.pages.audit import facts_of
from standins.audit.recorded_events import CONTEXT, WRITTEN, event_of

KINDS = sorted(schema.name for schema in SCHEMAS.values())


def bodies() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for each in WRITTEN:
        made = leaves(event_of(each), CONTEXT, each["sequence"])
        found[each["kind"]] += [orjson.loads(leaf.data) for leaf in made]
    return found


BODIES = bodies()


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
