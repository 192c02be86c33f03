"""The policy: the active one and its proof, its revisions, and a draft until its proposal.

1. A draft is checked by the workbench's own functions and kept nowhere; only a signed step changes anything.
2. What a revision's page shows is what its gates will ask: its proof, exactly what it changes, the consents it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from kvcustody.console.web.page_request import PageRequest, redirect
from kvcustody.console.web.pages.policy_status import known_policy, read_policy_status, release_of
from kvcustody.console.web.source_listing import DiffLine, Line, lines_of, marked, text_diff
from kvcustody.errors import PolicyError
from kvcustody.governance.api.models.policies import SimulationRequest
from kvcustody.governance.api.operations.policy_release import enforcement_on_record
from kvcustody.governance.api.operations.policy_workbench import simulated
from kvcustody.governance.observability.serving_summary import tiers_at_work
from kvcustody.governance.release import activation_gates as gates
from kvcustody.governance.release.replay_records import Proposal, ReleaseState
from kvcustody.governance.service.access.roles import Permission
from kvcustody.governance.service.problem_details import not_found
from kvcustody.governance.service.processes import policy_tasks as tasks
from kvcustody.governance.service.processes.policy_tasks import Draft
from kvcustody.policies import library
from kvcustody.policies.document.problems import PolicyRejected, Problem
from kvcustody.policies.workbench.diff.model import PolicyDiff
from kvcustody.policies.workbench.prove.model import Proof
from kvcustody.policies.workbench.run_test_cases import CasesReport

_CELLS_SHOWN = 100
_REVISIONS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking a draft: problems, or lint, proof and difference (None: `why` it cannot be compared)."""

    lines: list[Line]
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    proof: Proof | None
    change: PolicyDiff | None
    why: str = ""
    text: list[DiffLine] | None = None  # against what is in effect
    cases: CasesReport | None = None
    wrong_cases: tuple[Problem, ...] = ()
    lost: dict[str, Any] | None = None  # what recorded requests would lose

    @property
    def sound(self) -> bool:
        """Whether the draft may be proposed."""
        return not self.problems


def show(visit: PageRequest) -> Response:
    """Return the policies that workers run, and every released revision; tenant administrators get a link to open
    consents.
    """
    if not visit.may(Permission.READ_POLICY):
        visit.caller.must(Permission.CONSENT)
        return redirect("/policy/consents")
    state = release_of(visit)
    numbers = [] if state is None else sorted(state.proposals, reverse=True)[:_REVISIONS_SHOWN]
    return visit.page(
        "policy/policy.html",
        "Policy",
        state=state,
        effect=read_policy_status(visit),
        enforcement=enforcement_on_record(visit.service),
        revisions=[(number, state.proposals[number], state_word(state, number)) for number in numbers] if state else [],
        writes=visit.may(Permission.WRITE_POLICY),
    )


def revision(visit: PageRequest) -> Response:
    """Return one revision: its progress, its proof, its changes, its text, and the next step."""
    visit.caller.must(Permission.READ_POLICY)
    state, proposal = _proposal(visit)
    review = gates.review(state, proposal, visit.service.policy_work.assess)
    effect = visit.service.policies_in_effect()
    line = visit.number("line") or 0
    earlier = [number for number, one in state.proposals.items() if number < proposal.revision and one.activated]
    before = state.proposals[max(earlier)] if earlier else None
    return visit.page(
        "policy/revision.html",
        f"Revision {proposal.revision}",
        state=state,
        found=proposal,
        word=state_word(state, proposal.revision),
        workers=[
            worker
            for one in effect.policies
            if one.released and one.revision == proposal.revision
            for worker in one.workers
        ],
        at_work=effect.at_work or bool(effect.unsaid),
        review=review,
        new_access=review.change.new_access[:_CELLS_SHOWN],
        lost_access=[cell for cell in review.change.cells if not cell.opens][:_CELLS_SHOWN],
        lines=lines_of(proposal.document, target=line),
        before=before,
        text=None if before is None else text_diff(before.document, proposal.document),
        approves=visit.may(Permission.APPROVE_POLICY)
        and not proposal.activated
        and not _is_approved(state, proposal)
        and proposal.author != visit.caller.name,
        activates=visit.may(Permission.ACTIVATE_POLICY) and _is_approved(state, proposal) and not proposal.activated,
        restores=visit.may(Permission.WRITE_POLICY) and proposal.activated and proposal is not state.active,
    )


