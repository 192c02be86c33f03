"""Types of fields. Each declares once what a document may contain, what it is read as, and what editors check.

1. A section is a `DocumentPart` with annotated fields; `read_section` validates a marked tree as one and records every
   problem at its place. What the validation of one field refuses does not hide what is wrong elsewhere.
2. After a problem the place is `Broken`, and is read as a placeholder that no `Policy` will ever hold. A place that
   the YAML itself broke is read so in silence: its problem is already on record.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import PydanticCustomError, core_schema

from kvcustody.policies.document.model import NAME_PATTERN
from kvcustody.policies.document.problems import Problems, SourceMark, quote
from kvcustody.policies.document.yaml_nodes import (
    HIDDEN,
    Broken,
    MappingNode,
    Node,
    Place,
    Scalar,
    SequenceNode,
    along,
    describe,
    mark_at,
)
from kvcustody.tenants import OWN

RESERVED = frozenset({"*", "owner", "same-group", "default", "all", "none", "never", "any", "default-deny"})
WHAT = "\0"  # in a message: what it speaks of
_UNITS_US = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000, "d": 86_400_000_000}
_DURATION = r"(0|[1-9][0-9]{0,8})(ms|s|m|h|d)"
_PERCENTAGE = r"(0|[1-9][0-9]{0,2})(\.([0-9]{1,4}))?%"
_FRACTION = r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})"
_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_ISSUER = r"[A-Za-z0-9._:@+=~,/!|'-]{1,128}"
_ROUTE = r"(/[A-Za-z0-9._~@:{}-]+|/\*)+"
_ROUNDS_MAX = 64

M = TypeVar("M", bound="DocumentPart")


class Wrong(NamedTuple):
    """One error. `at` leads to it from where it is noticed; `near` holds the word and its possible replacements. `what`
    is a template like `DocumentPart.called` (empty: the name of the field).
    """

    code: str
    message: str
    hint: str | None = None
    near: tuple[str, tuple[str, ...]] | None = None
    at: Place = ()
    what: str = ""


def refused(*wrongs: Wrong) -> PydanticCustomError:
    """Return the error that a validator raises."""
    return PydanticCustomError("refused", "refused", {"wrongs": wrongs})


@dataclass(frozen=True)
class Reads:
    """How a scalar is read: `read` returns the value of its text, or the error.

    With `keeps` the value is the scalar itself, where its mark is needed later.
    """

    kind: str
    read: Callable[[str], Any]
    placeholder: Any
    schema: dict[str, Any] = field(hash=False)
    kinds: tuple[str, ...] = ("string",)
    what: str = ""
    keeps: bool = False

    def called(self, what: str) -> Reads:
        """Return the same reader with another name in messages."""
        return replace(self, what=what)

    def naming(self, place: str, *, but: str | None = None) -> Reads:
        """Return the same reader for names that the document declares elsewhere (`names_at`)."""
        return replace(self, schema=self.schema | names_at(place, but=but))

    def __call__(self, node: object) -> Any:
        """Return the value of a node."""
        if isinstance(node, Scalar) and node.kind in self.kinds:
            value = self.read(node.text)
            if isinstance(value, Wrong):
                raise refused(value._replace(what=value.what or self.what))
            return node if self.keeps else value
        if isinstance(node, Broken):
            return Scalar("", "null", node.mark) if self.keeps else self.placeholder
        raise refused(_not(self.kind, node, self.what))

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_plain_validator_function(self)

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        return dict(self.schema)


@dataclass(frozen=True)
class Shape:
    """How a list or a mapping is read. `read` receives its node and the validator of its entries, which have type
    `usual`.
    """

    read: Callable[[Any, Callable[[Any], Any]], Any]
    describe: Callable[[dict[str, Any], Any], dict[str, Any]]
    usual: Any = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        entries = handler(source) if self.usual is None else handler.generate_schema(self.usual)
        return core_schema.no_info_wrap_validator_function(self.read, entries)

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        return self.describe(handler(core), handler)


def listed(
    most: int = 10_000, *, distinct: bool = False, single: bool = False, kind: str = "a list", what: str = ""
) -> Shape:
    """Return the type of a list. With `distinct` its words differ and it is not empty; with `single` one word may
    replace it.
    """

    def repeats(node: SequenceNode) -> Iterator[Wrong]:
        if not node:
            yield Wrong("KVP305", f"{WHAT} is empty", what=what)
        seen: set[str] = set()
        for index, item in enumerate(node):
            if isinstance(item, Scalar) and item.text in seen:
                yield Wrong("KVP305", f"{WHAT} lists {quote(item.text)} twice", at=(index,), what=what)
            elif isinstance(item, Scalar):
                seen.add(item.text)

    def read(node: Node, items: Callable[[Any], Any]) -> Any:
        if isinstance(node, Broken):
            return ()
        if not isinstance(node, SequenceNode):
            if single:
                return items([node])
            raise refused(_not(kind, node, what))
        _check_count(node, most, what)
        if distinct and (wrongs := tuple(repeats(node))):
            raise refused(*wrongs)
        return items(node)

    def describe(several: dict[str, Any], _: Any) -> dict[str, Any]:
        several |= {"minItems": 1, "uniqueItems": True} if distinct else {}
        several["maxItems"] = most
        return {"anyOf": [several["items"], several]} if single else several

    return Shape(read, describe)


def names_at(place: str, *, but: str | None = None) -> dict[str, Any]:
    """Tell an editor where a document declares the names allowed here; validators ignore it.

    The keys of the mapping at `place`, or the words of its list; `*` in it is the name under which the value
    stands, and `but` a key that is no name.
    """
    return {"x-names": {"in": place} | ({} if but is None else {"but": but})}


def by_name(least: int = 0, most: int = 10_000, *, names: dict[str, Any] | None = None) -> Shape:
    """Return the type of a mapping whose keys are names. `names` restricts them for editors only."""

    def read(node: Node, entries: Callable[[Any], Any]) -> Any:
        if isinstance(node, Broken):
            return {}
        if not isinstance(node, MappingNode):
            raise refused(_not("a mapping", node))
        if len(node) < least:
            raise refused(Wrong("KVP305", f"{WHAT} is empty"))
        _check_count(node, most)
        return entries(node)

    told = {"minProperties": least, "maxProperties": most}
    more = {} if names is None else {"propertyNames": names}
    return Shape(read, lambda entries, _: entries | told | more)


def either(usual: Any, other: Reads | type[DocumentPart], *words: str) -> Shape:
    """Return the type of a value that has another form besides the usual one: mappings, scalars, or certain words."""

    def read(node: Node, usually: Callable[[Any], Any]) -> Any:
        if not isinstance(other, Reads):
            return other.model_validate(node) if isinstance(node, MappingNode) else usually(node)
        if isinstance(node, Scalar) and (not words or node.text in words):
            return other(node)
        return usually(node)

    def describe(usually: dict[str, Any], handler: Any) -> dict[str, Any]:
        more = other.schema if isinstance(other, Reads) else handler(other.__pydantic_core_schema__)
        return {"anyOf": [*usually.get("anyOf", [usually]), more]}

    return Shape(read, describe, usual)


def _check_count(node: SequenceNode | MappingNode, most: int, what: str = "") -> None:
    if len(node) > most:
        raise refused(Wrong("KVP307", f"{WHAT} has `{len(node)}` entries, over {most}", what=what))


class DocumentPart(BaseModel):
    """Base of every mapping with known fields. `called` is its name in messages: `{0}` is its own key, `{1}` the key
    above, `{tenant}` marks a tenant's own entry, and `{id}` is the id of the entry that contains it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    called: ClassVar[str]
    __slots__ = ("node",)  # a private attribute of pydantic's would cost what the rest of a section does
    if TYPE_CHECKING:
        node: MappingNode

    @property
    def mark(self) -> SourceMark:
        """The place where the section begins."""
        return self.node.mark

    def at(self, *place: str) -> SourceMark:
        """Return the place of a field's value, or of an entry in it."""
        return mark_at(self.node, place)

    def keys_of(self, name: str) -> Iterable[Scalar]:
        """Return the keys of a mapping by name, with their marks."""
        node = self.node.get(name)
        return node.keys_written.values() if isinstance(node, MappingNode) else ()

    def _wrongs(self) -> Iterable[Wrong]:
        """What is wrong among the fields of the section, where each by itself is sound."""
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, node: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        known, required = field_names(cls)
        if isinstance(node, Broken):
            node = MappingNode(((Scalar(name, "string", node.mark), node) for name in required), node.mark)
        if not isinstance(node, MappingNode):
            raise refused(_not("a mapping", node, cls.called))
        fields: Mapping[str, Node] = node
        if not (required <= node.keys() <= known.keys()):
            if wrongs := tuple(_strangers(cls, node)):
                raise refused(*wrongs)
            fields = {name: node[name] for name in known if name in node}
        section = handler(fields)
        object.__setattr__(section, "node", node)
        if (wrongs := tuple(section._wrongs())) and sound(node):
            raise refused(*wrongs)
        return section


