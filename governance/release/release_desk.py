"""The release desk: every step of a policy release as a call that checks, records and then takes effect.

1. A step is checked against the state that all records before it amount to, signed, and put on record: first as a
   class A event in the ledger, then in the store. Narrowing steps go into the store first and on record after.
2. Two desks at one store do not both take the next step; the second is told to look again.
3. The desk needs a store, a trust configuration and a clock; neither a network nor a running worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcustody.audit.kinds import ReleaseStep
from kvcustody.clock import Clock
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.governance.decisions.staged_table import Stage, StagedTable
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.activation_gates import Gate, Review
from kvcustody.governance.release.consents import consent_body
from kvcustody.governance.release.record import (
    ReleaseAction,
    ReleaseError,
    ReleaseRecord,
    make_record,
    stage_form,
)
from kvcustody.governance.release.replay_records import Proposal, ReleaseState, fold
from kvcustody.governance.release.store import ReleaseStore
from kvcustody.policies.bundle.bundle import SKEW_US, manifest_of, sign_manifest, write_bundle
from kvcustody.policies.bundle.manifest import BundleManifest
from kvcustody.policies.bundle.trust import Signer, Trust
from kvcustody.policies.workbench.diff.model import WidenedAccess
from kvcustody.signed_document import DocumentSignature, digest

YEAR_SECONDS = 365 * 86_400


class ReleaseWorkflow:
    """Takes the steps of a release in a store, for people who hold keys."""

    def __init__(
        self,
        store: ReleaseStore,
        trust: Trust,
        *,
        clock: Clock,
        ledger: Ledger,
        gate: Gate = gates.check,
    ) -> None:
        self._store = store
        self._trust = trust
        self._clock = clock if isinstance(clock, DeadlineClock) else DeadlineClock(clock)
        self._ledger = ledger
        self._gate = gate

    def state(self) -> ReleaseState:
        """Return the state of the release, with every record verified; raises `ReleaseError`."""
        return fold(self._store.read(), self._trust)

    def review(self, revision: int) -> Review:
        """Return a revision's proof, its difference from the active one and its missing consents."""
        state = self.state()
        return gates.review(state, state.proposal(revision))

    def propose(
        self,
        document: str,
        signer: Signer,
        *,
        note: str,
        seconds: int = YEAR_SECONDS,
        file: str = "policy",
    ) -> Proposal:
        """Propose a document as the next revision, valid for `seconds`. Raises `PolicyRejected` for a bad document."""
        return self._propose(self.state(), document, signer, note=note, seconds=seconds, file=file)

    def rollback(self, revision: int, signer: Signer, *, note: str, seconds: int = YEAR_SECONDS) -> Proposal:
        """Propose an earlier revision's document as a new, higher revision; it is approved and activated like any
        other.
        """
        state = self.state()
        old = state.proposal(revision)
        if not old.activated:
            raise ReleaseError(f"revision `{revision}` was never in effect, so it cannot be restored")
        return self._propose(state, old.document, signer, note=note, seconds=seconds, restores=revision)

    def approve(self, revision: int, signer: Signer, *, cells: str = "") -> Review:
        """Sign a revision against what is active; one that widens needs `cells`, the digest that its review showed."""
        state = self.state()
        proposal = state.proposal(revision)
        proposal.approval = None  # an earlier approval, perhaps against another base, is replaced
        reviewed = gates.review(state, proposal)
        if reviewed.cells and cells != reviewed.cells:
            raise ReleaseError(
                f"revision `{revision}` {reviewed.change.widening_text()}; review it, then approve exactly that with "
                f"--cells {reviewed.cells}",
                cells=reviewed.cells,
            )
        body = {
            "revision": revision,
            "base": state.active_revision,
            "revoked": sorted(state.revoked),
            "cells": reviewed.cells,
            "verdict": reviewed.change.verdict.value,
            "signature": sign_manifest(proposal.manifest, signer).form(),
        }
        self._take(state, signer, ReleaseAction.APPROVED, body, proposal)
        return reviewed

    def consent(self, revision: int, source: str, signer: Signer) -> tuple[WidenedAccess, ...]:
        """Record the owner's consent to what a revision opens through the grant or segment `source`."""
        state = self.state()
        proposal = state.proposal(revision)
        tenant = next((key.tenant for key in self._trust.keys.values() if key.name == signer.name), None)
        openings = tuple(
            opening
            for opening in gates.review(state, proposal).change.consents
            if opening.id == source and opening.owner == tenant
        )
        if not openings:
            raise ReleaseError(f"revision `{revision}` opens nothing of `{tenant}` through `{source}`")
        for opening in openings:
            body = consent_body(revision, proposal.manifest.id, opening.data())
            self._take(state, signer, ReleaseAction.CONSENTED, body, proposal, detail=opening.id)
        return openings

    def activate(self, revision: int, signer: Signer, *, stage: Stage | None = None) -> Review:
        """Put an approved revision into effect, for everybody or a stage, once it has passed every gate."""
        state = self.state()
        proposal = state.proposal(revision)
        state.check_activable(proposal, self._at(state))
        reviewed = self._gate(state, proposal)
        if stage is not None:
            if state.active is None:
                raise ReleaseError("the first revision cannot be staged: no other revision is in effect")
            coming = gates.table_of(proposal, state.revoked)
            stage = Stage(frozenset(map(coming.policy.named, stage.tenants)), stage.share)
            StagedTable(gates.table_of(state.active, state.revoked), coming, stage)
        body = {"revision": revision, "stage": stage_form(stage), "proof": gates.proof_digest(reviewed.proof)}
        detail = "" if stage is None else str(stage)
        self._take(state, signer, ReleaseAction.ACTIVATED, body, proposal, detail=detail)
        return reviewed

    def revoke(self, ids: Iterable[str], signer: Signer, *, reason: str) -> frozenset[str]:
        """Withdraw grants, segments or groups permanently. It takes effect before it is recorded; returns all
        tombstones.
        """
        state = self.state()
        listed = sorted(set(ids))
        body = {"ids": listed, "reason": reason}
        self._take(state, signer, ReleaseAction.REVOKED, body, state.active, narrows=True, detail=",".join(listed))
        return state.revoked

    def break_glass(
        self, signer: Signer, *, reason: str, seconds: int, document: str | None = None, restores: int = 0
    ) -> Review:
        """Act in an emergency, by one person: a narrower document, or an earlier active revision, for `seconds`.

        When the time is over nothing is reused, until a revision is released in the ordinary way.
        """
        state = self.state()
        if (document is None) == (restores == 0):
            raise ReleaseError("break-glass needs either a narrower document or a revision to restore")
        text = state.proposal(restores).document if document is None else document
        manifest, signature = self._manifest(state, text, signer, seconds, "break-glass")
        body = self._body(manifest, text, signature, reason, restores) | {"base": state.active_revision}
        trial = fold(self._store.read(), self._trust)
        record = self._record(trial, signer, ReleaseAction.BROKE_GLASS, body)
        trial.apply(record.to_bytes())
        assert trial.active is not None
        found = self._gate(trial, trial.active)
        self._take(state, signer, ReleaseAction.BROKE_GLASS, body, trial.active, narrows=True, detail=reason)
        return found

    def bundle(self, revision: int) -> bytes:
        """Return an approved revision as a signed bundle; raises `ReleaseError` for one that is not approved."""
        state = self.state()
        proposal = state.proposal(revision)
        if proposal.approval is None or proposal.is_break_glass:
            raise ReleaseError(f"revision `{revision}` is not approved, so it has no bundle")
        since = sorted(state.revoked - set(proposal.manifest.revoked))
        if since:
            raise ReleaseError(
                f"revision `{revision}` does not know that `{since[0]}` was revoked; release a new revision, whose "
                "bundle does"
            )
        return write_bundle(proposal.bundle())

    # -- how a step is taken ------------------------------------------------------------------------------------------

    def _propose(
        self,
        state: ReleaseState,
        document: str,
        signer: Signer,
        *,
        note: str,
        seconds: int,
        restores: int = 0,
        file: str = "policy",
    ) -> Proposal:
        manifest, signature = self._manifest(state, document, signer, seconds, file)
        body = self._body(manifest, document, signature, note, restores)
        self._take(state, signer, ReleaseAction.PROPOSED, body, None, manifest=manifest)
        return state.proposal(manifest.revision)

    def _manifest(
        self, state: ReleaseState, document: str, signer: Signer, seconds: int, file: str
    ) -> tuple[BundleManifest, DocumentSignature]:
        at_us = self._at(state)
        manifest, _ = manifest_of(
            document,
            audience=self._trust.audience,
            revision=state.highest + 1,
            issued_us=at_us,
            expires_us=at_us + seconds * 1_000_000,
            revoked=state.revoked,
            file=file,
        )
        return manifest, sign_manifest(manifest, signer)

    @staticmethod
    def _body(
        manifest: BundleManifest, document: str, signature: DocumentSignature, note: str, restores: int
    ) -> dict[str, Any]:
        return {
            "revision": manifest.revision,
            "manifest": manifest.form(),
            "document": document,
            "signature": signature.form(),
            "note": note,
            "restores": restores,
        }

    def _at(self, state: ReleaseState) -> int:
        """Now, never before the last step; a clock that is far behind it is refused."""
        now_us = self._clock.utc_us()
        last_us = state.records[-1].at_us if state.records else 0
        if now_us < last_us - SKEW_US:
            raise ReleaseError("this machine's clock is behind the last step of the release; correct it")
        return max(now_us, last_us)

    def _record(
        self, state: ReleaseState, signer: Signer, step: ReleaseAction, body: Mapping[str, Any]
    ) -> ReleaseRecord:
        issued_us = body["manifest"]["issued_us"] if "manifest" in body else self._at(state)
        return make_record(
            signer,
            step,
            body,
            number=len(state.records) + 1,
            previous=state.head,
            audience=self._trust.audience,
            at_us=issued_us,
        )

    def _take(
        self,
        state: ReleaseState,
        signer: Signer,
        step: ReleaseAction,
        body: Mapping[str, Any],
        about: Proposal | None,
        *,
        manifest: BundleManifest | None = None,
        narrows: bool = False,
        detail: str = "",
    ) -> None:
        """Apply the step to `state` first, so that nothing is stored that a reader would refuse."""
        if not narrows and self._clock.state().in_doubt:
            raise ReleaseError(
                "this machine's clock is far ahead of its boot clock: set it right, or `kvcustody clock confirm` that "
                "it is; only what narrows is released until then"
            )
        record = self._record(state, signer, step, body)
        data = record.to_bytes()
        state.apply(data)
        manifest = manifest or (about.manifest if about is not None else None)
        event = ReleaseStep(
            self._clock.now_us(),
            record.number,
            step.value,
            manifest.revision if manifest is not None else 0,
            manifest.digest if manifest is not None else "",
            digest(data),
            signer.name,
            detail[:512],
        )
        if not narrows:
            self._ledger.submit_durable(event)
        self._store.append(record.number, data)
        if narrows:
            self._ledger.submit_durable(event)
