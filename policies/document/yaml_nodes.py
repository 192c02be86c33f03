"""A YAML document as a tree of marked nodes, built from parser events so that nothing is lost or expanded.

1. Anchors, aliases, tags, merge keys, duplicate keys, second documents and forbidden characters are problems, never
   resolved; the places that carry them become `Broken` and are not complained about again.
2. Size, node count and depth are bounded before a tree exists (a bomb costs what reading its text costs).
3. Mappings and lists are dictionaries and lists, so that models are validated from the tree itself; a place in a
   validation error leads to its mark (`mark_at`).
4. A plain scalar that YAML 1.1 and 1.2 read differently (`no`, `22:30`, `0777`, `1_000`) is a problem wherever it
   stands. A policy has no floating-point number; other files may have a decimal one, which both read alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from kvcustody.policies.document.problems import Problems, SourceMark, quote

BYTES_MAX = 1 << 20
NODES_MAX = 200_000
DEPTH_MAX = 32

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# C0 but tab and line ends (a lone carriage return hides a line), C1, zero-width, bidirectional, separators, BOM, tags.
HIDDEN = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e0fff]"
)
_TRAPS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("KVP201", "implicit boolean", re.compile(r"(?i:y|n|yes|no|on|off)\Z")),
    ("KVP202", "sexagesimal number", re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?\Z")),
    (
        "KVP203",
        "floating-point number",
        re.compile(
            r"[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?\Z|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z"
        ),
    ),
)
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]*)\.[0-9]+([eE][-+][0-9]+)?\Z")
_INTEGER = re.compile(r"[-+]?[0-9]+\Z")
_AMBIGUOUS = re.compile(r"[-+]?(0[0-9_]+|0[xob][0-9a-fA-F_]+|[0-9][0-9_]*_[0-9_]*)\Z")
_CAST = dict.fromkeys(("null", "Null", "NULL", "~", ""), "null")
_CAST |= dict.fromkeys(("true", "True", "TRUE", "false", "False", "FALSE"), "boolean")


@dataclass(slots=True)
class Scalar:
    """A scalar as written; `kind` is its YAML 1.2 core type: string, integer, float, boolean or null."""

    text: str
    kind: str
    mark: SourceMark


class SequenceNode(list["Node"]):
    """A list of nodes."""

    __slots__ = ("mark",)

    def __init__(self, items: Iterable[Node], mark: SourceMark) -> None:
        super().__init__(items)
        self.mark = mark


class MappingNode(dict[str, "Node"]):
    """Fields in document order; `keys_written` has each key as written, with its mark."""

    __slots__ = ("keys_written", "mark")

    def __init__(self, entries: Iterable[tuple[Scalar, Node]], mark: SourceMark) -> None:
        entries = tuple(entries)
        super().__init__((key.text, value) for key, value in entries)
        self.keys_written = {key.text: key for key, _ in entries}
        self.mark = mark


@dataclass(slots=True)
class Broken:
    """A placeholder for a part whose problem is already recorded."""

    mark: SourceMark


Node = Scalar | SequenceNode | MappingNode | Broken
Place = tuple[str | int, ...]
"""The fields and positions on the way to a value, as validation errors have them."""


class _AbandonError(Exception):
    """The rest of the document cannot be read; the reason is on record."""


def parse(
    source: str | bytes,
    problems: Problems,
    *,
    floats: bool = False,
    bytes_max: int = BYTES_MAX,
    nodes_max: int = NODES_MAX,
) -> Node | None:
    """Return the document's root, or None if it cannot be read at all; every complaint goes to `problems`."""
    text = _decode(source, problems, bytes_max)
    if text is None or not _visible(text, problems):
        return None
    try:
        return _Builder(text, problems, floats=floats, nodes_max=nodes_max).root()
    except _AbandonError:
        return None


def write_values(values: dict[str, Any]) -> bytes:
    """Return a document of plain values. Every text is quoted, because hexadecimal digits can look like a number."""
    return bytes(yaml.dump(values, Dumper=_Quoting, sort_keys=False).encode())


class _Quoting(yaml.SafeDumper):
    pass


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'"))


