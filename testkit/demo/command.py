"""`kvcustody demo attack`: attacks on a real local engine, with and without governance, reported side by side."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcustody.testkit.demo.attacks import AttackOutcome
from kvcustody.testkit.demo.run import AttackReport
from kvcustody.testkit.demo.vocabulary import CANDIDATES

EPILOG = """
Examples:

    kvcustody demo attack

    kvcustody demo attack --engine vllm

    kvcustody demo attack --seed 7 --json

Exit code 0: the governed engine gave nothing away, and the plain one did. 1: it did, or an attack proved nothing.
"""
_TERMINATED = 143


class EngineName(StrEnum):
    """The engines that can be attacked."""

    transformers = "transformers"
    vllm = "vllm"


def attack(
    *,
    engine: Annotated[
        EngineName, typer.Option(help="transformers takes seconds, vllm a minute or two.")
    ] = EngineName.transformers,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the victim's secret and the order of guesses.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout instead of tables.")
    ] = False,
) -> None:
    """Let one tenant attack another's KV cache in a real engine, first as it is, then governed.

    A victim tells a service a secret phrase. Another tenant guesses it word by word from what the engine reports and
    from what it computes, reads it out of the next block that it is handed, and finds it in a tier outside the engine.
    Everything runs on this machine, on random weights, offline; nothing is left behind.
    """
    from kvcustody.governance.observability.logs import configure
    from kvcustody.testkit.demo.command import print_report
    from kvcustody.testkit.demo.run import demonstrate

    configure("error")
    with _terminable(), _progress() as say:
        report = demonstrate(engine.value, seed, say)
    if as_json:
        sys.stdout.write(orjson.dumps(report.as_json(), option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=150))
    raise typer.Exit(0 if report.verdict == "held" else 1)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints progress on stderr; it is silent where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(f"{text} …")


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM end the engines' processes and remove the files, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_STYLE = {"held": "green", "leaked": "bold red", "void": "yellow"}
_MEANS = {
    "held": "the governed engine gave nothing away; the plain one gave away everything listed",
    "leaked": "the governed engine gave something away",
    "void": "an attack got nothing from the plain engine either, or the governed one reuses nothing: nothing is proved",
}


def print_report(report: AttackReport, console: Console) -> None:
    """Print what each attack recovered from each engine, then the controls and the verdict."""
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
