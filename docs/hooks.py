"""The changes that MkDocs makes to each page while it builds the site."""

from __future__ import annotations

import re
from typing import Any

_MARKED_FENCE = re.compile(r"^```(\w+) .+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drop the marks of fences that tests read: MkDocs shows "```yaml fragment" as no code at all."""
    return _MARKED_FENCE.sub(r"```\1", markdown)
