"""Reads open tasks from their sources: the release, the ledger, the book of principals, certificates and sinks on disk.

    inbox = InboxReader(certificates=(path,))
    found = inbox.read(connection, now_us, release=state, effect=effect)

Nothing is kept about it: an item is gone when what it waits for is done. What a revision opens is compared once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, select

from kvcustody.audit.evidence.cases.case_record import CaseState, SubjectCase
from kvcustody.audit.evidence.cases.read_cases import read_cases
from kvcustody.audit.evidence.erasure.requests_and_answers import (
    ErasureStanding,
    ErasureState,
    Requested,
    read_standings,
    requests,
)
from kvcustody.audit.siem.sink_folder import SinkTrouble
from kvcustody.audit.store.schema.service import service_keys, service_principals
from kvcustody.audit.store.schema.stored_rows import stored_rows
from kvcustody.audit.tlog.witness.status import WitnessStatus, witness_status
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.declared_openings import OVER
from kvcustody.governance.release.policies_in_effect import PoliciesInEffect
from kvcustody.governance.release.replay_records import Proposal, ReleaseState
from kvcustody.governance.service.access.principal_table import KEY_COLUMNS, principal_of
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.health.verdict import Trouble, TroubleKind
from kvcustody.governance.service.inbox.item import (
    SOON_US,
    WITNESS_AGE_US,
    InboxItem,
    InboxKind,
    InboxState,
    in_order,
    state_until,
)
from kvcustody.governance.service.schedules.made_reports import undelivered
from kvcustody.policies.workbench.diff.model import WidenedAccess

_COMPARED_MAX = 64


class InboxContents(NamedTuple):
    """The open tasks, the most urgent first, and the dates behind them for metrics.

    `cases`: how many requests of people there are by state; `next_case_us` and `missed_case_us`: the first deadline of
    one that is open, and the first that was missed.
    `ends`: by kind when the first of them ends or ended, however far away. `erasures`: how many there are by state;
    `next_deadline_us` and `missed_deadline_us`: the first deadline that is open, and the first that was missed.
    `unwitnessed_us`: how long the oldest checkpoint that no witness signed has waited; `witnesses`: how many there are.
    """

    items: tuple[InboxItem, ...]
    ends: dict[InboxKind, int]
    erasures: dict[ErasureState, int]
    next_deadline_us: int | None
    missed_deadline_us: int | None
    unwitnessed_us: int
    witnesses: int
    cases: dict[CaseState, int]
    next_case_us: int | None
    missed_case_us: int | None


class _End(NamedTuple):
    """When something ends; `item` None: that is far away."""

    kind: InboxKind
    due_us: int
    item: InboxItem | None


class InboxReader:
    """Reads every open task. `certificates`: PEM files whose expiry matters.

    `troubles`: of the sinks, by name. `verdict`: what else keeps the service from what it is for, once each.
    """

    def __init__(
        self,
        certificates: Sequence[Path] = (),
        assess: gates.Assess = gates.assess,
        troubles: Callable[[], Sequence[tuple[str, SinkTrouble]]] = tuple,
        verdict: Callable[[], Sequence[Trouble]] = tuple,
    ) -> None:
        self._verdict = verdict
        self._certificates = tuple(certificates)
        self._assess = assess
        self._troubles = troubles
        self._compared: dict[tuple[str, int, frozenset[str]], tuple[WidenedAccess, ...]] = {}

    def read(
        self,
        connection: Connection,
        now_us: int,
        *,
        release: ReleaseState | None = None,
        effect: PoliciesInEffect | None = None,
    ) -> InboxContents:
        """Return everybody's open tasks; `connection` sees every tenant's rows."""
        ends = [*_keys(connection, now_us), *_policy(release, now_us), *_grants(effect, now_us)]
        for path in self._certificates:
            ends += _certificates(path, now_us)
        asked = requests(connection)
        standings = read_standings(connection, asked, now_us)
        cases = [(case, case.state(now_us)) for case in read_cases(connection)]
        seen = witness_status(connection, now_us)
        items = [
            *(one.item for one in ends if one.item is not None),
            *self._proposals(release, now_us),
            *_erasures(standings),
            *_cases(cases),
            *_witness(seen, now_us),
            *_reports(connection),
            *_sinks(self._troubles()),
            *_of_service(self._verdict()),
        ]
        due: dict[ErasureState, list[int]] = {}
        for one in asked:
            due.setdefault(standings[one].state, []).append(one.deadline_us)
        return InboxContents(
            in_order(items),
            {kind: min(one.due_us for one in ends if one.kind is kind) for kind in {one.kind for one in ends}},
            {state: len(due.get(state, ())) for state in ErasureState},
            min(due.get(ErasureState.OPEN, ()), default=None),
            min(due.get(ErasureState.MISSED, ()), default=None),
            seen.unwitnessed_us,
            len(seen.witnesses),
            {state: sum(found is state for _, found in cases) for state in CaseState},
            min(
                (case.due.until_us for case, found in cases if found in (CaseState.OPEN, CaseState.NEAR)),
                default=None,
            ),
            min((case.due.until_us for case, found in cases if found is CaseState.MISSED), default=None),
        )

    def _proposals(self, state: ReleaseState | None, now_us: int) -> Iterator[InboxItem]:
        if state is None:
            return
        for number, proposal in sorted(state.proposals.items()):
            waits = number > state.active_revision and not proposal.activated
            if waits and now_us < proposal.manifest.expires_us:
                yield from self._proposal(state, proposal)

    def _proposal(self, state: ReleaseState, proposal: Proposal) -> Iterator[InboxItem]:
        number, since_us, by = proposal.revision, proposal.manifest.issued_us, proposal.author
        missing = [
            opening
            for opening in self._openings(state, proposal)
            if gates.consent_id(proposal, opening) not in state.consents
        ]
        page = f"/policy/{number}"
        if proposal.approval is None:
            yield InboxItem(
                InboxKind.APPROVAL, f"revision-{number}", InboxState.WAITING,
                f"revision {number} of {by} waits for an approval", since_us, None, None, None, page,
                f"kvcustody policy review {number}",
            )  # fmt: skip
        elif not missing:
            yield InboxItem(
                InboxKind.ACTIVATION, f"revision-{number}", InboxState.WAITING,
                f"revision {number} is approved and can be activated", since_us, None, None, None, page,
                f"kvcustody policy activate {number}",
            )  # fmt: skip
        for source, owner in sorted({(opening.id, opening.owner) for opening in missing}):
            yield InboxItem(
                InboxKind.CONSENT, f"revision-{number}-{source}-{owner}", InboxState.WAITING,
                f"revision {number} would open data of {owner} through {source}; its owner has not consented",
                since_us, None, owner, None, "/policy/consents",
                f"kvcustody policy consent {number} {source}",
            )  # fmt: skip

    def _openings(self, state: ReleaseState, proposal: Proposal) -> tuple[WidenedAccess, ...]:
        key = (proposal.manifest.id, state.active_revision, state.revoked)
        if key not in self._compared:
            if len(self._compared) >= _COMPARED_MAX:
                self._compared.clear()
            try:
                found = gates.review(state, proposal, self._assess).change.consents
            except gates.TooCostlyError:
                found = ()  # whoever reviews it is told so
            self._compared[key] = found
        return self._compared[key]


def _policy(state: ReleaseState | None, now_us: int) -> Iterator[_End]:
    """The end of what is active."""
    if state is None or state.active is None:
        return
    ends_us, number = state.active.manifest.expires_us, state.active.revision
    when, item = state_until(InboxKind.POLICY, ends_us, now_us), None
    if when is not None:
        item = InboxItem(
            InboxKind.POLICY, f"revision-{number}", when,
            f"revision {number} {_ends(when)}: after that nothing is reused", None, ends_us, None, None,
            f"/policy/{number}", "kvcustody policy propose",
        )  # fmt: skip
    yield _End(InboxKind.POLICY, ends_us, item)


def _grants(effect: PoliciesInEffect | None, now_us: int) -> Iterator[_End]:
    """Grants and segments in effect; one that has ended, or was taken back, waits for nobody."""
    seen: set[tuple[str, str]] = set()
    for way in effect.openings(now_us) if effect is not None else ():
        if way.until_us is None or way.state in OVER or (way.id, way.owner) in seen:
            continue
        seen.add((way.id, way.owner))
        when, item = state_until(InboxKind.GRANT, way.until_us, now_us), None
        if when is not None:
            item = InboxItem(
                InboxKind.GRANT, f"{way.id}-{way.owner}", when,
                f"{way.kind} {way.id}, which opens data of {way.owner}, {_ends(when)}", None, way.until_us,
                way.owner, None, "/grants", "kvcustody policy propose",
            )  # fmt: skip
        yield _End(InboxKind.GRANT, way.until_us, item)


def _erasures(standings: Mapping[Requested, ErasureStanding]) -> Iterator[InboxItem]:
    """Erasures that missed their deadline, and those that no worker follows."""
    for one, standing in standings.items():
        if standing.state in (ErasureState.MISSED, ErasureState.NOT_FOLLOWED):
            said = "missed its deadline" if standing.state is ErasureState.MISSED else f"is {standing.text}"
            yield InboxItem(
                InboxKind.ERASURE, one.erasure, InboxState.OVERDUE,
                f"erasure {one.erasure[:12]} of {one.tenant or 'any tenant'} {said}", one.at_us,
                one.deadline_us, one.tenant, None, f"/erasures/{one.erasure}",
                f"kvcustody erasure status {one.erasure}",
            )  # fmt: skip


def _cases(cases: Sequence[tuple[SubjectCase, CaseState]]) -> Iterator[InboxItem]:
    """Requests of people whose deadline is near, or was missed."""
    for case, found in cases:
        if found in (CaseState.NEAR, CaseState.MISSED):
            opened, missed = case.opened, found is CaseState.MISSED
            words = "was not answered by" if missed else "must be answered by"
            yield InboxItem(
                InboxKind.CASE, opened.case_id, InboxState.OVERDUE if missed else InboxState.SOON,
                f"case {opened.case_id[:12]} of {opened.tenant} ({opened.subject_right}) {words} {case.due.day}",
                opened.received_us, case.due.until_us, opened.tenant, None, f"/cases/{opened.case_id}",
                f"kvcustody case show {opened.case_id}",
            )  # fmt: skip


def _keys(connection: Connection, now_us: int) -> Iterator[_End]:
    """Principals whose last key is about to end, or has within as long."""
    table, soon_us = service_keys.c, SOON_US[InboxKind.KEY]
    query = select(*KEY_COLUMNS).where(table.revoked_us.is_(None), table.expires_us > now_us - soon_us)
    last: dict[str, tuple[int, str, int]] = {}
    for key in stored_rows(connection, query):
        if not key.unread:  # it counts as no key
            ends = (key.expires_us, key.prefix, key.issued_us)
            last[key.principal] = max(last.get(key.principal, (0, "", 0)), ends)
    rows = stored_rows(
        connection,
        select(service_principals).where(
            service_principals.c.name.in_(last), service_principals.c.disabled_us.is_(None)
        ),
    )
    for one in map(principal_of, rows):
        ends_us, prefix, issued_us = last[one.name]
        if Role.BOOTSTRAP in one.roles:
            continue
        when, item = state_until(InboxKind.KEY, ends_us, now_us), None
        if when is not None:
            item = InboxItem(
                InboxKind.KEY, prefix, when, f"the last key of {one.name} {_ends(when)}", issued_us, ends_us,
                None, one.name, "/principals", f"kvcustody apikey issue {one.name} --replace",
            )  # fmt: skip
        yield _End(InboxKind.KEY, ends_us, item)


def _witness(witness: WitnessStatus, now_us: int) -> Iterator[InboxItem]:
    if not witness.signed_size:
        return  # nothing is signed that a witness could see
    if not witness.witnesses:
        yield InboxItem(
            InboxKind.WITNESS, "none", InboxState.WAITING,
            ("no witness has signed this ledger: split views and truncated tails stay "
"undetected"), None, None, None, None,
            "/health", "kvcustody witness serve",
        )  # fmt: skip
    elif witness.unwitnessed_us > WITNESS_AGE_US:
        since_us = now_us - witness.unwitnessed_us
        yield InboxItem(
            InboxKind.WITNESS, "behind", InboxState.OVERDUE, "no witness has signed newer records",
            since_us, since_us + WITNESS_AGE_US, None, None, "/health", "kvcustody audit status",
        )  # fmt: skip


def _reports(connection: Connection) -> Iterator[InboxItem]:
    """Scheduled reports that could not be made, and those that a destination did not take."""
    for one in undelivered(connection):
        what = f"the {one.framework} report {one.report[:12]} of {one.tenant or 'all tenants'}"
        when = "and is not retried" if one.is_given_up else f"after {one.tries} tries"
        done = f"was not accepted by {one.destination}" if one.destination else "was not made"
        yield InboxItem(
            InboxKind.REPORT, f"{one.report}-{one.destination}" if one.destination else one.report,
            InboxState.OVERDUE if one.is_given_up else InboxState.WAITING,
            f"{what} {done}, {when}: {one.error}", one.since_us, None, one.tenant, one.principal, "/reports",
            f"kvcustody report retry {one.report}",
        )  # fmt: skip


def _sinks(troubles: Sequence[tuple[str, SinkTrouble]]) -> Iterator[InboxItem]:
    """Sinks that take nothing, gave batches up, or lost leaves."""
    for name, trouble in troubles:
        yield InboxItem(
            InboxKind.SINK, f"{name}-{trouble.about}",
            InboxState.OVERDUE if trouble.lasting else InboxState.WAITING, f"sink {name}: {trouble.text}",
            trouble.since_us, None, None, None, "/health", f"kvcustody service {trouble.operation} {name}",
        )  # fmt: skip


def _of_service(troubles: Sequence[Trouble]) -> Iterator[InboxItem]:
    """What the verdict says, one item a kind; of sinks there are items of their own."""
    texts: dict[TroubleKind, list[str]] = {}
    for one in troubles:
        if one.kind is not TroubleKind.SINK:
            texts.setdefault(one.kind, []).append(one.text)
    for kind, said in texts.items():
        yield InboxItem(
            InboxKind.SERVICE, kind.value, InboxState.OVERDUE, "; ".join(said),
            None, None, None, None, "/health", "kvcustody service health",
        )  # fmt: skip


def _certificates(path: Path, now_us: int) -> Iterator[_End]:
    """The first certificate of a file to end; one that cannot be read is said by whoever serves with it."""
    try:
        from cryptography import x509

        ends = min(one.not_valid_after_utc for one in x509.load_pem_x509_certificates(path.read_bytes()))
    except (OSError, ValueError):
        return
    ends_us = int(ends.timestamp()) * 1_000_000
    when, item = state_until(InboxKind.CERTIFICATE, ends_us, now_us), None
    if when is not None:
        item = InboxItem(
            InboxKind.CERTIFICATE, path.name, when, f"the certificate in {path.name} {_ends(when)}", None, ends_us,
            None, None, "/health", "kvcustody serve",
        )  # fmt: skip
    yield _End(InboxKind.CERTIFICATE, ends_us, item)


def _ends(when: InboxState) -> str:
    return "has ended" if when is InboxState.OVERDUE else "ends soon"
