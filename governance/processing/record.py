"""The record of processing activities (GDPR 30), of a controller or a processor, as far as the KV cache knows it.

1. Facts from policies and the ledger are filled in. Facts that only the controller or the processor knows are left open
   and marked as open.
2. It covers a period. Every policy in effect in it, by the leaves, is named by its digest, with its time limits and
   recipients. Each recipient is listed up to the classification as granted. A policy whose document nobody has is named
   too.
3. Measures point to controls of the library, each with the status that the ledger's evidence of the period gives it.
4. A record is a function of the ledger as of a checkpoint, the documents of policies, and the stated facts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args, get_type_hints

from kvcustody.audit.reports.document import Document, Facts
from kvcustody.audit.verify.documents.record_agreement import RECORD
from kvcustody.errors import LedgerError
from kvcustody.governance.cases.recipients import GrantedRecipient
from kvcustody.policies.document.model import Offload, Policy
from kvcustody.times import span

OPEN = "to be stated by the controller"
CONTROLLER, PROCESSOR = "controller", "processor"
ROLES = (CONTROLLER, PROCESSOR)
OF_LEAVES, OF_RELEASE, GIVEN, UNKNOWN = "leaves", "release", "given", "unknown"


class ControllerStatement(NamedTuple):
    """The statements of the controller or the processor; an empty one is left open."""

    controller: str = ""
    contact: str = ""
    officer: str = ""
    purposes: str = ""
    subjects: str = ""
    data: str = ""
    transfers: str = ""


class TimeLimit(NamedTuple):
    """The envisaged time limits of one classification (30(1)(f)), as the policy of this digest has them."""

    classification: str
    since_last_use: str
    since_birth: str
    running_at_most: str
    overwritten_within: str
    read_back: str
    tiers: str
    policy_digest: str


class RecordedPolicy(NamedTuple):
    """A policy in effect in the period. Times are UTC microseconds; `until_us` 0: it still is.

    `source` is where its document comes from: `leaves`, `release`, `given` with the question, or `unknown`.
    """

    digest: str
    name: str
    stage: str
    since_us: int
    until_us: int
    workers: tuple[str, ...]
    source: str


class ProcessedCategory(NamedTuple):
    """The processing for one tenant at one classification: custody units that were due, and covered."""

    tenant: str
    classification: str
    due: int
    covered: int


class ServedController(NamedTuple):
    """A controller on whose behalf a processor acts (30(2)(a)): the tenant, and its stated name."""

    tenant: str
    name: str


class MeasuredControl(NamedTuple):
    """A control of the library, the period's evidence for it, and the report sections that show it."""

    framework: str
    control: str
    title: str
    status: str
    sections: tuple[str, ...]


class ProcessingRecord(NamedTuple):
    """One record of processing: the caching of attention keys and values of language models.

    `checkpoint` 0: of the ledger as it was, which nobody signed. `policy`, its digest and `run_by` are of the policy
    that was given, else of the last to take effect for everybody. `orders` says who checks the authors of orders, and
    how many orders are signed; empty where nothing is signed.
    """

    version: str
    role: str
    checkpoint: int
    since_us: int
    until_us: int
    activity: str
    controller: str
    contact: str
    officer: str
    purposes: str
    subjects: str
    data: str
    transfers: str
    controllers: tuple[ServedController, ...]
    categories: tuple[ProcessedCategory, ...]
    policies: tuple[RecordedPolicy, ...]
    recipients: tuple[GrantedRecipient, ...]
    time_limits: tuple[TimeLimit, ...]
    erasure_within: str
    measures: tuple[str, ...]
    controls: tuple[MeasuredControl, ...]
    policy: str
    policy_digest: str
    run_by: tuple[str, ...]
    due: int
    covered: int
    history: str = ""
    orders: str = ""

    def document(self) -> Document:
        """Return the record as an unsigned document."""
        return RECORD.document(_plain(self))


def record_of_facts(facts: Facts) -> ProcessingRecord:
    """Parse the record of a document's facts; raises `LedgerError` for other facts."""
    try:
        made: ProcessingRecord = _read_fields(ProcessingRecord, facts)
    except (TypeError, KeyError, AttributeError) as problem:
        raise LedgerError(f"this is not a record of processing: {problem}") from None
    if _plain(made) != facts:
        raise LedgerError("this is not a record of processing: a field has the wrong type")
    return made


def _read_fields(kind: Any, value: Facts) -> Any:
    """A named tuple from JSON values; whether they are of its types is not looked at."""
    hints, given = get_type_hints(kind), {}
    for name, each in value.items():
        hint = hints[name]
        if hasattr(hint, "_fields"):
            given[name] = _read_fields(hint, each)
        elif isinstance(each, list):
            item = get_args(hint)[0]
            given[name] = tuple(_read_fields(item, one) if hasattr(item, "_fields") else one for one in each)
        else:
            given[name] = each
    return kind(**given)


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def limits_of(policy: Policy, digest: str) -> tuple[TimeLimit, ...]:
    """Return the time limits of a policy, by classification."""
    return tuple(_limit(policy, level, digest) for level in range(len(policy.classifications)))


def _limit(policy: Policy, level: int, digest: str) -> TimeLimit:
    kept, scrub, offload = policy.retention[level], policy.scrub[level], policy.offload[level]
    return TimeLimit(
        policy.classifications[level],
        length(kept.idle_us),
        length(kept.absolute_us),
        length(kept.active_max_us),
        length(scrub.within_us),
        "every block" if scrub.verify == 1 else f"a share of {scrub.verify} of the blocks",
        _copies(offload),
        digest,
    )


def _copies(offload: Offload) -> str:
    """Where copies may be, how they lie there, and for how long."""
    if not offload.tiers:
        return "device memory only"
    how = "encrypted" if offload.encrypt else "in plain memory"
    places = (f"{limit.tier}, {how}, at most {length(limit.absolute_us)}" for limit in offload.limits)
    return "; ".join(("device memory", *places))


def measures_of(policy: Policy) -> tuple[str, ...]:
    """Return technical and organisational measures (30(1)(g), 30(2)(d)) in words."""
    crossing = (
        "no tenant boundary is crossed." if policy.profile.isolating else "grants and segments may cross tenants."
    )
    return (
        "Reuse is denied unless the policy permits it; across tenants only by a named grant or segment.",
        f"Profile {policy.profile.value}: {crossing}",
        "Blocks are found under keys derived from a random secret of the tenant; destroying it makes them unreachable.",
        "Memory is zeroized after custody ends and before it is handed out again, with a receipt for each shard.",
        "Subjects and sessions appear in the ledger under random pseudonyms; destroying the link and key unlinks them.",
        "The ledger is tamper-evident: Merkle trees under signed checkpoints, checked offline.",
        "Deletion coverage is computed twice, by independent implementations.",
    )


def length(value_us: int) -> str:
    """Return a duration as a policy writes it."""
    return span(value_us) if value_us else "not kept"
