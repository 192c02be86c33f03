"""The stable codes of policy problems (KVP1xx document, 2xx scalars, 3xx shape, 4xx references, 5xx obligations, 6xx
profile) and of lint findings (7xx).

A code never changes its meaning and is never given again. `docs/reference/policy-codes.md` has a row for each.
"""

from __future__ import annotations

from typing import NamedTuple


class Code(NamedTuple):
    """A code's meaning and the advice to the author."""

    title: str
    advice: str


CODES: dict[str, Code] = {
    "KVP101": Code("not UTF-8", "save the file as UTF-8"),
    "KVP102": Code("document too large", "a policy is at most 1 MiB; split tenants over several deployments"),
    "KVP103": Code("not well-formed YAML", "correct the YAML at this place"),
    "KVP104": Code("forbidden character", "remove it; control and bidirectional characters hide what a reviewer sees"),
    "KVP105": Code("more than one document", "keep one document in a file; remove the `---` line"),
    "KVP106": Code("empty document", "start from a library policy, such as `single-org`"),
    "KVP107": Code("anchor", "write the value out; anchors are not part of the policy language"),
    "KVP108": Code("alias", "write the value out; aliases are not part of the policy language"),
    "KVP109": Code("tag", "remove the tag; every field has one type"),
    "KVP110": Code("merge key", "write the fields out; merge keys are not part of the policy language"),
    "KVP111": Code("duplicate key", "keep one of the two"),
    "KVP112": Code("too many nodes", "a policy has at most 200000 YAML nodes"),
    "KVP113": Code("nested too deeply", "a policy nests at most 32 levels"),
    "KVP114": Code("key that is not a name", "use a plain or quoted name as the key"),
    "KVP201": Code("implicit boolean", "write `true` or `false`, or quote the word"),
    "KVP202": Code("sexagesimal number", "write a duration such as `30m`, or quote the value"),
    "KVP203": Code("floating-point number", "write an integer, a percentage such as `12.5%`, or quote the value"),
    "KVP204": Code(
        "ambiguous integer",
        "write a decimal integer without leading zeros or underscores, or quote the value",
    ),
    "KVP205": Code("wrong type", "use the type that the message names"),
    "KVP206": Code("malformed identifier", "use ASCII letters, digits and `._-`, starting with a letter or digit"),
    "KVP207": Code("reserved identifier", "choose another name"),
    "KVP208": Code("not one of the choices", "use one of the listed values"),
    "KVP209": Code("malformed duration", "write an integer and a unit: `0s`, `250ms`, `30m`, `8h`, `7d`"),
    "KVP210": Code("malformed percentage", "write `0%` to `100%`, with at most four decimals"),
    "KVP211": Code("malformed share", "write `all`, `none`, or a fraction below one such as `1/64`"),
    "KVP212": Code("malformed date", "write a UTC date as `2027-03-31`; it is exclusive at 00:00"),
    "KVP213": Code(
        "malformed digest", "paste the digest printed when the segment was declared, with all 64 hex digits"
    ),
    "KVP214": Code("integer out of range", "use a value in the range that the message names"),
    "KVP215": Code("malformed text", "write one line of 1 to 500 characters"),
    "KVP216": Code("malformed route", "write an absolute path such as `/v1/hr/*`; `*` is one whole path segment"),
    "KVP301": Code("unknown field", "remove it"),
    "KVP302": Code("missing field", "add it"),
    "KVP303": Code("unknown schema", "write `schema: kvcustody/policy@1`"),
    "KVP304": Code("identifier used twice", "give each rule, grant, segment and group its own identifier"),
    "KVP305": Code("empty or repeated list", "list each value once, and at least one"),
    "KVP306": Code("field does not apply here", "remove it"),
    "KVP307": Code("too many entries", "stay within the limit that the message names"),
    "KVP401": Code("unknown tenant", "add the tenant under `tenants`, or correct its name"),
    "KVP402": Code("unknown classification", "use a name listed under `classifications`"),
    "KVP403": Code("unknown label", "declare the label and its values under `labels`"),
    "KVP404": Code("wildcard grant", "name one owner and one reader; a grant for everybody does not exist"),
    "KVP405": Code("grant to its own owner", "a tenant reads its own domains by a rule; remove the grant"),
    "KVP406": Code("dates out of order", "`until` is exclusive and must be later than `from`"),
    "KVP407": Code("unknown group", "put a tenant into the group, or correct its name"),
    "KVP408": Code("permit that a rule cannot give", "only `reuse`, `export` and `administer` are permitted by rules"),
    "KVP409": Code(
        "permit across a tenant boundary", "write a grant or a segment; a rule permits only within a tenant"
    ),
    "KVP410": Code("group on `tenants.default`", "name each member of a group; unlisted tenants cannot share"),
    "KVP411": Code("too many segments for a tenant", "a tenant matches at most 16 segments"),
    "KVP412": Code("cross-tenant segment without an end", "add `expires`"),
    "KVP413": Code("unclear tenant", "write `id^issuer`, with an issuer that is listed under `issuers`"),
    "KVP414": Code("unknown kind of content", "declare it under `eviction.kinds`, or correct its name"),
    "KVP501": Code("missing retention", "add `{idle, absolute, active_max}` for the classification"),
    "KVP502": Code("missing scrub", "add `scrub.default`, or an entry for the classification"),
    "KVP503": Code("missing offload", "add `never` or `{tiers, encrypt}` for the classification"),
    "KVP504": Code("missing integrity", "add `integrity.default`, or an entry for the classification"),
    "KVP505": Code("idle longer than absolute", "an idle limit beyond the absolute one never takes effect; shorten it"),
    "KVP506": Code("zero where time is needed", "write a duration longer than `0s`"),
    "KVP507": Code("weaker than the floor", "an outage action may only be stricter than the floor"),
    "KVP508": Code(
        "tenant looser than the policy",
        "a tenant's own obligations may only be stricter; remove or tighten it",
    ),
    "KVP509": Code(
        "media without encryption", "write `encrypt: required`; media cannot be scrubbed, only crypto-erased"
    ),
    "KVP510": Code(
        "tier longer than retention",
        "shorten it to the classification's `retention.absolute`, or leave it out: no copy outlives its block",
    ),
    "KVP601": Code("guarantees over 100 %", "lower the guaranteed shares until they fit"),
    "KVP602": Code("guaranteed over cap", "raise the cap or lower the guarantee"),
    "KVP603": Code("guaranteed differs from cap", "write the same percentage for both in this profile"),
    "KVP604": Code("cross-tenant grant in an isolating profile", "remove the grant, or use `profile: shared`"),
    "KVP605": Code("cross-tenant segment in an isolating profile", "list only the owner, or use `profile: shared`"),
    "KVP606": Code("borrowing in an isolating profile", "remove `borrow: true`, or use `profile: shared`"),
    "KVP607": Code("sharing group in an isolating profile", "remove `share: true`, or use `profile: shared`"),
    "KVP608": Code("unbounded guarantees", "add `tenants_max`, or guarantee `0%`"),
    "KVP609": Code("plain copies in an isolating profile", "write `encrypt: required`, or use `profile: shared`"),
    "KVP610": Code(
        "think times of all tenants in an isolating profile",
        "write `learned: tenant`, or use `profile: shared`",
    ),
}

