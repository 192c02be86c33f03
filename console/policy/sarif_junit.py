"""Problems and findings for machines: JSON, SARIF 2.1.0 for code review, JUnit XML for CI.

1. Every code links to its row in docs/reference/policy-codes.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

import orjson

from kvcustody._version import __version__
from kvcustody.policies.document.problem_codes import CODES
from kvcustody.policies.document.problems import Problem
from kvcustody.policies.workbench.validate import Validation

CODES_PAGE = "docs/reference/policy-codes.md"
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def problem_data(problem: Problem) -> dict[str, Any]:
    """Return one problem as JSON data."""
    return {**problem._asdict(), "help": f"{CODES_PAGE}#{problem.code.lower()}"}


def validation_data(validation: Validation) -> dict[str, Any]:
    """Return one document's validation as JSON data."""
    return {
        "file": validation.file,
        "sound": validation.sound,
        "digest": validation.digest,
        "problems": [problem_data(problem) for problem in validation.problems],
        "omitted": validation.omitted,
    }


def sarif(problems: Sequence[Problem], level: str = "error") -> str:
    """Return problems as one SARIF run."""
    codes = sorted({problem.code for problem in problems})
    driver = {
        "name": "kvcustody policy",
        "version": __version__,
        "rules": [
            {
                "id": code,
                "shortDescription": {"text": CODES[code].title},
                "help": {"text": f"{CODES[code].advice}; see {CODES_PAGE}#{code.lower()}"},
            }
            for code in codes
        ],
    }
    results = [
        {
            "ruleId": problem.code,
            "ruleIndex": codes.index(problem.code),
            "level": level,
            "message": {"text": f"{problem.message}; {problem.hint}"},
            "locations": [_location(problem)],
        }
        for problem in problems
    ]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


def _location(problem: Problem) -> dict[str, Any]:
    region = {"startLine": max(problem.line, 1), "startColumn": max(problem.column, 1)}
    return {"physicalLocation": {"artifactLocation": {"uri": quote(problem.file)}, "region": region}}


def junit(suite: str, cases: Iterable[tuple[str, Sequence[object]]]) -> str:
    """Return one JUnit test case per (name, failures); a case without failures passes."""
    cases = list(cases)
    failed = sum(1 for _, failures in cases if failures)
    name = quoteattr(f"kvcustody policy {suite}")
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    lines.append(f'<testsuite name={name} tests="{len(cases)}" failures="{failed}">')
    for case, failures in cases:
        lines.append(f"  <testcase name={quoteattr(case)} classname={name}>")
        lines.extend(f"    <failure message={quoteattr(str(f))}>{escape(str(f))}</failure>" for f in failures)
        lines.append("  </testcase>")
    lines.append("</testsuite>")
    return "\n".join(lines)
