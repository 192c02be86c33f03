"""The obligations for tiers, against a reference that evaluates the YAML's data each time, and against Cedar.

The reference knows nothing of the loader, the typed form or the compiler. Positive controls: a reference that forgets a
tenant's own entry, and Cedar statements without their tiers, must disagree.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from kvcustody.policies.document.model import Action, Scope, Tier, Via
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.workbench.cedar import cedar_entity, cedar_request, to_cedar
from kvcustody.policies.workbench.prove.prove import prove
from kvcustody.policies.workbench.request import Request
from standins.policies.decide_reference import random_document, reference

SECOND, MINUTE = 10**6, 60 * 10**6
LABELS = {"region": ["eu", "us"], "purpose": ["chat", "files"]}
ABSENT = {"absolute": None, "within": None}


def us(written):
    number, unit = int(written[:-1]), written[-1]
    return number * {"s": SECOND, "m": MINUTE, "h": 60 * MINUTE}[unit]


def limits(entry, tier):
    """Return an entry's (absolute, within) for a tier, None for omitted values; None: the tier is not listed."""
    if entry == "never" or tier not in entry["tiers"]:
        return None
    own = entry["tiers"][tier] if isinstance(entry["tiers"], dict) else {}
    said = {**ABSENT, **{key: entry[key] for key in ABSENT if key in entry}, **own}
    return tuple(None if said[key] is None else us(said[key]) for key in ("absolute", "within"))