def _decode(source: str | bytes, problems: Problems, bytes_max: int) -> str | None:
    try:
        raw = source.encode() if isinstance(source, str) else source
        if len(raw) > bytes_max:
            problems.add(SourceMark(1, 1), "KVP102", f"the document has `{len(raw)}` bytes, over {bytes_max}")
            return None
        return raw.decode().removeprefix("\ufeff")
    except UnicodeEncodeError as error:
        problems.add(_place(str(source)[: error.start]), "KVP101", "the text holds a lone surrogate")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode()
        problems.add(_place(before), "KVP101", f"byte `0x{raw[error.start]:02x}` is not UTF-8")
    return None


def _visible(text: str, problems: Problems) -> bool:
    has_hidden = False
    for match in HIDDEN.finditer(text):
        problems.add(_place(text[: match.start()]), "KVP104", f"character `U+{ord(match.group()):04X}` is not allowed")
        has_hidden = True
        if problems.count >= 20:  # a binary file; finding the place of each costs a scan
            break
    return not has_hidden


def _place(before: str) -> SourceMark:
    return SourceMark(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)


class _Builder:
    """Parser events in, marked nodes out; explicit stack depth, no recursion deeper than `DEPTH_MAX`."""

    def __init__(self, text: str, problems: Problems, *, floats: bool, nodes_max: int) -> None:
        self._problems = problems
        self._floats = floats
        self._nodes_max = nodes_max
        self._events = self._read(text)
        self._nodes = 0

    def root(self) -> Node | None:
        event = next(self._events)
        while isinstance(event, yaml.StreamStartEvent):
            event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            self._problems.add(SourceMark(1, 1), "KVP106", "the document is empty")
            return None
        if event.tags:
            self._problems.add(_mark(event), "KVP109", "directive `%TAG` is not allowed")
        node = self._node(next(self._events), 1)
        next(self._events)  # document end
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            self._problems.add(_mark(after), "KVP105", "a second document starts here")
        elif isinstance(node, Scalar) and node.kind == "null":
            self._problems.add(SourceMark(1, 1), "KVP106", "the document is empty")
            return None
        return node

    def _read(self, text: str) -> Iterator[Any]:
        try:
            yield from yaml.parse(text, Loader=_LOADER)
        except yaml.MarkedYAMLError as error:
            at = error.problem_mark or error.context_mark
            mark = SourceMark(at.line + 1, at.column + 1) if at else SourceMark(1, 1)
            detail = (error.problem or "cannot be parsed").lower()
            hint = _advice(error, text)
            if error.context == _ALIAS and error.context_mark:  # the star, not what stands behind it
                mark = SourceMark(error.context_mark.line + 1, error.context_mark.column + 1)
                detail = "`*` begins an alias, and no name follows"
            self._problems.add(mark, "KVP103", f"the YAML is not well-formed: {detail}", hint)
            raise _AbandonError from error
        except yaml.YAMLError as error:
            self._problems.add(SourceMark(1, 1), "KVP103", "the YAML is not well-formed")
            raise _AbandonError from error

    def _node(self, event: Any, depth: int) -> Node:
        mark = _mark(event)
        self._nodes += 1
        if self._nodes > self._nodes_max:
            self._problems.add(mark, "KVP112", f"the document has more than `{self._nodes_max}` nodes")
            raise _AbandonError
        if isinstance(event, yaml.AliasEvent):
            self._problems.add(
                mark,
                "KVP108",
                f"alias {quote(f'*{event.anchor}')} is not allowed",
                "write the value out, or quote it: " + quote(f'"*{event.anchor}"'),
            )
            return Broken(mark)
        sound = self._undecorated(event, mark)
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event, mark)
        else:
            if depth > DEPTH_MAX:
                self._problems.add(mark, "KVP113", f"the document nests deeper than `{DEPTH_MAX}` levels")
                raise _AbandonError
            node = self._list(mark, depth) if isinstance(event, yaml.SequenceStartEvent) else self._map(mark, depth)
        return node if sound else Broken(mark)

    def _undecorated(self, event: Any, mark: SourceMark) -> bool:
        if event.anchor is not None:
            self._problems.add(mark, "KVP107", f"anchor {quote(f'&{event.anchor}')} is not allowed")
        if event.tag is not None:
            self._problems.add(mark, "KVP109", f"tag {quote(event.tag)} is not allowed")
        return event.anchor is None and event.tag is None

    def _scalar(self, event: Any, mark: SourceMark) -> Node:
        text: str = event.value
        if event.style not in (None, ""):
            return Scalar(text, "string", mark)
        if text in _CAST:
            return Scalar(text, _CAST[text], mark)
        if _AMBIGUOUS.match(text):
            self._problems.add(mark, "KVP204", f"integer {quote(text)} is ambiguous")
            return Broken(mark)
        if _INTEGER.match(text):
            return Scalar(text, "integer", mark)
        if self._floats and _FLOAT.match(text):
            return Scalar(text, "float", mark)
        for code, what, pattern in _TRAPS:
            if pattern.match(text):
                self._problems.add(mark, code, f"{what} {quote(text)} is not allowed")
                return Broken(mark)
        return Scalar(text, "string", mark)

    def _list(self, mark: SourceMark, depth: int) -> Node:
        items = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return SequenceNode(items, mark)

    def _map(self, mark: SourceMark, depth: int) -> Node:
        entries: dict[str, tuple[Scalar, Node]] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event, depth)
            value = self._node(next(self._events), depth + 1)
            if key is None:
                continue
            if key.text in entries:
                first = entries[key.text][0].mark.line
                self._problems.add(key.mark, "KVP111", f"key {quote(key.text)} is already on line {first}")
                continue
            entries[key.text] = (key, value)
        return MappingNode(entries.values(), mark)

    def _key(self, event: Any, depth: int) -> Scalar | None:
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and not event.style:
            self._nodes += 1
            self._problems.add(_mark(event), "KVP110", "merge key `<<` is not allowed")
            return None
        node = self._node(event, depth + 1)
        if isinstance(node, Scalar) and node.kind == "string":
            return node
        if isinstance(node, Scalar):
            self._problems.add(node.mark, "KVP114", f"key {quote(node.text)} is {_KINDS[node.kind]}, not a name")
        elif not isinstance(node, Broken):
            self._problems.add(node.mark, "KVP114", "a list or mapping cannot be a key")
        return None


