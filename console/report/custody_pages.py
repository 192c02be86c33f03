"""Sections about the system and its custody: boundary, population and reconciliation, coverage and timeliness."""

from __future__ import annotations

from collections.abc import Sequence

from kvcustody.audit.kinds import BARE
from kvcustody.audit.reports.model import Report
from kvcustody.console.report.render import charts
from kvcustody.console.report.render.number_format import (
    count,
    duration,
    minute,
    moment,
    percent,
    second,
    size,
)
from kvcustody.console.report.render.page_model import Block, Chart, Facts, Literal, Paragraph, Section, Table
from kvcustody.plurals import several
from kvcustody.tenants import SEPARATOR
from kvcustody.times import DAY_US, MINUTE_US

_TENANTS_DRAWN = 20
_LEGEND = (("covered", 1), ("late", 2), ("failed or missing", 4), ("disputed", 3), ("unproven or overdue", 5))


def boundary_section(report: Report) -> Section:
    """The checkpoint, workers, policies and logs that the report is about."""
    boundary = report.boundary
    point = boundary.checkpoint
    blocks: list[Block] = [
        Facts(
            [
                ("kvcustody", report.version),
                ("log", point.origin),
                ("checkpoint", f"{point.size} root leaves, root {point.root}"),
                ("last event under it", moment(point.at_us)),
                ("signed", moment(point.signed_us)),
            ]
        ),
        *([Paragraph(boundary.history, "bad")] if boundary.history else []),
        Table(
            (
                "worker",
                "incarnation",
                "software",
                "device",
                "started",
                "end",
                "shards",
                "blocks",
                "bytes a block",
            ),
            [
                (
                    f"{item.name} ({item.origin})" if item.origin else item.name,
                    *(item.incarnation[:12], item.software, item.device, minute(item.started_us)),
                    item.end or "none on record",
                    *(count(item.shards), count(item.blocks), count(item.bytes_per_block)),
                )
                for item in boundary.workers
            ],
            left=6,
            widths=(0.12, 0.12, 0.13, 0.09, 0.14, 0.16, 0.06, 0.09, 0.09),
        ),
        *_policies(report),
        *_proof(report),
        *_issuers(report),
    ]
    if boundary.extends is not None:
        blocks.append(
            Paragraph(
                f"This checkpoint extends the one of {several(boundary.extends, 'root leaf')}. The consistency proof "
                f"has {several(len(boundary.consistency), 'hash')} and is in the JSON."
            )
        )
        blocks.append(
            Table(
                ("changed since that checkpoint, about the same period", "before", "now"),
                [(one.figure, count(one.before), count(one.after)) for one in report.changes]
                or [("nothing: every figure is as it was", "", "")],
            )
        )
    return Section("System boundary", tuple(blocks))


def hashes_section(report: Report) -> Section:
    """What a check begins with: the signed note, every log's root, the population's digest."""
    boundary = report.boundary
    blocks: list[Block] = [
        Paragraph("The checkpoint as it was signed; its signature can be checked with the log's public key."),
        Literal(boundary.checkpoint.note.rstrip("\n")),
        Facts(
            [
                ("digest of the population", report.population.digest),
                *([] if report.recount is None else [("the same, from leaves", report.recount.digest)]),
            ]
        ),
        Table(
            ("log under the checkpoint", "root", "leaves"),
            [(item.name, item.root, count(item.size)) for item in boundary.logs[:100]],
            left=2,
            widths=(0.28, 0.6, 0.12),
        ),
    ]
    if len(boundary.logs) > 100:
        blocks.append(Paragraph(f"In the JSON: {several(len(boundary.logs) - 100, 'more log')}.", "quiet"))
    return Section("Annex: hashes", tuple(blocks), begins_page=True)


def _issuers(report: Report) -> list[Block]:
    """Whose the tenants are, by name."""
    issuers = report.boundary.issuers
    if not issuers:
        return []
    rows = [
        (item.issuer, "ids alone" if item.tenants == BARE else f"id{SEPARATOR}{item.issuer}")
        for item in issuers
    ]
    return [Table(("issuer of tenants", "what they are called"), rows, left=2, widths=(0.5, 0.5))]


def _policies(report: Report) -> Sequence[Block]:
    if not report.boundary.policies:
        return (Paragraph("Policies: this ledger records no activation.", "bad"),)
    return (
        Table(
            ("policy revision", "name", "profile", "in effect from", "by", "released", "digest"),
            [
                (
                    *(str(item.revision), item.name, item.profile, second(item.at_us), item.actor),
                    "on record" if item.released else "stated by a worker",
                    item.digest,
                )
                for item in report.boundary.policies
            ],
            left=7,
            widths=(0.08, 0.15, 0.08, 0.16, 0.1, 0.11, 0.32),
        ),
    )


