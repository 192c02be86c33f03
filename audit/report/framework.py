"""Frameworks: which controls our evidence can serve, what each is served by, and how far that reaches.

1. The texts are data files beside this module. Each control has a limit, and none claims that a control is met.
2. `evidence` names sections of a report; a name that is no section is an error at load time.
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import NamedTuple

from kvcustody.errors import ConfigError

SECTIONS = {
    "checkpoint": "System boundary",
    "policies": "Policies",
    "proof": "Policy proof",
    "population": "Population",
    "reconciliation": "Reconciliation",
    "coverage": "Coverage",
    "timeliness": "Timeliness",
    "recount": "Recount from leaves",
    "sample": "Sample",
    "exceptions": "Exceptions",
    "decisions": "Decisions",
    "erasures": "Erasures",
    "findings": "Orphan findings",
    "activity": "Recorded events",
    "losses": "Gaps and spills",
    "witness": "Witnesses",
    "storage": "Storage limitation",
    "opinion": "Opinion",
}
NAMES = ("nist-800-53", "cc-fdp-rip", "iso-27001", "soc2", "gdpr", "hipaa", "pci-dss", "eu-ai-act")


class Control(NamedTuple):
    """One control: what we have for it, in which sections, and what that does not show."""

    id: str
    title: str
    supports: str
    evidence: tuple[str, ...]
    limit: str
    clock: bool = False  # about a clock, which replayed history has none of


class Framework(NamedTuple):
    """A framework and the controls that our evidence can serve."""

    id: str
    title: str
    edition: str
    controls: tuple[Control, ...]


@cache
def load_framework(name: str) -> Framework:
    """A framework by its name; raises `ConfigError` for one that there is no file of."""
    if name not in NAMES:
        close = get_close_matches(name, NAMES, n=1, cutoff=0.5)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise ConfigError(f"framework `{name}` is none of: {', '.join(NAMES)}{hint}", framework=name)
    text = resources.files("kvcustody.audit.report").joinpath(f"frameworks/{name}.toml").read_text("utf-8")
    value = tomllib.loads(text)
    controls = tuple(
        Control(
            item["id"],
            item["title"],
            item["supports"],
            tuple(item["evidence"]),
            item["limit"],
            bool(item.get("clock")),
        )
        for item in value["controls"]
    )
    unknown = {section for control in controls for section in control.evidence} - set(SECTIONS)
    if unknown:
        raise ConfigError(
            f"framework `{name}` names sections that no report has: {', '.join(sorted(unknown))}"
        )
    return Framework(value["id"], value["title"], str(value["edition"]), controls)
