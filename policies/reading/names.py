"""The names that a document declares. Every reference in the document is checked against them.

1. Names are gathered before any section is read, so sections may refer to each other in any order.
2. A reference to a name that is not declared is a problem. Two things are not reported again: a placeholder (a scalar
   that is not a string), and a reference into a section whose declarations could not be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from kvcustody.errors import ConfigError
from kvcustody.policies.document.model import DEFAULT_TENANT, Labels
from kvcustody.policies.document.problems import Problems, SourceMark, quote
from kvcustody.policies.document.yaml_nodes import Scalar
from kvcustody.policies.reading.fields import IDENTIFIER, TENANT, DocumentPart, Reads, Wrong, complain
from kvcustody.policies.reading.sections import PolicyDocument
from kvcustody.tenants import issuers_of

T = TypeVar("T")


class KnownNames:
    """Classifications and issuers, used to read a document's levels and tenants."""

    def __init__(self, problems: Problems, issuers: tuple[str, ...], classifications: Iterable[str]) -> None:
        self.problems = problems
        self.issuers = issuers
        self.levels = {word: level for level, word in enumerate(classifications)}
        self._resolve = issuers_of(issuers).resolve

    def level(self, node: Scalar | None, what: str) -> int:
        """Return the level of a classification."""
        if node is None or node.kind != "string" or not self.levels:
            return 0
        if node.text not in self.levels:
            hint = self.problems.near(node.text, self.levels)
            message = f"{what} {quote(node.text)} is not in `classifications`"
            self.problems.add(node.mark, "KVP402", message, hint)
        return self.levels.get(node.text, 0)

    def tenant(self, node: Scalar, what: str) -> str:
        """Return a tenant's name in the form that the ledger uses."""
        try:
            return self._resolve(node.text) if node.text else ""
        except ConfigError as error:
            self.problems.add(node.mark, "KVP413", error.message)
            return ""


class DeclaredNames(KnownNames):
    """Declared classifications, tenants and labels, and the identifiers already used."""

    def __init__(self, document: PolicyDocument, problems: Problems) -> None:
        issuers, levels = (
            dict.fromkeys(word.text for word in words if word.text)
            for words in (document.issuers, document.classifications)
        )
        super().__init__(problems, tuple(issuers), levels)
        self.tenants = {key.text: self._entry(key) for key in document.keys_of("tenants")}
        """The name of each entry of `tenants`."""
        entries = (called or key for key, called in self.tenants.items() if key != DEFAULT_TENANT)
        self._known = dict.fromkeys(entries)
        self.labels: dict[str, tuple[str, ...]] = {}
        for key in document.keys_of("labels"):
            self.labels[self._key(key, IDENTIFIER, "label")] = tuple(v.text for v in document.labels[key.text])
        section = document.eviction
        self.contents: dict[str, SourceMark] = {}
        for key in () if section is None else section.keys_of("kinds"):
            self._key(key, IDENTIFIER, "kind of content")
            self.contents[key.text] = key.mark
        self._used: dict[str, SourceMark] = {}

    def _entry(self, key: Scalar) -> str:
        if key.text == DEFAULT_TENANT:
            return DEFAULT_TENANT
        return super().tenant(key, "tenant") if self._key(key, TENANT, "tenant") else ""

    def _key(self, key: Scalar, reads: Reads, what: str) -> str:
        found = reads.read(key.text)
        if isinstance(found, Wrong):
            complain(self.problems, key.mark, found, what)
            return ""
        return key.text

    def claim(self, node: Scalar, what: str) -> str:
        """Claim an identifier, unique among rules, grants, segments and groups because decisions name them by it."""
        name = node.text
        if name in self._used and name:
            line = self._used[name].line
            self.problems.add(node.mark, "KVP304", f"{what} {quote(name)} is already on line {line}")
        self._used.setdefault(name, node.mark)
        return name

    def claim_key(self, key: Scalar, what: str) -> str:
        """Claim an identifier that is a key."""
        return self.claim(key, what) if self._key(key, IDENTIFIER, what) else ""

    def tenant(self, node: Scalar, what: str) -> str:
        """Return a tenant named in the policy."""
        name = super().tenant(node, what)
        if name and name not in self._known and self.tenants:
            hint = self.problems.near(name, self._known)
            self.problems.add(node.mark, "KVP401", f"{what} {quote(name)} is not in `tenants`", hint)
        return name

    def content(self, node: Scalar | None, what: str) -> str | None:
        """Return a kind of content declared in `eviction.kinds`."""
        if node is None or node.kind != "string":
            return None
        if node.text not in self.contents:
            hint = self.problems.near(node.text, self.contents)
            message = f"kind {quote(node.text)} of {what} is not in `eviction.kinds`"
            self.problems.add(node.mark, "KVP414", message, hint)
        return node.text

    def label_names(self, nodes: Iterable[Scalar], what: str) -> tuple[str, ...]:
        """Return names of declared labels, sorted."""
        for node in nodes:
            if node.text not in self.labels:
                hint = self.problems.near(node.text, self.labels)
                message = f"label {quote(node.text)} of {what} is not declared"
                self.problems.add(node.mark, "KVP403", message, hint)
        return tuple(sorted(node.text for node in nodes))

    def label_pairs(self, section: DocumentPart, labels: Mapping[str, Scalar]) -> Labels:
        """Return the label values of a tenant or a route, sorted by name."""
        for key in section.keys_of("labels"):
            value = labels[key.text]
            known = self.labels.get(key.text)
            if known is None:
                hint = self.problems.near(key.text, self.labels)
                self.problems.add(key.mark, "KVP403", f"label {quote(key.text)} is not declared", hint)
            elif value.kind == "string" and value.text not in known:
                hint = self.problems.near(value.text, known)
                message = f"label {quote(key.text)} has no value {quote(value.text)}"
                self.problems.add(value.mark, "KVP403", message, hint)
        return tuple(sorted((name, value.text) for name, value in labels.items()))

    def by_level(
        self, keys: Iterable[Scalar], entries: Mapping[str, T], what: str, also: tuple[str, ...] = ()
    ) -> dict[str, tuple[Scalar, T]]:
        """Return the entries of a mapping keyed by classification name (or one of `also`)."""
        known = (*self.levels, *also)
        by_name: dict[str, tuple[Scalar, T]] = {}
        for key in keys:
            if key.text in known:
                by_name[key.text] = (key, entries[key.text])
            elif self.levels:
                hint = self.problems.near(key.text, known)
                message = f"{what} names classification {quote(key.text)}, which is not in `classifications`"
                self.problems.add(key.mark, "KVP402", message, hint)
        return by_name
