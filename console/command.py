"""How every command of kvcustody behaves: one-line errors, exit codes, JSON on request, progress on stderr.

1. A `CustodyError` prints `error: KVC…: message` on stderr and exits 2; there is no traceback for a user's mistake.
2. Ctrl-C exits 130 after everything that was open has been closed.
3. stdout carries the result alone; with `--json` it is one JSON document.
4. No text of a line, a table or a document reaches the terminal as a command to it: control characters and what turns
   the direction of writing stand as their escapes, and names are no markup. `say`, `make_table` and `print_json` print.
5. A command that reads a ledger with replayed or generated history says so, whatever it shows of it.
"""

from __future__ import annotations

import math
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import orjson
import typer
import typer.core
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvcustody.errors import ConfigError, CustodyError
from kvcustody.times import WHOLE_NUMBER

if TYPE_CHECKING:
    from pydantic import BaseModel

EXIT_NO = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
_TYPED = "kvcustody.typed"  # in a context's `meta`: the words of the command line
_NUMBER_MAX = 1 << 63
_LINE_SECONDS = 10.0
_TURNS = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # the direction of writing, or the line
_NOT_SHOWN = re.compile(f"[\x00-\x1f\x7f-\x9f{_TURNS}]")
_AS_JSON = orjson.OPT_INDENT_2 | orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z
_NOT_SHOWN_IN_JSON = re.compile(f"[\x7f-\x9f{_TURNS}]")  # JSON escapes the others itself

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of tables.")]


class _Marked(NamedTuple):
    """What this command has said of replayed or generated history, and the processes that it is of."""

    said: bool
    processes: list[dict[str, Any]]


_MARKED: ContextVar[_Marked] = ContextVar("marked")

Yes = Annotated[bool, typer.Option("--yes", help="Do it without asking once more: for scripts.")]


def confirm(what: str, word: str, *, yes: bool) -> None:
    """Have somebody at a terminal type `word` before `what` is ended; raises `ConfigError` where nobody did."""
    if yes:
        return
    if not _terminal():
        raise ConfigError(
            f"{what} is ended, which cannot be taken back: give --yes where nobody can be asked"
        )
    asked = f"This ends {what}, and cannot be taken back. Type {word} to go on"
    typed: str = typer.prompt(asked, default="", show_default=False, err=True)
    if typed.strip() != word:
        raise ConfigError(f"{what} is not ended: `{word}` was not typed")


def _terminal() -> bool:
    return sys.stdin.isatty()


# What typer calls a wrong use of a command; it has its own copy of click, or click's, by its version.
UsageError: Any = typer.BadParameter.__bases__[0]


def _one_line(error: Exception) -> str:
    """A usage error in our form: lowercase, one line, no full stop."""
    text = " ".join(str(getattr(error, "format_message", error.__str__)()).split()).rstrip(".")
    return text[:1].lower() + text[1:]


def _check_numbers(command: Any) -> None:
    """Have a command, or every command of a group, refuse numbers that no ledger holds: past 64 bits, or not finite."""
    if hasattr(command, "checks_numbers"):
        return
    command.checks_numbers = True
    for param in command.params:
        if _takes_whole_numbers(param.type_descriptor.annotation):
            param.process_value = _written_one_way(param)
    if isinstance(command, typer.core.TyperGroup):
        group: Any = command
        group.resolve_command = _resolving(group.resolve_command)
    command.invoke = _checked(command.invoke)


def _written_one_way(param: Any) -> Callable[[Any, Any], Any]:
    """Takes a parameter's whole numbers as queries do: in digits, without `_`, a plus, spaces or zeros before them."""
    process = param.process_value

    def processing(ctx: Any, value: Any) -> Any:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, str) and WHOLE_NUMBER.fullmatch(each) is None:
                raise UsageError(
                    f"`{param.name}`: {each[:24]!r} is no whole number in decimal digits", ctx=ctx
                )
        return process(ctx, value)

    return processing


def _takes_whole_numbers(annotation: Any) -> bool:
    return annotation is int or any(map(_takes_whole_numbers, get_args(annotation)))


def _resolving(resolve: Callable[[Any, list[str]], Any]) -> Callable[[Any, list[str]], Any]:
    def resolving(ctx: Any, args: list[str]) -> Any:
        name, command, rest = resolve(ctx, args)
        if command is not None:
            _check_numbers(command)
        return name, command, rest

    return resolving


def _checked(invoke: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(ctx: Any) -> Any:
        for name, value in ctx.params.items():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, int) and not -_NUMBER_MAX <= each < _NUMBER_MAX:
                    raise UsageError(f"`{name}`: {str(each)[:24]}… is no number of 64 bits", ctx=ctx)
                if isinstance(each, float) and not math.isfinite(each):
                    raise UsageError(f"`{name}`: {each} is no finite number", ctx=ctx)
        return invoke(ctx)

    return checked


