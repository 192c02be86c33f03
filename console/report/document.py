"""A report as a page, and as the files that are kept: HTML, PDF, JSON, OSCAL."""

from __future__ import annotations

from collections.abc import Iterable

from kvcustody.audit.reports.framework import SECTIONS, Control
from kvcustody.audit.reports.model import Report
from kvcustody.console.report.board_pages import (
    assertion_section,
    board_section,
    roles_section,
    service_section,
    sources_section,
)
from kvcustody.console.report.custody_pages import (
    boundary_section,
    coverage_section,
    hashes_section,
    population_section,
    tiers_section,
)
from kvcustody.console.report.evidence_pages import (
    activity_section,
    exceptions_section,
    losses_section,
    sample_section,
)
from kvcustody.console.report.opinion_pages import (
    opinion_section,
    opinion_tile,
    share_text,
    storage_section,
)
from kvcustody.console.report.render.number_format import count, duration
from kvcustody.console.report.render.page_model import (
    Block,
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
from kvcustody.errors import ConfigError
from kvcustody.times import iso

FILES = {"html": "report.html", "pdf": "report.pdf", "json": "report.json", "oscal": "oscal.json"}
FORMATS = tuple(FILES)
WATERMARK = "REPLAYED OR GENERATED HISTORY"  # on every page of a report that counts any
_ROLES = ("Prepared by", "Reviewed by", "Management response", "Auditor")


def render_all(report: Report, formats: Iterable[str] = FORMATS) -> dict[str, bytes]:
    """The files of a report by name; raises `ConfigError` for a format that there is none of."""
    made: dict[str, bytes] = {}
    for name in formats:
        if name == "json":
            made["report.json"] = report.to_bytes()
        elif name == "html":
            from kvcustody.console.report.render.html import render_html

            made["report.html"] = render_html(page_of(report))
        elif name == "pdf":
            from kvcustody.console.report.render.pdf import render_pdf

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
        f"{report.framework.edition}. KV-cache custody of {scope}, due from {iso(asked.since_us)} to "
        f"{iso(asked.until_us)}, as the ledger stood at checkpoint {asked.checkpoint}. "
        + report.boundary.history,
        _tiles(report),
        (
            board_section(report),
            opinion_section(report),
            assertion_section(report),
            service_section(report),
            boundary_section(report),
            _controls(report),
            population_section(report),
            coverage_section(report),
            storage_section(report),
            *(() if report.tiers.is_empty else (tiers_section(report),)),
            _recount(report),
            exceptions_section(report),
            activity_section(report),
            losses_section(report),
            sources_section(report),
            roles_section(report),
            Section("Limitations", (Items(report.limitations),)),
            _sign_off(report),
            sample_section(report),
            hashes_section(report),
        ),
        f"kvcustody {report.version}. Evidence, not a verdict: what a control needs is judged by people.",
        watermark=WATERMARK if report.boundary.history else "",
        at_us=report.boundary.checkpoint.at_us,
    )


def _tiles(report: Report) -> tuple[Tile, ...]:
    total, uncovered = report.total, report.total.due - report.total.covered
    age = report.boundary.witnessed.age_us
    return (
        opinion_tile(report),
        Tile(share_text(report.opinion), "of units due ended in time, with evidence"),
        Tile(count(total.due), "units due: (block, generation, shard)"),
        Tile(count(uncovered), "units that are not covered", "bad" if uncovered else "good"),
        Tile(duration(report.timeliness.p99_us), "from due to destroyed, 99th percentile"),
        Tile(
            "none" if age is None else duration(age), "age of the last witness", "bad" if age is None else ""
        ),
    )


def _controls(report: Report) -> Section:
    status = {each.control: each for each in report.statuses}

    def row(control: Control) -> tuple[str, ...]:
        found = status[control.id]
        sections = ", ".join(dict.fromkeys(SECTIONS[name] for name in found.sections))
        supports = control.supports if found.sections else ""
        return (f"{control.id} {control.title}", found.status, supports, sections, control.limit)

    return Section(
        "Controls",
        (
            Paragraph(
                "Evidence present: sections of this report support the control, for the scope and period above, under "
                "the limitations below. None in the period: they could, and have nothing of it. Not addressed, not "
                "ours: no evidence here is about it. Whether a control is met is not stated anywhere in this report."
            ),
            Table(
                ("control", "status", "what there is", "sections", "what it does not show"),
                [row(control) for control in report.framework.controls],
                left=5,
                widths=(0.17, 0.1, 0.29, 0.16, 0.28),
            ),
            Paragraph(f"Ids: {report.framework.ids_from}; taken {report.framework.ids_taken}."),
        ),
    )


def _recount(report: Report) -> Section:
    again = report.recount
    if again is None:
        return Section("Recount from leaves", (Paragraph("Not done for this report.", "bad"),))
    blocks: list[Block] = [
        Paragraph(
            "Every figure was computed again from the canonical bytes of leaves alone, without any table: where one "
            "says what no leaf does, the two differ."
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


def _signature(report: Report) -> list[tuple[str, str]]:
    """One digest and one signature in every format."""
    signature = report.signature
    if signature is None:
        return [("signature", "none: no key signed this report, so anybody may have written it")]
    return [
        ("signed by", signature.key),
        ("signature over the digest", f"{signature.key_id} {signature.data}"),
    ]


def _sign_off(report: Report) -> Section:
    return Section(
        "Sign-off and re-run",
        (
            Paragraph("The same command on the same ledger gives the same bytes:"),
            Literal(report.rerun().replace(" --", " \\\n  --")),
            Facts([("SHA-256 of the report without its signature", report.digest()), *_signature(report)]),
            Signatures(_ROLES),
        ),
    )
