"""Test cases of a policy, written in YAML: what is asked, what is expected, and what must never be permitted.

1. A cases file is read as strictly as a policy: every problem has a place and a code, nothing is guessed.
2. A field of `ask` or `classify` may be a list: the case then stands for every combination.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvcustody.policies.document.model import Action, Effect, Policy, Scope, Via
from kvcustody.policies.document.problems import Problems, SourceMark, quote
from kvcustody.policies.document.yaml_nodes import Node, SequenceNode, parse
from kvcustody.policies.reading.fields import FieldReader
from kvcustody.policies.workbench.prove.prove import Never
from kvcustody.policies.workbench.request import Request
from kvcustody.tenants import issuers_of

SCHEMA = "kvcustody/policy-tests@1"
_ACTIONS = {action.name.lower(): action for action in Action}
_SCOPES = {scope.name.lower(): scope for scope in Scope}
_VIAS = {via.name.lower(): via for via in Via}
_EFFECTS = {effect.value: effect for effect in Effect}
_COMBINATIONS_MAX = 10_000
_ANY: Any = None


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """One request with the effect expected of it, and the ids expected to have determined it (None: any)."""

    name: str
    request: Request
    expect: Effect
    because: tuple[str, ...] | None
    mark: SourceMark


@dataclass(frozen=True, slots=True)
class Classified:
    """One request to classify, with the level expected."""

    name: str
    tenant: str
    route: str | None
    claim: str | None
    hint: str | None
    expect: str
    mark: SourceMark


@dataclass(frozen=True, slots=True)
class Cases:
    """Everything that a cases file says, lists expanded."""

    file: str
    asked: tuple[PolicyCase, ...]
    classified: tuple[Classified, ...]
    never: tuple[tuple[Never, SourceMark], ...]

    @property
    def count(self) -> int:
        """How many checks there are."""
        return len(self.asked) + len(self.classified) + len(self.never)


def load_cases(text: str | bytes, *, name: str, policy: Policy) -> Cases:
    """The cases that `text` holds for `policy`. Raises `PolicyRejected`."""
    problems = Problems(name)
    root = parse(text, problems)
    fields = FieldReader(problems)
    fields.issuers = issuers_of(policy.issuers)
    reader = _Reader(fields, policy)
    cases = None if root is None else reader.cases(root, name)
    problems.raise_if_any()
    assert cases is not None, "a document without a root has a problem"
    return cases


class _Reader:
    """Reads cases against one policy's names."""

    def __init__(self, fields: FieldReader, policy: Policy) -> None:
        self._fields = fields
        self._policy = policy
        self._levels = {name: level for level, name in enumerate(policy.classifications)}
        self._scopes = {tenant.id: tenant.scope for tenant in policy.tenants}

    def cases(self, root: Node, file: str) -> Cases:
        fields = self._fields
        found = fields.mapping(root, "the cases file", ("schema",), ("cases", "never"))
        if "schema" in found and (text := fields.string(found["schema"], "`schema`")) not in (None, SCHEMA):
            fields.problems.add(found["schema"].mark, "KVP303", f"schema {quote(str(text))} is not `{SCHEMA}`",
                                f"write `schema: {SCHEMA}`")  # fmt: skip
        asked: list[PolicyCase] = []
        classified: list[Classified] = []
        for item in fields.items(found["cases"], "`cases`", _COMBINATIONS_MAX) if "cases" in found else ():
            self._case(item, asked, classified)
        never = [
            (self._never(item), item.mark)
            for item in (
                fields.items(found["never"], "`never`", _COMBINATIONS_MAX) if "never" in found else ()
            )
        ]
        return Cases(file, tuple(asked), tuple(classified), tuple(never))

    def _case(self, item: Node, asked: list[PolicyCase], classified: list[Classified]) -> None:
        fields = self._fields
        found = fields.mapping(item, "case", ("name", "expect"), ("ask", "classify", "because"))
        name = fields.text(found["name"], "`name`") if "name" in found else ""
        if found and ("ask" in found) == ("classify" in found):
            fields.problems.add(
                item.mark, "KVP302", f"case {quote(name)} has neither `ask` nor `classify`, or both"
            )
            return
        if "expect" not in found or "name" not in found:
            return
        if "classify" in found:
            expect = self._level_name(found["expect"], "`expect`")
            classified += self._classified(name, found["classify"], expect)
            return
        effect = fields.choice(found["expect"], "`expect`", _EFFECTS)
        because = (
            tuple(
                sorted(
                    text
                    for n in _each(found["because"])
                    if (text := fields.string(n, "`because`")) is not None
                )
            )
            if "because" in found
            else None
        )
        asked += [
            PolicyCase(name, request, effect, because, item.mark) for request in self._requests(found["ask"])
        ]

    def _requests(self, node: Node) -> Iterator[Request]:
        fields = self._fields
        optional = ("action", "owner", "scope", "via", "at", "source")
        found = fields.mapping(node, "`ask`", ("reader", "classification"), optional)
        if not {"reader", "classification"} <= found.keys():
            return
        actions = self._choices(found, "action", _ACTIONS, Action.REUSE)
        readers = [self._tenant(n, "reader") for n in _each(found["reader"])]
        owners = [self._tenant(n, "owner") for n in _each(found["owner"])] if "owner" in found else [_ANY]
        levels = [
            self._levels.get(self._level_name(n, "classification"), 0) for n in _each(found["classification"])
        ]
        scopes = self._choices(found, "scope", _SCOPES, _ANY)
        vias = self._choices(found, "via", _VIAS, Via.OWN)
        instants = [fields.date_us(n, "`at`") for n in _each(found["at"])] if "at" in found else [0]
        source = fields.identifier(found["source"], "`source`") if "source" in found else None
        if "at" not in found and any(via is not Via.OWN for via in vias):
            fields.problems.add(
                node.mark, "KVP302", "`ask` has no field `at`", "add the day to ask for, as 2027-03-31"
            )
        lists = (actions, readers, owners, levels, scopes, vias, instants)
        if self._too_many(node, lists):
            return
        for action, reader, owner, level, scope, via, now_us in product(*lists):
            own = self._scopes.get(reader, self._policy.scope)
            wide = scope if scope is not _ANY else own if via is Via.OWN else Scope.TENANT
            yield Request(
                action, reader, reader if owner is _ANY else owner, level, wide, via, now_us, source
            )

    def _classified(self, name: str, node: Node, expect: str) -> Iterator[Classified]:
        fields = self._fields
        found = fields.mapping(node, "`classify`", ("tenant",), ("route", "claim", "hint"))
        if "tenant" not in found:
            return
        tenants = [self._tenant(n, "tenant") for n in _each(found["tenant"])]
        rest = [
            [fields.string(n, f"`{field}`") for n in _each(found[field])] if field in found else [None]
            for field in ("route", "claim", "hint")
        ]
        if self._too_many(node, (tenants, *rest)):
            return
        for tenant, (route, claim, hint) in product(tenants, product(*rest)):
            yield Classified(name, tenant, route, claim, hint, expect, node.mark)

    def _never(self, item: Node) -> Never:
        found = self._fields.mapping(
            item, "`never`", (), ("reader", "owner", "action", "classification", "via")
        )
        level = (
            self._level_name(found["classification"], "classification") if "classification" in found else None
        )
        return Never(
            self._tenant(found["reader"], "reader") if "reader" in found else None,
            self._tenant(found["owner"], "owner") if "owner" in found else None,
            self._fields.choice(found["action"], "`action`", _ACTIONS) if "action" in found else None,
            None if level is None else self._levels.get(level, 0),
            self._fields.choice(found["via"], "`via`", _VIAS) if "via" in found else None,
        )

    def _too_many(self, node: Node, lists: tuple[list[Any], ...]) -> bool:
        count = 1
        for values in lists:
            count *= len(values)
        if count > _COMBINATIONS_MAX:
            self._fields.problems.add(
                node.mark, "KVP307", f"the case stands for `{count}` requests, over {_COMBINATIONS_MAX}"
            )
        return count > _COMBINATIONS_MAX

    def _choices(
        self, found: dict[str, Node], field: str, choices: dict[str, Any], missing: Any
    ) -> list[Any]:
        if field not in found:
            return [missing]
        return [self._fields.choice(node, f"`{field}`", choices) for node in _each(found[field])]

    def _tenant(self, node: Node, what: str) -> str:
        """Any tenant may be asked about, listed or not."""
        return self._fields.tenant(node, what)

    def _level_name(self, node: Node, what: str) -> str:
        name = self._fields.string(node, what)
        if name is not None and name not in self._levels:
            hint = self._fields.problems.near(name, self._levels)
            self._fields.problems.add(
                node.mark, "KVP402", f"{what} {quote(name)} is not in `classifications`", hint
            )
        return name or ""


def _each(node: Node) -> tuple[Node, ...]:
    return node.items if isinstance(node, SequenceNode) else (node,)
