"""What MkDocs calls while it builds the site: tables that say what the code says are made here."""

from __future__ import annotations

import re
from typing import Any

from kvcustody.console.documentation import render

_MARKED_FENCE = re.compile(r"^```(\w+) .+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with its tables; a fence that a test reads (```yaml fragment) is shown as its language."""
    return _MARKED_FENCE.sub(r"```\1", render(markdown))
