"""The record of processing activities (GDPR 30) as far as the KV cache knows it: time limits, measures, recipients.

1. What the policy and the ledger say is filled in; what only the controller knows is left open and named as open.
2. A record is a function of the policy, the ledger's figures and the controller's own words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcustody.audit.coverage.summary import CoverageRow
from kvcustody.policies.document.model import Offload, Policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.times import span

OPEN = "to be stated by the controller"


class ControllerStatement(NamedTuple):
    """What the controller states; empty is left open."""

    controller: str = ""
    contact: str = ""
    officer: str = ""
    purposes: str = ""
    subjects: str = ""
    data: str = ""
    transfers: str = ""


class TimeLimit(NamedTuple):
    """The envisaged time limits of one classification (30(1)(f)), as the policy has them."""

    classification: str
    since_last_use: str
    since_birth: str
    running_at_most: str
    overwritten_within: str
    read_back: str
    tiers: str


class Recipient(NamedTuple):
    """A tenant that may reuse what another owns, and by which grant or segment (30(1)(d))."""

    owner: str
    reader: str
    by: str
    at_most: str
    reason: str


class ProcessingRecord(NamedTuple):
    """One record of processing: the caching of attention keys and values of language models."""

    activity: str
    controller: str
    contact: str
    officer: str
    purposes: str
    subjects: str
    data: str
    recipients: tuple[Recipient, ...]
    transfers: str
    time_limits: tuple[TimeLimit, ...]
    erasure_within: str
    measures: tuple[str, ...]
    policy: str
    policy_digest: str
    run_by: tuple[str, ...]
    due: int
    covered: int
    history: str = ""

    def facts(self) -> dict[str, Any]:
        """The record as JSON values."""
        lists = {
            name: [item._asdict() for item in getattr(self, name)] for name in ("recipients", "time_limits")
        }
        return self._asdict() | lists | {"measures": list(self.measures), "run_by": list(self.run_by)}


def record_of_facts(facts: dict[str, Any]) -> ProcessingRecord:
    """The record that `facts` gave."""
    recipients = tuple(Recipient(**item) for item in facts["recipients"])
    limits = tuple(TimeLimit(**item) for item in facts["time_limits"])
    texts = {name: tuple(facts[name]) for name in ("measures", "run_by")}
    return ProcessingRecord(**facts | {"recipients": recipients, "time_limits": limits} | texts)


def record_of(
    policy: Policy,
    total: CoverageRow,
    stated: ControllerStatement,
    *,
    history: str,
    run_by: tuple[str, ...] = (),
    revoked: frozenset[str] = frozenset(),
) -> ProcessingRecord:
    """The record under a policy; `total` is the coverage of the period that it speaks of.

    `history` says what of the ledger's own is replayed or generated. `run_by` are the workers at work that run this
    policy, by the ledger. What was `revoked` has no recipients.
    """
    return ProcessingRecord(
        activity="Caching of attention keys and values of language models (KV cache), so that prompts need not be "
        "computed again",
        controller=stated.controller or OPEN,
        contact=stated.contact or OPEN,
        officer=stated.officer or OPEN,
        purposes=stated.purposes or OPEN,
        subjects=stated.subjects or OPEN,
        data=stated.data
        or "Tensors computed from prompts and answers of users; no text, but derived from it",
        recipients=tuple(_recipients(policy, revoked)),
        transfers=stated.transfers or OPEN,
        time_limits=tuple(_limit(policy, level) for level in range(len(policy.classifications))),
        erasure_within=_time(policy.erasure.within_us),
        measures=_measures(policy),
        policy=policy.name,
        policy_digest=compile_policy(policy, revision=1).digest,
        run_by=run_by,
        due=total.due,
        covered=total.covered,
        history=history,
    )


def _limit(policy: Policy, level: int) -> TimeLimit:
    kept, scrub, offload = policy.retention[level], policy.scrub[level], policy.offload[level]
    return TimeLimit(
        policy.classifications[level],
        _time(kept.idle_us),
        _time(kept.absolute_us),
        _time(kept.active_max_us),
        _time(scrub.within_us),
        "every block" if scrub.verify == 1 else f"a share of {scrub.verify} of the blocks",
        _copies(offload),
    )


def _copies(offload: Offload) -> str:
    """Where copies may be, how they lie there, and for how long."""
    if not offload.tiers:
        return "device memory only"
    how = "encrypted" if offload.encrypt else "in plain memory"
    places = (f"{limit.tier}, {how}, at most {_time(limit.absolute_us)}" for limit in offload.limits)
    return "; ".join(("device memory", *places))


def _recipients(policy: Policy, revoked: frozenset[str]) -> list[Recipient]:
    names = policy.classifications
    made = [
        Recipient(grant.owner, grant.reader, f"grant {grant.id}", names[grant.at_most], grant.reason)
        for grant in policy.grants
        if grant.id not in revoked
    ]
    for segment in policy.segments:
        if segment.id in revoked:
            continue
        readers = ("every admitted tenant",) if segment.tenants is None else segment.tenants
        made += [
            Recipient(
                segment.owner, reader, f"segment {segment.id}", names[segment.level], "declared prompt prefix"
            )
            for reader in readers
            if reader != segment.owner
        ]
    return sorted(made)


def _measures(policy: Policy) -> tuple[str, ...]:
    return (
        "Reuse is denied unless the policy permits it; across tenants only by a named grant or segment.",
        f"Profile {policy.profile.value}: "
        + (
            "no tenant boundary is crossed."
            if policy.profile.isolating
            else "grants and segments may cross tenants."
        ),
        "Blocks are found under keys derived from a random secret of the tenant; destroying it makes them unreachable.",
        "Memory is zeroized after custody ends and before it is handed out again, with a receipt for each shard.",
        "Subjects and sessions appear in the ledger under random pseudonyms; destroying the link and key unlinks them.",
        "The ledger is tamper-evident: Merkle trees under signed checkpoints, checked offline.",
        "Deletion coverage is computed twice, by independent implementations.",
    )


def _time(value_us: int) -> str:
    """A length of time as a policy writes it."""
    return span(value_us) if value_us else "not kept"
