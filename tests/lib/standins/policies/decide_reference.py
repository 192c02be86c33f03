# ruff: noqa: E501, E731 (the reference stays short enough to be read at once)
"""A second reading of the policy language, written from its page, and random documents for it."""

from __future__ import annotations

import datetime as dt

from kvcustody.policies.document.model import Action, Scope, Via
from kvcustody.policies.table.model import AccessRequest

DAY = 86_400_000_000


WORDS = [action.name.lower() for action in Action]


VIAS = [via.name.lower() for via in Via]


SCOPES = [scope.name.lower() for scope in Scope]


DATES = [f"20{year}-0{month}-01" for year in (26, 27) for month in (1, 4, 7)]


def day(date, missing):
    if date is None:
        return missing
    return (dt.date.fromisoformat(date) - dt.date(1970, 1, 1)).days * DAY


# fmt: off
def reference(doc, revoked, action, reader, owner, level, scope, via, now, source=None, default=False):
    """(permitted, reasons), evaluated from the document itself: structure, then forbids, then permits."""
    classes, tenants, live, deny = doc["classifications"], doc["tenants"], (), (default, ("default-deny",))
    entry, name, wide, rank = lambda t: tenants.get(t, tenants.get("default")), classes[level], SCOPES.index(scope), classes.index
    if entry(reader) is None or entry(owner) is None:
        return deny
    if via == "own" and (reader != owner or wide > (SCOPES.index(entry(reader).get("scope", doc["scope"])) if action in WORDS[1:5] else 2)):
        return deny
    labels = lambda t, route: {pair for said in [entry(t), *(r for r in doc["classify"] if r["tenant"] in (t, "*") and (route or "route" not in r))]
                               for pair in said.get("labels", {}).items()}
    apart = lambda rule: {name for name, _ in (labels(reader, False) - labels(owner, False)) | (labels(owner, False) - labels(reader, True))} - set(
        rule.get("crosses", ()))
    if via == "grant" and action == "reuse" and wide >= 2:
        pairs = [(g["id"], g["id"], g["owner"], g["reader"], g) for g in doc["grants"]] + [
            (f"{name}~{a}~{b}", name, a, b, g) for name, g in doc["groups"].items() for a in tenants for b in tenants
            if g["share"] and a != b and tenants[a].get("group") == name == tenants[b].get("group")]
        live = [i for i, parent, a, b, g in pairs if (a, b) == (owner, reader) and level <= rank(g["at_most"]) and not apart(g)
                and not {i, parent} & revoked and day(g.get("from"), -1) <= now < day(g.get("until"), 1 << 62)]
    if via == "segment" and action in WORDS[1:5] and wide >= 2:
        reach = lambda s: 4 if s["tenants"] == "*" else 2 if s["tenants"] == [s["owner"]] else 3
        live = [s["id"] for s in doc["segments"] if s["owner"] == owner and s["classification"] == name and wide <= reach(s)
                and (s["tenants"] == "*" or reader in s["tenants"]) and not apart(s) and s["id"] not in revoked and now < day(s["expires"], 0)]
    live = sorted(i for i in live if source in (None, i))
    if via != "own" and not live:
        return deny
    group, hits = tenants.get(reader, {}).get("group"), {"permit": [], "forbid": []}
    near = reader == owner or (group is not None and group == tenants.get(owner, {}).get("group"))
    for rule in doc["rules"]:
        when = {"reader": None, "owner": [owner], "classification": classes, "via": VIAS} | rule["when"]
        who, what = when["reader"], when["classification"]
        if isinstance(what, dict):
            what = classes[rank(what.get("at_least", classes[0])) : rank(what.get("at_most", classes[-1])) + 1]
        fits = {"owner": reader == owner, "same-group": near, None: True}.get(who) if not isinstance(who, list) else reader in who
        if fits and action in rule["action"] and name in what and via in when["via"] and owner in when["owner"]:
            hits[rule["effect"]].append(rule["id"])
    if hits["forbid"]:
        return False, tuple(sorted(hits["forbid"]))
    kept, tiers = (entry(owner).get(part, {}).get(name, doc[part][name]) for part in ("retention", "offload"))
    if (action in ("publish", "retain") and "0s" in (kept["idle"], kept["absolute"])) or (action == "offload" and tiers == "never"):
        return False, (f"{'offload' if action == 'offload' else 'retention'}:{name}",)
    sections = {"admit": f"tenants:{reader if reader in tenants else 'default'}", "publish": f"retention:{name}",
                "retain": f"retention:{name}", "offload": f"offload:{name}"}
    permits = live or ([sections[action]] if action in sections else sorted(hits["permit"]))
    return (True, tuple(permits)) if permits else deny
