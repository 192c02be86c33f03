"""Pages of complete lists: cut by position, with a cursor bound to the request.

An answer that can grow without bound has a query of its own with keyset positions; these cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcustody.governance.service.operations.desk import Desk
from kvcustody.governance.service.page_cursor import CursorBinding


def page(
    desk: Desk, question: CursorBinding, items: Sequence[dict[str, Any]], cursor: str | None, limit: int
) -> dict[str, Any]:
    """Return at most `limit` items from the cursor's position on, and the next page's cursor."""
    position = desk.cursors.read(question, cursor)
    start = int(position[0]) if position else 0
    following = desk.cursors.write(question, [start + limit]) if start + limit < len(items) else None
    return {"items": list(items[start : start + limit]), "next": following}


def newest_page(
    desk: Desk, binding: CursorBinding, items: Sequence[dict[str, Any]], cursor: str | None, limit: int
) -> dict[str, Any]:
    """Return a page with the last items first. Items added meanwhile move no other item to another page."""
    position = desk.cursors.read(binding, cursor)
    end = min(int(position[0]), len(items)) if position else len(items)
    start = max(0, end - limit)
    following = desk.cursors.write(binding, [start]) if start else None
    return {"items": list(items[start:end])[::-1], "next": following}
