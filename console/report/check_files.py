"""A document's files against its facts: each form, and each long table's CSV, is made again and compared as bytes."""

from __future__ import annotations

from pathlib import Path

from kvcustody._version import __version__
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.model import REPORT
from kvcustody.audit.verify.documents.report_rules import open_report
from kvcustody.console.files import read_file
from kvcustody.console.render.document_forms import forms_of, render_all
from kvcustody.errors import ConfigError

_NAMES = ("report.json", "ropa.json")


def document_file(folder: Path) -> Path:
    """The JSON of a report or a record in its folder; raises `ConfigError` where there is none."""
    found = next((folder / name for name in _NAMES if (folder / name).exists()), None)
    if found is None:
        raise ConfigError(f"`{folder}` has no {' and no '.join(_NAMES)}", path=folder)
    return found


def differing_files(folder: Path, document: Document) -> tuple[tuple[str, ...], list[str]]:
    """The files of the folder that were compared, and what is wrong with any of them."""
    shown = open_report(document) if document.kind == REPORT else document
    there = [form for form, name in forms_of(shown).files.items() if (folder / name).exists()]
    version = document.facts["version"]
    if version != __version__ and len(there) > 1:
        return (), [
            f"version {version} rendered it and this is {__version__}: its pages can be compared with that one"
        ]
    made = render_all(shown, there)
    absent = [name for name in made if not (folder / name).exists()]
    wrong = [name for name, data in made.items() if name not in absent and read_file(folder / name) != data]
    return tuple(sorted(made.keys() - {*absent})), [
        *(f"`{name}` is not there, and a page names it for its table's rows" for name in absent),
        *(f"`{name}` is not what the signed {document.kind.name} gives, byte for byte" for name in wrong),
    ]
