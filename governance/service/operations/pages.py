"""Pages of what the library gives whole: cut by position, the cursor bound to the question.

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
    """The items from the cursor's position on, at most `limit`, and the cursor of the next page."""
    position = desk.cursors.read(question, cursor)
    start = int(position[0]) if position else 0
    following = desk.cursors.write(question, [start + limit]) if start + limit < len(items) else None
    return {"items": list(items[start : start + limit]), "next": following}


def newest_page(
    desk: Desk, binding: CursorBinding, items: Sequence[dict[str, Any]], cursor: str | None, limit: int
) -> dict[str, Any]:
    """As `page`, the last items first. What is added at the end meanwhile moves no item to another page."""
    position = desk.cursors.read(binding, cursor)
    end = min(int(position[0]), len(items)) if position else len(items)
    start = max(0, end - limit)
    following = desk.cursors.write(binding, [start]) if start else None
    return {"items": list(items[start:end])[::-1], "next": following}