def _proof(report: Report) -> Sequence[Block]:
    proof = report.proof
    if proof is None:
        return (Paragraph("Policy proof: none was supplied for this report.", "bad"),)
    active = "activated in this ledger" if proof.is_active else "not activated in this ledger"
    return (
        Facts(
            [
                ("policy that was proved", f"{proof.policy}, digest {proof.digest} ({active})"),
                ("proof", f"{'holds' if proof.holds else 'does not hold'}, digest {proof.proof_digest}"),
            ]
        ),
        Table(
            ("property", "what it says", "holds", "cells looked at"),
            [
                (item.id, item.title, "yes" if item.holds else "no", count(item.cells))
                for item in proof.properties
            ],
            left=3,
            widths=(0.1, 0.66, 0.08, 0.16),
            bad=frozenset(place for place, item in enumerate(proof.properties) if not item.holds),
        ),
    )


def population_section(report: Report) -> Section:
    """How the population was taken, and its totals against others."""
    facts = report.population
    return Section(
        "Population and reconciliation",
        (
            Paragraph(
                "The population is every custody that was due in the period. It was taken by this definition:"
            ),
            Literal(facts.query),
            Facts(
                [
                    ("custodies (block, generation)", count(facts.custodies)),
                    ("units (a custody on each shard)", count(facts.units)),
                ]
            ),
            Paragraph(
                "Totals against totals from elsewhere; both sides are shown whether or not they agree."
            ),
            Table(
                ("identity", "left side from", "right side from", "left", "right", "holds"),
                [
                    (
                        *(
                            item.name,
                            item.left_source,
                            item.right_source,
                            count(item.left),
                            count(item.right),
                        ),
                        "yes" if item.holds else "no",
                    )
                    for item in facts.balances
                ],
                left=3,
                widths=(0.38, 0.18, 0.18, 0.1, 0.1, 0.06),
                bad=frozenset(place for place, item in enumerate(facts.balances) if not item.holds),
            ),
        ),
    )


def coverage_section(report: Report) -> Section:
    """Units and bytes, over time and by tenant, and how soon they were destroyed."""
    asked = report.asked
    labels = _labels([item.start_us for item in report.timeline], asked.until_us - asked.since_us)
    by_tenant = _by_tenant(report)
    lags = report.timeliness
    limits = [f"≤ {duration(item.up_to_us)}" if item.up_to_us else "longer" for item in lags.lags]
    return Section(
        "Coverage and timeliness",
        (
            Paragraph(
                "Two figures, never mixed: custody that ended in time with evidence, and bytes destroyed by the "
                "weakest verification of their shards. What was not read back is not called verified."
            ),
            Chart(
                charts.columns(
                    "Units due over the period",
                    labels,
                    [(item.covered, item.uncovered) for item in report.timeline],
                    (("covered", 1), ("not covered", 4)),
                    "UTC",
                )
            ),
            Chart(by_tenant),
            Table(
                (
                    *("tenant", "classification", "due", "covered", "late", "failed", "missing", "unproven"),
                    *("overdue", "disputed", "share"),
                ),
                [
                    (
                        row.tenant,
                        row.classification,
                        *(
                            count(value)
                            for value in (
                                row.due,
                                row.covered,
                                row.late,
                                row.failed,
                                row.missing,
                                row.unproven,
                            )
                        ),
                        *(count(row.overdue), count(row.disputed), percent(row.covered, row.due)),
                    )
                    for row in (*report.coverage, report.total._replace(tenant="all", classification=""))
                ],
                left=2,
            ),
            Table(
                ("bytes destroyed, by weakest verification", "bytes", ""),
                [
                    (
                        "full: read back in full",
                        count(report.total.full_bytes),
                        size(report.total.full_bytes),
                    ),
                    (
                        "sampled: some of a receipt's blocks read",
                        count(report.total.sampled_bytes),
                        size(report.total.sampled_bytes),
                    ),
                    (
                        "retired: the device finished",
                        count(report.total.retired_bytes),
                        size(report.total.retired_bytes),
                    ),
                    (
                        "launched: enqueued",
                        count(report.total.launched_bytes),
                        size(report.total.launched_bytes),
                    ),
                ],
            ),
            *_read_back(report),
            Chart(
                charts.columns(
                    "From due to destroyed",
                    limits,
                    [(item.custodies,) for item in lags.lags],
                    (("custodies", 1),),
                    "",
                )
            ),
            Facts(
                [
                    ("median, 99th percentile", f"{duration(lags.p50_us)}, {duration(lags.p99_us)}"),
                    ("longest", duration(lags.max_us)),
                    ("longest fence, which excuses a late scrub", duration(report.total.fence_us_max)),
                ]
            ),
        ),
    )