@cache
def field_names(section: type[DocumentPart]) -> tuple[dict[str, None], frozenset[str]]:
    """Return the fields of a section by their names in documents, required ones first; and the required ones."""
    named = [(told.alias or name, told.is_required()) for name, told in section.model_fields.items()]
    named.sort(key=lambda pair: not pair[1])
    return {name: None for name, _ in named}, frozenset(name for name, required in named if required)


def _strangers(section: type[DocumentPart], node: MappingNode) -> Iterator[Wrong]:
    known, required = field_names(section)
    hint = f"known fields are {', '.join(known)}"
    for name, value in node.items():
        if name not in known and not isinstance(value, Broken):
            message = f"unknown field {quote(name)} in {WHAT}"
            yield Wrong("KVP301", message, hint, (name, tuple(known)), (name,), section.called)
    for name in known:
        if name in required and name not in node:
            yield Wrong("KVP302", f"{WHAT} has no field `{name}`", at=(name,), what=section.called)


def _not(kind: str, node: object, what: str = "") -> Wrong:
    assert isinstance(node, Scalar | SequenceNode | MappingNode)
    hint = None
    if kind == "an integer":
        hint = "write an integer, such as `5`"
        if isinstance(node, Scalar) and re.fullmatch(r"-?[0-9]{1,18}", node.text):
            hint = f"write it without quotes: {quote(node.text)}"
    return Wrong("KVP205", f"{WHAT} must be {kind}, not {describe(node)}", hint, what=what)


