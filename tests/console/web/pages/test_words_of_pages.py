"""Pages show code as code, and say one of a thing and more of it as English does."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import httpx
import pytest

from kvcustody.console.web.rendering import environment
from standins.console.pages_by_role import PAGES
from standins.console.web_world import World

OWN = re.compile(r"<(pre|code|textarea|script|style|option|title)\b.*?</\1>", re.DOTALL)


def faults(page: str) -> list[str]:
    """Backticks outside code, and plurals in brackets or of one."""
    text = html.unescape(re.sub(r"<[^>]*>", " ", OWN.sub(" ", page)))
    return re.findall(
        r".{0,30}`.{0,30}|\w+\((?:s|es|ies)\)|(?<![\d.,:-])\b1 (?!is\b|was\b|across\b)[a-z]+[^s\W]s\b", text
    )


@pytest.mark.parametrize("name", PAGES)
def test_code_and_plurals(world: World, visitor: Callable[[str], httpx.Client], name: str) -> None:
    world.release()
    person = visitor(name)
    for path in PAGES[name].values():
        assert faults(person.get(f"/console{path}").text) == [], path


def test_no_template_writes_a_backtick_or_a_plural_in_brackets() -> None:
    loader = environment.loader
    assert loader is not None
    for name in loader.list_templates():
        if name.endswith(".html"):
            source = loader.get_source(environment, name)[0]
            text = re.sub(r"{[%{#].*?[%}#]}", " ", source, flags=re.DOTALL)
            assert "`" not in text and not re.search(r"\w\((s|es|ies)\)", source), name


def test_control_each_fault_is_said() -> None:
    assert faults("<p>the setting `policy_trust`</p>") and faults("<p>2 witness(es)</p>") and faults("<p>1 events</p>")
    assert faults("<p>the setting <code>policy_trust</code>, 1 event, 21 events, 1 witness</p>") == []
