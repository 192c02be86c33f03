"""The state of a release from its records: every record is verified, then applied in order.

1. A state is a function of the records and the trust configuration. Each record must be signed by a key with the role
   that its action needs. It must follow the previous record, and all records before it must allow it.
2. Revisions rise by one with each proposal. The active one only rises.
3. Nobody approves what they proposed. An approval is of a manifest against one active revision, and void under another.
4. What was revoked stays revoked, whatever is proposed later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcustody.governance.decisions.staged_table import Stage
from kvcustody.governance.release.record import (
    NOTHING_BEFORE,
    ReleaseAction,
    ReleaseError,
    ReleaseRecord,
    read_record,
    read_stage,
)
from kvcustody.policies.bundle.bundle import Bundle, check_document
from kvcustody.policies.bundle.manifest import BundleManifest, read_manifest
from kvcustody.policies.bundle.trust import KeyRole, Trust, TrustedKey
from kvcustody.policies.document.model import Policy
from kvcustody.signed_document import (
    DocumentRejected,
    DocumentSignature,
    check_signature,
    digest,
    read_signature,
)


@dataclass(frozen=True, slots=True)
class Approval:
    """An approval of this manifest, against this active revision, with exactly this widening."""

    approver: str
    signature: DocumentSignature
    base: int
    revoked: frozenset[str]
    cells: str


@dataclass(slots=True)
class Proposal:
    """A revision: its document, its author, and what happened to it."""

    manifest: BundleManifest
    document: str
    policy: Policy
    author: str
    signature: DocumentSignature
    note: str
    restores: int = 0
    until_us: int = 0  # end of the time box of a revision that broke the glass
    approval: Approval | None = None
    activated: bool = False

    @property
    def revision(self) -> int:
        """Its number."""
        return self.manifest.revision

    @property
    def is_break_glass(self) -> bool:
        """Whether one person put it into effect, for a limited time."""
        return self.until_us > 0

    def bundle(self) -> Bundle:
        """Return the revision as a bundle with its signatures so far."""
        signatures = [self.signature] + ([self.approval.signature] if self.approval else [])
        return Bundle(self.manifest, self.document, tuple(sorted(signatures)))


@dataclass(slots=True)
class ReleaseState:
    """The whole state of a release. `active` None: nothing is in effect yet."""

    trust: Trust
    records: list[ReleaseRecord] = field(default_factory=list)
    head: str = NOTHING_BEFORE
    proposals: dict[int, Proposal] = field(default_factory=dict)
    consents: set[str] = field(default_factory=set)
    active: Proposal | None = None
    staged: Proposal | None = None
    stage: Stage | None = None
    revoked: frozenset[str] = frozenset()

    @property
    def highest(self) -> int:
        """The highest revision that was ever proposed."""
        return max(self.proposals, default=0)

    @property
    def active_revision(self) -> int:
        """The revision in effect, 0 where there is none."""
        return 0 if self.active is None else self.active.revision

    def proposal(self, revision: int) -> Proposal:
        """A revision by its number; raises `ReleaseError`."""
        found = self.proposals.get(revision)
        if found is None:
            raise ReleaseError(f"there is no revision `{revision}`; the highest is `{self.highest}`")
        return found

    def apply(self, data: bytes) -> ReleaseRecord:
        """Verify and apply one more record; raises `ReleaseError` and changes nothing for one that is not valid."""
        record = read_record(data)
        if (record.number, record.previous) != (len(self.records) + 1, self.head):
            raise ReleaseError(f"release record `{record.number}` does not follow the one before it")
        if record.audience != self.trust.audience:
            raise ReleaseError(f"release record is for `{record.audience}`, this deployment is `{self.trust.audience}`")
        if self.records and record.at_us < self.records[-1].at_us:
            raise ReleaseError(f"release record `{record.number}` is older than the one before it; check the clock")
        try:
            key = check_signature(self.trust.keys, record.signature, record.message(), f"step `{record.number}`")
            _APPLY[record.action](self, record, key)
        except ReleaseError:
            raise
        except DocumentRejected as error:
            raise ReleaseError(error.message) from None
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            raise ReleaseError(f"release record `{record.number}`: the body is malformed") from None
        self.records.append(record)
        self.head = digest(data)
        return record

    # -- one method for each action -----------------------------------------------------------------------------------

    def _proposed(self, record: ReleaseRecord, key: TrustedKey) -> None:
        _need(key, KeyRole.AUTHOR)
        proposal = self._revision(record, key)
        self.proposals[proposal.revision] = proposal

    def _revision(self, record: ReleaseRecord, key: TrustedKey) -> Proposal:
        body = record.body
        manifest = read_manifest(body["manifest"])
        if manifest.revision != self.highest + 1:
            raise ReleaseError(f"revision `{manifest.revision}` does not follow `{self.highest}`")
        if manifest.audience != self.trust.audience or manifest.issued_us != record.at_us:
            raise ReleaseError(f"revision `{manifest.revision}` is of another deployment or another time")
        if not self.revoked <= set(manifest.revoked):
            raise ReleaseError(f"revision `{manifest.revision}` brings back revoked access")
        signature = read_signature(body["signature"])
        signer = check_signature(self.trust.keys, signature, manifest.message(), "proposal")
        if signer.name != key.name:
            raise ReleaseError("a proposal is not signed by its author")
        policy = check_document(manifest, body["document"])
        restores = int(body["restores"])
        if restores and not self.proposal(restores).activated:
            raise ReleaseError(f"revision `{restores}` was never in effect, so it cannot be restored")
        return Proposal(manifest, body["document"], policy, key.name, signature, str(body["note"]), restores=restores)

    def _approved(self, record: ReleaseRecord, key: TrustedKey) -> None:
        _need(key, KeyRole.APPROVER)
        body = record.body
        proposal = self.proposal(body["revision"])
        if key.public == self.trust.keys[proposal.author].public:
            raise ReleaseError(f"`{key.name}` proposed revision `{proposal.revision}` and cannot approve it")
        if proposal.is_break_glass or proposal.activated:
            raise ReleaseError(f"revision `{proposal.revision}` is in effect already")
        if body["base"] != self.active_revision or frozenset(body["revoked"]) != self.revoked:
            raise ReleaseError(f"the approval of revision `{proposal.revision}` is against another active revision")
        signature = read_signature(body["signature"])
        message = proposal.manifest.message()
        if check_signature(self.trust.keys, signature, message, "approval").name != key.name:
            raise ReleaseError("an approval is not signed by its approver")
        proposal.approval = Approval(key.name, signature, body["base"], self.revoked, str(body["cells"]))

    def _consented(self, record: ReleaseRecord, key: TrustedKey) -> None:
        _need(key, KeyRole.OWNER)
        if record.body["owner"] != key.tenant:
            raise ReleaseError(f"`{key.name}` may consent only for `{key.tenant}`")
        self.consents.add(str(record.body["opening"]))

    def _activated(self, record: ReleaseRecord, key: TrustedKey) -> None:
        proposal = self.proposal(record.body["revision"])
        stage = read_stage(record.body["stage"])
        _need(key, KeyRole.APPROVER, *([KeyRole.OPERATOR] if stage is not None else []))
        self.check_activable(proposal, record.at_us)
        if stage is not None:
            self.staged, self.stage = proposal, stage
            return
        self._take_effect(proposal)

    def check_activable(self, proposal: Proposal, now_us: int) -> None:
        """Raise `ReleaseError` unless this revision may come into effect, as far as records alone can tell."""
        approval, revision = proposal.approval, proposal.revision
        if approval is None:
            raise ReleaseError(f"revision `{revision}` is not approved")
        if revision <= self.active_revision:
            raise ReleaseError(
                f"revision `{revision}` is not newer than the active `{self.active_revision}`; to go back, use "
                "`kvcustody policy rollback`, which proposes the old content as a new revision"
            )
        if approval.base != self.active_revision:
            raise ReleaseError(
                f"revision `{revision}` was approved against revision `{approval.base}`, but "
                f"`{self.active_revision}` is active now; approve it again"
            )
        if not proposal.manifest.issued_us <= now_us < proposal.manifest.expires_us:
            raise ReleaseError(f"revision `{revision}` has expired; propose it again")

    def _revoked(self, record: ReleaseRecord, key: TrustedKey) -> None:
        ids = record.body["ids"]
        if not isinstance(ids, list) or not ids or not all(type(id_) is str for id_ in ids):
            raise ReleaseError("a revocation names no ids")
        if not key.roles & {KeyRole.APPROVER, KeyRole.BREAK_GLASS}:
            _need(key, KeyRole.OWNER)
            foreign = [id_ for id_ in ids if self.owners(id_) != {key.tenant}]
            if foreign:
                raise ReleaseError(f"`{foreign[0]}` is not a grant or segment of `{key.tenant}`")
        self.revoked |= frozenset(ids)

    def owners(self, source: str) -> set[str]:
        """Return the owner of each grant or segment: by the active revision, else any earlier active one, else a
        proposal.

        A mere proposal that gives an id to another owner takes no owner's right to revoke.
        """
        every = list(self.proposals.values())
        in_effect = [found for found in (self.active, self.staged) if found is not None]
        for revisions in (in_effect, [found for found in every if found.activated], every):
            owners = {owner for found in revisions for owner in _owners(found.policy, source)}
            if owners:
                return owners
        return set()

    def _broke_glass(self, record: ReleaseRecord, key: TrustedKey) -> None:
        _need(key, KeyRole.BREAK_GLASS)
        proposal = self._revision(record, key)
        if self.active is None:
            raise ReleaseError("no revision is in effect yet, so break-glass is not possible")
        longest = record.at_us + self.trust.break_glass_seconds_max * 1_000_000
        if not record.at_us < proposal.manifest.expires_us <= longest:
            raise ReleaseError(f"breaking the glass is for at most {self.trust.break_glass_seconds_max // 3600} hours")
        if record.body["base"] != self.active_revision:
            raise ReleaseError("break-glass was signed against another active revision")
        if proposal.restores and proposal.manifest.document != self.proposal(proposal.restores).manifest.document:
            raise ReleaseError(f"this is not the content of revision `{proposal.restores}`")
        proposal.until_us = proposal.manifest.expires_us
        proposal.approval = Approval("", proposal.signature, self.active_revision, self.revoked, "")
        self.proposals[proposal.revision] = proposal
        self._take_effect(proposal)

    def _take_effect(self, proposal: Proposal) -> None:
        self.active, self.staged, self.stage = proposal, None, None
        self.revoked |= frozenset(proposal.manifest.revoked)
        proposal.activated = True


_APPLY = {
    ReleaseAction.PROPOSED: ReleaseState._proposed,
    ReleaseAction.APPROVED: ReleaseState._approved,
    ReleaseAction.CONSENTED: ReleaseState._consented,
    ReleaseAction.ACTIVATED: ReleaseState._activated,
    ReleaseAction.REVOKED: ReleaseState._revoked,
    ReleaseAction.BROKE_GLASS: ReleaseState._broke_glass,
}


def fold(records: Iterable[bytes], trust: Trust) -> ReleaseState:
    """Return the state of these records; raises `ReleaseError` at the first that is not valid."""
    state = ReleaseState(trust)
    for data in records:
        state.apply(data)
    return state


def _owners(policy: Policy, source: str) -> set[str]:
    grants = (*policy.grants, *policy.group_grants())
    owners = {grant.owner for grant in grants if grant.id == source}
    return owners | {segment.owner for segment in policy.segments if segment.id == source}


def _need(key: TrustedKey, *roles: KeyRole) -> None:
    if not key.roles & set(roles):
        wanted = " or ".join(role.value for role in roles)
        raise ReleaseError(f"`{key.name}` does not have the role {wanted}", key=key.name)