# fmt: on


def random_document(rng):
    classes = ["low", "mid", "high", "top"][: rng.randint(1, 4)]
    names = [f"t{i}" for i in range(rng.randint(2, 6))]
    pick = lambda xs: rng.sample(xs, rng.randint(1, len(xs)))
    groups = {g: {"share": rng.random() < 0.6} for g in ("red", "blue")}
    tenants = {name: {} for name in names}
    for tenant in tenants.values():
        if rng.random() < 0.7:
            tenant["group"] = rng.choice(list(groups))
        if rng.random() < 0.3:
            tenant["scope"] = rng.choice(SCOPES[:3])
        if rng.random() < 0.2:
            tenant["retention"] = {rng.choice(classes): {"idle": "0s", "absolute": "0s", "active_max": "1m"}}
        if rng.random() < 0.2:
            tenant["offload"] = {rng.choice(classes): "never"}
        if rng.random() < 0.2:
            tenant["labels"] = {"region": rng.choice(["eu", "us"])}
    used = {tenant.get("group") for tenant in tenants.values()}
    groups = {g: spec for g, spec in groups.items() if g in used}
    for spec in groups.values():
        if spec["share"]:
            spec["at_most"] = rng.choice(classes)
            if rng.random() < 0.5:
                spec["from"], spec["until"] = sorted(rng.sample(DATES, 2))
    if rng.random() < 0.5:
        tenants["default"] = {}
    grants = []
    for i in range(rng.randint(0, 8)):
        owner, reader = rng.sample(names, 2)
        start, end = sorted(rng.sample(DATES, 2))
        grant = {
            "id": f"g{i}",
            "owner": owner,
            "reader": reader,
            "at_most": rng.choice(classes),
            "until": end,
            "reason": "random",
        }
        grants.append(grant | ({"from": start} if rng.random() < 0.5 else {}))
    segments = []
    for i in range(rng.randint(0, 6)):
        owner = rng.choice(names)
        to = "*" if rng.random() < 0.3 else [owner] if rng.random() < 0.3 else pick(names)
        segments.append(
            {
                "id": f"s{i}",
                "owner": owner,
                "tenants": to,
                "digest": "hmac:" + "ab" * 32,
                "tokens": 64,
                "classification": rng.choice(classes),
                "expires": rng.choice(DATES),
            }
        )
    level = lambda: rng.choice(
        [None, pick(classes), {"at_most": rng.choice(classes)}, {"at_least": rng.choice(classes)}]
    )
    classify = [{"tenant": "*", "as": classes[0]}]
    if rng.random() < 0.2:
        classify.append({"tenant": rng.choice(names), "labels": {"purpose": "files"}})
    if rng.random() < 0.3:
        route = {"route": "/v1/eu/*", "labels": {"region": "eu"}}
        classify.append({"tenant": rng.choice([*names, "*"]), **route})
    for crossing in (*grants, *segments, *(spec for spec in groups.values() if spec["share"])):
        if rng.random() < 0.3:
            crossing["crosses"] = rng.choice([["region"], ["purpose", "region"]])
    rules = [{"id": "own", "effect": "permit", "action": ["reuse"], "when": {"reader": "owner"}}]
    rules = rules if rng.random() < 0.9 else []
    for i in range(rng.randint(0, 6)):
        permit = rng.random() < 0.6
        when = {
            "reader": rng.choice(
                [None, "owner", pick(names)] if permit else [None, "owner", "same-group", pick(names)]
            ),
            "owner": rng.choice([None, None, None if permit else pick(names)]),
            "classification": level(),
            "via": rng.choice([None, ["own"] if permit else pick(VIAS)]),
        }
        rules.append(
            {
                "id": f"r{i}",
                "effect": "permit" if permit else "forbid",
                "action": pick(["reuse", "export", "administer"]) if permit else rng.sample(WORDS, rng.randint(1, 2)),
                "when": {key: value for key, value in when.items() if value is not None},
            }
        )
    never = {"idle": "0s", "absolute": "0s", "active_max": "1m"}
    some = {"idle": "5m", "absolute": "1h", "active_max": "1m"}
    return {
        "schema": "kvcustody/policy@1", "name": "random", "profile": "shared", "classifications": classes,
        "labels": {"region": ["eu", "us"], "purpose": ["files"]}, "classify": classify,
        "scope": rng.choice(SCOPES[:3]), "tenants": tenants, "groups": groups, "segments": segments, "grants": grants,
        "rules": rules, "retention": {c: rng.choice([some, some, never]) for c in classes},
        "scrub": {"default": {"within": "1s", "verify": "all"}},
        "offload": {c: rng.choice(["never", {"tiers": ["host"], "encrypt": "required"}]) for c in classes},
        "audit": {"on_outage": {"decisions": "deny", "lifecycle": "spill", "own_hits": "aggregate"}},
    }  # fmt: skip


