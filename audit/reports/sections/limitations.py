"""Limitations: what the evidence of a report does not show. Some always apply; missing evidence adds more."""

from __future__ import annotations

from collections.abc import Iterator

from kvcustody.audit.reports.framework import NAMES
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.reports.section import FactStage, ReportFacts, Section
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.boundary import deaths, stated_policies, stated_tenants
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.sections.losses import SECTION as LOSSES
from kvcustody.audit.reports.sections.proof import SECTION as PROOF
from kvcustody.audit.reports.sections.read_back import SECTION as READ_BACK
from kvcustody.audit.reports.sections.recount import SECTION as RECOUNT
from kvcustody.audit.reports.sections.sample import SECTION as SAMPLE
from kvcustody.audit.reports.sections.tiers import SECTION as TIERS
from kvcustody.audit.tlog.witness.status import UNWITNESSED
from kvcustody.plurals import several

ALWAYS = (
    "The log shows that nothing recorded was altered. That everything was recorded rests on the identities under "
    "Reconciliation.",
    "A leaf shows what was written and when it was sealed, and not that it is true.",
    "Outside the boundary: attackers with the engine's own user id or root, code execution in the engine, DMA and RDMA "
    "peers without confidential computing, residue in L2, registers and shared memory, virtual machine snapshots, "
    "memorisation by a model, packet sizes.",
    "KV caches only: prompts, outputs, logs and backups elsewhere are not covered.",
    "A due time and a ceiling that were recorded falsely, both and in accord with every hold, cannot be told from true "
    "ones.",
    "Review, risk assessment and response are acts of the organisation and are not shown here.",
)


_NAMED = 4


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def limitations(report: ReportFacts) -> tuple[str, ...]:
    """Return the limitations that always apply, and those that follow from this report's facts."""
    sentences = list(ALWAYS)
    boundary = report[BOUNDARY]
    if report.framework.id not in NAMES:
        sentences.append("The controls are those of a file that the preparer gave, and not of kvcustody's library.")
    if boundary.history:
        sentences.insert(0, f"{boundary.history} Figures of this report count it.")
    if boundary.monitored:
        sentences.insert(0, boundary.monitored)
    if boundary.orders:
        sentences.append(boundary.orders)
    policies, tenants = stated_policies(boundary), stated_tenants(boundary)
    if policies:
        sentences.append(
            f"No release on record put {_some(policies)} into effect: that workers ran it, and every limit and ceiling "
            "that their leaves name by it, rests on what these workers say."
        )
    if tenants:
        sentences.append(
            f"No issuer on record has {several(len(tenants), 'tenant')} that workers name ({_some(tenants)}): whose "
            "custody, erasures and decisions these are rests on what the workers say."
        )
    sentences += _not_read_back(report)
    if boundary.witnessed.age_us is None:
        sentences.append(f"{UNWITNESSED[:1].upper()}{UNWITNESSED[1:]}.")
    proof = report[PROOF]
    if proof is None:
        sentences.append("No policy proof was supplied: isolation by policy is shown by decisions alone.")
    elif not proof.is_active:
        sentences.append("The policy that was proved is none that this ledger activated.")
    if any(worker.allocated is None for worker in boundary.workers) and report.asked.tenant is None:
        sentences.append(
            "Workers that still run, or died, left no counters of their own in the ledger: their blocks are reconciled "
            "with the generation counter alone."
        )
    succeeded, silent, declared = deaths(boundary.workers)
    if succeeded + silent + declared:
        sentences.append(
            f"Processes that ended without saying so, whose open custody counts as unproven: {succeeded:,} closed by a "
            f"successor, {silent:,} for their silence, {declared:,} declared dead by two people."
        )
    copies = sum(row.due for row in report[TIERS].rows)
    if copies:
        sentences.append(
            f"Due off the device: {several(copies, 'copy')}, counted by tier. "
            "Where a destroyed key alone proves a copy's end, nobody can open it, and its bytes may still be there."
        )
    if report[LOSSES].gaps:
        sentences.append(f"Gaps ({report[LOSSES].gaps:,}): what they would have said is unknown.")
    if report.asked.seed == ReportParameters._field_defaults["seed"]:
        sentences.append("The sample's seed is the default, which was known beforehand: an auditor gives another.")
    left = sum(item.leaves_left_out for item in report[SAMPLE].sample)
    if left:
        sentences.append(f"Not in this report: {several(left, 'leaf')} of drawn custodies. An export has them all.")
    if report[RECOUNT] is None:
        sentences.append("Coverage was not recomputed from leaves for this report.")
    if report.asked.tenant is not None:
        sentences.append(
            "This is one tenant's own report: totals over all tenants, counters of workers and other tenants' leaves "
            "are left out. The size of the root log shows how many batches all tenants had together."
        )
    return tuple(sentences)


def _not_read_back(report: ReportFacts) -> Iterator[str]:
    total = report[COVERAGE].total
    unread = total.launched_bytes + total.retired_bytes
    if unread:
        yield f"{unread:,} bytes were overwritten without being read back (levels launched and retired)."
    if total.sampled_bytes:
        yield (f"{total.sampled_bytes:,} bytes were verified by samples; the blocks not read are not verified.")
    asleep = sum(row.receipts_unread for row in report[READ_BACK] if row.level == "sampled")
    if asleep:
        meant = sum(row.receipts for row in report[READ_BACK] if row.level == "sampled")
        yield (
            f"Of {several(meant, 'receipt')} of level sampled {asleep:,} read none of their blocks: these count as not "
            "read back."
        )


SECTION: Section[tuple[str, ...]] = Section(
    "limitations",
    "Limitations",
    limitations,
    order=170,
    about=(
        "what the evidence does not show; how many orders carry a signature; policies and tenants that only workers "
        "state"
    ),
    fields={"limitations": ""},
    stage=FactStage.CONCLUSION,
)
