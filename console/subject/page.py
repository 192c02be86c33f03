"""A subject's page: what is held, why, until when; what was erased; what to do."""

from __future__ import annotations

from kvcustody.audit.reports.subject_access import SubjectPage
from kvcustody.console.report.render.number_format import count, moment, percent
from kvcustody.console.report.render.page_model import Facts, Literal, Page, Paragraph, Section, Table, Tile

_LISTED = 200


def page_of(found: SubjectPage) -> Page:
    """The page, without the subject's name."""
    evidence, left = found.evidence, found.held_blocks
    return Page(
        "What is held of one subject",
        f"Tenant {found.tenant}, as the ledger stood at {moment(found.now_us)}. The subject appears under its "
        f"pseudonyms only. {found.history}",
        (
            Tile(count(left), "blocks in custody", "" if left else "good"),
            Tile(moment(found.until_us)[:19] or "-", "when the last recorded claim on them ends"),
            Tile(count(len(found.holdings)), "residencies on record"),
            Tile(
                percent(evidence.covered, evidence.due), "of its ended units destroyed in time, with evidence"
            ),
        ),
        (
            _holdings(found),
            Section(
                "What ended",
                (
                    Facts(
                        [
                            ("units due that were handed to this subject", count(evidence.due)),
                            ("covered", count(evidence.covered)),
                            ("late", count(evidence.late)),
                            (
                                "failed, missing, unproven",
                                count(evidence.failed + evidence.missing + evidence.unproven),
                            ),
                            ("overdue", count(evidence.overdue)),
                            ("bytes read back in full", count(evidence.full_bytes)),
                            ("bytes verified by samples", count(evidence.sampled_bytes)),
                            (
                                "bytes overwritten, not read",
                                count(evidence.retired_bytes + evidence.launched_bytes),
                            ),
                        ]
                    ),
                ),
            ),
            _erasures(found),
            Section(
                "Limits of this page",
                (
                    Paragraph(
                        "It speaks of KV caches that this ledger records, and of no prompt, answer, log or backup "
                        "elsewhere. A running request's blocks are listed once it is released, except those handed out "
                        "at its admission."
                    ),
                ),
            ),
        ),
        "kvcustody. Made from the ledger; the pseudonyms are linked to the subject only by the directory.",
    )


def _holdings(found: SubjectPage) -> Section:
    rows = [
        (
            item.state,
            item.classification,
            f"{item.incarnation[:8]} {item.residency}",
            item.pseudonym,
            "asserted" if item.asserted else "verified",
            f"{', '.join(item.reasons)} (revision {item.revision})",
            moment(item.opened_us)[:19],
            moment(item.until_us)[:19],
            count(item.blocks),
            count(item.in_custody),
        )
        for item in found.holdings[:_LISTED]
    ]
    if not rows:
        return Section(
            "What is held, why, until when", (Paragraph("Nothing is on record for this subject.", "good"),)
        )
    table = Table(
        ("state", "class", "residency", "as", "identity", "why", "since", "until", "blocks", "in custody"),
        rows,
        left=8,
        widths=(0.07, 0.09, 0.1, 0.17, 0.08, 0.15, 0.12, 0.12, 0.05, 0.05),
    )
    more = len(found.holdings) - _LISTED
    rest = (Paragraph(f"{count(more)} older residencies are in the JSON.", "quiet"),) if more > 0 else ()
    return Section("What is held, why, until when", (table, *rest))


def _erasures(found: SubjectPage) -> Section:
    rows = [
        (
            item.erasure,
            item.selector,
            moment(item.at_us)[:19],
            moment(item.deadline_us)[:19],
            item.standing.text,
            ", ".join((*item.waiting, *item.unreachable)),
        )
        for item in found.erasures
    ]
    blocks = (
        (
            Table(
                ("erasure", "of", "asked", "deadline", "state", "waiting for"),
                rows,
                left=6,
                widths=(0.24, 0.1, 0.17, 0.17, 0.12, 0.2),
            ),
        )
        if rows
        else (Paragraph("None was asked for.", "quiet"),)
    )
    commands = (
        f"kvcustody erasure request --tenant {found.tenant} --subject NAME\n"
        "kvcustody erasure status ERASURE\n"
        "kvcustody erasure certificate ERASURE --signing-key KEY --out certificate.json"
    )
    return Section(
        "Erasure and certificate",
        (*blocks, Paragraph("To erase, and to show that it was done:"), Literal(commands)),
    )
