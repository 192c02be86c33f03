"""Run in trestle's environment: parses every OSCAL document under a folder; prints how many, or fails at the first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trestle.oscal import assessment_plan, assessment_results, catalog, component, poam, profile, ssp

MODELS = {
    "catalog.json": catalog.Model,
    "component-definition.json": component.Model,
    "profile.json": profile.Model,
    "ssp.json": ssp.Model,
    "assessment-plan.json": assessment_plan.Model,
    "assessment-results.json": assessment_results.Model,
    "poam.json": poam.Model,
}


def main() -> None:
    """Parse them."""
    files = sorted(Path(sys.argv[1]).glob("*/*.json"))
    for file in files:
        MODELS[file.name].model_validate(json.loads(file.read_bytes()))
    print(len(files))


if __name__ == "__main__":
    main()
