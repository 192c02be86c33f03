"""Test cases of a policy, in YAML: questions, expected answers, and what must never be permitted.

1. A cases file is read as strictly as a policy: every problem has a place and a code, nothing is guessed.
2. A field of `ask` or `classify` may be a list: the case then stands for every combination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Annotated, Any

from pydantic import Field

from kvcustody.policies.document.model import Action, Effect, Policy, Scope, Tier, Via
from kvcustody.policies.document.problems import Problems, SourceMark, quote
from kvcustody.policies.document.yaml_nodes import Scalar, parse
from kvcustody.policies.reading.fields import (
    DATE,
    IDENTIFIER,
    NAMED,
    STRING,
    TENANT,
    WHAT,
    DocumentPart,
    Text,
    Wrong,
    choice,
    complain,
    constant,
    listed,
    read_section,
)
from kvcustody.policies.reading.names import KnownNames
from kvcustody.policies.workbench.prove.prove import Never
from kvcustody.policies.workbench.request import Request

SCHEMA = "kvcustody/policy-tests@1"
_COMBINATIONS_MAX = 10_000
_EACH = listed(single=True)
_Action = Annotated[Action, choice(Action)]
_Via = Annotated[Via, choice(Via)]
_Tier = Annotated[Tier, choice(Tier)]
_Level = Annotated[Scalar, NAMED.called("classification")]
_Reader = Annotated[Scalar, TENANT.called("reader")]
_Owner = Annotated[Scalar, TENANT.called("owner")]
_Strings = Annotated[tuple[Annotated[str | None, STRING], ...], _EACH]


class AskTerms(DocumentPart):
    """Requests to decide."""

    called = "`ask`"
    reader: Annotated[tuple[_Reader, ...], _EACH]
    classification: Annotated[tuple[_Level, ...], _EACH]
    action: Annotated[tuple[_Action, ...], _EACH] = (Action.REUSE,)
    owner: Annotated[tuple[_Owner, ...] | None, _EACH] = None
    scope: Annotated[tuple[Annotated[Scope, choice(Scope)], ...] | None, _EACH] = None
    via: Annotated[tuple[_Via, ...], _EACH] = (Via.OWN,)
    at_us: Annotated[tuple[Annotated[int, DATE], ...], _EACH] = Field((0,), alias="at")
    source: Annotated[Scalar | None, IDENTIFIER] = None
    tier: Annotated[tuple[_Tier, ...] | None, _EACH] = None

    def _wrongs(self) -> Iterator[Wrong]:
        if "at_us" not in self.model_fields_set and any(via is not Via.OWN for via in self.via):
            yield Wrong(
                "KVP302",
                f"{WHAT} has no field `at`",
                "add the day to ask for, as 2027-03-31",
                what=self.called,
            )
        if self.tier is not None and set(self.action) != {Action.OFFLOAD}:
            yield Wrong("KVP306", "`tier` does not apply to actions but `offload`", at=("tier",))


class ClassifyTerms(DocumentPart):
    """Requests to classify."""

    called = "`classify`"
    tenant: Annotated[tuple[Annotated[Scalar, TENANT], ...], _EACH]
    route: _Strings = (None,)
    claim: _Strings = (None,)
    hint: _Strings = (None,)


class CaseEntry(DocumentPart):
    """A question and its expected answer."""

    called = "case"
    name: Text
    expect: Annotated[Scalar, NAMED]
    ask: AskTerms | None = None
    classify: ClassifyTerms | None = None
    because: _Strings | None = None

    def _wrongs(self) -> Iterator[Wrong]:
        if (self.ask is None) == (self.classify is None):
            yield Wrong("KVP302", f"case {quote(self.name)} has neither `ask` nor `classify`, or both")


class NeverTerms(DocumentPart):
    """What must never be permitted."""

    called = "`never`"
    reader: _Reader | None = None
    owner: _Owner | None = None
    action: _Action | None = None
    classification: _Level | None = None
    via: _Via | None = None
    tier: _Tier | None = None


class CasesDocument(DocumentPart):
    """A cases file."""

    called = "the cases file"
    form: Annotated[str, constant(SCHEMA)] = Field(alias="schema")
    cases: Annotated[tuple[CaseEntry, ...], listed(_COMBINATIONS_MAX)] = ()
    never: Annotated[tuple[NeverTerms, ...], listed(_COMBINATIONS_MAX)] = ()


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """One request, its expected effect, and the ids expected to have determined it (None: any).

    With `tier`, it is asked whether copies of the owner's blocks may be there.
    """

    name: str
    request: Request
    expect: Effect
    because: tuple[str, ...] | None
    mark: SourceMark
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class Classified:
    """One request to classify, with the expected level."""

    name: str
    tenant: str
    route: str | None
    claim: str | None
    hint: str | None
    expect: str
    mark: SourceMark


@dataclass(frozen=True, slots=True)
class Cases:
    """The content of a cases file, with lists expanded."""

    file: str
    asked: tuple[PolicyCase, ...]
    classified: tuple[Classified, ...]
    never: tuple[tuple[Never, SourceMark], ...]

    @property
    def count(self) -> int:
        """The number of checks."""
        return len(self.asked) + len(self.classified) + len(self.never)


def load_cases(text: str | bytes, *, name: str, policy: Policy) -> Cases:
    """Return the cases in `text` for `policy`. Raises `PolicyRejected`."""
    problems = Problems(name)
    root = parse(text, problems)
    cases = None
    if root is not None:
        cases = _Expansion(policy, problems).cases(read_section(CasesDocument, root, problems))
    problems.raise_if_any()
    assert cases is not None, "a document without a root has a problem"
    return cases


class _Expansion:
    """Expands cases against one policy's names; any tenant may be asked about, listed or not."""

    def __init__(self, policy: Policy, problems: Problems) -> None:
        self._names = KnownNames(problems, policy.issuers, policy.classifications)
        self._scope = policy.scope
        self._scopes = {tenant.id: tenant.scope for tenant in policy.tenants}

    def cases(self, document: CasesDocument) -> Cases:
        policy_cases: list[PolicyCase] = []
        classified: list[Classified] = []
        for entry in document.cases:
            expect = entry.expect
            if entry.classify is not None:
                self._names.level(expect, "`expect`")
                classified += self._classified(entry.name, entry.classify, expect.text)
            elif entry.ask is not None:
                effect = choice(Effect).read(expect.text)
                if isinstance(effect, Wrong):
                    complain(self._names.problems, expect.mark, effect, "`expect`")
                because = None if entry.because is None else tuple(sorted(map(str, entry.because)))
                policy_cases += [
                    PolicyCase(entry.name, request, effect, because, entry.mark, tier)
                    for request in self._requests(entry.ask)
                    for tier in entry.ask.tier or (None,)
                ]
        never = tuple((self._never(terms), terms.mark) for terms in document.never)
        return Cases(self._names.problems.file, tuple(policy_cases), tuple(classified), never)

    def _requests(self, ask: AskTerms) -> Iterator[Request]:
        owners = [None] if ask.owner is None else self._tenants(ask.owner, "owner")
        levels = [self._names.level(level, "classification") for level in ask.classification]
        readers, scopes = self._tenants(ask.reader, "reader"), (None,) if ask.scope is None else ask.scope
        lists = (ask.action, readers, owners, levels, scopes, ask.via, ask.at_us)
        if self._too_many(ask, (*lists, ask.tier or (None,))):
            return
        source = ask.source.text if ask.source else None
        for action, reader, owner, level, scope, via, now_us in product(*lists):
            own = self._scopes.get(reader, self._scope)
            wide = scope if scope is not None else own if via is Via.OWN else Scope.TENANT
            yield Request(action, reader, reader if owner is None else owner, level, wide, via, now_us, source)

    def _classified(self, name: str, terms: ClassifyTerms, expect: str) -> Iterator[Classified]:
        lists = (self._tenants(terms.tenant, "tenant"), terms.route, terms.claim, terms.hint)
        if not self._too_many(terms, lists):
            for tenant, route, claim, hint in product(*lists):
                yield Classified(name, tenant, route, claim, hint, expect, terms.mark)

    def _never(self, terms: NeverTerms) -> Never:
        level = None if terms.classification is None else self._names.level(terms.classification, "classification")
        return Never(
            None if terms.reader is None else self._names.tenant(terms.reader, "reader"),
            None if terms.owner is None else self._names.tenant(terms.owner, "owner"),
            terms.action,
            level,
            terms.via,
            terms.tier,
        )

    def _tenants(self, listed: tuple[Scalar, ...], what: str) -> list[str]:
        return [self._names.tenant(tenant, what) for tenant in listed]

    def _too_many(self, section: DocumentPart, lists: Sequence[Sequence[Any]]) -> bool:
        count = prod(map(len, lists))
        if count > _COMBINATIONS_MAX:
            message = f"the case stands for `{count}` requests, over {_COMBINATIONS_MAX}"
            self._names.problems.add(section.mark, "KVP307", message)
        return count > _COMBINATIONS_MAX
