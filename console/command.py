"""The common behaviour of all commands: one-line errors, exit codes, JSON on request, progress on stderr.

1. A `CustodyError` prints `error: KVC…: message` on stderr and exits 2; there is no traceback for a user's mistake.
2. Ctrl-C exits 130 after everything that was open has been closed.
3. stdout carries the result alone; with `--json` it is one JSON document.
4. No text of a line, a table or a document reaches the terminal as a command to it. Control characters, and characters
   that change the direction of writing, are escaped. Names are not interpreted as markup. `say`, `make_table` and
   `print_json` print.
5. A command that reads a ledger with replayed or generated history says so, whatever it shows of it.
"""

from __future__ import annotations

import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import orjson
import typer
import typer.core

from kvcustody.console.terminal.lines import TURNS
from kvcustody.console.terminal.lines import printable as printable  # noqa: PLC0414 - others have both from here
from kvcustody.console.terminal.lines import say as say  # noqa: PLC0414
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.times import WHOLE_NUMBER

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

EXIT_NO = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
_TYPED = "kvcustody.typed"  # in a context's `meta`: the words of the command line
_NUMBER_MAX = 1 << 63
_BOUNDS = (  # what the library says of a number, and what we say
    (re.compile(r"Input should be greater than or equal to (\S+)"), r"must be \1 or more"),
    (re.compile(r"Input should be less than or equal to (\S+)"), r"must be \1 or less"),
    (re.compile(r"Input should be a valid number, unable to parse string as a number"), "must be a number"),
)
_NOT_OFFERED = re.compile(r"(?:Value error, )?'([^']*)' is not one of ((?:'[^']*'(?:, )?)+)")
_AS_JSON = orjson.OPT_INDENT_2 | orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z
_NOT_SHOWN_IN_JSON = re.compile(f"[\x7f-\x9f{TURNS}]")  # JSON escapes the others itself

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of tables.")]


class _Marked(NamedTuple):
    """The replayed or generated history that this command has reported, and its processes."""

    said: bool
    processes: list[dict[str, Any]]


_MARKED: ContextVar[_Marked] = ContextVar("marked")

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation: for scripts.")]


def confirm(what: str, word: str, *, yes: bool) -> None:
    """Require a person at a terminal to type `word` before `what` is ended.

    Raises:
        ConfigError: nobody typed it.
    """
    if yes:
        return
    if not _terminal():
        raise ConfigError(f"{what} would end, which cannot be undone: give --yes in scripts")
    asked = f"This ends {what}, and cannot be undone. Type {word} to go on"
    typed: str = typer.prompt(asked, default="", show_default=False, err=True)
    if typed.strip() != word:
        raise ConfigError(f"{what} is not ended: `{word}` was not typed")


def _terminal() -> bool:
    return sys.stdin.isatty()


# What typer calls a wrong use of a command; it has its own copy of click, or click's, by its version.
UsageError: Any = typer.BadParameter.__bases__[0]


def _one_line(error: Exception) -> str:
    """Return a usage error in our format: lowercase, one line, no full stop."""
    text = " ".join(str(getattr(error, "format_message", error.__str__)()).split()).rstrip(".")
    text = _NOT_OFFERED.sub(_with_nearest, text)
    for theirs, ours in _BOUNDS:
        text = theirs.sub(ours, text)
    return text[:1].lower() + text[1:]


def _with_nearest(found: re.Match[str]) -> str:
    """Return the message for an unknown value: the known values, and the nearest one."""
    close = get_close_matches(found[1], re.findall("'([^']*)'", found[2]), n=1)
    hint = f"; did you mean `{close[0]}`?" if close else ""
    return f"`{found[1]}` is not one of {found[2]}{hint}"


def prepare(command: Any) -> None:
    """Give a command, or every command of a group, the common behaviour: help, texts, numbers."""
    if hasattr(command, "is_prepared"):
        return
    command.is_prepared = True
    command.format_help = lambda ctx, _: _print_help(command, ctx)
    command.get_help_option = partial(_help_option, command.get_help_option)
    for param in command.params:
        _take_texts(param)
        if _takes_whole_numbers(param.type_descriptor.annotation):
            param.process_value = _written_one_way(param)
    if isinstance(command, typer.core.TyperGroup):
        group: Any = command
        group.resolve_command = _resolving(group.resolve_command)
    command.invoke = _checked(command.invoke)


def _print_help(command: Any, ctx: Any) -> None:
    from kvcustody.console.terminal.help_page import print_help

    print_help(command, ctx)


def _help_option(get: Callable[[Any], Any], ctx: Any) -> Any:
    option = get(ctx)
    _take_texts(option)
    return option


def _take_texts(param: Any) -> None:
    """Make a parameter take its text unchanged: typer would build a validator, and import pydantic for it."""
    if hasattr(param, "takes_texts") or not hasattr(param, "get_runtime_param"):
        return
    param.takes_texts = True
    typed = param.type_descriptor
    simple = typed.annotation in (str, bool) and typed.parameter_info.parser is None
    if simple and param.nargs == 1 and not param.multiple:
        param.get_runtime_param = partial(_Text, param.get_runtime_param)


