"""`kvcustody policy explain` and `test`: the reasons of one decision, and whether all expected decisions are made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from kvcustody.console.command import Json, print_json, say
from kvcustody.console.policy.lint import day_us
from kvcustody.console.policy.review import Revoked
from kvcustody.console.policy.sarif_junit import junit
from kvcustody.console.policy.validate import EXIT_NO, File
from kvcustody.console.render.number_format import duration
from kvcustody.errors import ConfigError, PolicyError
from kvcustody.governance.edge.placement_document import read_placement
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.policies.document.model import Action, Scope, Tier, Via
from kvcustody.policies.document.problems import did_you_mean, quote
from kvcustody.policies.document.token_priorities import KindRange
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.workbench.explain import Explanation, explain
from kvcustody.policies.workbench.explain_eviction import EvictionExplanation, explain_eviction
from kvcustody.policies.workbench.explain_route import explain_route
from kvcustody.policies.workbench.request import Request
from kvcustody.policies.workbench.run_test_cases import CasesReport, run_cases
from kvcustody.policies.workbench.test_case_model import load_cases
from kvcustody.policies.workbench.validate import load_table, read_source


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="explain", epilog=_EXPLAIN)(explain_command)
    app.command(name="test", epilog=_TEST)(run_command)


_EXPLAIN = (
    "Examples:\n\n    kvcustody policy explain policy.yaml --reader acme-labs --owner acme -c internal --via grant\n\n"
    "    kvcustody policy explain policy.yaml --reader acme -c restricted --at 2027-01-01\n\n"
    "    kvcustody policy explain policy.yaml --reader acme -c internal --action offload --tier nvme\n\n"
    "    kvcustody policy explain policy.yaml --evict --reader acme -c internal --tokens 4096 "
    "--kind 1024:2048=pasted_log\n\n"
    "    kvcustody policy explain policy.yaml --reader acme --route /v1/chat/completions --placement placement.yaml"
)
Reader = Annotated[str, typer.Option("--reader", help="The reading tenant.")]
Owner = Annotated[str | None, typer.Option("--owner", help="Whose blocks; the reader's own if left out.")]
Level = Annotated[
    str | None, typer.Option("--classification", "-c", help="Of the blocks; with --route, of the credential.")
]
ActionOption = Annotated[
    str, typer.Option("--action", help="admit, reuse, publish, retain, offload, export or administer.")
]
ScopeOption = Annotated[
    str | None, typer.Option("--scope", help="The tenant's private scope, or `tenant`, if left out.")
]
ViaOption = Annotated[str | None, typer.Option("--via", help="own for own blocks, else grant, if left out.")]
At = Annotated[str | None, typer.Option("--at", help="The day, as 2027-03-31; now if left out.")]
Source = Annotated[str | None, typer.Option("--source", help="One grant or segment; any if left out.")]

TierOption = Annotated[
    str | None,
    typer.Option("--tier", help="With --action offload: whether copies may be in this tier: host, nvme or remote."),
]
Evict = Annotated[
    bool, typer.Option("--evict", help="Say how a prompt's blocks are kept when the pool is full, and why.")
]
PromptTokens = Annotated[int, typer.Option("--tokens", min=1, help="With --evict: the prompt's length.")]
PromptSegment = Annotated[
    str | None, typer.Option("--segment", help="With --evict: the segment that the prompt begins with.")
]
PromptMarks = Annotated[
    list[str] | None,
    typer.Option("--marked", help="With --evict: a span as the door marks it by a message's role: 0:96=system."),
]
PromptKinds = Annotated[
    list[str] | None,
    typer.Option("--kind", help="With --evict: a span of a kind of content, as the caller says it: 0:512=pasted_log."),
]


@dataclass(frozen=True, kw_only=True)
class AccessOptions(ParameterGroup):
    """The request to explain."""

    reader: Reader
    classification: Level = None
    owner: Owner = None
    action: ActionOption = "reuse"
    scope: ScopeOption = None
    via: ViaOption = None
    at: At = None
    source: Source = None
    revoked: Revoked = None
    tier: TierOption = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions(ParameterGroup):
    """The prompt whose blocks are explained, with `--evict`."""

    evict: Evict = False
    tokens: PromptTokens = 4096
    segment: PromptSegment = None
    kind: PromptKinds = None
    marked: PromptMarks = None


@dataclass(frozen=True, kw_only=True)
class RouteOptions(ParameterGroup):
    """The request whose workers are explained, with `--route`."""

    route: Annotated[
        str | None,
        typer.Option("--route", help="Say which workers may serve a request to this path, and why."),
    ] = None
    hint: Annotated[
        str | None, typer.Option("--hint", help="With --route: the classification that its client asks for.")
    ] = None
    placement: Annotated[
        Path | None, typer.Option("--placement", help="With --route: the deployment's placement groups.")
    ] = None


@grouped
def explain_command(
    *,
    file: File,
    access: AccessOptions,
    prompt: PromptOptions,
    placed: RouteOptions,
    as_json: Json = False,
) -> None:
    """Say why one request is permitted or denied: the rules and grants that decided it.

    For a deny, also the nearest permit: which term failed, and what it would have to be. For `offload`, also how long
    copies may be in each tier, and which lines say so. With `--route`, which workers may serve the reader's requests
    instead; `--classification` is then what the credential claims. Exit 0: permitted; 1: denied.
    """
    table = load_table(file, revoked=frozenset(access.revoked or ()))
    if placed.route is not None:
        _explain_route(table, access, placed, placed.route, as_json=as_json)
        return
    if access.classification is None:
        raise ConfigError("`--classification`: name the blocks' classification")
    if prompt.evict:
        level = _level(table, access.classification)
        spans = [_span(text, "--kind") for text in prompt.kind or ()]
        spans += [_span(text, "--marked")._replace(is_marked=True) for text in prompt.marked or ()]
        kept = explain_eviction(
            table,
            table.policy.named(access.reader),
            level,
            prompt.tokens,
            segment=prompt.segment,
            kinds=spans,
        )
        if as_json:
            print_json(kept.data())
        else:
            _print_eviction(kept)
        return
    in_tier = _tier(access.tier, access.action)
    request = _request(table, access)
    explanation = explain(table, request)
    if as_json:
        print_json(explanation.data())
    else:
        _print(explanation, in_tier)
    reached = in_tier is None or any(one.tier is in_tier and one.permitted for one in explanation.tiers)
    if not explanation.decision.permitted or not reached:
        raise typer.Exit(EXIT_NO)


def _explain_route(
    table: DecisionTable, access: AccessOptions, placed: RouteOptions, route: str, *, as_json: bool
) -> None:
    workers = None
    if placed.placement is not None:
        groups = read_placement(placed.placement).groups
        workers = {name: tuple(group.workers) for name, group in groups.items()}
    tenant, claim = table.policy.named(access.reader), access.classification
    if table.tenant(tenant) is None:
        raise ConfigError(f"tenant `{tenant}` is not in the policy: no worker serves it", tenant=tenant)
    found = explain_route(table, tenant, route=route, claim=claim, hint=placed.hint, workers=workers)
    if as_json:
        print_json(found.data())
    else:
        say(str(found))
    if not found.permitted:
        raise typer.Exit(EXIT_NO)


E = TypeVar("E", bound=IntEnum)


def _choice(kind: type[E], word: str, option: str) -> E:
    known = {member.name.lower(): member for member in kind}
    if word not in known:
        hint = did_you_mean(word, known) or f"choices are {', '.join(known)}"
        raise ConfigError(f"`{option}` {quote(word)} is not a choice; {hint}", value=word)
    return known[word]


def _request(table: DecisionTable, access: AccessOptions) -> Request:
    reader, owner = access.reader, access.owner or access.reader
    reader, owner = table.policy.named(reader), table.policy.named(owner)
    level = _level(table, access.classification)
    way = _choice(Via, access.via, "--via") if access.via is not None else Via.OWN if reader == owner else Via.GRANT
    entry = table.tenant(reader)
    own = Scope.TENANT if entry is None else entry.scope
    wide = (
        _choice(Scope, access.scope, "--scope") if access.scope is not None else own if way is Via.OWN else Scope.TENANT
    )
    return Request(
        _choice(Action, access.action, "--action"),
        reader,
        owner,
        level,
        wide,
        way,
        day_us(access.at),
        access.source,
    )


def _level(table: DecisionTable, classification: str | None) -> int:
    assert classification is not None, "asked for before"
    names = table.policy.classifications
    if classification not in names:
        hint = did_you_mean(classification, names) or f"classifications are {', '.join(names)}"
        raise PolicyError(f"no classification {quote(classification)}; {hint}", classification=classification)
    return names.index(classification)


def _span(text: str, option: str) -> KindRange:
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})=(.+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError(f"`{option}` {quote(text)} is not FIRST:LAST=KIND, in tokens", value=text)
    return KindRange(int(found[1]), int(found[2]), found[3])


def _print_eviction(explanation: EvictionExplanation) -> None:
    say(f"line {explanation.line}: eviction `{explanation.policy}`: {explanation.order}; children before parents")
    idle, absolute = duration(explanation.idle_us), duration(explanation.absolute_us)
    say(
        f"kept at most {idle} after the last use and {absolute} in all "
        f"({explanation.tenant}, {explanation.classification})"
    )
    for signal in explanation.signals:
        say(f"  signal {signal.signal}: {signal.says}")
    if explanation.learned is not None:
        say(f"  think times are learned from the {explanation.learned}'s own requests")
    if not explanation.ranges:
        say("priorities and kinds of content have no part in this order")
        return
    say(f"{'tokens':>17}  {'priority':>8}  {'for':>8}  why")
    for each in explanation.ranges:
        span = f"{each.first}..{each.until}"
        lasts = "always" if each.for_us is None else duration(each.for_us)
        say(f"{span:>17}  {each.priority:>8}  {lasts:>8}  line {each.line}: {each.because}")


def _tier(name: str | None, action: str) -> Tier | None:
    if name is None:
        return None
    if action != Action.OFFLOAD.name.lower():
        raise ConfigError("`--tier` goes with `--action offload`", value=name)
    if name not in set(Tier):
        hint = did_you_mean(name, Tier) or f"tiers are {', '.join(Tier)}"
        raise ConfigError(f"`--tier` {quote(name)} is no tier; {hint}", value=name)
    return Tier(name)


def _print(explanation: Explanation, tier: Tier | None) -> None:
    say(explanation.request.text(explanation.classifications))
    say(explanation.summary)
    for entry in explanation.considered:
        fit = "fits" if entry.fits else f"fails by {', '.join(entry.failing)}"
        say(f"  line {entry.mark.line}: {entry.kind} {entry.id} ({entry.effect}): {fit}")
    if explanation.nearest is not None:
        changes = ", ".join(f"{term} {new} instead of {old}" for term, old, new in explanation.nearest.changed)
        say(f"nearest permit: {changes or 'through another source'} (by {', '.join(explanation.nearest.reasons)})")
    for answer in explanation.tiers:
        if tier in (None, answer.tier):
            say(answer)
            for source in answer.sources:
                say(f"  line {source.line}: {source.what}: {source.says}")
    for error in explanation.decision.errors:
        say(f"  error: {error}")


_TEST = (
    "Examples:\n\n    kvcustody policy test policy.yaml policy.tests.yaml\n\n"
    "    kvcustody policy test policy.yaml cases.yaml --min-named 100 --format junit"
)
CasesFile = Annotated[Path, typer.Argument(help="A cases file (docs/reference/policy-language.md).", metavar="CASES")]
MinNamed = Annotated[int, typer.Option("--min-named", min=0, max=100, help="Percent of rules and grants to cover.")]
MinCells = Annotated[int, typer.Option("--min-cells", min=0, max=100, help="Percent of table cells to cover.")]


class CasesFormat(StrEnum):
    """The format of the results."""

    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"


CasesStyle = Annotated[CasesFormat, typer.Option("--format", help="text, json, or junit for CI.")]


def run_command(
    file: File,
    cases: CasesFile,
    *,
    style: CasesStyle = CasesFormat.TEXT,
    min_named: MinNamed = 0,
    min_cells: MinCells = 0,
    revoked: Revoked = None,
    as_json: Json = False,
) -> None:
    """Run the cases that say what a policy must decide, and tell which rules, grants and cells they do not reach.

    A file without a case fails: it shows nothing. Exit 0: all pass and the coverage is reached; 1: not.
    """
    table = load_table(file, revoked=frozenset(revoked or ()))
    loaded = load_cases(read_source(cases), name=str(cases), policy=table.policy)
    report = run_cases(table, loaded)
    coverage = report.coverage
    short = coverage.named_share * 100 < min_named or coverage.cell_share * 100 < min_cells
    if as_json or style is CasesFormat.JSON:
        print_json(report.data())
    elif style is CasesFormat.JUNIT:
        named = [(f"{r.name}: {r.asked}", () if r.passed else (r,)) for r in report.results]
        say(junit("test", named or [("cases", ("there are no cases",))]))
    else:
        _print_report(report)
    if short or not report.passed:
        raise typer.Exit(EXIT_NO)


def _print_report(report: CasesReport) -> None:
    for failure in report.failures:
        say(f"{report.file}:{failure.mark.line}:{failure.mark.column}: FAIL {failure}")
    coverage = report.coverage
    say(
        f"{len(report.results) - len(report.failures)} of {len(report.results)} cases pass; rules, grants and segments "
        f"{coverage.named}/{coverage.named_total}, cells {coverage.cells}/{coverage.cells_total}"
    )
    if coverage.not_named:
        say(f"not reached: {', '.join(coverage.not_named)}")
    if not report.results:
        say(f"{report.file}: there are no cases; an empty file proves nothing")
