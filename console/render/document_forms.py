"""A document in its published formats: HTML by a template, a PDF of that HTML, canonical JSON, and others.

`FORMS` has every kind of document: its template, what the template gets, and its forms with the names of their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvcustody.audit.evidence.processes.enforcement import NotEnforced, unnamed_qualification
from kvcustody.audit.evidence.processes.marked_processes import MarkedProcess, history
from kvcustody.audit.reports.document import Document, DocumentKind
from kvcustody.audit.reports.erasure.certificate import CERTIFICATE
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import THRESHOLD_PPM
from kvcustody.audit.reports.section import Section, sections
from kvcustody.audit.reports.sections.board import threshold_verdict
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.sections.decided import MEANINGS
from kvcustody.audit.reports.sections.opinion import ADVERSE_BELOW_PPM
from kvcustody.audit.reports.sections.opinion import SECTION as OPINION
from kvcustody.audit.reports.short_ids import short_ids
from kvcustody.audit.reports.subject_access import SubjectPage
from kvcustody.audit.tlog.signed_note import parse_note
from kvcustody.audit.verify.documents.record_agreement import RECORD
from kvcustody.console.case.letter import LETTER_FORMS, Letter
from kvcustody.console.render.html import Rendered, render_template
from kvcustody.errors import ConfigError
from kvcustody.governance.processing.record import record_of_facts
from kvcustody.governance.processing.record_csv import to_csv

FILES = {"html": "report.html", "pdf": "report.pdf", "json": "report.json", "oscal": "oscal.json"}
FORMATS = tuple(FILES)
WATERMARK = "REPLAYED OR GENERATED HISTORY"  # on every page of a report that counts any


class DocumentForms(NamedTuple):
    """A kind of document: its template and values, each format's file name, and the functions that make other formats.

    A form is `html`, `pdf`, `json`, or one of `others`.
    """

    template: str
    values: Callable[[Any], Mapping[str, Any]]
    files: Mapping[str, str]
    others: Mapping[str, Callable[[Any], bytes]] = {}


def _of_report(report: Report) -> Mapping[str, Any]:
    opinion, total = report[OPINION], report[COVERAGE].total
    shown = [one for one in sections() if one.part is not None and one.is_shown(report)]
    point = report[BOUNDARY].checkpoint
    return {
        "report": report,
        "zone": report.asked.zone,
        "sections": shown,
        "cited_sections": cited_sections(shown),
        "short_id": short_ids(worker.incarnation for worker in report[BOUNDARY].workers),
        "log_keys": [
            f"{each.name}+{each.key_id.hex()}"
            for each in parse_note(point.note.encode()).signatures
            if each.name == point.origin
        ],
        "adverse_below_ppm": ADVERSE_BELOW_PPM,
        "verdict": threshold_verdict(report.asked.threshold_ppm, opinion.low_ppm, opinion.high_ppm, total.due),
        "default_threshold_ppm": THRESHOLD_PPM,
        "meanings": MEANINGS,
        "watermark": WATERMARK,
    }


def cited_sections(shown: Sequence[Section[Any]]) -> dict[str, str]:
    """Return, by the name that controls cite, the section's number and title as the contents list them."""
    titles = {one.name: f"{number}.\u00a0{one.title}" for number, one in enumerate(shown, 1)}
    return {
        name: titles[one.printed_in or one.name]
        for one in sections()
        for name in one.cited
        if (one.printed_in or one.name) in titles
    }


def _of_certificate(document: Document) -> Mapping[str, Any]:
    facts = document.facts
    marked = tuple(MarkedProcess(**one) for one in facts["marked"])
    said = (history(marked), unnamed_qualification([NotEnforced(**one) for one in facts["monitored"]]))
    return {
        "certificate": facts,
        "qualifications": [text for text in said if text],
        "away": [*facts["waiting"], *facts["unreachable"]],
        "signed_by": document.signature.key if document.signature else "nobody",
    }


def _of_record(document: Document) -> Mapping[str, Any]:
    return {
        "record": record_of_facts(document.facts),
        "digest": document.digest(),
        "signed_by": document.signature.key if document.signature else "nobody",
    }


def _oscal(report: Report) -> bytes:
    from kvcustody.console.report.oscal import assessment_results

    return assessment_results(report)


FORMS: dict[type | DocumentKind, DocumentForms] = {
    Report: DocumentForms("audit/reports/report.html", _of_report, FILES, {"oscal": _oscal}),
    CERTIFICATE: DocumentForms(
        "audit/reports/erasure/certificate.html",
        _of_certificate,
        {"html": "certificate.html", "json": "certificate.json"},
    ),
    RECORD: DocumentForms(
        "governance/processing/record.html",
        _of_record,
        {form: f"ropa.{form}" for form in ("html", "pdf", "json", "csv")},
        {"csv": to_csv},
    ),
    SubjectPage: DocumentForms(
        "audit/reports/subject_access.html", lambda page: {"page": page}, {"html": "subject.html"}
    ),
    Letter: DocumentForms(
        "console/case/letter.html", lambda letter: {"letter": letter}, LETTER_FORMS, {"text": Letter.text}
    ),
}


def forms_of(document: Any) -> DocumentForms:
    """Return a document's formats."""
    return FORMS[document.kind if isinstance(document, Document) else type(document)]


def rendered(document: Any) -> Rendered:
    """Return a document's HTML, with the CSV files of its long tables."""
    forms = forms_of(document)
    return render_template(forms.template, forms.values(document))


def render(document: Any, form: str) -> bytes:
    """Return a document in one format.

    Raises:
        ConfigError: it has no such format.
    """
    forms = forms_of(document)
    if form not in forms.files:
        raise ConfigError(f"format `{form}` is none of: {', '.join(forms.files)}", format=form)
    if form in forms.others:
        return forms.others[form](document)
    if form == "json":
        made: bytes = document.to_bytes()
        return made
    html = rendered(document).html
    if form == "html":
        return html.encode()
    from kvcustody.console.render.pdf import pdf_of

    return pdf_of(html)


def render_all(document: Any, formats: Iterable[str] = FORMATS) -> dict[str, bytes]:
    """Return a document's files by name: the requested formats, and with a page the CSV files that it names."""
    wanted, made = tuple(formats), dict[str, bytes]()
    if {"html", "pdf"} & {*wanted}:
        made |= rendered(document).files
    names = forms_of(document).files
    return made | {names.get(form, form): render(document, form) for form in wanted}