class _Text(NamedTuple):
    """The parameter type that typer uses for texts."""

    validator: Callable[[], Any]

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return an ASCII text or a missing value as it is; pass any other through the validator."""
        is_text = isinstance(value, str) and value.isascii() and param.type_descriptor.annotation is str
        return value if value is None or is_text else self.validator().coerce(value, param=param, ctx=ctx)


def _written_one_way(param: Any) -> Callable[[Any, Any], Any]:
    """Make a parameter take whole numbers in the form of queries: digits, without `_`, plus, spaces or leading
    zeros.
    """
    process = param.process_value

    def processing(ctx: Any, value: Any) -> Any:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, str) and WHOLE_NUMBER.fullmatch(each) is None:
                name = " / ".join(param.opts) if param.opts[0].startswith("-") else param.name.upper()
                raise UsageError(f"{name} `{each[:24]}`: is not a whole number in decimal digits", ctx=ctx)
        return process(ctx, value)

    return processing


def _takes_whole_numbers(annotation: Any) -> bool:
    return annotation is int or any(map(_takes_whole_numbers, get_args(annotation)))


def _resolving(resolve: Callable[[Any, list[str]], Any]) -> Callable[[Any, list[str]], Any]:
    def resolving(ctx: Any, args: list[str]) -> Any:
        name, command, rest = resolve(ctx, args)
        if command is not None:
            prepare(command)
        return name, command, rest

    return resolving


def check_once(ctx: Any) -> None:
    """Refuse an option that takes one value and is given twice, because the first value would be lost silently."""
    typed = [word.partition("=")[0] for word in ctx.meta.get(_TYPED, ()) if word.startswith("--")]
    for param in ctx.command.params:
        if not (getattr(param, "multiple", False) or getattr(param, "is_flag", False)):
            given = [word for word in typed if word in param.opts]
            if len(given) > 1:
                raise UsageError(f"`{given[0]}` takes one value, and is given {len(given)}", ctx=ctx)


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
        """Refuse U+0000 in an argument: no database stores it."""
        if any("\0" in text for text in args):
            raise UsageError("an argument contains the character U+0000", ctx=ctx)
        ctx.meta.setdefault(_TYPED, list(args))
        for param in self.params:
            _take_texts(param)
        return list(super().parse_args(ctx, args))

    def get_help_option(self, ctx: Any) -> Any:
        """Return the help option that every group has."""
        return _help_option(super().get_help_option, ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the group's help page."""
        _print_help(self, ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command as any group does; it is one of ours."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            prepare(command)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command by rule 1 and rule 2."""
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
    """Return the hint for a command or an option that was typed by its former name."""
    from kvcustody.console.former_names import former_names

    names, option = former_names(), getattr(error, "option_name", None)
    command = at.command_path.removeprefix(program.command_path).strip()
    if option is not None:
        return names.option_hint(command, option)
    missing = getattr(getattr(error, "param", None), "opts", ())
    return names.command_hint(program.meta.get(_TYPED, [])) or names.argument_hint(command, missing)


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Turn Ctrl-C into a `KeyboardInterrupt` at the next call of the yielded function, never in the middle of an act.

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
    """Run the block until Ctrl-C or SIGTERM; the exit status is then 1 where `lost` returns True, and 130 elsewhere."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None
    try:
        yield
    except KeyboardInterrupt:
        if not lost():
            raise
        say("error: interrupted; the output above is incomplete", file=sys.stderr)
        raise typer.Exit(EXIT_NO) from None
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def tell_history(text: str, processes: Sequence[dict[str, Any]] = ()) -> None:
    """Report marked history (rule 5): once per command on stderr, and in its JSON document where the processes are
    known.
    """
    told = _MARKED.get(None)
    if told is None or not told.said:
        head = ": ".join(text.split(": ", 2)[:2])  # without the processes, whose names take lines of a terminal
        say(f"note: {head if sys.stderr.isatty() else text}", file=sys.stderr)
    _MARKED.set(_Marked(True, list(processes)))


def print_json(value: Any) -> None:
    """Print one JSON document on stdout; an object about a ledger with marked processes names them in `marked` (rule
    5).
    """
    told = _MARKED.get(None)
    if told is not None and told.processes and isinstance(value, dict):
        value = value | {"marked": told.processes}
    text = orjson.dumps(value, option=_AS_JSON).decode()
    sys.stdout.write(_NOT_SHOWN_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def print_more(answer: dict[str, Any]) -> None:
    """Print how to get the next page, where there is one."""
    if answer["next"] is not None:
        say(f"more: --cursor {answer['next']}")


def print_dated(data: Any) -> None:
    """Print facts that no operation returns as one JSON document, with each moment in both formats."""
    from kvcustody.governance.api.http.answer_times import dated_data

    print_json(dated_data(data))


def progress_bar() -> Progress:
    """Return a progress bar on stderr, or occasional lines where stderr is no terminal."""
    from kvcustody.console.terminal.progress import make_progress

    return make_progress()


def make_table(title: str, *columns: str, left: int = 1) -> Table:
    """Return a plain table; the first `left` columns are text, the others numbers."""
    from rich.text import Text

    from kvcustody.console.terminal.tables import PlainTable

    table = PlainTable(title)
    for index, column in enumerate(columns):
        table.add_column(Text(printable(column)), justify="left" if index < left else "right")
    return table


def stdout() -> Console:
    """Return the terminal for results, wide enough for a table where stdout is no terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)