def sound(node: Node | None) -> bool:
    """Return whether no part of the node is broken."""
    if isinstance(node, MappingNode):
        return all(map(sound, node.values()))
    return all(map(sound, node)) if isinstance(node, SequenceNode) else not isinstance(node, Broken)


def read_section(section: type[M], root: Node, problems: Problems) -> M:
    """Return the section in a tree, whatever is wrong with it. Every problem is recorded and its place marked as
    broken.
    """
    for _ in range(_ROUNDS_MAX):  # what is wrong between fields shows when each of them is read
        try:
            return section.model_validate(root)
        except ValidationError as error:
            for found in error.errors(include_url=False, include_input=False):
                for wrong in found["ctx"]["wrongs"]:
                    _record(root, found["loc"], wrong, problems)
                    root = _broken(root, (*found["loc"], *wrong.at))
    raise AssertionError("a refused place is broken, and a broken one is not refused")


def _record(root: Node, place: Place, wrong: Wrong, problems: Problems) -> None:
    names = [quote(step) for step in reversed(place) if isinstance(step, str)]
    above = [node["id"] for node, _ in along(root, place) if isinstance(node, MappingNode) and "id" in node]
    told = {
        "id": quote(getattr(above[-1], "text", "") if above else ""),
        "tenant": "tenant " if place[:1] == ("tenants",) else "",
    }
    mark = mark_at(root, (*place, *wrong.at), key=wrong.code == "KVP301")
    complain(problems, mark, wrong, (wrong.what or "{0}").format(*names, **told))


def complain(problems: Problems, mark: SourceMark, wrong: Wrong, what: str) -> None:
    """Record what is wrong with `what`."""
    hint = problems.near(*wrong.near) if wrong.near else None
    problems.add(mark, wrong.code, wrong.message.replace(WHAT, what), hint or wrong.hint)


