"""Answers of the API on a terminal: a page as a table, anything else as names and values."""

from __future__ import annotations

from typing import Any

import orjson

from kvcustody.console.command import make_table, stdout

_COLUMNS_MAX = 8


def show(value: Any) -> None:
    """Print an answer."""
    if isinstance(value, dict) and isinstance(value.get("items"), list):
        _page(value["items"])
        if value.get("next"):
            print(f"more: --cursor {value['next']}")
        return
    for name, item in value.items():
        print(f"{name}: {_cell(item)}")


def _page(items: list[Any]) -> None:
    if not items:
        print("nothing")
        return
    if not all(isinstance(item, dict) for item in items):
        for item in items:
            print(_cell(item))
        return
    names = list(items[0])[:_COLUMNS_MAX]
    table = make_table("", *names, left=len(names))
    for item in items:
        table.add_row(*(_cell(item.get(name)) for name in names))
    stdout().print(table, markup=False)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else orjson.dumps(value).decode()
