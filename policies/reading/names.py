"""The names that a document declares, against which every reference in it is checked.

1. Names are gathered before any section is read, so sections may refer to each other in any order.
2. A reference to a name that is not declared is a problem; a placeholder (the empty name) is not complained about
   again.
"""

from __future__ import annotations

from kvcustody.errors import ConfigError
from kvcustody.policies.document.model import DEFAULT_TENANT, Labels
from kvcustody.policies.document.problems import SourceMark, quote
from kvcustody.policies.document.yaml_nodes import MappingNode, Node, Scalar, SequenceNode
from kvcustody.policies.reading.fields import FieldReader
from kvcustody.tenants import issuers_of

CLASSIFICATIONS_MAX = 16
LABELS_MAX = 8
ISSUERS_MAX = 64


class DeclaredNames:
    """Declared classifications, tenants and labels, and the identifiers already used."""

    def __init__(self, fields: FieldReader) -> None:
        self.fields = fields
        self.issuers: tuple[str, ...] = ()
        self.levels: dict[str, int] = {}
        self.tenants: dict[str, None] = {}
        self.labels: dict[str, tuple[str, ...]] = {}
        self._used: dict[str, SourceMark] = {}

    def declare(self, sections: dict[str, Node]) -> None:
        """Gather what the document declares."""
        if (node := sections.get("issuers")) is not None:
            self._declare_issuers(node)
        if (node := sections.get("classifications")) is not None:
            self._declare_levels(node)
        if isinstance(node := sections.get("tenants"), MappingNode):
            self.tenants = {
                self._called(key.text): None for key, _ in node.entries if key.text != DEFAULT_TENANT
            }
        if (node := sections.get("labels")) is not None:
            self._declare_labels(node)

    def _declare_issuers(self, node: Node) -> None:
        words = self.fields.words(
            node, "`issuers`", lambda item: self.fields.issuer(item, "issuer"), ISSUERS_MAX
        )
        self.issuers = tuple(dict.fromkeys(word for word in words if word))
        self.fields.issuers = issuers_of(self.issuers)

    def _called(self, text: str) -> str:
        """A tenant's name; where it is unclear, as it is written: the entry itself says what is wrong."""
        try:
            return self.fields.issuers.resolve(text)
        except ConfigError:
            return text

    def _declare_levels(self, node: Node) -> None:
        if not isinstance(node, SequenceNode):
            self.fields.items(node, "`classifications`", CLASSIFICATIONS_MAX)
            return
        words = self.fields.words(
            node,
            "`classifications`",
            lambda item: self.fields.identifier(item, "classification"),
            CLASSIFICATIONS_MAX,
        )
        self.levels = {word: level for level, word in enumerate(dict.fromkeys(words)) if word}

    def _declare_labels(self, node: Node) -> None:
        entries = self.fields.entries(node, "`labels`")
        if len(entries) > LABELS_MAX:
            self.fields.problems.add(
                node.mark, "KVP307", f"`labels` has `{len(entries)}` entries, over {LABELS_MAX}"
            )
        for key, value in entries:
            name = self.fields.identifier(key, "label")
            what = f"label {quote(key.text)}"
            self.labels[name] = self.fields.words(
                value, what, lambda item: self.fields.identifier(item, "label value")
            )

    def claim(self, node: Node, what: str) -> str:
        """A new identifier, unique among rules, grants, segments and groups: decisions name them by it."""
        name = self.fields.identifier(node, what)
        if name in self._used and name:
            line = self._used[name].line
            self.fields.problems.add(node.mark, "KVP304", f"{what} {quote(name)} is already on line {line}")
        self._used.setdefault(name, node.mark)
        return name

    def level(self, node: Node, what: str) -> int:
        """A classification's level."""
        name = self.fields.string(node, what)
        if name is not None and name not in self.levels and self.levels:
            hint = self.fields.problems.near(name, self.levels)
            self.fields.problems.add(
                node.mark, "KVP402", f"{what} {quote(name)} is not in `classifications`", hint
            )
        return self.levels.get(name or "", 0)

    def tenant(self, node: Node, what: str) -> str:
        """A tenant that the policy names."""
        name = self.fields.tenant(node, what)
        if name and name not in self.tenants:
            hint = self.fields.problems.near(name, self.tenants)
            self.fields.problems.add(node.mark, "KVP401", f"{what} {quote(name)} is not in `tenants`", hint)
        return name

    def label_pairs(self, node: Node) -> Labels:
        """Label values of a tenant or a route, sorted by name."""
        pairs = []
        for key, value in self.fields.entries(node, "`labels`"):
            if key.text not in self.labels:
                hint = self.fields.problems.near(key.text, self.labels)
                self.fields.problems.add(key.mark, "KVP403", f"label {quote(key.text)} is not declared", hint)
                continue
            text = self.fields.string(value, f"label {quote(key.text)}")
            if text is not None and text not in self.labels[key.text]:
                hint = self.fields.problems.near(text, self.labels[key.text])
                message = f"label {quote(key.text)} has no value {quote(text)}"
                self.fields.problems.add(value.mark, "KVP403", message, hint)
            pairs.append((key.text, text or ""))
        return tuple(sorted(pairs))


def by_classification(
    names: DeclaredNames, node: Node, what: str, also: tuple[str, ...] = ()
) -> dict[str, tuple[Scalar, Node]]:
    """The entries of a mapping keyed by classification name (or one of `also`)."""
    known = (*names.levels, *also)
    found: dict[str, tuple[Scalar, Node]] = {}
    for key, value in names.fields.entries(node, what):
        if key.text in known:
            found[key.text] = (key, value)
        elif names.levels:
            hint = names.fields.problems.near(key.text, known)
            message = f"{what} names classification {quote(key.text)}, which is not in `classifications`"
            names.fields.problems.add(key.mark, "KVP402", message, hint)
    return found
