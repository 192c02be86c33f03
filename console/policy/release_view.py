"""Reviews, proposals and histories of releases, as data and in lines."""

from __future__ import annotations

from typing import Any

from kvcustody.console.command import print_json
from kvcustody.governance.release.activation_gates import Review
from kvcustody.governance.release.record import read_stage
from kvcustody.governance.release.replay_records import Proposal, ReleaseState
from kvcustody.policies.workbench.request import instant


def review_data(found: Review) -> dict[str, Any]:
    """A review as JSON data."""
    return {
        "revision": found.proposal.revision,
        "digest": found.proposal.manifest.digest,
        "verdict": found.change.verdict.value,
        "cells": found.cells,
        "missing_consents": [opening.data() for opening in found.missing],
        "proved": found.proof.holds,
        "difference": found.change.data(),
    }


def history_data(state: ReleaseState) -> dict[str, Any]:
    """A release as JSON data."""
    return {
        "audience": state.trust.audience,
        "active": state.active_revision,
        "staged": None if state.staged is None else state.staged.revision,
        "stage": None if state.stage is None else str(state.stage),
        "revoked": sorted(state.revoked),
        "glass_broken_until_us": state.active.until_us if state.active is not None else 0,
        "steps": [
            {
                "step": record.number,
                "at": instant(record.at_us),
                "who": record.actor,
                "what": record.action.value,
                "revision": int(record.body.get("revision", 0)),
                "detail": _detail(record.body),
            }
            for record in state.records
        ],
    }


def _detail(body: Any) -> str:
    if "ids" in body:
        return f"{', '.join(body['ids'])}: {body['reason']}"
    if "note" in body:
        return str(body["note"])
    if "what" in body:
        return f"{body['what']['owner']} lets {body['what']['reader']} read through {body['what']['id']}"
    if body.get("stage"):
        return f"staged for {read_stage(body['stage'])}"
    return str(body.get("verdict", ""))


def show_proposal(made: Proposal, as_json: bool) -> None:
    """A proposal in a line, or as JSON."""
    manifest = made.manifest
    if as_json:
        print_json({"manifest": manifest.form(), "id": manifest.id, "author": made.author})
    else:
        print(f"proposed: {manifest.name}, revision {manifest.revision}, {manifest.digest}")


def show_review(found: Review) -> None:
    """Whether isolation is proved, and whose consent is lacking."""
    print("isolation: proved" if found.proof.holds else "isolation: NOT PROVED; see `kvcustody policy prove`")
    for opening in found.missing:
        print(f"lacks the consent of {opening.owner} to {opening.id}")