def random_request(rng, doc):
    """Half aimed at something that the document opens, half anything."""
    names = [*(name for name in doc["tenants"] if name != "default"), "stranger", "other", "default", "owner"]
    now = day(rng.choice(DATES), 0) + rng.choice([-1, 0, 1, DAY])
    aim = rng.random()
    level = rng.randrange(len(doc["classifications"]))
    source = rng.choice([None, None, None, "g0", "s0", "g1"])
    if aim < 0.2 and doc["grants"]:
        grant = rng.choice(doc["grants"])
        level = rng.randint(0, doc["classifications"].index(grant["at_most"])) if aim < 0.15 else level
        now = day(grant["until"], 0) - DAY if aim < 0.1 else now
        source = source if aim < 0.05 else None
        return "reuse", grant["reader"], grant["owner"], level, rng.choice(SCOPES[2:]), "grant", now, source
    if aim < 0.4 and doc["segments"]:
        segment = rng.choice(doc["segments"])
        reader = rng.choice(names if segment["tenants"] == "*" else segment["tenants"])
        level = doc["classifications"].index(segment["classification"])
        now = day(segment["expires"], 0) - rng.randint(0, 1) if aim < 0.35 else now
        source = source if aim < 0.25 else None
        return (
            rng.choice(WORDS[1:5]),
            reader,
            segment["owner"],
            level,
            rng.choice(["tenant", "tenant", "group"]),
            "segment",
            now,
            source,
        )
    reader = rng.choice(names)
    if aim < 0.9:
        reader = rng.choice(list(doc["tenants"])) if aim < 0.8 else reader
        scope = rng.choice(["session", "session", "session", *SCOPES[:3]])
        return rng.choice([*WORDS, "reuse", "admit"]), reader, reader, level, scope, "own", now, None
    via = rng.choice(VIAS)
    return rng.choice(WORDS), reader, rng.choice(names), level, rng.choice(SCOPES), via, now, source


def call(table, request):
    action, reader, owner, level, scope, via, now, source = request
    return table.decide(
        AccessRequest(Action[action.upper()], reader, owner, level, Scope[scope.upper()], Via[via.upper()], source),
        now,
    )
