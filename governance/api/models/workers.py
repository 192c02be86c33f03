"""Workers, as the API shows them and as they report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcustody.governance.api.models.base import Measure, Model, TenantName, Utc, Whole, example
from kvcustody.governance.api.models.policies import EnforcementOrderModel
from kvcustody.governance.api.models.shown import page_of, shown
from kvcustody.governance.observability.attempts import REASONS
from kvcustody.governance.service.epochs.epoch_book import PAGE_RAISES
from kvcustody.governance.service.epochs.epoch_takers import EpochTaker
from kvcustody.governance.service.fleet.workers import WorkerRun
from kvcustody.governance.service.ingest.check_leaves import KEPT_RUNS_MAX
from kvcustody.governance.service.ingest.worker_protocol import PROTOCOL
from kvcustody.governance.service.operations.parameters import LARGE

Workers = page_of(
    shown(
        WorkerRun,
        example={
            "worker": "gpu-0",
            "incarnation": "ab" * 16,
            "started_us": 1_780_000_000_000_000,
            "ended_us": None,
            "end": None,
            "seen_us": 1_780_000_100_000_000,
            "silent": False,
            "received_sequence": 4711,
            "policy_revision": 3,
            "status": {"running": 4},
            "charged": {"acme": 900},
            "tenants": {"active_tokens": {"acme": 1200}},
            "origin": "",
            "state": "at work",
            "epoch_version": 16,
            "epoch_since_us": 1_780_000_050_000_000,
            "epoch_behind_since_us": 1_780_000_099_000_000,
            "unread": "",
        },
    ),
    "Workers",
)
Doors = page_of(
    shown(
        EpochTaker,
        example={
            "name": "door-1",
            "role": "door",
            "version": 16,
            "since_us": 1_780_000_050_000_000,
            "newest": 17,
            "heard_us": 1_780_000_100_000_000,
            "behind_since_us": 1_780_000_099_000_000,
            "state": "behind",
            "unread": "",
        },
    ),
    "Doors",
)
NameScope = Literal["session", "subject", "tenant"]
Counter = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-z][a-z0-9_./:-]*$")]


_ORDER = {
    "erasure": "4f1c0e",
    "tenant": "acme",
    "selector": "subject",
    "subject": "5e0c…",
    "session": None,
    "actor": "acme-dpo",
    "at_us": 1_780_000_000_000_000,
    "deadline_us": 1_780_000_060_000_000,
    "detail": "{}",
    "named": True,
    "subject_name": "user-17",
    "session_name": None,
}


_KEY_ORDER = {"order": 4711, "tenant": "acme", "action": "rotate", "at_us": 1_780_000_000_000_000}


class DeadProcess(Model):
    """A process that will not return, with its spill: a second person must agree within a day."""

    model_config = example({"incarnation": "ab" * 16, "spill_lost": True, "reason": "the host burnt down"})

    incarnation: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    spill_lost: Literal[True]
    reason: Annotated[str, Field(min_length=1, max_length=256)]


class ClosingModel(Model):
    """The outcome: `asked` (another person has to agree), `closed`, or `closing` where that takes longer."""

    model_config = example({"incarnation": "ab" * 16, "outcome": "asked"})

    incarnation: str
    outcome: Literal["asked", "closed", "closing"]


class PolicyRecords(Model):
    """Signed steps, and their total number; the worker verifies them itself."""

    model_config = example({"items": ['{"action":"proposed"}'], "total": 1})

    items: list[str]
    total: Whole


class ErasureOrderModel(Model):
    """An erasure order for a worker. Only workers see whom it names."""

    model_config = example(_ORDER)

    erasure: str
    tenant: str | None
    selector: str
    subject: str | None
    session: str | None
    actor: str
    at_us: Utc
    deadline_us: Utc
    detail: str
    named: bool
    subject_name: str | None
    session_name: str | None


class WorkerKeyOrder(Model):
    """A tenant's key epochs from before `at_us` are to get a successor (`rotate`), or to end with one (`destroy`)."""

    model_config = example(_KEY_ORDER)

    order: int
    tenant: str
    action: Literal["rotate", "destroy"]
    at_us: Utc


class RestrictedSubjectModel(Model):
    """A subject whose processing a case restricts: its blocks are kept but not used."""

    model_config = example({"case_id": "0f" * 16, "tenant": "acme", "subject": "ada"})

    case_id: str
    tenant: str
    subject: str


class Orders(Model):
    """The erasures that the worker still owes an answer for, the last key order of each tenant, and for whom it
    enforces.

    `restrictions`: all that are in force.
    """

    model_config = example({"items": [_ORDER], "keys": [_KEY_ORDER], "enforcement": None, "restrictions": []})

    items: list[ErasureOrderModel]
    keys: list[WorkerKeyOrder]
    enforcement: EnforcementOrderModel | None = None  # type: ignore[valid-type]
    restrictions: list[RestrictedSubjectModel] = Field(default_factory=list)