_KINDS = {
    "string": "a string",
    "integer": "an integer",
    "float": "a number",
    "boolean": "a boolean",
    "null": "null",
}


def describe(node: Node) -> str:
    """Describe a node for a message: "a list", "integer `7`"."""
    if isinstance(node, Scalar):
        return "null" if node.kind == "null" else f"{node.kind} {quote(node.text)}"
    return "a list" if isinstance(node, SequenceNode) else "a mapping"


def along(root: Node, place: Place) -> Iterator[tuple[Node, str | int]]:
    """Yield the containers on the path to a place, each with the next step of the path, as far as the document has
    them.
    """
    node = root
    for step in place:
        if isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node):
            yield node, step
            node = node[step]
        elif isinstance(node, MappingNode) and isinstance(step, str):
            yield node, step
            if step not in node:
                return
            node = node[step]


def mark_at(root: Node, place: Place, *, key: bool = False) -> SourceMark:
    """Return where a value, or its key, is written. For a missing field this is the start of its mapping."""
    mark = root.mark
    for node, step in along(root, place):
        if isinstance(node, SequenceNode) and isinstance(step, int):
            mark = node[step].mark
        elif isinstance(node, MappingNode) and isinstance(step, str) and step in node:
            mark = node.keys_written[step].mark if key else node[step].mark
    return mark


def _advice(error: Any, text: str) -> str | None:
    """What to write where the YAML is not well-formed; None: only that it is to be corrected."""
    opened = error.context_mark.line + 1 if error.context_mark else 0
    if error.context == _ALIAS:
        return 'quote it: `"*"`'
    if error.context in _FLOWS:
        return f"close the `{_FLOWS[error.context]}` that opens on line {opened}"
    if error.context == "while scanning a quoted scalar":
        return f"close the quote that opens on line {opened}"
    if (error.problem or "").startswith("mapping values are not allowed"):
        return "quote the value, which holds `: `"
    at = error.problem_mark
    if at is not None and "cannot start any token" in (error.problem or ""):
        line = text.split("\n")[at.line]
        found = line[at.column : at.column + 1]
        return (
            "indent with spaces, not with a tab"
            if found == "\t"
            else f"quote the value that begins with {quote(found)}"
        )
    return None


_ALIAS = "while scanning an alias"
_FLOWS = {"while parsing a flow mapping": "{", "while parsing a flow sequence": "["}


def _mark(event: Any) -> SourceMark:
    start = event.start_mark
    return SourceMark(start.line + 1, start.column + 1)
