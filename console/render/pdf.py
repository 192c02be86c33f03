"""A PDF of a document's HTML, made by WeasyPrint (the extra `reports`) in its own process.

1. The bytes are a function of the HTML, of the fonts in `fonts/` and of the versions of WeasyPrint, fontTools, Pango
   and HarfBuzz. fontconfig sees no font of the system, and the only date is the document's. The last line says them.
2. Nothing is fetched: the HTML holds all that it shows, and an address in it ends the making.
3. A character that no font here draws is refused by name; nothing is dropped or written another way.
4. The memory that a PDF takes is the process's, and goes with it.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvcustody.errors import ConfigError

_HERE = Path(__file__).parent
_FONTS = _HERE / "fonts" / "fonts.conf"
_MAKER = _HERE / "pdf_process.py"
_DEADLINE_SECONDS = 300.0  # a page of the most rows takes 6 s of processor time
_PANGO = (
    "a PDF needs Pango: install libpango-1.0-0 and libpangoft2-1.0-0 (Debian, Ubuntu) or pango (Fedora, Alpine, "
    "Homebrew); HTML and JSON need neither"
)
_WEASYPRINT = "a PDF needs `weasyprint`: install kvcustody with the extra `reports`"


@cache
def can_make_pdf() -> bool:
    """Return whether WeasyPrint and Pango are installed."""
    return find_spec("weasyprint") is not None and ctypes.util.find_library("pango-1.0") is not None


def makers_of(pdf: bytes) -> str:
    """Return the versions that made a PDF, as it states them; empty where it does not."""
    last = pdf.rstrip().rpartition(b"\n")[2]
    return last[2:].decode(errors="replace") if last.startswith(b"% ") else ""


def pdf_of(html: str) -> bytes:
    """Return the PDF of an HTML document (tagged, for A4).

    Raises `ConfigError` where WeasyPrint or Pango is missing, and as rules 2 and 3 say.
    """
    if find_spec("weasyprint") is None:
        raise ConfigError(_WEASYPRINT, missing="weasyprint")
    try:
        process = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-I", str(_MAKER)],
            input=html.encode(),
            capture_output=True,
            env={**os.environ, "FONTCONFIG_FILE": str(_FONTS), "SOURCE_DATE_EPOCH": "0"},
            check=False,
            timeout=_DEADLINE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the PDF was not finished within {_DEADLINE_SECONDS:g} s: it is given up") from None
    if process.returncode == 0:
        return process.stdout
    raise _refusal(process.stderr.decode(errors="replace"))


def _refusal(said: str) -> ConfigError:
    """Return the error that the process reported in its last line."""
    last = said.strip().rpartition("\n")[2]
    try:
        refused = json.loads(last)
    except ValueError:
        return ConfigError(f"the PDF could not be made: {last or 'its process ended without a message'}")
    if "library" in refused:
        return ConfigError(f"{_PANGO} ({refused['library']})", missing="pango")
    if "urls" in refused:
        first = refused["urls"][0][:200]
        return ConfigError(f"PDFs may not load resources, but the document names `{first}`", urls=refused["urls"])
    return ConfigError(
        f"a PDF cannot print `{refused['word']}`: no font here has U+{refused['code']:04X}; the HTML form has it",
        word=refused["word"],
    )
