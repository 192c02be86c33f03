"""The findings of a run over one target, as JSON, SARIF and a page."""

from __future__ import annotations

import html
import json
from typing import Any, NamedTuple

from kvcustody._version import __version__
from kvcustody.testkit.conform.public_cases import CASE_OF, Target

SCHEMA = "kvcustody/conform@1"
FOUND, HOLDS, NOT_RUN = "found", "holds", "not run"


class CaseFinding(NamedTuple):
    """One case: found (the product has the bug), holds, or not run, with what was seen or why it did not run."""

    case: str
    verdict: str
    evidence: str
    script: str
    seconds: float


class ConformReport(NamedTuple):
    """The findings for one target in one version of a product."""

    target: Target
    version: str
    findings: tuple[CaseFinding, ...]

    @property
    def holds(self) -> bool:
        """Whether every case ran and none was found."""
        return all(one.verdict == HOLDS for one in self.findings)

    def data(self) -> dict[str, Any]:
        """Return the report for JSON, without the machine's paths and without times."""
        return {
            "schema": SCHEMA,
            "target": self.target.name,
            "says": self.target.says,
            "product": self.target.product,
            "version": self.version,
            "kit": __version__,
            "cases": [
                {
                    "case": one.case,
                    "holds": CASE_OF[one.case].holds,
                    "sources": list(CASE_OF[one.case].sources),
                    "verdict": one.verdict,
                    "evidence": one.evidence,
                    "script": one.script,
                }
                for one in self.findings
            ],
        }

    def to_json(self) -> str:
        """Return the report as JSON text, as it is stored."""
        return json.dumps(self.data(), indent=2) + "\n"

    def to_sarif(self) -> str:
        """Return found cases as results of one SARIF run."""
        rules = [
            {
                "id": one.case,
                "shortDescription": {"text": CASE_OF[one.case].holds},
                "helpUri": CASE_OF[one.case].sources[0],
            }
            for one in self.findings
        ]
        results = [
            {
                "ruleId": one.case,
                "ruleIndex": place,
                "level": "error",
                "message": {"text": f"{self.target.says} {self.version}: {one.evidence}"},
                "locations": [{"logicalLocations": [{"fullyQualifiedName": self.target.name, "kind": "module"}]}],
            }
            for place, one in enumerate(self.findings)
            if one.verdict == FOUND
        ]
        driver = {"name": "kvcustody known-bugs", "version": __version__, "rules": rules}
        run = {"tool": {"driver": driver}, "results": results}
        schema = "https://json.schemastore.org/sarif-2.1.0.json"
        return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"

    def to_html(self) -> str:
        """Return a page without scripts."""
        rows = "".join(
            f"<tr><td>{html.escape(CASE_OF[one.case].holds)}</td><td><strong>{one.verdict}</strong></td>"
            f"<td>{html.escape(one.evidence)}</td><td>"
            + ", ".join(f'<a href="{html.escape(link)}">public</a>' for link in CASE_OF[one.case].sources)
            + f"</td><td><code>{html.escape(one.script)}</code></td></tr>"
            for one in self.findings
        )
        title = f"{html.escape(self.target.says)} {html.escape(self.version)}"
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body>'
            f"<h1>{title}</h1><table><thead><tr><th>what ought to hold</th><th>verdict</th><th>what was seen</th>"
            f"<th>said before by</th><th>script</th></tr></thead><tbody>{rows}</tbody></table></body></html>\n"
        )
