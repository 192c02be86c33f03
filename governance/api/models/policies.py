"""Policies, as the API shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvcustody.audit.evidence.processes.enforcement import (
    EnforcementOrder,
    Forecast,
    MonitoredPeriod,
    WorkerEnforcement,
)
from kvcustody.governance.api.models.base import Model, TenantName, Utc, Whole, example
from kvcustody.governance.api.models.shown import shown
from kvcustody.governance.service.operations.parameters import LARGE

SOURCE = "schema: kvcustody/policy@1\nname: example\n…"
Source = Annotated[str, Field(min_length=1, max_length=1 << 20)]
Ids = Annotated[list[Annotated[str, Field(min_length=1, max_length=160)]], Field(max_length=1000)]
_ENFORCEMENT_ORDER: dict[str, Any] = {
    "order": 4711, "at_us": 1_780_000_000_000_000, "mode": "canary", "tenants": ["acme"], "share_millionths": 50_000,
    "seed": "0f" * 16, "until_us": 1_781_000_000_000_000, "actor": "olga", "reason": "first week",
}  # fmt: skip
_WORKER_ENFORCEMENT: dict[str, Any] = {
    "worker": "gpu-0", "incarnation": "ab" * 16, "mode": "canary", "tenants": ["acme"], "share_millionths": 50_000,
    "until_us": 1_781_000_000_000_000, "since_us": 1_780_000_000_000_000, "order": 4711, "actor": "olga", "refused": "",
}  # fmt: skip
_MONITORED_PERIOD: dict[str, Any] = {
    "worker": "gpu-0", "incarnation": "ab" * 16, "mode": "monitor", "tenants": [], "share_millionths": 0,
    "from_us": 1_779_000_000_000_000, "until_us": 1_780_000_000_000_000, "order": 4700, "actor": "olga",
}  # fmt: skip
_FORECAST: dict[str, Any] = {
    "tenant": "acme", "requests": 900, "would_deny": 12, "prompt_tokens": 90_000, "reused_tokens": 60_000,
    "refused_tokens": 4_000, "forecast_tokens": 55_000,
}  # fmt: skip

EnforcementOrderModel = shown(EnforcementOrder, "EnforcementOrder", _ENFORCEMENT_ORDER)
WorkerEnforcementModel = shown(WorkerEnforcement, "WorkerEnforcement", _WORKER_ENFORCEMENT)
MonitoredPeriodModel = shown(MonitoredPeriod, "MonitoredPeriod", _MONITORED_PERIOD)

_REVISION = {
    "revision": 3,
    "name": "regulated-saas",
    "digest": "sha256:…",
    "author": "alice",
    "note": "joint evaluation",
    "state": "active",
    "approver": "bob",
    "issued_us": 1_780_000_000_000_000,
    "expires_us": 1_811_536_000_000_000,
    "restores": 0,
}

EFFECTIVE = {
    "revision": 3,
    "name": "regulated-saas",
    "digest": "sha256:…",
    "since_us": 1_780_000_000_000_000,
    "stage": "",
    "workers": ["gpu-0", "gpu-1"],
    "source": "release",
    "revoked": [],
}
_OWN_GRANT = {
    "id": "labs-reads-acme",
    "kind": "grant",
    "reader": "acme-labs",
    "at_most": "internal",
    "until_us": 1_806_451_200_000_000,
    "state": "live",
    "reason": "joint evaluation",
}

_CONSENT = {
    "revision": 4,
    "manifest": "sha256:…",
    "author": "alice",
    "note": "joint evaluation",
    "opening": "sha256:…",
    "what": {
        "id": "labs-reads-acme",
        "via": "grant",
        "owner": "acme",
        "reader": "acme-labs",
        "classifications": ["public", "internal"],
        "from": "2026-01-01",
        "until": "2027-03-31",
        "content": "",
        "labels": [],
        "without_effect": "",
    },
}


class PolicySource(Model):
    """A policy document; `revoked` lists ids that stay revoked whatever the document says."""

    model_config = example({"source": SOURCE})

    source: Source
    revoked: Ids = Field(default_factory=list)


class PolicyPair(Model):
    """Two documents; without `old`, the policy in effect."""

    model_config = example({"source": SOURCE, "old": SOURCE})

    source: Source
    old: Source | None = None
    revoked: Ids = Field(default_factory=list)


class SimulationRequest(PolicyPair):
    """The recorded requests to decide again, and the documents to compare; without `old`, the policy in effect."""

    model_config = example({"source": SOURCE, "old": SOURCE})

    since: Annotated[int | None, Field(strict=True, ge=0, lt=LARGE)] = None
    revision: Annotated[int | None, Field(strict=True, ge=1, lt=1 << 31)] = None
    requests_max: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 20_000
    block_tokens: Annotated[int, Field(strict=True, ge=1, le=4096)] = 16


class Simulated(Model):
    """What would change by tenant, most lost blocks first; `complete`: every recorded request was decided."""

    model_config = example({"tenants": [], "unknown_levels": 0, "complete": True})

    tenants: list[dict[str, Any]]
    unknown_levels: Whole
    complete: bool


class PolicyQuestion(Model):
    """One request to explain, under a document or the policy in effect."""

    model_config = example({"reader": "acme-labs", "owner": "acme", "classification": "internal", "via": "grant"})

    reader: TenantName
    owner: TenantName | None = None
    classification: Annotated[str, Field(min_length=1, max_length=128)]
    action: Literal["admit", "reuse", "publish", "retain", "offload", "export", "administer"] = "reuse"
    scope: Literal["session", "subject", "tenant", "group", "public"] = "tenant"
    via: Literal["own", "grant", "segment"] = "own"
    at_us: Annotated[int | None, Field(strict=True, ge=0, lt=LARGE)] = None
    grant: Annotated[str | None, Field(min_length=1, max_length=160)] = None
    source: Source | None = None


class CasesRequest(Model):
    """Cases to run against a document."""

    model_config = example({"source": SOURCE, "cases": "cases: []"})

    source: Source
    cases: Source


class PolicyProblem(Model):
    """A problem in a document: its place and the remedy."""

    line: int
    column: int
    code: str
    message: str
    hint: str


class ValidationModel(Model):
    """Whether a document is valid; `digest` covers its meaning."""

    model_config = example({"sound": True, "digest": "sha256:…", "problems": [], "omitted": 0})

    sound: bool
    digest: str | None
    problems: list[PolicyProblem]
    omitted: int


class WorkbenchAnswer(BaseModel):
    """An answer of the policy workbench, in the form of its command's `--json`."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"examples": [{"verdict": "narrower"}]})


