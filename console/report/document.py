"""A report as a page, and as the files that are kept: HTML, PDF, JSON, OSCAL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcustody.audit.report.contents import Report, utc_text
from kvcustody.audit.report.framework import SECTIONS, Control
from kvcustody.console.report import charts
from kvcustody.console.report.blocks import (
    Block,
    Chart,
    Facts,
    Items,
    Literal,
    Page,
    Paragraph,
    Section,
    Signatures,
    Table,
    Tile,
)
from kvcustody.console.report.evidence_pages import (
    activity_section,
    exceptions_section,
    losses_section,
    sample_section,
)
from kvcustody.console.report.words import count, duration, minute, moment, percent, size
from kvcustody.errors import ConfigError

FORMATS = ("html", "pdf", "json", "oscal")
_TENANTS_DRAWN = 20
_LEGEND = (("covered", 1), ("late", 2), ("failed or missing", 4), ("disputed", 3), ("unproven or overdue", 5))
_ROLES = ("Prepared by", "Reviewed by", "Management response", "Auditor")


def render_all(report: Report, formats: Iterable[str] = FORMATS) -> dict[str, bytes]:
    """The files of a report by name; raises `ConfigError` for a format that there is none of."""
    made: dict[str, bytes] = {}
    for name in formats:
        if name == "json":
            made["report.json"] = report.to_bytes()
        elif name == "html":
            from kvcustody.console.report.html import render_html

            made["report.html"] = render_html(page_of(report))
        elif name == "pdf":
            from kvcustody.console.report.pdf import render_pdf

            made["report.pdf"] = render_pdf(page_of(report))
        elif name == "oscal":
            from kvcustody.console.report.oscal import assessment_results

            made["oscal.json"] = assessment_results(report)
        else:
            raise ConfigError(f"format `{name}` is none of: {', '.join(FORMATS)}", format=name)
    return made


def page_of(report: Report) -> Page:
    """The page of a report."""
    asked = report.asked
    scope = f"tenant {asked.tenant}" if asked.tenant else "all tenants"
    return Page(
        f"Evidence report: {report.framework.title}",
        f"{report.framework.edition}. KV-cache custody of {scope}, due from {utc_text(asked.since_us)} to "
        f"{utc_text(asked.until_us)}, as the ledger stood at checkpoint {asked.checkpoint}.",
        _tiles(report),
        (
            _boundary(report),
            _controls(report),
            _population(report),
            _coverage(report),
            _recount(report),
            sample_section(report),
            exceptions_section(report),
            activity_section(report),
            losses_section(report),
            Section("Limitations", (Items(report.limitations),)),
            _sign_off(report),
        ),
        f"kvcustody {report.version}. Evidence, not a verdict: what a control needs is judged by people.",
    )


def _tiles(report: Report) -> tuple[Tile, ...]:
    total, uncovered = report.total, report.total.due - report.total.covered
    age = report.boundary.witnessed.age_us
    return (
        Tile(percent(total.covered, total.due), "of units due ended in time, with evidence"),
        Tile(count(total.due), "units due: (block, generation, shard)"),
        Tile(count(uncovered), "units that are exceptions", "bad" if uncovered else "good"),
        Tile(duration(report.timeliness.p99_us), "from due to destroyed, 99th percentile"),
        Tile(count(report.losses.gaps), "gaps in the ledger", "bad" if report.losses.gaps else "good"),
        Tile(
            "none" if age is None else duration(age), "age of the last witness", "bad" if age is None else ""
        ),
    )


def _boundary(report: Report) -> Section:
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
        Paragraph("The checkpoint as it was signed; its signature can be checked with the log's public key."),
        Literal(point.note.rstrip("\n")),
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
                    *(item.name, item.incarnation[:12], item.software, item.device, minute(item.started_us)),
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
        Table(
            ("log under the checkpoint", "root", "leaves"),
            [(item.name, item.root, count(item.size)) for item in boundary.logs[:100]],
            left=2,
            widths=(0.28, 0.6, 0.12),
        ),
    ]
    if len(boundary.logs) > 100:
        blocks.append(Paragraph(f"{len(boundary.logs) - 100} more logs are in the JSON.", "quiet"))
    if boundary.extends is not None:
        blocks.append(
            Paragraph(
                f"This checkpoint extends the one of {boundary.extends} root leaves; the consistency proof has "
                f"{len(boundary.consistency)} hashes and is in the JSON."
            )
        )
    return Section("System boundary", tuple(blocks))


def _policies(report: Report) -> Sequence[Block]:
    if not report.boundary.policies:
        return (Paragraph("Policies: this ledger records no activation.", "bad"),)
    return (
        Table(
            ("policy revision", "name", "profile", "in effect from", "by", "digest"),
            [
                (str(item.revision), item.name, item.profile, moment(item.at_us), item.actor, item.digest)
                for item in report.boundary.policies
            ],
            left=6,
            widths=(0.1, 0.16, 0.09, 0.19, 0.12, 0.34),
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


def _controls(report: Report) -> Section:
    def row(control: Control) -> tuple[str, ...]:
        sections = ", ".join(dict.fromkeys(SECTIONS[name] for name in control.evidence))
        return (f"{control.id} {control.title}", control.supports, sections, control.limit)

    return Section(
        "Controls",
        (
            Paragraph(
                "Each line is evidence supporting a control, for the scope and period above, under the limitations "
                "below. Whether a control is met is not stated anywhere in this report."
            ),
            Table(
                ("evidence supporting", "what there is", "sections", "what it does not show"),
                [row(control) for control in report.framework.controls],
                left=4,
                widths=(0.18, 0.36, 0.16, 0.3),
            ),
        ),
    )


def _population(report: Report) -> Section:
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
                    ("digest of the population", facts.digest),
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


def _coverage(report: Report) -> Section:
    asked = report.asked
    day = asked.until_us - asked.since_us > 2 * 86_400_000_000
    labels = [minute(item.start_us)[: 10 if day else 16].replace("T", " ") for item in report.timeline]
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
                    [label[11:] or label for label in labels] if not day else labels,
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
                    ("sampled", count(report.total.sampled_bytes), size(report.total.sampled_bytes)),
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


def _recount(report: Report) -> Section:
    again = report.recount
    if again is None:
        return Section("Recount from leaves", (Paragraph("Not done for this report.", "bad"),))
    blocks: list[Block] = [
        Paragraph(
            "A second implementation computed every figure again from the canonical bytes of leaves alone. It shares "
            "no code with the first."
        ),
        Facts(
            [
                ("leaves read", count(again.leaves)),
                ("population digest from leaves", again.digest),
                ("is that of the tables", "yes" if again.digest == report.population.digest else "no"),
                ("figures that differ", count(len(again.differences))),
                ("residencies without an opening", count(again.unaccounted_residencies)),
                ("generations that no leaf lists as handed out", count(again.unaccounted_generations)),
                ("zeroized custody without an end", count(again.unaccounted_receipts)),
            ]
        ),
    ]
    if again.differences:
        rows = [(*item[:3], count(item.tables), count(item.leaves)) for item in again.differences]
        blocks.append(Table(("tenant", "classification", "figure", "tables", "leaves"), rows, left=3))
    return Section("Recount from leaves", tuple(blocks))


def _sign_off(report: Report) -> Section:
    return Section(
        "Sign-off and re-run",
        (
            Paragraph("The same command on the same ledger gives the same bytes:"),
            Literal(report.rerun().replace(" --", " \\\n  --")),
            Facts([("expected SHA-256 of report.json", report.digest())]),
            Signatures(_ROLES),
        ),
    )