class IncarnationModel(Model):
    """A worker process: `offset_us` converts its boot time to UTC; `utc_us` is its clock's present time.

    `utc_us` is left out for a process that has ended, whose spill is handed in.
    """

    model_config = example({"offset_us": 1_779_990_000_000_000, "utc_us": 1_780_000_000_000_000})

    offset_us: Annotated[int, Field(strict=True, gt=-LARGE, lt=LARGE)]
    utc_us: Utc | None = None


class Registered(Model):
    """Whether the incarnation is new, its worker, and the known issuers; the first issuer's tenants go by bare ids.

    `protocol`: the version that this control plane speaks with workers.
    """

    model_config = example({"new": True, "worker": "gpu-0", "issuers": ["corp"], "protocol": PROTOCOL})

    new: bool
    worker: str
    issuers: list[str]
    protocol: Whole


class MetIssuer(Model):
    """An issuer of tenants that a worker met: its tenants go by bare ids, or by qualified names."""

    model_config = example({"issuer": "corp", "tenants": "bare"})

    issuer: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\^\x00-\x1f]+$")]
    tenants: Literal["bare", "qualified"]


class KnownIssuers(Model):
    """The issuers that the ledger knows; the first one's tenants go by bare ids."""

    model_config = example({"issuers": ["corp"]})

    issuers: list[str]


class BegunErasure(Model):
    """An erasure that a worker's own engine began: its selector as one canonical line, and its deadline."""

    model_config = example({"selector": '{"tenant":"acme"}', "deadline_us": 1_780_000_060_000_000})

    selector: Annotated[str, Field(min_length=2, max_length=8192)]
    deadline_us: Utc


class ErasureOnRecord(Model):
    """Whether this put the request on record."""

    model_config = example({"new": True})

    new: bool


class RefusedAttempts(Model):
    """The number of refusals of one source for one reason: a network, or `others`."""

    model_config = example({"reason": "forged", "source": "203.0.113.0/24", "attempts": 17})

    reason: Literal[*sorted(REASONS)]  # type: ignore[valid-type]
    source: Annotated[str, Field(max_length=64, pattern=r"^[0-9a-fA-F:./]*$|^others$")]
    attempts: Annotated[int, Field(strict=True, ge=1, lt=LARGE)]


class AttemptsReport(Model):
    """Identities that a worker's door refused in the last `seconds`."""

    model_config = example({"seconds": 60, "items": [{"reason": "forged", "source": "203.0.113.0/24", "attempts": 17}]})

    seconds: Annotated[int, Field(strict=True, ge=0, le=86_400 * 366)]
    items: Annotated[list[RefusedAttempts], Field(min_length=1, max_length=1000)]


class WorkerReport(Model):
    """A worker's status: counters by name, blocks by charged tenant, and tenants' work."""

    model_config = example(
        {
            "policy_revision": 3,
            "status": {"running": 4, "blocks.cached": 900},
            "charged": {"acme": 900},
            "tenants": {"active_tokens": {"acme": 1200}},
        }
    )

    policy_revision: Whole = 0
    status: Annotated[
        dict[Counter, Annotated[Measure, Field(strict=True)]],
        Field(max_length=512, default_factory=dict),
    ]
    charged: Annotated[dict[TenantName, Whole], Field(max_length=1000, default_factory=dict)]
    tenants: Annotated[
        dict[
            Literal["active_tokens", "denials", "hit_tokens", "prompt_tokens", "recomputed_blocks", "thrashing"],
            Annotated[dict[TenantName, Annotated[Measure, Field(ge=0)]], Field(max_length=1000)],
        ],
        Field(default_factory=dict),
    ]


class Heard(Model):
    """When the report arrived; `unlinkings`: how many times subjects were unlinked from their pseudonyms."""

    model_config = example({"at_us": 1_780_000_000_000_000, "unlinkings": 0})

    at_us: Utc
    unlinkings: Whole


class PseudonymsModel(Model):
    """Pseudonyms that a worker has in memory."""

    model_config = example({"names": ["0a1b2c3d4e5f60718293a4b5"]})

    names: Annotated[list[Annotated[str, Field(pattern=r"^[0-9a-f]{24}([0-9a-f]{8})?$")]], Field(max_length=5000)]


class UnlinkedModel(Model):
    """Pseudonyms that no longer belong to anybody; the worker must forget them."""

    model_config = example({"gone": []})

    gone: list[str]


class BatchStored(Model):
    """The result of a batch: the number of new leaves, and of those that the ledger had. It is durable.

    `unlinkings`: how often subjects were unlinked from their pseudonyms; where it changed, ask `checkPseudonyms`.
    """

    model_config = example({"added": 1000, "known": 0, "last_sequence": 1000, "unlinkings": 0})

    added: Whole
    known: Whole
    last_sequence: Whole
    unlinkings: Whole


_RUN = {"incarnation": "ab" * 16, "first": 1, "last": 500, "leaves": 510}


class KeptRunModel(Model):
    """Consecutive sequences of a process of this worker, all acknowledged, and the number of their leaves."""

    model_config = example(_RUN)

    incarnation: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    first: Annotated[int, Field(strict=True, ge=1, lt=LARGE)]
    last: Annotated[int, Field(strict=True, ge=1, lt=LARGE)]
    leaves: Annotated[int, Field(strict=True, ge=1, lt=LARGE)]


