"""The demonstration's report on the terminal, the two engines side by side."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcustody.integrations.demo.attacks import AttackOutcome
from kvcustody.integrations.demo.run import AttackReport
from kvcustody.integrations.demo.vocabulary import CANDIDATES

_STYLE = {"held": "green", "leaked": "bold red", "void": "yellow"}
_MEANS = {
    "held": "the governed engine gave nothing away; the plain one gave away everything listed",
    "leaked": "the governed engine gave something away",
    "void": "an attack got nothing from the plain engine either, or the governed one reuses nothing: nothing is proved",
}


def print_report(report: AttackReport, console: Console) -> None:
    """What each attack recovered from each engine, then the controls and the verdict."""
    versions = ", ".join(f"{name} {found}" for name, found in report.versions.items() if found)
    console.print(f"[bold]{report.engine} under attack[/]  [dim]{escape(versions)}; seed {report.seed}[/]")
    console.print(
        f"The victim's secret: [bold]{' '.join(report.secret)}[/], each word one of {len(CANDIDATES)}, "
        f"each at the end of a block of {report.block_tokens} tokens."
    )
    table = Table(box=None, header_style="dim", padding=(0, 2, 1, 0))
    for column in ("attack", "looks at", f"{report.engine} as it is", "under kvcustody", "verdict"):
        table.add_column(column, overflow="fold")
    for attack in report.attacks:
        style = _STYLE[attack.verdict]
        table.add_row(
            attack.name,
            attack.reads,
            escape(_cell(attack.plain, report)),
            escape(_cell(attack.governed, report)),
            f"[{style}]{attack.verdict}",
        )
    console.print()
    console.print(table)
    _print_controls(report, console)
    style = _STYLE[report.verdict]
    console.print(f"[{style}]{report.verdict}[/]: {_MEANS[report.verdict]}  [dim]({report.seconds:.0f} s)[/]")


def _print_controls(report: AttackReport, console: Console) -> None:
    cached, cacheable = report.own_reuse
    console.print(
        f"The governed engine still serves its own tenant: {cached} of {cacheable} tokens of a repeated prompt."
    )
    if report.own_salts is not None:
        console.print(
            "For comparison, vLLM as it is, each tenant with a cache_salt that no other can guess: the prefix probe "
            f"recovers {_words(report.own_salts, report)}; the salt reaches neither freed blocks nor the external tier."
        )


def _cell(outcome: AttackOutcome, report: AttackReport) -> str:
    if outcome.refused is not None:
        return f"does not start: {outcome.refused}"
    if outcome.residue_bytes is not None:
        says = f'; they say: "{outcome.text}"' if outcome.text else ""
        return f"{outcome.residue_bytes:,} bytes not zero{says}"
    return f'"{outcome.text}", {_words(outcome, report)}' if outcome.text else _words(outcome, report)


def _words(outcome: AttackOutcome, report: AttackReport) -> str:
    return f"{len(outcome.words)} of {len(report.secret)} words"
