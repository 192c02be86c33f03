"""A report's files against its model: each format is rendered again from what was signed, and compared as bytes."""

from __future__ import annotations

from pathlib import Path

from kvcustody._version import __version__
from kvcustody.audit.reports.model import Report
from kvcustody.console.files import read_file
from kvcustody.console.report.document import FILES, render_all


def differing_files(folder: Path, report: Report) -> tuple[tuple[str, ...], list[str]]:
    """The files of the folder that were compared, and what is wrong with any of them."""
    there = {name: kind for kind, name in FILES.items() if (folder / name).exists()}
    if report.version != __version__ and len(there) > 1:
        return (), [
            f"version {report.version} rendered it and this is {__version__}: its pages can be compared with that one"
        ]
    made = render_all(report, there.values())
    wrong = [name for name, data in made.items() if read_file(folder / name) != data]
    return tuple(sorted(made)), [
        f"`{name}` is not what the signed report gives, byte for byte" for name in wrong
    ]
