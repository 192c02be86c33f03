"""The digest depends on what a policy says, not on how it is written."""

from __future__ import annotations

import json

import pytest

from kvcustody.policies import library
from kvcustody.policies.document.digest import canonical, digest
from kvcustody.policies.reading.load_policy import load_policy

PINNED = "sha256:a72aae6147c21ad6bdc86e845385a065f04368accbd2d5e22e8d5f19243bb6b5"
SAME = {
    "comment": ("profile: shared", "profile: shared   # a remark"),
    "quotes": ("name: base", 'name: "base"'),
    "unit": ("idle: 1d, absolute: 7d", "idle: 24h, absolute: 168h"),
    "fraction": ("verify: 1/64", "verify: 2/128"),
    "percentage": ("cap: 60%", "cap: 60.00%"),
    "order of tiers": ("[host, nvme]", "[nvme, host]"),
    "order of actions": ("[reuse, export]", "[export, reuse]"),
    "order of readers": ("[acme, labs]", "[labs, acme]"),
    "block style": ("{policy: lru}", "\n  policy: lru"),
    "default written out": ("profile: shared", "profile: shared\nscope: subject"),
    "equal levels": ("{at_least: high}", "high"),
    "a tier's default written out": ("required}", "required, absolute: 7d, within: 630m}"),
    "tiers as a table": ("tiers: [host, nvme]", "tiers: {nvme: {}, host: {absolute: 7d}}"),
}
OTHER = {
    "integrity": ("audit:\n", "integrity: {default: {verify: 1/64}}\naudit:\n"),
    "name": ("name: base", "name: base2"),
    "order of classifications": ("[low, mid, high]", "[mid, low, high]"),
    "duration": ("idle: 30m", "idle: 31m"),
    "share": ("verify: 1/64", "verify: 1/63"),
    "reason": ("joint evaluation", "joint valuation"),
    "end": ("until: 2027-03-31", "until: 2027-04-01"),
    "start": ("    from: 2026-01-01\n", ""),
    "tenant": ("residencies: 100", "residencies: 101"),
    "rule": ("[reuse, export]", "[reuse]"),
    "eviction": ("policy: lru", "policy: fifo"),
    "kinds": ("{policy: lru}", "{policy: cost, kinds: {log: 1}}"),
    "encryption": ("encrypt: none", "encrypt: required"),
    "a tier's time": ("required}", "required, absolute: 6d}"),
    "what a tier's bytes may outlast": ("required}", "required, within: 1m}"),
    "the time of one tier": ("tiers: [host, nvme]", "tiers: {nvme: {absolute: 6d}, host: {}}"),
    "segment": ("tokens: 512", "tokens: 513"),
}


def of(text, name="p.yaml"):
    return digest(load_policy(text, name=name))


def test_pinned(base_file):
    """A change here changes what approvers sign: it needs a new schema version."""
    assert of(base_file) == PINNED


@pytest.mark.parametrize("edit", SAME.values(), ids=SAME)
def test_equal_policies_have_equal_digests(base, edit):
    assert base.replace(*edit, 1) != base and of(base.replace(*edit, 1), name="q.yaml") == of(base)


@pytest.mark.parametrize("edit", OTHER.values(), ids=OTHER)
def test_different_policies_have_different_digests(base, edit):
    assert base.replace(*edit, 1) != base and of(base.replace(*edit, 1)) != of(base)


def test_places_of_a_remote_store(base):
    """Every declared label is the default, and no label at all is not."""

    def said(match):
        return of(base.replace("tiers: [host, nvme], encrypt: required", f"tiers: [remote], encrypt: required{match}"))

    assert said("") == said(", match: region") == said(", match: [region]") != said(", match: none")


def test_order_of_sections_and_entries_does_not_matter(base):
    parts = base.split("\nrules:\n")
    rules, rest = parts[1].split("retention:\n")
    first, second = rules.splitlines()
    assert of(f"{parts[0]}\nretention:\n{rest}rules:\n{second}\n{first}\n") == of(base)


def refuse(number):
    raise AssertionError(f"float {number}")


def test_canonical_form_has_no_floats_marks_or_non_ascii(base):
    for text in (base, *map(library.source, library.names())):
        form = canonical(load_policy(text, name="p.yaml"))
        assert form.isascii() and b'"mark"' not in form and b'"file"' not in form
        json.loads(form, parse_float=refuse)


def test_kinds_of_content_enter_the_digest_where_they_are_written(base):
    """A policy without them has the digest that it had before they existed; their order says nothing."""
    one = base.replace("{policy: lru}", "{policy: cost, kinds: {log: 1, system_prompt: 90}}")
    two = base.replace("{policy: lru}", "{policy: cost, kinds: {system_prompt: 90, log: 1}}")
    other = one.replace("log: 1", "log: 2")
    of_a_kind = one.replace("tokens: 512", "tokens: 512\n    kind: log")
    assert one != base and of_a_kind != one
    assert of(one) == of(two) and len({of(one), of(other), of(of_a_kind)}) == 3
    form = json.loads(canonical(load_policy(base, name="p.yaml")))
    assert "kinds" not in form["eviction"] and all("content" not in each for each in form["segments"])


def test_signals_enter_the_digest_where_they_are_written(base):
    """All of them are the default, in any order; a policy of another kind has the digest that it had before them."""
    every = "next-turn, scope, freshness, pressure, reuse, position"
    plain = of(base.replace("{policy: lru}", "{policy: value}"))
    assert plain == of(base.replace("{policy: lru}", f"{{policy: value, learned: tenant, signals: [{every}]}}"))
    turned = ", ".join(reversed(every.split(", ")))
    assert plain == of(base.replace("{policy: lru}", f"{{policy: value, signals: [{turned}]}}"))
    assert plain != of(base.replace("{policy: lru}", "{policy: value, signals: [reuse]}"))
    assert plain != of(base.replace("{policy: lru}", "{policy: value, learned: pool}"))
    form = json.loads(canonical(load_policy(base, name="p.yaml")))
    assert not form["eviction"].keys() & {"signals", "learned"}