def _broken(root: Node, place: Place) -> Node:
    """Return the tree with the place at `path` marked as broken."""
    broken = Broken(mark_at(root, place))
    steps = list(along(root, place))
    if not steps:
        return broken
    container: Any = steps[-1][0]
    container[steps[-1][1]] = broken
    return root


def _text(text: str) -> str | Wrong:
    if not text.strip() or len(text) > 500 or "\n" in text or "\r" in text:
        return Wrong("KVP215", f"{WHAT} {quote(text)} is not one line of 1 to 500 characters")
    return _hidden(text) or text


def _hidden(text: str) -> Wrong | None:
    found = None if text.isprintable() else next((c for c in text if c == "\t" or HIDDEN.match(c)), None)
    return Wrong("KVP104", f"{WHAT} {quote(text)} holds character `U+{ord(found):04X}`") if found else None


def _duration(least: int) -> Callable[[str], int | Wrong]:
    @lru_cache(4096)  # a document says few different ones, often
    def read(text: str) -> int | Wrong:
        match = re.fullmatch(_DURATION, text)
        value = int(match[1]) * _UNITS_US[match[2]] if match else -1
        if not 0 <= value <= 3650 * _UNITS_US["d"]:
            return Wrong("KVP209", f"{WHAT} {quote(text)} is not a duration of at most 3650d")
        return value if value >= least else Wrong("KVP506", f"{WHAT} is {quote(text)}")

    return read


@lru_cache(4096)
def _percentage(text: str) -> Fraction | Wrong:
    value = Fraction(text[:-1]) / 100 if re.fullmatch(_PERCENTAGE, text) else Fraction(2)
    return value if value <= 1 else Wrong("KVP210", f"{WHAT} {quote(text)} is not a percentage of at most 100%")


def _share(text: str) -> Fraction | Wrong:
    if text in ("all", "none"):
        return Fraction(text == "all")
    share = Fraction(text) if re.fullmatch(_FRACTION, text) else Fraction(1)
    return share if share < 1 else Wrong("KVP211", f"{WHAT} {quote(text)} is not a share")


@lru_cache(4096)
def _date(text: str) -> int | Wrong:
    try:
        day = dt.date.fromisoformat(text) if re.fullmatch(_DATE, text) else dt.date.min
    except ValueError:
        day = dt.date.min
    if not 1970 <= day.year <= 2199:
        return Wrong("KVP212", f"{WHAT} {quote(text)} is not a date")
    return (day - dt.date(1970, 1, 1)).days * _UNITS_US["d"]


def _route(text: str) -> str | Wrong:
    if len(text) > 256 or not re.fullmatch(_ROUTE, text) or "/../" in text + "/" or "/./" in text + "/":
        return Wrong("KVP216", f"{WHAT} {quote(text)} is not a route")
    return text


