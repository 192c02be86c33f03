"""A report's other OSCAL documents: component definition, profile, security plan, assessment plan, milestones.

1. Each imports the one before by its file name, so that a folder is read as one: profile, plan of the system, plan of
   the assessment, its results, and what is open. Identifiers follow from the report's digest. Where no OSCAL catalog is
   known to have a framework's ids, one comes along: ids as tokens, and our paraphrases as titles.
2. The plan of the system is a skeleton: it says what the product does, and `REMAINING` where only its owner can speak.
3. Milestones are the exceptions of the report's opinion; without any there is no such document, as OSCAL has none that
   is empty.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import orjson

from kvcustody.audit.reports.framework import OURS
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.sections.boundary import SECTION as BOUNDARY
from kvcustody.audit.reports.sections.opinion import SECTION as OPINION
from kvcustody.audit.reports.sections.population import SECTION as POPULATION
from kvcustody.console.report.oscal import NAMESPACE, VERSION, assessment_results, control_id
from kvcustody.plurals import several
from kvcustody.times import iso

REMAINING = "To be stated by the owner of the system."
CATALOG = "catalog.json"
PROFILE, SYSTEM, PLAN, RESULTS = "profile.json", "ssp.json", "assessment-plan.json", "assessment-results.json"
_COMPONENT = "Who may reuse a cached block, for how long it may exist, and evidence that it is gone."
_Name = Callable[[str], str]


def oscal_documents(report: Report) -> dict[str, bytes]:
    """Return the documents by file name."""
    digest = report.digest()

    def name(what: str) -> str:
        return str(uuid.uuid5(NAMESPACE, f"{digest} {what}"))

    documents: dict[str, Any] = {
        "component-definition.json": {"component-definition": _component_definition(report, name)},
        PROFILE: {"profile": _profile(report, name)},
        SYSTEM: {"system-security-plan": _system(report, name)},
        PLAN: {"assessment-plan": _plan(report, name)},
    }
    if not report.framework.catalog:
        documents[CATALOG] = {"catalog": _catalog(report, name)}
    if report[OPINION].exceptions:
        documents["poam.json"] = {"plan-of-action-and-milestones": _milestones(report, name)}
    files = {file: orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n" for file, body in documents.items()}
    return files | {RESULTS: assessment_results(report, plan=PLAN)}


def _metadata(report: Report, title: str) -> dict[str, Any]:
    return {
        "title": f"{title}: {report.framework.title} ({report.framework.edition})",
        "last-modified": iso(report[BOUNDARY].checkpoint.signed_us),
        "version": f"checkpoint-{report.asked.checkpoint}",
        "oscal-version": VERSION,
        "remarks": f"Ids: {report.framework.ids_from}; taken {report.framework.ids_taken}.",
    }


def _ours(report: Report) -> list[Any]:
    return [control for control in report.framework.controls if control.scope == OURS]


def _component_definition(report: Report, name: _Name) -> dict[str, Any]:
    requirements = [
        {
            "uuid": name(f"requirement {control.id}"),
            "control-id": control_id(control.id),
            "description": control.supports,
            "remarks": f"What it does not show: {control.limit}",
        }
        for control in _ours(report)
    ]
    implementation = {
        "uuid": name("implementation"),
        "source": report.framework.catalog or PROFILE,
        "description": "What the component's evidence can serve.",
        "implemented-requirements": requirements,
    }
    component = {
        "uuid": name("component"),
        "type": "software",
        "title": "kvcustody",
        "description": _COMPONENT,
        **({"control-implementations": [implementation]} if requirements else {}),
    }
    return {
        "uuid": name("component definition"),
        "metadata": _metadata(report, "Component"),
        "components": [component],
    }


def _catalog(report: Report, name: _Name) -> dict[str, Any]:
    return {
        "uuid": name("catalog"),
        "metadata": _metadata(report, "Ids"),
        "controls": [
            {
                "id": control_id(control.id),
                "title": control.title,
                "props": [{"name": "label", "value": control.id}],
            }
            for control in report.framework.controls
        ],
    }


def _profile(report: Report, name: _Name) -> dict[str, Any]:
    chosen = [control_id(control.id) for control in report.framework.controls]
    return {
        "uuid": name("profile"),
        "metadata": _metadata(report, "Profile"),
        "imports": [
            {
                "href": report.framework.catalog or CATALOG,
                "include-controls": [{"with-ids": chosen}],
            }
        ],
    }


def _system(report: Report, name: _Name) -> dict[str, Any]:
    component = name("component")
    return {
        "uuid": name("system"),
        "metadata": _metadata(report, "System"),
        "import-profile": {"href": PROFILE},
        "system-characteristics": {
            "system-ids": [{"id": report[BOUNDARY].checkpoint.origin}],
            "system-name": report[BOUNDARY].checkpoint.origin,
            "description": f"Serving engines whose KV caches kvcustody governs. {REMAINING}",
            "system-information": {"information-types": [{"title": "KV-cache contents", "description": REMAINING}]},
            "status": {"state": "other", "remarks": REMAINING},
            "authorization-boundary": {
                "description": f"{several(len(report[BOUNDARY].workers), 'process')} of workers, by the ledger. "
                f"{REMAINING}"
            },
        },
        "system-implementation": {
            "users": [{"uuid": name("user"), "title": "Operators", "remarks": REMAINING}],
            "components": [
                {
                    "uuid": component,
                    "type": "software",
                    "title": "kvcustody",
                    "description": _COMPONENT,
                    "status": {"state": "operational"},
                }
            ],
        },
        "control-implementation": {
            "description": "What the component does for each control; the rest is the owner's to state.",
            "implemented-requirements": [
                {
                    "uuid": name(f"system {control.id}"),
                    "control-id": control_id(control.id),
                    "by-components": [
                        {
                            "component-uuid": component,
                            "uuid": name(f"by component {control.id}"),
                            "description": control.supports or control.limit,
                            "remarks": REMAINING,
                        }
                    ],
                }
                for control in report.framework.controls
            ],
        },
    }


def _plan(report: Report, name: _Name) -> dict[str, Any]:
    chosen = [{"control-id": control_id(control.id)} for control in _ours(report)]
    return {
        "uuid": name("plan of the assessment"),
        "metadata": _metadata(report, "Assessment plan"),
        "import-ssp": {"href": SYSTEM},
        "reviewed-controls": {"control-selections": [{"include-controls": chosen} if chosen else {"include-all": {}}]},
        "terms-and-conditions": {
            "parts": [
                {"name": "methodology", "title": "Population", "prose": report[POPULATION].query},
                {"name": "methodology", "title": "Made again by", "prose": report.rerun()},
            ]
        },
    }


def _milestones(report: Report, name: _Name) -> dict[str, Any]:
    return {
        "uuid": name("milestones"),
        "metadata": _metadata(report, "Plan of action and milestones"),
        "import-ssp": {"href": SYSTEM},
        "poam-items": [
            {
                "uuid": name(f"item {number} {each.id}"),
                "title": each.id,
                "description": f"{each.cause}. Risk: {each.risk}.",
                "remarks": f"Owner: {each.owner}. Date: {each.date}. Response: {each.response}. "
                f"Compensating control: {each.compensating_control}.",
            }
            for number, each in enumerate(report[OPINION].exceptions)  # several may be of one kind
        ],
    }
