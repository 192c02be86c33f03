"""Health, as the API shows it."""

from __future__ import annotations

from typing import Literal

from kvcustody.audit.evidence.query.attempts import RefusedIdentities
from kvcustody.audit.tlog.checkpoint_signer import SignerStatus
from kvcustody.audit.tlog.witness.status import WitnessSeen
from kvcustody.audit.write.event_writer import WriterStatus
from kvcustody.governance.api.models.base import Model, Whole, example
from kvcustody.governance.api.models.shown import shown
from kvcustody.governance.service.health.verdict import Trouble

RefusedModel = shown(RefusedIdentities, "RefusedIdentities")
WitnessModel = shown(WitnessSeen, "WitnessSeen")
Ledger = shown(WriterStatus, "LedgerHealth")
TroubleModel = shown(Trouble, "Trouble")
Checkpoints = shown(SignerStatus, "CheckpointHealth")


class Alive(Model):
    """The answer `ok`."""

    model_config = example({"status": "ok"})

    status: Literal["ok"]


_REFUSED = {
    "place": "door",
    "of_worker": "gpu-0",
    "reason": "invalid",
    "attempts": 17,
    "sources": 1,
    "last_us": 1_780_000_000_000_000,
}
_WITNESSES = {
    "size": 4,
    "signed_size": 4,
    "witnessed_size": 4,
    "unwitnessed_us": 0,
    "witnesses": [{"name": "witness.example", "size": 4, "at_us": 1_780_000_000_000_000, "age_us": 5_000_000}],
    "warning": None,
}


_UNSEALED = {"logs": 2, "leaves": 31, "age_us": 4_200_000, "overdue": False}


class Witnesses(Model):
    """The tree size that witnesses have signed; `warning` names what no witness has seen."""

    model_config = example(_WITNESSES)

    size: Whole
    signed_size: Whole
    witnessed_size: Whole
    unwitnessed_us: Whole
    witnesses: list[WitnessModel]  # type: ignore[valid-type]
    warning: str | None


class WaitingLeaves(Model):
    """Leaves that no checkpoint covers yet; `overdue`: the oldest has waited for three intervals, so nothing seals."""

    model_config = example(_UNSEALED)

    logs: Whole
    leaves: Whole
    age_us: Whole
    overdue: bool


class Health(Model):
    """The state of the service. `degraded`: `troubles` lists each problem with its kind and a sentence.
    `/health/ready`, the metrics and the inbox report the same problems.

    `row_walls`: PostgreSQL's row-level security stands behind the queries (never on SQLite). `issuers`: whose
    tenants the ledger names, first the one that the bare ids are of. `refused_identities`: of the last day, as they
    are on record. `orders_not_authenticated`: workers at work that write this ledger themselves, and follow every
    order that was written there. `orders_authenticated`: this service follows signed orders alone, and
    `orders_not_followed` are those of the newest thousand that no trusted key signed. `not_guarding`: threads of this
    process that ended or keep failing; while there are any, it admits nothing. `sink_troubles`: sinks that take
    nothing, batches that were given up, and leaves that a restore or a purge took from a sink.
    """

    model_config = example(
        {
            "status": "ok",
            "troubles": [],
            "ledger": {
                "admitting": True,
                "healthy": True,
                "cause": "",
                "backlog": 0,
                "submitted_sequence": 90,
                "durable_sequence": 90,
                "spilled_bytes": 0,
            },
            "checkpoints": {"size": 4, "at_us": 1_780_000_000_000_000, "refused": "", "problem": ""},
            "unsealed": _UNSEALED,
            "witnesses": _WITNESSES,
            "row_walls": True,
            "issuers": ["corp"],
            "refused_identities": [_REFUSED],
            "received_leaves": 120,
            "sink_troubles": [],
            "workers": 1,
            "not_guarding": [],
            "silent_workers": [],
            "orders_not_authenticated": [],
            "orders_authenticated": True,
            "orders_not_followed": [],
        }
    )

    status: Literal["ok", "degraded"]
    troubles: list[TroubleModel]  # type: ignore[valid-type]
    ledger: Ledger  # type: ignore[valid-type]
    checkpoints: Checkpoints | None  # type: ignore[valid-type]
    unsealed: WaitingLeaves
    witnesses: Witnesses
    row_walls: bool
    issuers: list[str]
    refused_identities: list[RefusedModel]  # type: ignore[valid-type]
    received_leaves: Whole
    sink_troubles: list[str]
    workers: Whole
    not_guarding: list[str]
    silent_workers: list[str]
    orders_not_authenticated: list[str]
    orders_authenticated: bool
    orders_not_followed: list[str]


_ITEM = {
    "id": "approval:revision-8", "kind": "approval", "about": "revision-8", "state": "waiting",
    "text": "revision 8 of alice waits for an approval", "since_us": 1_780_000_000_000_000, "due_us": None,
    "tenant": None, "principal": None, "page": "/policy/8", "command": "kvcustody policy review 8",
}  # fmt: skip


class InboxItemModel(Model):
    """One open task: `soon` ends within days, `overdue` is past its date, `waiting` has no date."""

    model_config = example(_ITEM)

    id: str
    kind: Literal[
        "approval",
        "activation",
        "consent",
        "erasure",
        "case",
        "grant",
        "policy",
        "key",
        "certificate",
        "witness",
        "report",
        "sink",
        "service",
    ]
    about: str
    state: Literal["waiting", "soon", "overdue"]
    text: str
    since_us: int | None
    due_us: int | None
    tenant: str | None
    principal: str | None
    page: str
    command: str


class InboxPage(Model):
    """A page of open tasks, the most urgent first."""

    model_config = example({"items": [_ITEM], "next": None})

    items: list[InboxItemModel]
    next: str | None
