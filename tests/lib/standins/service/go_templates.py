"""A small reader of the Go templates of a Helm chart: the statements and functions that our chart uses, and no other.

`test_deployment_tools.py` compares it with Helm itself. A form that it does not know raises `UnknownForm`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_WORD = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[()|]|\$?[\w.]+|:=|=|\$)')


class UnknownForm(AssertionError):
    """A form of Go's templates that this reader does not know."""


def _json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _replaced(pattern: str, text: str, by: str) -> str:
    return re.sub(pattern, re.sub(r"\$\{(\d+)\}", r"\\g<\1>", by), text)


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[0] if match else ""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "append": lambda items, item: [*items, item],
    "default": lambda other, value: value or other,
    "dict": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
    "get": lambda values, name: values.get(name, ""),
    "list": lambda *items: [*items],
    "printf": lambda form, *values: form % values,
    "regexFind": _first,
    "regexMatch": lambda pattern, text: re.search(pattern, text) is not None,
    "regexReplaceAll": _replaced,
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "sortAlpha": sorted,
    "splitList": lambda by, text: text.split(by),
    "toJson": _json,
    "toString": str,
    "uniq": lambda items: [*dict.fromkeys(items)],
}


def fill(template: str, values: Mapping[str, Any], release: str) -> str:
    """A template of a chart as Helm fills it."""
    pieces = list(_pieces(template))
    root = {"Values": values, "Release": {"Name": release}}
    text, end = _filled(pieces, 0, root, [{}])
    assert end == len(pieces), "an `end` too many"
    return text


def _pieces(template: str) -> Iterator[tuple[bool, str]]:
    """Text (False) and actions (True), with blanks cut where a dash says so."""
    place, cut = 0, False
    for match in re.finditer(r"\{\{(-?)(?!\})((?:\"(?:[^\"\\]|\\.)*\"|[^\"])*?)(-?)\}\}", template):
        text = template[place : match.start()]
        text = text.lstrip() if cut else text
        yield False, text.rstrip() if match[1] else text
        yield True, match[2].strip()
        place, cut = match.end(), bool(match[3])
    yield False, template[place:].lstrip() if cut else template[place:]


def _filled(pieces: list[tuple[bool, str]], at: int, dot: Any, scopes: list[dict[str, Any]]) -> tuple[str, int]:
    """The text from `at` to the `end` of this block, and where that stands."""
    parts: list[str] = []
    while at < len(pieces):
        action, text = pieces[at]
        if not action:
            parts.append(text)
        elif text == "end":
            return "".join(parts), at
        elif block := re.match(r"(range|with|if) (.+)", text, re.DOTALL):
            value = _value(block[2], dot, scopes)
            inner = (value or []) if block[1] == "range" else [value] if value else []
            for item in inner:
                parts.append(_filled(pieces, at + 1, dot if block[1] == "if" else item, [*scopes, {}])[0])
            at = _end(pieces, at + 1)
        elif assigned := re.match(r"(\$\w+) (:?=) (.+)", text, re.DOTALL):
            name, value = assigned[1], _value(assigned[3], dot, scopes)
            holder = scopes[-1] if assigned[2] == ":=" else next(s for s in reversed(scopes) if name in s)
            holder[name] = value
        else:
            value = _value(text, dot, scopes)
            if value is None:
                raise KeyError(text)
            parts.append(str(value))
        at += 1
    return "".join(parts), at


def _end(pieces: list[tuple[bool, str]], at: int) -> int:
    depth = 1
    while True:
        action, text = pieces[at]
        depth += action and (re.match(r"(range|with|if) ", text) is not None) - (text == "end")
        if not depth:
            return at
        at += 1


def _value(pipeline: str, dot: Any, scopes: list[dict[str, Any]]) -> Any:
    words = _WORD.findall(pipeline)
    if "".join(words) != re.sub(r'("(?:[^"\\]|\\.)*")|\s+', lambda m: m[1] or "", pipeline):
        raise UnknownForm(f"a form that this test does not know: {pipeline}")
    value, left = _pipeline(words, dot, scopes)
    assert not left, f"a bracket too many: {pipeline}"
    return value


def _pipeline(words: list[str], dot: Any, scopes: list[dict[str, Any]]) -> tuple[Any, list[str]]:
    """The value of a pipeline up to its closing bracket, and the words after it."""
    passed: list[Any] = []
    while True:
        command: list[Any] = []
        function: Callable[..., Any] | None = None
        while words and words[0] not in ("|", ")"):
            word, words = words[0], words[1:]
            if word == "(":
                value, words = _pipeline(words, dot, scopes)
                words = words[1:]
            elif word.startswith('"'):
                value = json.loads(word)
            elif word.startswith((".", "$")):
                value = _place(word, dot, scopes)
            elif word in FUNCTIONS and function is None and not command:
                function = FUNCTIONS[word]
                continue
            else:
                raise UnknownForm(f"a form that this test does not know: {word}")
            command.append(value)
        command += passed
        passed = [function(*command) if function else command[0]]
        if not words or words[0] == ")":
            return passed[0], words
        words = words[1:]


def _place(word: str, dot: Any, scopes: list[dict[str, Any]]) -> Any:
    variable, *names = word.split(".")
    value = next(s[variable] for s in reversed(scopes) if variable in s) if variable else dot
    for name in filter(None, names):
        value = value.get(name)
    return value
