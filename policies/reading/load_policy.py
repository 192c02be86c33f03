"""Load a policy document: text in, a complete typed `Policy` out, or every problem with its place.

1. `load_policy` returns a policy only when its document had no problem at all; otherwise it raises `PolicyRejected`.
2. It reads no clock, file or environment: equal text gives an equal policy with an equal digest.
"""

from __future__ import annotations

from kvcustody.policies.document.model import (
    ContentKind,
    ErasureDuty,
    Eviction,
    EvictionKind,
    EvictionSignal,
    LearnedFrom,
    Policy,
    TokenRange,
)
from kvcustody.policies.document.problems import Problems, SourceMark
from kvcustody.policies.document.yaml_nodes import parse
from kvcustody.policies.reading.fields import read_section
from kvcustody.policies.reading.names import DeclaredNames
from kvcustody.policies.reading.obligations import (
    INTEGRITY,
    OFFLOAD,
    RETENTION,
    SCRUB,
    after_deaths,
    outages,
    policy_wide,
    receipt_shares,
)
from kvcustody.policies.reading.sections import (
    HITS_DEFAULT,
    PRIORITY_DEFAULT,
    ErasureSection,
    PolicyDocument,
)
from kvcustody.policies.reading.sharing import (
    build_grants,
    build_placement,
    build_rules,
    build_segments,
)
from kvcustody.policies.reading.tenants import (
    TenantObligations,
    build_classify,
    build_groups,
    build_tenants,
    default_scope,
)


def load_policy(text: str | bytes, *, name: str) -> Policy:
    """The policy that `text` holds; `name` is how problems call the document. Raises `PolicyRejected`."""
    problems = Problems(name)
    root = parse(text, problems)
    policy = None
    if root is not None:
        document = read_section(PolicyDocument, root, problems)
        policy = _policy(document, problems, text if isinstance(text, str) else text.decode())
    problems.raise_if_any()
    assert policy is not None, "a document without a root has a problem"
    return policy


def _policy(document: PolicyDocument, problems: Problems, source: str) -> Policy:
    names = DeclaredNames(document, problems)
    retention = policy_wide(names, document, RETENTION)
    owed = TenantObligations(
        retention,
        policy_wide(names, document, SCRUB),
        policy_wide(names, document, OFFLOAD, retention),
        policy_wide(names, document, INTEGRITY),
        receipt_shares(names, document),
    )
    tenants, default = build_tenants(names, document, owed)
    return Policy(
        name=document.name.text,
        description=document.description,
        profile=document.profile,
        classifications=tuple(names.levels),
        scope=default_scope(document),
        labels=tuple(sorted((label, tuple(sorted(values))) for label, values in names.labels.items())),
        classify=build_classify(names, document),
        tenants=tenants,
        default=default,
        groups=build_groups(names, document, tenants),
        segments=build_segments(names, document),
        grants=build_grants(names, document),
        rules=build_rules(names, document),
        retention=owed.retention,
        scrub=owed.scrub,
        offload=owed.offload,
        outage=outages(names, document),
        eviction=_eviction(document, names),
        erasure=_erasure(document.erasure),
        integrity=owed.integrity,
        placement=build_placement(names, document),
        on_worker_death=after_deaths(names, document),
        route_receipts=owed.route_receipts,
        issuers=names.issuers,
        file=problems.file,
        source=source,
        mark=SourceMark(1, 1),
    )


def _eviction(document: PolicyDocument, names: DeclaredNames) -> Eviction:
    section, contents = document.eviction, names.contents
    if section is None:
        return Eviction(EvictionKind.LRU)
    ranges = tuple(TokenRange(r.start, r.until, r.priority, r.for_us, r.mark) for r in section.ranges)
    priority, hits = section.priority, section.hits
    if section.policy is EvictionKind.PRIORITY and priority is None:
        priority = PRIORITY_DEFAULT
    if section.policy is EvictionKind.SLRU and hits is None:
        hits = HITS_DEFAULT
    kinds = tuple(ContentKind(name, section.kinds[name], contents[name]) for name in sorted(section.kinds))
    signals, learned = section.signals, section.learned
    if section.policy is EvictionKind.VALUE:
        signals, learned = signals or tuple(EvictionSignal), learned or LearnedFrom.TENANT
    if learned is LearnedFrom.POOL and document.profile.isolating:
        message = f"eviction learns from every tenant's think times in profile `{document.profile}`"
        names.problems.add(section.at("learned"), "KVP610", message)
    return Eviction(
        section.policy,
        priority,
        ranges,
        section.protected,
        hits,
        kinds,
        tuple(sorted(signals)),
        learned,
        section.mark,
    )


def _erasure(section: ErasureSection | None) -> ErasureDuty:
    duty = ErasureDuty()
    if section is None:
        return duty
    within = duty.within_us if section.within is None else section.within
    return ErasureDuty(within, section.running or duty.running, section.mark)