LINT_CODES: dict[str, Code] = {
    "KVP701": Code("rule that can never match", "correct its terms, or remove it"),
    "KVP702": Code("shadowed rule", "remove it, or narrow the rule that covers it"),
    "KVP703": Code("overridden permit", "remove it, or narrow the forbid: a forbid overrides every permit"),
    "KVP704": Code("redundant permit", "remove it; nothing changes without it"),
    "KVP705": Code("nothing is reused", "add a rule such as `{effect: permit, action: reuse, when: {reader: owner}}`"),
    "KVP711": Code("ended grant, group or segment", "remove it, or set a new end after asking its owner"),
    "KVP712": Code("grant, group or segment about to end", "renew it in time, or let it end on purpose"),
    "KVP713": Code("grant or segment without effect", "remove it, or the rule or retention that rules it out"),
    "KVP714": Code("redundant grant", "remove it; another one covers it"),
    "KVP716": Code(
        "grant or segment that can open nothing",
        "give its owner `scope: tenant`, name the labels in `crosses`, or remove it",
    ),
    "KVP715": Code("unused grant or segment", "revoke it if nobody needs it"),
    "KVP721": Code("tenant that the identity provider does not know", "correct its name, or remove it"),
    "KVP722": Code("confusable identifiers", "rename one; they are compared byte for byte, but read by people"),
    "KVP731": Code(
        "retention longer than a parent's",
        "a block ends with its parent; keep the segment as long, or the rest as short",
    ),
    "KVP732": Code("higher classification kept longer than a lower one", "shorten it, unless the order is intended"),
    "KVP741": Code("nothing left to share", "lower a guarantee, or guarantee the others something"),
    "KVP751": Code(
        "scrub deadline that cannot be met",
        "allow more time, verify a smaller share, or lower the largest cap",
    ),
    "KVP752": Code(
        "copies in plain host memory",
        "write `encrypt: required`, unless you intend the engine's own unencrypted offloading",
    ),
    "KVP761": Code("field without effect", "remove it, so that nobody relies on it, or use an engine where it works"),
    "KVP771": Code(
        "requests that no worker may serve",
        "give the rules that match them a group in common, unless they should be refused",
    ),
    "KVP772": Code("group dedicated twice", "list the tenants of both in one rule, or give each a group"),
    "KVP773": Code(
        "recompute without a tier that outlives its worker",
        "offload the classification to `nvme`, or remove it",
    ),
    "KVP774": Code(
        "share of route receipts without effect",
        "remove it: every request of a tenant that a grant or a segment opens has a receipt",
    ),
    "KVP775": Code(
        "copies only allowed in a remote store, and none is configured",
        "set `remote_tier_url` at every worker, or give the classification another tier",
    ),
}
"""What lint reports of sound policies."""
CODES |= LINT_CODES