def _is_approved(state: ReleaseState, proposal: Proposal) -> bool:
    """Return whether an approval counts: one against another active revision has to be given again."""
    return proposal.approval is not None and proposal.approval.base == state.active_revision


def draft(visit: PageRequest) -> Response:
    """Return an editor with the active policy, a library policy, or the one to restore."""
    visit.caller.must(Permission.WRITE_POLICY)
    chosen = visit.text("from")
    if chosen in library.names():
        document = library.source(str(chosen))
    else:
        known, _ = known_policy(visit.service.policies_in_effect())
        document = "" if known is None or known.policy is None else known.policy.source
    return _draft_page(visit, document, None)


def check(visit: PageRequest) -> Response:
    """Check the form's text (rule 1)."""
    visit.caller.must(Permission.WRITE_POLICY)
    document = visit.document("source")
    return _draft_page(visit, document, _checked(visit, document))


def _tested(visit: PageRequest, draft: Draft) -> tuple[CasesReport | None, tuple[Problem, ...]]:
    """Run the form's test cases against a draft; None without any, problems where they cannot be read."""
    cases = visit.document("cases")
    if not cases.strip():
        return None, ()
    try:
        more = tasks.weight_of(cases)
        return visit.service.policy_work.call(tasks.tested, draft, cases, "cases", more=more), ()
    except PolicyRejected as rejected:
        return None, rejected.problems


def _simulated(visit: PageRequest, document: str) -> dict[str, Any] | None:
    """Return what recorded requests would lose under a draft, where that is requested."""
    if visit.text("simulate") is None:
        return None
    return visit.ask(simulated, SimulationRequest(source=document))


def state_word(state: ReleaseState, number: int) -> str:
    """Return the state: proposed, approved, staged, active or past."""
    proposal = state.proposals[number]
    if proposal is state.active:
        return "active"
    if proposal is state.staged:
        return "staged"
    if proposal.activated:
        return "past"
    return "approved" if proposal.approval is not None else "proposed"


def _draft_page(visit: PageRequest, document: str, checked: Checked | None) -> Response:
    return visit.page(
        "policy/draft.html",
        "A draft",
        document=document,
        checked=checked,
        cases=visit.document("cases"),
        simulate=visit.text("simulate") is not None,
        library=library.names(),
        releases=release_of(visit) is not None,
    )


def _checked(visit: PageRequest, document: str) -> Checked:
    work = visit.service.policy_work
    found = work.call(tasks.validated, Draft(document))
    if not found.sound:
        return Checked(lines_of(document, found.problems), found.problems, (), None, None)
    state, effect = release_of(visit), visit.service.policies_in_effect()
    draft = Draft(document, revoked=frozenset() if state is None else state.revoked)
    tiers = tiers_at_work(one.status for one in visit.service.fleet.running())
    _, warnings = work.call(tasks.linted, draft, visit.service.clock.utc_us(), tiers)
    known, why = known_policy(effect)
    old = None if known is None else known.table()
    change = None if old is None else work.call(tasks.compared, old, draft)
    text = None if known is None or known.policy is None else text_diff(known.policy.source, document)
    report, wrong = _tested(visit, draft)
    return Checked(
        marked(lines_of(document, warnings, "doubt")),
        (),
        warnings,
        work.call(tasks.proved, draft),
        change,
        why,
        text,
        report,
        wrong,
        _simulated(visit, document) if old is not None else None,
    )


def _proposal(visit: PageRequest) -> tuple[ReleaseState, Proposal]:
    text = visit.places["revision"]
    state = release_of(visit)
    if state is None or not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise not_found()
    try:
        return state, state.proposal(int(text))
    except PolicyError:
        raise not_found() from None
