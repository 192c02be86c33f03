"""What a stage says: a line for each check, PASS, FAIL or SKIP, each SKIP with a reason that is foreseen.

    report.check("a hand-out finds zeros", seen == 0, found_bytes=seen)
    report.control("without the wait it does not", any(control))
    report.skip("racecheck", Reason.TOOL_MISSING, "compute-sanitizer is not on the path")

- A stage that said nothing, or shows an absence without a control, has failed (`verdict`).
- A skip whose reason is not of `Reason` is unexplained, and counts as a failure of the whole run.
- Each line is in the file as soon as it is said: a stage that is cut off leaves what it had found.
"""

from __future__ import annotations

import importlib.util
import json
from enum import StrEnum
from pathlib import Path
from typing import Any

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
Line = dict[str, Any]
"""`status`, `check`, `control` or `measured` (true), and `reason`, `detail` and `figures` where there are any."""


class Reason(StrEnum):
    """Why a check may be left out."""

    TOOL_MISSING = "tool missing"
    TOOL_REFUSED = "tool refused"
    NOT_INSTALLED = "not installed"
    ENGINE_LACKS = "engine lacks"
    DEVICE_LACKS = "device lacks"
    REHEARSAL = "rehearsal"


class Report:
    """The lines of one stage, kept in a file as they are said."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.lines: list[Line] = []

    def check(self, name: str, passed: bool, detail: str = "", /, **figures: Any) -> None:
        """One thing that must hold."""
        self._say(PASS if passed else FAIL, name, detail=detail, figures=figures)

    def control(self, name: str, passed: bool, detail: str = "", /, **figures: Any) -> None:
        """What must be seen where the defence is off: it shows that the checks beside it could have failed."""
        self._say(PASS if passed else FAIL, name, control=True, detail=detail, figures=figures)

    def measured(self, name: str, /, **figures: Any) -> None:
        """Figures that nothing is judged by."""
        self._say(PASS, name, measured=True, figures=figures)

    def skip(self, name: str, reason: Reason | str, detail: str = "") -> None:
        """One thing that cannot be asked here; a `reason` outside `Reason` is an unexplained skip."""
        self._say(SKIP, name, reason=str(reason), detail=detail)

    def _say(self, status: str, name: str, **rest: Any) -> None:
        line: Line = {"status": status, "check": name, **{key: value for key, value in rest.items() if value}}
        self.lines.append(line)
        print(told(line), flush=True)
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def missing(*packages: str) -> list[str]:
    """Those that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def told(line: Line) -> str:
    """The line as a person reads it."""
    kind = "control: " if line.get("control") else "measured: " if line.get("measured") else ""
    words = [f"{line['status']} {kind}{line['check']}"]
    if "reason" in line:
        words.append(f"[{line['reason']}]")
    if "detail" in line:
        words.append(line["detail"])
    if "figures" in line:
        words.append(", ".join(f"{name} {value}" for name, value in line["figures"].items()))
    return "  " + " | ".join(words)


def is_explained(line: Line) -> bool:
    """Whether a skip has a reason that is foreseen."""
    return line.get("reason") in set(Reason)


def verdict(lines: list[Line]) -> str:
    """Of a stage: FAIL where a line failed, a skip is unexplained, or nothing was said; SKIP where all was skipped."""
    statuses = {line["status"] for line in lines}
    if FAIL in statuses or not lines or any(line["status"] == SKIP and not is_explained(line) for line in lines):
        return FAIL
    return PASS if PASS in statuses else SKIP