class Revision(Model):
    """A revision of the policy."""

    model_config = example(_REVISION)

    revision: Whole
    name: str
    digest: str
    author: str
    note: str
    state: Literal["proposed", "approved", "staged", "active", "past"]
    approver: str | None
    issued_us: Utc
    expires_us: Utc
    restores: Whole


class RevisionDetail(Revision):
    """A revision with its document."""

    model_config = example(_REVISION | {"document": SOURCE})

    document: str


class Revisions(Model):
    """A page of revisions, newest first."""

    model_config = example({"items": [_REVISION], "next": None})

    items: list[Revision]
    next: str | None


class ConsentScope(Model):
    """What a grant or segment opens, in the words that its owner consents to."""

    id: str
    via: str
    owner: str
    reader: str
    classifications: list[str]
    from_: Annotated[str, Field(alias="from")]
    until: str
    content: str
    labels: list[str]
    without_effect: str


class Consent(Model):
    """An opening on your tenant's data that waits for its consent; `opening` is the digest that a consent names."""

    model_config = example(_CONSENT)

    revision: Whole
    manifest: str
    author: str
    note: str
    opening: str
    what: ConsentScope


class Consents(Model):
    """A page of openings that wait for your tenant's consent, of the newest revision first."""

    model_config = example({"items": [_CONSENT], "next": None})

    items: list[Consent]
    next: str | None


class OwnGrant(Model):
    """A grant on your own tenant's blocks; `until_us` null: it does not end. Name its `id` to withdraw it."""

    model_config = example(_OWN_GRANT)

    id: str
    kind: Literal["grant", "group", "segment"]
    reader: str
    at_most: str
    until_us: Utc | None
    state: Literal["live", "ends soon", "not yet", "expired", "revoked"]
    reason: str


class OwnGrants(Model):
    """A page of your tenant's openings to others.

    `unknown`: digests of policies that workers run and of which the ledger holds no document: what those open is not
    among the items. `at_work`: the items are of what workers run; else of what is released, and no worker is at work.
    """

    model_config = example({"items": [_OWN_GRANT], "next": None, "unknown": [], "at_work": True})

    items: list[OwnGrant]
    next: str | None
    unknown: list[str]
    at_work: bool


