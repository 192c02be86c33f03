"""A report as OSCAL assessment results (NIST, version 1.1.3): observations, without a verdict on any control.

1. One observation a control: what was looked at, by which method, where the evidence is. There are no findings, for a
   finding states whether its target is satisfied, and that is the assessor's to say.
2. Identifiers are UUIDs of version 5 over the report's digest, times are those of the checkpoint: the same report
   gives the same bytes.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

import orjson

from kvcustody.audit.reports.framework import Control
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.section import citations
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.coverage import SECTION as COVERAGE
from kvcustody.audit.reports.sections.limitations import SECTION as LIMITATIONS
from kvcustody.audit.reports.sections.opinion import SECTION as OPINION
from kvcustody.audit.reports.sections.population import SECTION as POPULATION
from kvcustody.console.render.number_format import percent
from kvcustody.times import iso

VERSION = "1.1.3"
NAMESPACE = uuid.UUID("6f1f3a55-6d2f-5d5b-9a53-0d1c9c2b7a10")
_PROPS = "urn:kvcustody:report"
# Computed a second time or compared with another source; what else is cited was read.
_TESTED = frozenset({"recount", "reconciliation", "proof", "sample"})


def assessment_results(report: Report, *, plan: str = "") -> bytes:
    """Return the document's bytes; `plan` is the file of the imported plan, or empty to describe one in place."""
    digest = report.digest()

    def name(what: str) -> str:
        return str(uuid.uuid5(NAMESPACE, f"{digest} {what}"))

    boundary, asked = report[BOUNDARY], report.asked
    collected = iso(boundary.checkpoint.at_us)
    everything: dict[str, Any] = {"include-all": {}}
    chosen = [{"control-id": control_id(control.id)} for control in report.cited()]
    observations = [
        _observation(report, control, name(f"observation {control.id}"), collected, name("report"))
        for control in report.cited()
    ]
    body = {
        "uuid": name("results"),
        "metadata": {
            "title": f"Evidence report: {report.framework.title} ({report.framework.edition})",
            "last-modified": iso(boundary.checkpoint.signed_us),
            "version": f"checkpoint-{asked.checkpoint}",
            "oscal-version": VERSION,
            "props": [
                _prop("software-version", report.version),
                _prop("checkpoint-root", boundary.checkpoint.root),
                _prop("report-sha-256", digest),
                _prop("opinion", report[OPINION].kind),
                *([_prop("history", report[BOUNDARY].history)] if report[BOUNDARY].history else []),
                *_signature(report),
            ],
            "remarks": "Evidence for assessors. No target is stated to be satisfied or not satisfied.",
        },
        "import-ap": {"href": plan or f"#{name('plan')}"},
        "results": [
            {
                "uuid": name("result"),
                "title": "Custody of KV-cache blocks",
                "description": "Evidence from the ledger as a signed checkpoint left it. "
                + " ".join(report[LIMITATIONS]),
                "start": iso(asked.since_us),
                "end": iso(asked.until_us),
                "reviewed-controls": {"control-selections": [{"include-controls": chosen} if chosen else everything]},
                **({"observations": observations} if observations else {}),
            }
        ],
        "back-matter": {
            "resources": [
                *(
                    ()
                    if plan
                    else (
                        {
                            "uuid": name("plan"),
                            "title": "How the evidence was taken",
                            "description": report[POPULATION].query,
                            "remarks": report.rerun(),
                        },
                    )
                ),
                {
                    "uuid": name("report"),
                    "title": "The report with its sample and inclusion proofs",
                    "rlinks": [
                        {
                            "href": "report.json",
                            "media-type": "application/json",
                            "hashes": [{"algorithm": "SHA-256", "value": digest}],
                        }
                    ],
                },
            ]
        },
    }
    return orjson.dumps({"assessment-results": body}, option=orjson.OPT_INDENT_2) + b"\n"


def _signature(report: Report) -> list[dict[str, str]]:
    """Return the report's own signature, which every format carries."""
    signature = report.signature
    if signature is None:
        return []
    return [
        _prop("report-key", signature.key),
        _prop("report-signature", f"{signature.key_id} {signature.data}"),
    ]


def control_id(text: str) -> str:
    """Return a control's id for OSCAL: NIST's own form for its controls (`si-12.3`), a token for others."""
    nist = re.fullmatch(r"([A-Z]{2}-\d+)(?:\((\d+)\))?", text)
    if nist:
        return nist[1].lower() + (f".{nist[2]}" if nist[2] else "")
    token = re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-")
    return token if token[0].isalpha() else f"c-{token}"


def _observation(report: Report, control: Control, name: str, collected: str, resource: str) -> dict[str, Any]:
    total, sections = report[COVERAGE].total, report.sections_of(control.id)
    figures = (
        _prop("units-due", str(total.due)),
        _prop("units-covered", str(total.covered)),
        _prop("covered-share", percent(total.covered, total.due)),
    )
    return {
        "uuid": name,
        "title": f"{control.id} {control.title}",
        "description": f"{report.statement(control.id)} {control.supports}",
        "props": [
            _prop("control-id", control_id(control.id)),
            *(figures if "coverage" in sections else ()),
        ],
        "methods": [
            *(["TEST"] if _TESTED.intersection(sections) else []),
            *(["EXAMINE"] if not _TESTED.issuperset(sections) else []),
        ],
        "types": ["control-objective"],
        "relevant-evidence": [
            {"href": f"#{resource}", "description": f"Section: {citations()[section].title}"} for section in sections
        ],
        "collected": collected,
        "remarks": f"What it does not show: {control.limit}",
    }


def _prop(name: str, value: str) -> dict[str, str]:
    return {"name": name, "ns": _PROPS, "value": value}
