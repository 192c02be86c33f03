"""Typed fields out of nodes: each method takes a node, gives a value of its type, and records what is wrong
with it.

1. A method always returns a value of its type; after a problem it is a placeholder that no `Policy` will ever hold.
2. A `Broken` node gives the placeholder in silence: its problem is already on record.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TypeVar

from kvcustody.errors import ConfigError
from kvcustody.policies.document.problems import Problems, quote
from kvcustody.policies.document.yaml_nodes import (
    HIDDEN,
    Broken,
    MappingNode,
    Node,
    Scalar,
    SequenceNode,
    describe,
)
from kvcustody.tenants import OWN, Issuers

T = TypeVar("T")

RESERVED = frozenset({"*", "owner", "same-group", "default", "all", "none", "never", "any", "default-deny"})
_UNITS_US = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
_DURATION = re.compile(r"(0|[1-9][0-9]{0,8})(ms|s|m|h|d)\Z")
_DURATION_MAX_US = 3650 * _UNITS_US["d"]
_PERCENTAGE = re.compile(r"(0|[1-9][0-9]{0,2})(?:\.([0-9]{1,4}))?%\Z")
_FRACTION = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})\Z")
_DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})\Z")
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
TENANT_FORM = r"[A-Za-z0-9][A-Za-z0-9._@:/-]{0,127}"
ISSUER_FORM = r"[A-Za-z0-9._:@+=~,/!|'-]{1,128}"
_TENANT = re.compile(rf"{TENANT_FORM}(\^{ISSUER_FORM})?\Z")
_ISSUER = re.compile(rf"{ISSUER_FORM}\Z")
_ROUTE = re.compile(r"(/[A-Za-z0-9._~@:{}-]+|/\*)+\Z")
_HEX = re.compile(r"[0-9a-f]{64}\Z")


class FieldReader:
    """Reads nodes as typed values, adding to one list of problems."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.issuers = Issuers()  # those that the document lists

    def mapping(
        self, node: Node, what: str, required: Iterable[str], optional: Iterable[str] = ()
    ) -> dict[str, Node]:
        """The fields of a mapping; complains of unknown and missing ones."""
        if not isinstance(node, MappingNode):
            self._wrong(node, f"{what} must be a mapping")
            return {}
        required = tuple(required)
        known = (*required, *optional)
        found: dict[str, Node] = {}
        for key, value in node.entries:
            if key.text in known:
                found[key.text] = value
            else:
                hint = self.problems.near(key.text, known) or f"known fields are {', '.join(known)}"
                self.problems.add(key.mark, "KVP301", f"unknown field {quote(key.text)} in {what}", hint)
        for name in required:
            if name not in found:
                self.problems.add(node.mark, "KVP302", f"{what} has no field `{name}`")
        return found

    def entries(self, node: Node, what: str) -> tuple[tuple[Scalar, Node], ...]:
        """The entries of a mapping whose keys are names chosen by the author."""
        if isinstance(node, MappingNode):
            return node.entries
        self._wrong(node, f"{what} must be a mapping")
        return ()

    def items(self, node: Node, what: str, count_max: int) -> tuple[Node, ...]:
        """The items of a list."""
        if not isinstance(node, SequenceNode):
            self._wrong(node, f"{what} must be a list")
            return ()
        if len(node.items) > count_max:
            self.problems.add(
                node.mark, "KVP307", f"{what} has `{len(node.items)}` entries, over {count_max}"
            )
            return ()
        return node.items

    def words(
        self, node: Node, what: str, read: Callable[[Node], T], count_max: int = 10_000
    ) -> tuple[T, ...]:
        """One value or a list of different ones."""
        nodes = node.items if isinstance(node, SequenceNode) else (node,)
        if not nodes:
            self.problems.add(node.mark, "KVP305", f"{what} is empty")
        if len(nodes) > count_max:
            self.problems.add(node.mark, "KVP307", f"{what} has `{len(nodes)}` entries, over {count_max}")
            return ()
        seen: set[str] = set()
        values = []
        for item in nodes:
            if isinstance(item, Scalar) and item.text in seen:
                self.problems.add(item.mark, "KVP305", f"{what} lists {quote(item.text)} twice")
            elif isinstance(item, Scalar):
                seen.add(item.text)
            values.append(read(item))
        return tuple(values)

    def string(self, node: Node, what: str) -> str | None:
        """A string, whatever it says; None after a problem."""
        if isinstance(node, Scalar) and node.kind == "string":
            return node.text
        self._wrong(node, f"{what} must be a string")
        return None

    def text(self, node: Node, what: str) -> str:
        """One line for people to read."""
        text = self.string(node, what)
        if text is None:
            return ""
        if not text.strip() or len(text) > 500 or "\n" in text or "\r" in text:
            self.problems.add(
                node.mark, "KVP215", f"{what} {quote(text)} is not one line of 1 to 500 characters"
            )
        elif HIDDEN.search(text) or "\t" in text:
            self._hidden(node, text, what)
        return text

    def identifier(self, node: Node, what: str) -> str:
        """A name of a rule, grant, segment, group, classification or label."""
        return self._name(
            node, what, _IDENTIFIER, "use at most 64 ASCII letters, digits and `._-`, a letter or digit first"
        )

    def tenant(self, node: Node, what: str) -> str:
        """A tenant's name: its id, wider than an identifier because issuers choose it, and where there are several
        issuers, `^` and its own."""
        hint = "use at most 128 ASCII letters, digits and `._@:/-`, a letter or digit first; `^` goes before an issuer"
        text = self._name(node, what, _TENANT, hint)
        try:
            return self.issuers.resolve(text) if text else ""
        except ConfigError as error:
            self.problems.add(node.mark, "KVP413", error.message)
            return ""

    def issuer(self, node: Node, what: str) -> str:
        """Who vouches for tenants, as principals name it."""
        hint = "use at most 128 ASCII letters, digits and `._:@+=~,/!|'-`; an identity document may give it a `name`"
        name = self._name(node, what, _ISSUER, hint)
        if name == OWN:
            self.problems.add(node.mark, "KVP207", f"{what} {quote(name)} is a reserved word")
        return name

    def integer(self, node: Node, what: str, low: int, high: int) -> int:
        """A decimal integer within bounds."""
        if not isinstance(node, Scalar) or node.kind != "integer":
            self._wrong(node, f"{what} must be an integer")
            return low
        if len(node.text) > 18 or not low <= int(node.text) <= high:
            self.problems.add(node.mark, "KVP214", f"{what} {quote(node.text)} is not in {low}..{high}")
            return low
        return int(node.text)

    def boolean(self, node: Node, what: str) -> bool:
        """`true` or `false`."""
        if isinstance(node, Scalar) and node.kind == "boolean":
            return node.text.lower() == "true"
        self._wrong(node, f"{what} must be `true` or `false`")
        return False

    def choice(self, node: Node, what: str, choices: dict[str, T]) -> T:
        """One of a few words."""
        first = next(iter(choices.values()))
        text = self.string(node, what)
        if text is None or text in choices:
            return choices.get(text or "", first)
        hint = self.problems.near(text, choices) or f"choices are {', '.join(choices)}"
        self.problems.add(node.mark, "KVP208", f"{what} {quote(text)} is not a choice", hint)
        return first

    def duration_us(self, node: Node, what: str, *, positive: bool = False) -> int:
        """`250ms`, `30m`, `8h`, `7d`, `0s` as microseconds; at most ten years."""
        text = self._plain(node, what, "a duration")
        if text is None:
            return 1
        match = _DURATION.match(text)
        value = int(match[1]) * _UNITS_US[match[2]] if match else -1
        if not 0 <= value <= _DURATION_MAX_US:
            self.problems.add(node.mark, "KVP209", f"{what} {quote(text)} is not a duration of at most 3650d")
            return 1
        if positive and value == 0:
            self.problems.add(node.mark, "KVP506", f"{what} is {quote(text)}")
            return 1
        return value

    def percentage(self, node: Node, what: str) -> Fraction:
        """`20%` or `12.5%` as an exact fraction."""
        text = self._plain(node, what, "a percentage")
        if text is None:
            return Fraction(0)
        match = _PERCENTAGE.match(text)
        value = Fraction(f"{match[1]}.{match[2] or 0}") / 100 if match else Fraction(2)
        if value > 1:
            self.problems.add(
                node.mark, "KVP210", f"{what} {quote(text)} is not a percentage of at most 100%"
            )
            return Fraction(0)
        return value

    def share(self, node: Node, what: str) -> Fraction:
        """`all`, `none` or `1/64` as an exact fraction."""
        text = self._plain(node, what, "a share")
        if text is None or text in ("all", "none"):
            return Fraction(text == "all")
        match = _FRACTION.match(text)
        if match is None or int(match[1]) >= int(match[2]):
            self.problems.add(node.mark, "KVP211", f"{what} {quote(text)} is not a share")
            return Fraction(0)
        return Fraction(int(match[1]), int(match[2]))

    def date_us(self, node: Node, what: str) -> int:
        """The instant at which a UTC day begins, in microseconds since the Unix epoch."""
        text = self._plain(node, what, "a date")
        if text is None:
            return 0
        match = _DATE.match(text)
        try:
            day = dt.date(*(int(part) for part in match.groups())) if match else None
        except ValueError:
            day = None
        if day is None or not 1970 <= day.year <= 2199:
            self.problems.add(node.mark, "KVP212", f"{what} {quote(text)} is not a date")
            return 0
        return (day - dt.date(1970, 1, 1)).days * _UNITS_US["d"]

    def digest(self, node: Node, what: str, prefix: str) -> str:
        """A prefixed digest of 64 lower-case hex digits; the digits alone are returned."""
        text = self.string(node, what)
        if text is None:
            return ""
        digits = text.removeprefix(prefix)
        if not text.startswith(prefix) or not _HEX.match(digits):
            self.problems.add(
                node.mark, "KVP213", f"{what} {quote(text)} is not `{prefix}` and 64 hex digits"
            )
        return digits

    def route(self, node: Node, what: str) -> str:
        """A path pattern; `*` is one whole segment, at the end any number of them."""
        text = self.string(node, what)
        if text is None:
            return "/"
        if len(text) > 256 or not _ROUTE.match(text) or "/../" in text + "/" or "/./" in text + "/":
            self.problems.add(node.mark, "KVP216", f"{what} {quote(text)} is not a route")
        return text

    def _name(self, node: Node, what: str, pattern: re.Pattern[str], hint: str) -> str:
        text = self.string(node, what)
        if text is None:
            return ""
        if text in RESERVED:
            self.problems.add(node.mark, "KVP207", f"{what} {quote(text)} is a reserved word")
        elif HIDDEN.search(text) or "\t" in text:
            self._hidden(node, text, what)
        elif not pattern.match(text):
            self.problems.add(node.mark, "KVP206", f"{what} {quote(text)} is not an identifier", hint)
        else:
            return text
        return ""

    def _hidden(self, node: Node, text: str, what: str) -> None:
        character = next(c for c in text if c == "\t" or HIDDEN.match(c))
        self.problems.add(
            node.mark, "KVP104", f"{what} {quote(text)} holds character `U+{ord(character):04X}`"
        )

    def _plain(self, node: Node, what: str, kind: str) -> str | None:
        """A scalar's text, even where it looks like a number: the message then says which unit is missing."""
        if isinstance(node, Scalar) and node.kind in ("string", "integer"):
            return node.text
        self._wrong(node, f"{what} must be {kind}")
        return None

    def _wrong(self, node: Node, message: str) -> None:
        if not isinstance(node, Broken):
            self.problems.add(node.mark, "KVP205", f"{message}, not {describe(node)}")
