"""Operations of the policy release: its state, the revisions, and the steps that people sign.

1. A step arrives signed by its caller's own key; each operation takes the kind of step that its role may take.
2. Who acts for one tenant alone sees of a release where it stands and what waits for that tenant's consent: no
   document, no step, nothing of another tenant's.
3. An activation builds on what its caller has seen: `If-Match` is the `ETag` of the release.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import orjson

from kvcustody.audit.evidence.processes import enforcement as recorded
from kvcustody.errors import PolicyError
from kvcustody.governance.api.declarations import Declarations
from kvcustody.governance.api.given import CallerDep, DeskDep, ServiceDep
from kvcustody.governance.api.http.answer_times import answer_bytes
from kvcustody.governance.api.models.policies import (
    Consents,
    EnforcementAsked,
    EnforcementModel,
    EnforcementOrderModel,
    EnforcingAsked,
    PoliciesInEffectModel,
    Records,
    Release,
    RevisionDetail,
    Revisions,
    SignedStep,
    WorkbenchAnswer,
)
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.consents import pending_consents, revoked_of
from kvcustody.governance.release.record import ReleaseAction, ReleaseRecord
from kvcustody.governance.release.replay_records import Proposal, ReleaseState
from kvcustody.governance.service.access.caller import Caller
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.fleet import enforcement_orders
from kvcustody.governance.service.fleet.policy_releases import PolicyReleases
from kvcustody.governance.service.operations.answer import Content
from kvcustody.governance.service.operations.desk import Desk
from kvcustody.governance.service.operations.operation import Operation
from kvcustody.governance.service.operations.pages import page
from kvcustody.governance.service.operations.parameters import NUMBER, Cursor, Header, Limit, Path
from kvcustody.governance.service.page_cursor import CursorBinding
from kvcustody.governance.service.problem_details import ProblemError, not_found

if TYPE_CHECKING:
    from kvcustody.governance.service.service import Service

Number = Annotated[int, Path(ge=1, lt=1 << 31, examples=[3]), NUMBER]
IfMatch = Annotated[str | None, Header(max_length=200, description="The `ETag` of the release that you read last.")]
POLICY_STEPS = (
    Permission.APPROVE_POLICY,
    Permission.STAGE_POLICY,
    Permission.NARROW_POLICY,
    Permission.WRITE_POLICY,
)
"""Every role that takes a step of a release may read the policy in effect."""
_read = partial(Operation, method="GET", action=Permission.READ_POLICY, tag="policies")
_STEPS: tuple[tuple[str, str, Permission, tuple[ReleaseAction, ...], bool | None, str], ...] = (
    ("proposePolicy", "propose", Permission.WRITE_POLICY, (ReleaseAction.PROPOSED,), None,
     "Propose a document as the next revision, or the content of an earlier revision (a rollback)."),
    ("approvePolicy", "approve", Permission.APPROVE_POLICY, (ReleaseAction.APPROVED,), None,
     "Approve a revision that another person proposed, and exactly the access that it adds."),
    ("consentToPolicy", "consent", Permission.CONSENT, (ReleaseAction.CONSENTED,), None,
     "Consent, as the data's owner, to the access that a revision opens to your tenant's data."),
    ("activatePolicy", "activate", Permission.ACTIVATE_POLICY, (ReleaseAction.ACTIVATED,), False,
     "Put an approved revision into effect, after its proof holds and every owner has consented."),
    ("stagePolicy", "stage", Permission.STAGE_POLICY, (ReleaseAction.ACTIVATED,), True,
     "Put an approved revision into effect for some tenants, or for a share of them."),
    ("revokeGrants", "revoke", Permission.NARROW_POLICY, (ReleaseAction.REVOKED,), None,
     "Revoke grants, segments or groups permanently. It takes effect before it is on record."),
    ("breakGlass", "break-glass", Permission.NARROW_POLICY, (ReleaseAction.BROKE_GLASS,), None,
     ("Change the policy alone in an emergency, for some hours. Only a narrower document or a revision "
"that was in effect is accepted.")),
)  # fmt: skip


def add_policies(api: Declarations) -> None:
    """Declare the operations."""
    missing = ("not-found", "conflict")
    api.add(
        _read("listRevisions", path="/v1/policies", command="policy revisions"),
        revisions,
        answers=Revisions,
        problems=("conflict", "cursor-invalid"),
    )
    standing = Operation(
        "getRelease",
        "GET",
        "/v1/policies/release",
        Permission.READ_POLICY,
        "policies",
        also=(*POLICY_STEPS, Permission.CONSENT),
        command="policy release",
    )
    api.add(standing, release, answers=Release, problems=("conflict",))
    effect = Operation(
        "getPolicyInEffect",
        "GET",
        "/v1/policies/in-effect",
        Permission.READ_POLICY,
        "policies",
        also=POLICY_STEPS,
        command="policy in-effect",
    )
    api.add(effect, in_effect, answers=PoliciesInEffectModel)
    standing_orders = Operation(
        "getEnforcement",
        "GET",
        "/v1/policies/enforcement",
        Permission.READ_POLICY,
        "policies",
        also=POLICY_STEPS,
        command="policy enforcement",
    )
    api.add(standing_orders, enforcement, answers=EnforcementModel)
    ordering = Operation(
        "orderEnforcement",
        "POST",
        "/v1/policies/enforcement:order",
        Permission.ACTIVATE_POLICY,
        "policies",
        keyed=True,
        command="policy enforce",
    )
    api.add(ordering, order_enforcement, answers=EnforcementOrderModel, status=202, problems=("conflict",))
    enforcing = Operation(
        "enforcePolicy",
        "POST",
        "/v1/policies/enforcement:enforce",
        Permission.NARROW_POLICY,
        "policies",
        keyed=True,
        command="policy enforce-everybody",
    )
    api.add(enforcing, enforce_policy, answers=EnforcementOrderModel, status=202)
    records_ = Operation(
        "listReleaseRecords",
        "GET",
        "/v1/policies/records",
        Permission.READ_POLICY,
        "policies",
        also=POLICY_STEPS,
        command="policy records",
    )
    api.add(records_, records, answers=Records, problems=("conflict", "cursor-invalid"))
    consents_ = Operation(
        "listConsents",
        "GET",
        "/v1/policies/consents",
        Permission.CONSENT,
        "policies",
        command="policy consents",
    )
    api.add(consents_, consents, answers=Consents, problems=("conflict", "cursor-invalid"))
    api.add(
        _read("getRevision", path="/v1/policies/{revision}", command="policy revision"),
        revision_of,
        answers=RevisionDetail,
        problems=missing,
    )
    api.add(
        _read("reviewRevision", path="/v1/policies/{revision}/review", command="workbench review"),
        review,
        answers=WorkbenchAnswer,
        problems=missing,
    )
    for name, verb, action, steps, staged, says in _STEPS:
        operation = Operation(
            name, "POST", f"/v1/policies:{verb}", action, "policies", keyed=True, command=f"policy {verb}"
        )
        problems = ("conflict", "changed", "if-match-required") if staged is not None else ("conflict",)
        api.add(operation, _taking(steps, staged, says), answers=Release, problems=problems)


def revisions(caller: CallerDep, service: ServiceDep, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """List every revision, newest first."""
    state = _state(service.policies)
    items = [_revision(state, state.proposals[number]) for number in sorted(state.proposals, reverse=True)]
    return page(service, CursorBinding("listRevisions", caller.name, {}), items, cursor, limit)


def release(caller: CallerDep, service: ServiceDep) -> Content:
    """Get the state of the release."""
    return _release(_state(service.policies), caller.tenant)


def in_effect(desk: DeskDep) -> dict[str, Any]:
    """List the policies that workers run, released or from a file, by their leaves; with no worker, the release's."""
    return desk.policies_in_effect().data()


