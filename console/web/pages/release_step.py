"""Prepares a release's next step for a person to sign: everything except the signatures.

1. The service signs nothing. The browser signs with the person's own key, which never leaves it, and sends the step
   to the API like anybody else.
2. What is prepared is what the release's own desk would take: the same manifest, body, number and predecessor.
3. An approval is of exactly the widening that its page showed: a page that is out of date prepares nothing.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from kvcustody.console.web.form_errors import FieldError
from kvcustody.console.web.page_request import PageRequest
from kvcustody.errors import PolicyError
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.consents import consent_body, pending_consents
from kvcustody.governance.release.record import SCHEMA, ReleaseAction
from kvcustody.governance.release.replay_records import Proposal, ReleaseState
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.problem_details import ProblemError, not_found
from kvcustody.plurals import several
from kvcustody.policies.bundle.bundle import manifest_of
from kvcustody.policies.bundle.manifest import SCHEMA as BUNDLE_SCHEMA
from kvcustody.policies.document.problems import PolicyRejected
from kvcustody.times import DAY_US

_DAYS_MAX = 3660
_ACTIONS = {
    "proposed": (Permission.WRITE_POLICY, "propose"),
    "approved": (Permission.APPROVE_POLICY, "approve"),
    "activated": (Permission.ACTIVATE_POLICY, "activate"),
    "consented": (Permission.CONSENT, "consent"),
    "revoked": (Permission.NARROW_POLICY, "revoke"),
}


def prepare(visit: PageRequest) -> Response:
    """Return the form's step as JSON: head, body, the manifest that is signed separately, and the address."""
    name = visit.text("step") or ""
    if name not in _ACTIONS:
        raise ProblemError("invalid", "`step` is no step that is signed here")
    action, verb = _ACTIONS[name]
    if name == "revoked" and not visit.may(action):
        action, verb = Permission.CONSENT, "withdraw"  # an owner, of its own
    visit.caller.must(action)
    state = visit.service.policies.state()
    last_us = state.records[-1].at_us if state.records else 0
    at_us = max(visit.service.clock.utc_us(), last_us)
    body, manifest = _body(visit, state, name, at_us)
    head = {
        "action": ReleaseAction(name).value,
        "at_us": at_us,
        "audience": state.trust.audience,
        "number": len(state.records) + 1,
        "previous": state.head,
        "schema": SCHEMA,
    }
    answer = {
        "head": head,
        "body": body,
        "manifest": manifest,
        "schema": SCHEMA,
        "bundle_schema": BUNDLE_SCHEMA,
        "url": f"/v1/policies:{verb}",
        "if_match": f'"{state.head}"',
        "revision": body.get("revision", state.active_revision),
    }
    return Response(orjson.dumps(answer), media_type="application/json")


def _body(
    visit: PageRequest, state: ReleaseState, name: str, at_us: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the body without the manifest's signature, and the manifest where it is signed too."""
    if name == "proposed":
        return _proposed(visit, state, at_us)
    if name == "consented":
        return _consented(visit, state), None
    if name == "revoked":
        return _revoked(visit, state), None
    found = _proposal(visit, state)
    if name == "approved":
        return _approved(visit, state, found), found.manifest.form()
    proof = gates.proof_digest(gates.review(state, found, visit.service.policy_work.assess).proof)
    return {"revision": found.revision, "stage": None, "proof": proof}, None


def _proposed(visit: PageRequest, state: ReleaseState, at_us: int) -> tuple[dict[str, Any], dict[str, Any]]:
    days = visit.number("days")
    days = 365 if days is None else days
    if not 1 <= days <= _DAYS_MAX:
        raise FieldError({"days": f"use from 1 to {_DAYS_MAX} days"})
    restored = visit.number("restores") or 0
    document = _find(state, restored).document if restored else visit.document("source")
    try:
        manifest, _ = manifest_of(
            document,
            audience=state.trust.audience,
            revision=state.highest + 1,
            issued_us=at_us,
            expires_us=at_us + days * DAY_US,
            revoked=state.revoked,
        )
    except PolicyRejected as error:
        raise ProblemError(
            "invalid", f"the document has {several(len(error.problems), 'problem')}; check it first"
        ) from None
    body = {
        "revision": manifest.revision,
        "manifest": manifest.form(),
        "document": document,
        "note": _reason(visit, "note"),
        "restores": restored,
    }
    return body, manifest.form()


def _approved(visit: PageRequest, state: ReleaseState, proposal: Proposal) -> dict[str, Any]:
    proposal.approval = None  # of this copy alone: an approval is against what is active now
    review = gates.review(state, proposal, visit.service.policy_work.assess)
    if (visit.text("cells") or "") != review.cells:
        raise ProblemError("changed", "the widening of this revision differs from the page; reload it")
    return {
        "revision": proposal.revision,
        "base": state.active_revision,
        "revoked": sorted(state.revoked),
        "cells": review.cells,
        "verdict": review.change.verdict.value,
    }


def _consented(visit: PageRequest, state: ReleaseState) -> dict[str, Any]:
    wanted, revision = visit.text("opening"), visit.number("revision")
    for found in pending_consents(state, visit.caller.tenant or "", visit.service.policy_work.assess):
        if (found.id, found.revision) == (wanted, revision):
            return consent_body(found.revision, found.manifest, found.opening.data())
    raise not_found()


def _revoked(visit: PageRequest, state: ReleaseState) -> dict[str, Any]:
    source = visit.text("id") or ""
    owners = state.owners(source)
    if not owners or not (visit.may(Permission.NARROW_POLICY) or owners == {visit.caller.tenant}):
        raise not_found()
    return {"ids": [source], "reason": _reason(visit, "reason")}


def _reason(visit: PageRequest, name: str) -> str:
    """Return why a step is taken, which stays on record."""
    text = visit.text(name)
    if text is None:
        raise FieldError({name: "say why: this stays on record"})
    return text


def _proposal(visit: PageRequest, state: ReleaseState) -> Proposal:
    return _find(state, visit.number("revision") or 0)


def _find(state: ReleaseState, number: int) -> Proposal:
    try:
        return state.proposal(number)
    except PolicyError:
        raise not_found() from None