class KeptModel(Model):
    """The batches that a worker keeps until a checkpoint covers them, oldest first."""

    model_config = example({"runs": [_RUN]})

    runs: Annotated[list[KeptRunModel], Field(max_length=KEPT_RUNS_MAX)]


class RunFound(Model):
    """The number of a run's leaves in the ledger, and whether the newest signed checkpoint covers all of them."""

    model_config = example({"leaves": 510, "covered": True})

    leaves: Whole
    covered: bool


class Covered(Model):
    """The state of the runs in their order, the newest signed checkpoint, and its root log's size (0: none).

    `refused`: why this service signs nothing more (the ledger contradicts what it signed); empty where it does, or
    another process signs.
    """

    model_config = example({"runs": [{"leaves": 510, "covered": True}], "size": 40, "note": "…", "refused": ""})

    runs: list[RunFound]
    size: Whole
    note: str | None
    refused: str


class PlacementRuleModel(Model):
    """A placement rule: only these groups of workers serve matching requests; null: any worker.

    `levels` are places in `classifications`. `dedicated`: these groups serve `tenants` alone.
    """

    model_config = example(
        {
            "id": "acme-own",
            "groups": ["east-1"],
            "tenants": ["acme"],
            "labels": {},
            "levels": None,
            "dedicated": True,
        }
    )

    id: str
    groups: list[str]
    tenants: list[str] | None
    labels: dict[str, str]
    levels: list[Whole] | None
    dedicated: bool


class PlacementClassifyModel(Model):
    """A tenant's default classification, or a route's higher one, with labels."""

    model_config = example({"tenant": "*", "route": None, "level": 1, "labels": {"region": "eu"}})

    tenant: str
    route: str | None
    level: Whole | None
    labels: dict[str, str]


class ReceiptSharesModel(Model):
    """The share of requests for which doors write route receipts: one `n/d` a classification; without one, a tenth.

    `tenants`: those with other shares than `others`. `opened`: tenants that a grant or a segment opens to others, with
    those others: every request of theirs has one. Null: every tenant.
    """

    model_config = example({"others": ["1/10", "1/1"], "tenants": {"acme": ["1/1", "1/1"]}, "opened": []})

    others: list[str]
    tenants: dict[str, list[str]]
    opened: list[str] | None


class PlacementModel(Model):
    """The parts of a policy that decide which workers serve a request, and whether it gets a route receipt.

    `tenants`: the labels of those whose labels are not `default_labels`. `on_worker_death`: one entry a classification,
    or none.
    """

    model_config = example(
        {
            "issuers": [],
            "classifications": ["public", "internal"],
            "tenants": {"acme": {"region": "eu"}},
            "default_labels": {},
            "classify": [],
            "rules": [],
            "on_worker_death": [],
            "route_receipts": {"others": [], "tenants": {}, "opened": []},
        }
    )

    issuers: list[str]
    classifications: list[str]
    tenants: dict[str, dict[str, str]]
    default_labels: dict[str, str]
    classify: list[PlacementClassifyModel]
    rules: list[PlacementRuleModel]
    on_worker_death: list[Literal["restore", "recompute", "fail"]]
    route_receipts: ReceiptSharesModel


class NameScopesModel(Model):
    """The scope of the names that routers see: the `default`, and tenants with another one.

    Tenants are called as the policies in effect call them, with `issuers` listed there. `default` null: no policy is
    known, and each session is named apart. `placement`: of each policy, where one says which workers may serve whose
    requests or which have a route receipt, what decides that; null: no policy is known.
    """

    model_config = example({"default": "subject", "tenants": {"acme": "tenant"}, "issuers": [], "placement": []})

    default: NameScope | None
    tenants: dict[str, NameScope]
    issuers: list[str]
    placement: list[PlacementModel] | None


class EpochsModel(Model):
    """Raised erase epochs in the order of their numbers; each has a number and its scope's tag under `key`.

    What is at or below `floor` has ended. `digest`: of all that is kept up to `version`; empty where more follow. Names
    of routers end after `namespace_days`, and are made by `scopes`, null where the asker knows those or is no door.
    `shortest_ceiling_us`: the shortest that any block may exist under the policies in effect; null: it is unknown.
    """

    model_config = example(
        {
            "key": "ab" * 32,
            "version": 17,
            "floor": 3,
            "digest": "cd" * 32,
            "raised": [[17, "ef" * 16]],
            "namespace_days": 30,
            "scopes": {"default": "subject", "tenants": {"acme": "tenant"}, "issuers": [], "placement": []},
            "shortest_ceiling_us": 1_800_000_000,
            "at_us": 1_780_000_000_000_000,
        }
    )

    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    version: Whole
    floor: Whole
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    raised: Annotated[list[tuple[Whole, str]], Field(max_length=PAGE_RAISES)]
    namespace_days: Whole
    scopes: NameScopesModel | None
    shortest_ceiling_us: Whole | None
    at_us: Utc