def _pattern(pattern: str, description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^({pattern})$", "description": description, **more}


def _name(pattern: str, description: str, hint: str, what: str = "", *reserved: str) -> Reads:
    match = re.compile(rf"{pattern}\Z").match

    def read(text: str) -> str | Wrong:
        if text in RESERVED or text in reserved:
            return Wrong("KVP207", f"{WHAT} {quote(text)} is a reserved word")
        if match(text):
            return text
        return _hidden(text) or Wrong("KVP206", f"{WHAT} {quote(text)} is not an identifier", hint)

    return Reads("a string", read, "", _pattern(pattern, description), what=what, keeps=True)


def _measure(
    kind: str, read: Callable[[str], Any], placeholder: Any, pattern: str, description: str, *examples: str
) -> Reads:
    """Refuse a bare number because of its missing unit, not because of its type."""
    shown = _pattern(pattern, description, examples=list(examples))
    return Reads(kind, read, placeholder, shown, ("string", "integer"))


def choice(words: Mapping[str, Any] | Iterable[Enum]) -> Reads:
    """Return the type of a choice among a few words; the first is the placeholder."""
    choices = dict(words) if isinstance(words, Mapping) else {word.name.lower(): word for word in words}

    def read(text: str) -> Any:
        if text in choices:
            return choices[text]
        message = f"{WHAT} {quote(text)} is not a choice"
        return Wrong("KVP208", message, f"choices are {', '.join(choices)}", (text, tuple(choices)))

    return Reads("a string", read, next(iter(choices.values())), {"enum": list(choices)})


def constant(value: str) -> Reads:
    """Return the schema of a document."""

    def read(text: str) -> str | Wrong:
        message = f"schema {quote(text)} is not `{value}`"
        return text if text == value else Wrong("KVP303", message, f"write `schema: {value}`")

    return Reads("a string", read, value, {"const": value})


def integer(low: int, high: int) -> Reads:
    """Return a decimal integer within bounds."""

    def read(text: str) -> int | Wrong:
        if len(text) > 18 or not low <= int(text) <= high:
            return Wrong("KVP214", f"{WHAT} {quote(text)} is not in {low}..{high}")
        return int(text)

    return Reads("an integer", read, low, {"type": "integer", "minimum": low, "maximum": high}, ("integer",))


def hex_digest(prefix: str) -> Reads:
    """Return a prefixed digest of 64 lower-case hex digits; the digits alone are the value."""

    def read(text: str) -> str | Wrong:
        if re.fullmatch(rf"{prefix}[0-9a-f]{{64}}", text):
            return text.removeprefix(prefix)
        return Wrong("KVP213", f"{WHAT} {quote(text)} is not `{prefix}` and 64 hex digits")

    return Reads("a string", read, "", _pattern(f"{prefix}[0-9a-f]{{64}}", "A digest"))


def told(description: str, default: Any = ..., alias: str | None = None) -> Any:
    """Return a field with a description; without a default it is required."""
    if default == {}:  # a mutable default would be copied each time
        return Field(default_factory=dict, description=description, alias=alias)
    return Field(default, description=description, alias=alias)


STRING = Reads("a string", str, None, {"type": "string"})
TEXT = Reads("a string", _text, "", _pattern(r"[^\n\r\t]+", "One line for people", minLength=1, maxLength=500))
TRUTH = Reads("`true` or `false`", lambda text: text.lower() == "true", None, {"type": "boolean"}, ("boolean",))
IDENTIFIER = _name(
    NAME_PATTERN,
    "A name: ASCII letters, digits and ._-",
    "use at most 64 ASCII letters, digits and `._-`, a letter or digit first",
)
TENANT = _name(
    rf"[A-Za-z0-9][A-Za-z0-9._@:/-]{{0,127}}(\^{_ISSUER})?",
    "A tenant's id, compared byte for byte; with several issuers, `^` and its own",
    "use at most 128 ASCII letters, digits and `._@:/-`, a letter or digit first; `^` goes before an issuer",
    "tenant",
)
ISSUER = _name(
    _ISSUER,
    "An issuer, as principals name it",
    "use at most 128 ASCII letters, digits and `._:@+=~,/!|'-`; an identity document may give it a `name`",
    "issuer",
    OWN,
)
NAMED = Reads("a string", str, "", IDENTIFIER.schema, keeps=True)  # it is looked up where it is declared
DURATION = _measure("a duration", _duration(0), 1, _DURATION, "A duration", "0s", "250ms", "30m", "8h", "7d")
POSITIVE = replace(DURATION, read=_duration(1))
PERCENTAGE = _measure("a percentage", _percentage, Fraction(0), _PERCENTAGE, "A percentage", "20%", "12.5%")
SHARE = _measure("a share", _share, Fraction(0), f"all|none|{_FRACTION}", "A share", "all", "none", "1/64")
DATE = _measure("a date", _date, None, _DATE, "A UTC date; an end is exclusive, at 00:00", "2027-03-31")
ROUTE = Reads("a string", _route, "/", _pattern(_ROUTE, "A path", maxLength=256))

Text = Annotated[str, TEXT]
Date = Annotated[int | None, DATE]
Duration = Annotated[int, DURATION]
Positive = Annotated[int, POSITIVE]
Percentage = Annotated[Fraction, PERCENTAGE]
Truth = Annotated[bool | None, TRUTH]