def follows(absolute):
    return max(SECOND, absolute // 16)


def expected(doc, tenant, level, tier, *, forgets=False):
    """(absolute, within, running, encrypt, match), from the document itself."""
    name = doc["classifications"][level]
    entry = doc["tenants"].get(tenant, doc["tenants"].get("default"))
    kept = (entry or {}).get("retention", {}).get(name, doc["retention"][name])
    wide, own = doc["offload"][name], (entry or {}).get("offload", {}).get(name)
    own = None if forgets else own
    limits_of_both = [limits(each, tier) for each in (wide, own) if each is not None]
    may = [
        reference(doc, frozenset(), a, tenant, tenant, level, "session", "own", 0)[0]
        for a in ("offload", "publish", "retain")
    ]
    if entry is None or None in limits_of_both or not may[0]:
        return None
    block = us(kept["absolute"])
    first = min(us(doc["retention"][name]["absolute"]) if limits_of_both[0][0] is None else limits_of_both[0][0], block)
    within = follows(first) if limits_of_both[0][1] is None else limits_of_both[0][1]
    absolute = first
    if len(limits_of_both) == 2:
        absolute = first if limits_of_both[1][0] is None else min(first, limits_of_both[1][0])
        within = min(within, follows(absolute) if limits_of_both[1][1] is None else limits_of_both[1][1])
    bounds = [
        block,
        us(doc["retention"][name]["absolute"]),
        *(each[0] for each in limits_of_both),
        us(kept["active_max"]),
    ]
    running = min(bound for bound in bounds if bound)
    plain = any(isinstance(each, dict) and each["encrypt"] == "none" for each in (wide,)) and (
        own is None or own["encrypt"] == "none"
    )
    match = set()
    for each in (wide, own) if tier == "remote" else ():
        if each is not None:
            written = each.get("match", sorted(LABELS) if each is wide else [])
            match |= set() if written == "none" else {written} if isinstance(written, str) else set(written)
    return absolute if may[1] and may[2] else 0, within, running, not (plain and tier == "host"), match


def random_offload(rng, most=None, absolute="1h", plain=True):
    """An entry; within `most` where that is given."""
    tiers = [tier for tier in ("host", "nvme", "remote") if rng.random() < 0.6 and (most is None or tier in most)]
    if not tiers:
        return "never"
    entry = {
        "tiers": tiers,
        "encrypt": "none" if plain and tiers == ["host"] and rng.random() < 0.5 else "required",
    }
    if absolute != "0s" and rng.random() < 0.5:
        entry["absolute"] = rng.choice(["50m", "7m", "13s"])
    if rng.random() < 0.4:
        entry["within"] = rng.choice(["41s", "9s"])
    if absolute != "0s" and rng.random() < 0.3:
        entry["tiers"] = {tier: rng.choice([{}, {"absolute": "11s"}, {"within": "3s"}]) for tier in tiers}
    if "remote" in tiers and rng.random() < 0.6:
        entry["match"] = rng.choice(["none", "region", ["region", "purpose"]])
    return entry


def with_tiers(rng, doc):
    """The document with tiers of every kind, and tenants' own entries that are stricter."""
    doc = json.loads(json.dumps(doc))
    doc["labels"] = LABELS
    doc["offload"] = {
        name: random_offload(rng, absolute=doc["retention"][name]["absolute"]) for name in doc["classifications"]
    }
    for entry in doc["tenants"].values():
        entry.pop("offload", None)
        for name in doc["classifications"]:
            wide = doc["offload"][name]
            if wide == "never" or rng.random() < 0.5:
                continue
            tiers = [tier for tier in wide["tiers"] if rng.random() < 0.7]
            own = {"tiers": tiers, "encrypt": "required"} if tiers else "never"
            if (
                tiers
                and us(doc["retention"][name]["absolute"])
                and entry.get("retention", {}).get(name, {}).get("absolute") != "0s"
            ):
                own |= rng.choice([{}, {"absolute": "5s"}])
            if tiers:
                own |= rng.choice([{}, {"within": "1s"}])
            if "remote" in tiers:
                own |= rng.choice([{}, {"match": ["region", "purpose"]}])
            entry.setdefault("offload", {})[name] = own
    return doc


def documents(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        doc = with_tiers(rng, random_document(rng))
        yield doc, compile_policy(load_policy(json.dumps(doc), name="random.yaml"), revision=1)


def compare(seed, count, **control):
    seen, wrong = Counter(), []
    for doc, table in documents(seed, count):
        for tenant in (*(name for name in doc["tenants"] if name != "default"), "stranger"):
            for level in range(len(doc["classifications"])):
                for tier in Tier:
                    duty = table.tier_duty(tenant, level, tier)
                    got = None
                    if duty.running_us:
                        got = duty.absolute_us, duty.within_us, duty.running_us, duty.encrypt, set(duty.match)
                    said = expected(doc, tenant, level, tier.value, **control)
                    seen["nothing" if got is None else "kept" if got[0] else "running"] += 1
                    if got != said:
                        wrong.append((tenant, level, tier, got, said))
        assert prove(table).holds
    return seen, wrong


def test_every_duty_is_what_the_document_says():
    seen, wrong = compare(seed=3, count=40)
    assert wrong == []
    assert min(seen["nothing"], seen["kept"]) > 200 and seen["running"] > 100


def test_control_a_reference_without_tenants_own_entries_disagrees():
    assert compare(seed=3, count=20, forgets=True)[1]


def cedar_disagreements(seed, count, spoil=str):
    cedarpy = pytest.importorskip("cedarpy")
    wrong, seen = [], Counter()
    for doc, table in documents(seed, count):
        cedar = to_cedar(table.policy)
        for tenant in (*(name for name in doc["tenants"] if name != "default"), "stranger"):
            entities = [cedar_entity(table.policy, tenant)]
            asked = [(level, tier) for level in range(len(doc["classifications"])) for tier in Tier]
            requests = [
                cedar_request(Request(Action.OFFLOAD, tenant, tenant, level, Scope.SESSION, Via.OWN, 0), tier)
                for level, tier in asked
            ]
            answers = cedarpy.is_authorized_batch(requests, spoil(cedar.text), entities)
            for (level, tier), answer in zip(asked, answers, strict=True):
                assert not answer.diagnostics.errors, answer.diagnostics.errors
                may = table.tier_duty(tenant, level, tier).running_us > 0
                seen[may] += 1
                if may is not answer.allowed:
                    wrong.append((tenant, level, tier, may))
    return wrong, seen


def test_cedar_agrees_by_tier():
    wrong, seen = cedar_disagreements(seed=4, count=20)
    assert wrong == [] and min(seen.values()) > 100


def test_control_cedar_without_tiers_disagrees():
    assert cedar_disagreements(seed=4, count=20, spoil=lambda text: text.replace('context.tier == ""', "true"))[0]