class EffectivePolicyModel(Model):
    """A policy and the workers that run it; without workers, the policy that the release has activated.

    `stage`: for whom it is, in words; empty: everybody. `source`: a `release`'s revision; a `document` that the workers
    recorded, from a file of theirs; or `unknown`, where the digest alone is on record.
    """

    model_config = example(EFFECTIVE)

    revision: Whole
    name: str
    digest: str
    since_us: Utc
    stage: str
    workers: list[str]
    source: Literal["release", "document", "unknown"]
    revoked: list[str]


class PoliciesInEffectModel(Model):
    """The policies in effect, those for everybody first; workers may run several.

    `at_work`: it is what workers run, by their signed leaves; else nobody is at work, and it is what is released.
    `unsaid`: workers at work of which no leaf says what they run. `monitoring`: those that do not enforce it for all.
    """

    model_config = example({"items": [EFFECTIVE], "at_work": True, "unsaid": [], "monitoring": []})

    items: list[EffectivePolicyModel]
    at_work: bool
    unsaid: list[str]
    monitoring: list[WorkerEnforcementModel]  # type: ignore[valid-type]


class Release(Model):
    """The state of the release, which the next step builds on. Its `ETag` goes into `If-Match` of an activation.

    `last_us` is when its last step was taken (0: none was). Of `revoked` a tenant's own people see what was theirs.
    """

    model_config = example(
        {
            "audience": "example.com/production",
            "steps": 7,
            "head": "sha256:…",
            "last_us": 1_780_000_000_000_000,
            "active_revision": 3,
            "staged_revision": 0,
            "revoked": [],
        }
    )

    audience: str
    steps: Whole
    head: str
    last_us: Utc
    active_revision: Whole
    staged_revision: Whole
    revoked: list[str]


class Records(Model):
    """Signed steps in their order, each exactly as it was signed."""

    model_config = example({"items": ['{"action":"proposed"}'], "next": None})

    items: list[str]
    next: str | None


class SignedStep(Model):
    """A signed step, as its signer made it (`kvcustody policy …`, release record)."""

    model_config = example({"record": '{"action":"proposed","number":1}'})

    record: Annotated[str, Field(min_length=2, max_length=2 << 20)]


class ForecastModel(Model):
    """The monitored reuse of a tenant: the policy would have denied `refused_tokens` of its `reused_tokens`.

    Enforced, `forecast_tokens` would have been found, and `prefilled_again_tokens` computed.
    """

    model_config = example(_FORECAST | {"prefilled_again_tokens": 5_000})

    tenant: str
    requests: Whole
    would_deny: Whole
    prompt_tokens: Whole
    reused_tokens: Whole
    refused_tokens: Whole
    forecast_tokens: Whole
    prefilled_again_tokens: Whole


assert set(Forecast._fields) < set(ForecastModel.model_fields)


class EnforcementModel(Model):
    """The newest order, what each running process does, when it monitored, and the forecast of then."""

    model_config = example(
        {
            "order": _ENFORCEMENT_ORDER,
            "workers": [_WORKER_ENFORCEMENT],
            "periods": [_MONITORED_PERIOD],
            "forecasts": [_FORECAST | {"prefilled_again_tokens": 5_000}],
        }
    )

    order: EnforcementOrderModel | None  # type: ignore[valid-type]
    workers: list[WorkerEnforcementModel]  # type: ignore[valid-type]
    periods: list[MonitoredPeriodModel]  # type: ignore[valid-type]
    forecasts: list[ForecastModel]


class EnforcementAsked(Model):
    """For whom to enforce: nobody (`monitor`), named tenants and a share of other sessions (`canary`), or everybody.

    `until_us` is needed unless the mode is `enforce`, at most three months ahead; `share` is written `5%`.
    """

    model_config = example(
        {
            "mode": "canary",
            "tenants": ["acme"],
            "share": "5%",
            "until_us": 1_781_000_000_000_000,
            "reason": "first week",
        }
    )

    mode: Literal["monitor", "canary", "enforce"]
    tenants: Annotated[list[TenantName], Field(max_length=256, default_factory=list)]
    share: Annotated[str, Field(max_length=12, pattern=r"^([0-9.]+%)?$")] = ""
    until_us: Utc | None = None
    reason: Annotated[str, Field(min_length=1, max_length=200)]


class EnforcingAsked(Model):
    """Why the policy is enforced for everybody from now on; the reason goes on record."""

    model_config = example({"reason": "the canary is over"})

    reason: Annotated[str, Field(min_length=1, max_length=200)]
