"""No module imports itself by way of others, TYPE_CHECKING and imports inside functions included."""

from __future__ import annotations

from standins.architecture.module_graph import circles, graph


def test_no_modules_import_each_other() -> None:
    arrows = graph()
    assert len(arrows) > 300, "the reading itself must find the product"
    assert circles(arrows) == []


def test_a_circle_would_be_seen() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert circles(arrows) == [["a", "b", "c"]]