class CustodyGroup(typer.core.TyperGroup):
    """The command group: turns our errors into one line and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse U+0000 in an argument: no database takes it."""
        if any("\0" in text for text in args):
            raise UsageError("an argument has the character U+0000", ctx=ctx)
        ctx.meta.setdefault(_TYPED, list(args))
        return list(super().parse_args(ctx, args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As for any group; the command refuses numbers that no ledger holds."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            _check_numbers(command)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command under rule 1 and rule 2."""
        outer = _MARKED.set(_Marked(False, []))
        try:
            return super().invoke(ctx)
        except UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            at = getattr(error, "ctx", None) or ctx
            former = _former_name(error, at, ctx.find_root())
            usage = ConfigError(former or f"{_one_line(error)}; see `{at.command_path} --help`")
            say(f"error: {usage}", file=sys.stderr)
            raise typer.Exit(EXIT_ERROR) from None
        except CustodyError as error:
            say(f"error: {error}", file=sys.stderr)
            raise typer.Exit(EXIT_ERROR) from None
        except KeyboardInterrupt:
            say("error: interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        finally:
            _MARKED.reset(outer)


def _former_name(error: Any, at: Any, program: Any) -> str | None:
    """What a usage error is answered with, where a command or an option was typed by its old name."""
    from kvcustody.console.former_names import former_names

    names, option = former_names(), getattr(error, "option_name", None)
    command = at.command_path.removeprefix(program.command_path).strip()
    if option is not None:
        return names.option_hint(command, option)
    missing = getattr(getattr(error, "param", None), "opts", ())
    return names.command_hint(program.meta.get(_TYPED, [])) or names.argument_hint(command, missing)


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Turn Ctrl-C into a `KeyboardInterrupt` at the next call of what this yields, never in the middle of an
    act.

    A second Ctrl-C interrupts at once.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def checkpoint() -> None:
        if asked:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield checkpoint
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield checkpoint
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def following(lost: Callable[[], bool]) -> Iterator[None]:
    """Go on until Ctrl-C or SIGTERM; the exit status is then 1 where `lost` says so, and 130 elsewhere."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None
    try:
        yield
    except KeyboardInterrupt:
        if not lost():
            raise
        say("error: interrupted, after what is said above", file=sys.stderr)
        raise typer.Exit(EXIT_NO) from None
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def tell_history(text: str, processes: Sequence[dict[str, Any]] = ()) -> None:
    """Rule 5: once a command on stderr, and in its JSON document where the processes are known."""
    told = _MARKED.get(None)
    if told is None or not told.said:
        say(f"note: {text}", file=sys.stderr)
    _MARKED.set(_Marked(True, list(processes)))


def print_json(value: Any) -> None:
    """One JSON document on stdout; of a ledger with marked processes an object names them, as `marked` (rule 5)."""
    told = _MARKED.get(None)
    if told is not None and told.processes and isinstance(value, dict):
        value = value | {"marked": told.processes}
    text = orjson.dumps(value, option=_AS_JSON).decode()
    sys.stdout.write(_NOT_SHOWN_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def as_answered(model: type[BaseModel], answer: dict[str, Any]) -> dict[str, Any]:
    """What an operation answers, its moments in both forms: the same from a server and from a ledger's own files."""
    from kvcustody.governance.api.http.answer_times import dated

    return dated(model, answer)


def print_answer(model: type[BaseModel], answer: dict[str, Any]) -> None:
    """Print what an operation answers as one JSON document."""
    print_json(as_answered(model, answer))


def print_dated(data: Any) -> None:
    """Print facts that no operation answers as one JSON document, each moment in both forms."""
    from kvcustody.governance.api.http.answer_times import dated_data

    print_json(dated_data(data))


def print_period(
    model: type[BaseModel], named: str, since_us: int, until_us: int, items: Sequence[dict[str, Any]]
) -> None:
    """Print what an operation answers of a period as one JSON document, its items under a name of the command's."""
    answer = as_answered(model, {"since_us": since_us, "until_us": until_us, "items": items})
    print_json({named if name == "items" else name: value for name, value in answer.items()})


class _Lines(Progress):
    """Progress where nobody looks at a terminal: a line on stderr every so many seconds of work."""

    _told_at = 0.0

    def refresh(self) -> None:
        """Where the work is, at most every `_LINE_SECONDS`."""
        now = time.monotonic()
        self._told_at = self._told_at or now
        if now - self._told_at >= _LINE_SECONDS:
            self._told_at = now
            for task in self.tasks:
                of = "" if task.total is None else f" of {task.total:,.0f}"
                say(f"{task.description}: {task.completed:,.0f}{of}", file=sys.stderr, flush=True)

    def update(self, *given: Any, **named: Any) -> None:
        """As a bar's, which would be drawn by a thread."""
        super().update(*given, **named)
        self.refresh()

    def advance(self, *given: Any, **named: Any) -> None:
        """As a bar's."""
        super().advance(*given, **named)
        self.refresh()


def progress_bar() -> Progress:
    """A bar on stderr; where stderr is not a terminal, a line now and then."""
    console = Console(stderr=True)
    return (Progress if console.is_terminal else _Lines)(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def printable(text: str) -> str:
    """The text with escapes for what would command the terminal that shows it (rule 4)."""
    return _NOT_SHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(*texts: object, **how: Any) -> None:
    """Print as `print` does, each line as it is to be shown (rule 4): the one way in which a command says something."""
    print(*("\n".join(map(printable, str(text).split("\n"))) for text in texts), **how)


class _PlainTable(Table):
    """A table whose texts are shown as they are, whoever wrote them (rule 4); what is to stand out is a `Text`."""

    def add_row(self, *cells: Any, **how: Any) -> None:
        """A row of texts."""
        super().add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), **how)


def make_table(title: str, *columns: str, left: int = 1) -> Table:
    """A plain table; the first `left` columns are text, the rest numbers."""
    table = _PlainTable(
        title=Text(printable(title)) if title else None,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        padding=(0, 2, 0, 0),
    )
    for index, column in enumerate(columns):
        table.add_column(Text(printable(column)), justify="left" if index < left else "right")
    return table


def stdout() -> Console:
    """The terminal for results; wide enough for a table when stdout is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
