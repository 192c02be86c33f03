"""A document's files against its facts: each form, and each long table's CSV, is made again and compared as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvcustody._version import __version__
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.model import REPORT
from kvcustody.audit.verify.documents.document_check import Unchecked
from kvcustody.audit.verify.documents.report_rules import open_report
from kvcustody.console.files import read_file
from kvcustody.console.render.document_forms import forms_of, render_all
from kvcustody.console.render.pdf import makers_of
from kvcustody.errors import ConfigError

_NAMES = ("report.json", "ropa.json")


def document_file(folder: Path) -> Path:
    """The JSON of a report or a record in its folder; raises `ConfigError` where there is none."""
    found = next((folder / name for name in _NAMES if (folder / name).exists()), None)
    if found is None:
        raise ConfigError(f"`{folder}` has no {' and no '.join(_NAMES)}", path=folder)
    return found


class ComparedFiles(NamedTuple):
    """The files of a folder that were compared, what is wrong with any, and what could not be compared."""

    compared: tuple[str, ...]
    problems: list[str]
    unchecked: tuple[Unchecked, ...] = ()


def compare_files(folder: Path, document: Document) -> ComparedFiles:
    """Make each file of the folder again and compare bytes. A PDF of other versions of its makers is not compared."""
    shown = open_report(document) if document.kind == REPORT else document
    there = [form for form, name in forms_of(shown).files.items() if (folder / name).exists()]
    version = document.facts["version"]
    if version != __version__ and len(there) > 1:
        said = f"version {version} rendered it and this is {__version__}: its pages can be compared with that one"
        return ComparedFiles((), [said])
    made = render_all(shown, there)
    absent = [name for name in made if not (folder / name).exists()]
    given = {name: read_file(folder / name) for name in made if name not in absent}
    wrong = [name for name, data in given.items() if data != made[name]]
    others = tuple(
        Unchecked(name, f"`{theirs}` made it and this is `{makers_of(made[name])}`: bytes differ between them")
        for name in wrong
        if name.endswith(".pdf") and (theirs := makers_of(given[name])) not in ("", makers_of(made[name]))
    )
    unlike = {each.path for each in others}
    return ComparedFiles(
        tuple(sorted(given.keys() - unlike)),
        [
            *(f"`{name}` is not there, and a page names it for its table's rows" for name in absent),
            *(
                f"`{name}` is not what the signed {document.kind.name} gives, byte for byte"
                for name in wrong
                if name not in unlike
            ),
        ],
        others,
    )
