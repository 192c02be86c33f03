"""A supplied proof of the policy, and whether the ledger activated that policy."""

from __future__ import annotations

from kvcustody.audit.reports.given import PolicyProof
from kvcustody.audit.reports.section import Citation, ReportFacts, ReportReading, Section
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY


def supplied_proof(reading: ReportReading) -> PolicyProof | None:
    """Return the proof; None if nobody supplied one."""
    if reading.proof is None:
        return None
    digests = {policy.digest for policy in reading[BOUNDARY].policies}
    return reading.proof._replace(is_active=reading.proof.digest in digests)


def _carries(report: ReportFacts) -> bool:
    proof = report[SECTION]
    return proof is not None and proof.holds and proof.is_active


SECTION: Section[PolicyProof | None] = Section(
    "proof",
    "Policy proof",
    supplied_proof,
    order=51,
    about="the supplied proof of the policy, and whether the ledger activated that policy",
    part=None,
    printed_in="boundary",
    fields={"proof": "the policy's proof"},
    cited={"proof": Citation("Policy proof", _carries)},
)