def _read_back(report: Report) -> Sequence[Block]:
    """Receipts of the period by what was really read."""
    if not report.read_back:
        return ()
    return (
        Paragraph(
            "Receipts of the period by what was really read back. A boot's scrub is of memory that was in nobody's "
            "custody, and stands apart."
        ),
        Table(
            (
                "of",
                "level",
                "result",
                "receipts",
                "that read nothing",
                "blocks",
                "read",
                "bytes",
                "bytes read",
            ),
            [
                (
                    *(item.scrub, item.level, item.result, count(item.receipts), count(item.receipts_unread)),
                    *(count(item.blocks), count(item.blocks_read), count(item.bytes), count(item.bytes_read)),
                )
                for item in report.read_back
            ],
            left=3,
            bad=frozenset(
                place
                for place, item in enumerate(report.read_back)
                if item.level == "sampled" and item.receipts_unread
            ),
        ),
    )


def tiers_section(report: Report) -> Section:
    """Copies off the device by tier: verdicts, evidence, identities, and what was decided about moving them."""
    tiers = report.tiers
    names = ("due", "covered", "late", "open", "unproven", "disputed", "zeroed", "unlinked", "key_destroyed")
    blocks: list[Block] = [
        Paragraph(
            "Each copy that was due has one verdict. Open: no leaf says yet that it ended, or that its bytes are gone. "
            "A copy whose key is destroyed opens for nobody; it may be unlinked later, and then has both."
        ),
        Table(
            ("tier", "tenant", "classification", *(name.replace("_", " ") for name in names), "share"),
            [
                (*row[:3], *(count(getattr(row, name)) for name in names), percent(row.covered, row.due))
                for row in tiers.rows
            ],
            left=3,
        ),
        Facts([("digest of the copies", tiers.digest)]),
    ]
    if tiers.balances:
        blocks.append(
            Table(
                ("identity", "left side from", "right side from", "left", "right", "holds"),
                [
                    (
                        *(item.name, item.left_source, item.right_source),
                        *(count(item.left), count(item.right), "yes" if item.holds else "no"),
                    )
                    for item in tiers.balances
                ],
                left=3,
                widths=(0.38, 0.18, 0.18, 0.1, 0.1, 0.06),
                bad=frozenset(place for place, item in enumerate(tiers.balances) if not item.holds),
            )
        )
    if tiers.decisions:
        blocks.append(
            Table(
                (
                    "tier",
                    "action",
                    "choice",
                    "outcome",
                    "decisions",
                    "bytes",
                    "moving, predicted",
                    "recomputing",
                    "took",
                ),
                [
                    (
                        *(item.tier, item.action, item.choice, item.outcome or "none"),
                        *(count(item.decisions), size(item.bytes), duration(item.transfer_us)),
                        *(duration(item.recompute_us), duration(item.actual_us)),
                    )
                    for item in tiers.decisions
                ],
                left=4,
            )
        )
    return Section("Tiers", tuple(blocks))


def _labels(starts_us: Sequence[int], period_us: int) -> list[str]:
    """When each part of the period begins: a day, a minute, or a second where parts are shorter than a minute."""
    if period_us > 2 * DAY_US:
        return [minute(start)[:10] for start in starts_us]
    step_us = starts_us[1] - starts_us[0] if len(starts_us) > 1 else period_us
    return [second(start)[11:19] if step_us < MINUTE_US else minute(start)[11:] for start in starts_us]


def _by_tenant(report: Report) -> charts.Figure:
    rows: dict[str, list[int]] = {}
    for row in report.coverage:
        parts = rows.setdefault(row.tenant, [0] * 6)
        disputed = row.in_time - row.covered
        found = (
            row.covered,
            row.late,
            row.failed + row.missing,
            disputed,
            row.unproven + row.overdue,
            row.due,
        )
        for place, value in enumerate(found):
            parts[place] += value
    drawn = sorted(rows.items(), key=lambda item: (-item[1][5], item[0]))[:_TENANTS_DRAWN]
    title = "Units due, by tenant"
    if len(rows) > len(drawn):
        title += f" (the {len(drawn)} largest of {len(rows)})"
    notes = [percent(parts[0], parts[5]) for _, parts in drawn]
    return charts.rows(title, [name for name, _ in drawn], [parts[:5] for _, parts in drawn], _LEGEND, notes)