def order_enforcement(caller: CallerDep, service: ServiceDep, what: EnforcementAsked) -> dict[str, Any]:
    """Order for whom every worker enforces its policy, and until when. For the others it only records decisions.

    A worker follows where its setting `monitoring` allows it and its policy's profile is `shared`; else it enforces.
    """
    return enforcement_orders.order(
        service,
        what.mode,
        tenants=what.tenants,
        share=what.share,
        until_us=what.until_us,
        actor=caller.name,
        reason=what.reason,
    )


def enforce_policy(caller: CallerDep, service: ServiceDep, why: EnforcingAsked) -> dict[str, Any]:
    """Order every worker to enforce its policy for everybody, at once."""
    return enforcement_orders.order(
        service, "enforce", tenants=[], share="", until_us=None, actor=caller.name, reason=why.reason
    )


def consents(caller: CallerDep, service: ServiceDep, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """List what a proposed revision would open on your own tenant's data and that has no consent yet."""
    pending = pending_consents(_state(service.policies), caller.tenant or "", service.policy_work.assess)
    items = [
        {
            "revision": item.revision,
            "manifest": item.manifest,
            "author": item.author,
            "note": item.note,
            "opening": item.id,
            "what": item.opening.data(),
        }
        for item in pending
    ]
    return page(service, CursorBinding("listConsents", caller.name, {}), items, cursor, limit)


def records(caller: CallerDep, service: ServiceDep, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
    """Get the signed steps, oldest first, to verify them yourself."""
    service.policies.trust  # noqa: B018 - `conflict` where there is none
    items = [{"record": data.decode()} for data in service.policies.records()]
    found = page(service, CursorBinding("listReleaseRecords", caller.name, {}), items, cursor, limit)
    return {"items": [item["record"] for item in found["items"]], "next": found["next"]}


def revision_of(service: ServiceDep, revision: Number) -> dict[str, Any]:
    """Get one revision, with its document."""
    state = _state(service.policies)
    found = _proposal(state, revision)
    return _revision(state, found) | {"document": found.document}


def review(service: ServiceDep, revision: Number) -> Content:
    """Get the proof of a revision, its differences from the active one, and the missing consents."""
    state = _state(service.policies)
    proposal = _proposal(state, revision)
    found = service.policy_work.review(*gates.compared(state, proposal), proposal.manifest.id)
    missing = b",".join(what for opening, what in found.openings.items() if opening not in state.consents)
    body = b'{"proof":%b,"change":%b,"cells":%b,"missing":[%b]}'
    body %= (found.proof, found.change, orjson.dumps(found.cells), missing)
    return Content(body)


def _taking(steps: tuple[ReleaseAction, ...], staged: bool | None, says: str) -> Callable[..., Content]:
    if staged is None:

        def take(caller: CallerDep, service: ServiceDep, what: SignedStep) -> Content:
            return taken(service, what, caller, steps, None)

        take.__doc__ = says
        return take

    def take_matching(caller: CallerDep, service: ServiceDep, what: SignedStep, if_match: IfMatch = None) -> Content:
        if if_match is None:
            raise ProblemError("if-match-required")
        if if_match.strip() not in (_tag(_state(service.policies)), "*"):
            raise ProblemError("changed")
        return taken(service, what, caller, steps, staged)

    take_matching.__doc__ = says
    return take_matching


def taken(
    service: Service,
    what: SignedStep,
    caller: Caller,
    steps: tuple[ReleaseAction, ...],
    staged: bool | None,
    check: Callable[[ReleaseState, ReleaseRecord], None] | None = None,
) -> Content:
    """Accept a signed step of one of these kinds, and notify waiting workers."""
    desk = service.policies
    desk.trust  # noqa: B018 - `conflict` where there is none
    state = desk.take(what.record.encode(), caller=caller.name, steps=steps, staged=staged, check=check)
    service.changed()
    return _release(state, caller.tenant)


def _state(desk: PolicyReleases) -> ReleaseState:
    """The release, to be read alone; raises `conflict` where none is released here."""
    desk.trust  # noqa: B018 - `conflict` where there is none
    state = desk.released()
    assert state is not None
    return state


def _tag(state: ReleaseState) -> str:
    return f'"{state.head}"'


def _release(state: ReleaseState, tenant: str | None) -> Content:
    answer = {
        "audience": state.trust.audience,
        "steps": len(state.records),
        "head": state.head,
        "last_us": state.records[-1].at_us if state.records else 0,
        "active_revision": state.active_revision,
        "staged_revision": 0 if state.staged is None else state.staged.revision,
        "revoked": sorted(state.revoked if tenant is None else revoked_of(state, tenant)),
    }
    body = answer_bytes(Release, answer)
    return Content(body, headers={"ETag": _tag(state)})


def _proposal(state: ReleaseState, revision: int) -> Proposal:
    try:
        return state.proposal(revision)
    except PolicyError:
        raise not_found() from None


def _revision(state: ReleaseState, proposal: Proposal) -> dict[str, Any]:
    standing = "approved" if proposal.approval is not None else "proposed"
    if proposal is state.staged:
        standing = "staged"
    elif proposal is state.active:
        standing = "active"
    elif proposal.activated:
        standing = "past"
    return {
        "revision": proposal.revision,
        "name": proposal.policy.name,
        "digest": proposal.manifest.digest,
        "author": proposal.author,
        "note": proposal.note,
        "state": standing,
        "approver": None if proposal.approval is None else proposal.approval.approver,
        "issued_us": proposal.manifest.issued_us,
        "expires_us": proposal.manifest.expires_us,
        "restores": proposal.restores,
    }


def enforcement_on_record(desk: Desk) -> dict[str, Any]:
    """Read the newest order, what running processes do, when anybody was monitored, and the forecast."""
    with desk.reading() as connection:
        order = recorded.newest_order(connection)
        return {
            "order": None if order is None else order._asdict(),
            "workers": [one._asdict() for one in recorded.worker_enforcement(connection)],
            "periods": [one._asdict() for one in recorded.monitored_periods(connection)],
            "forecasts": [one.data() for one in recorded.forecasts(connection)],
        }


def enforcement(desk: DeskDep, caller: CallerDep) -> dict[str, Any]:
    """Get for whom workers enforce: the order, what each does, and the forecast of those it monitors."""
    return enforcement_on_record(desk)
