"""A command's help as a page: usage, text, panels of arguments, options and commands, and examples.

Help texts are paragraphs, with `code`, *emphasis*, lists of lines that begin with `- `, and lines of code that are
indented by four spaces. typer would read them with a library for Markdown, whose import costs more than the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_MARKED = re.compile(r"`([^`]+)`|(?<![\w*])\*(\w[^*]*)\*(?![\w*])")
_OPTION = re.compile(r"((?:--?[\w?-]+(?:, | / |; )?)+)\s?(.*)")
_CODE, _KIND, _SAID_BESIDE = "bold cyan", "bold yellow", "dim"
_KIND_WIDTH = 24  # of what an option takes; the names of many choices go over several lines


def print_help(command: Any, ctx: Any) -> None:
    """Print a command's page on stdout."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(Padding(Text(f"Usage: {_usage(command, ctx)}", "bold"), 1))
    first, *more = _paragraphs(command.help or "-")
    if command.help:
        if command.deprecated:
            console.print(Padding(Text("(deprecated)", "red"), (0, 1)))
        console.print(Padding(first, (0, 1, 1, 1)))
    for paragraph in more:
        console.print(Padding(paragraph, (0, 1, 1, 1)), style=_SAID_BESIDE)
    shown = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    options = [param for param in shown if param.param_type_name == "option"]
    _print_panel(console, "Arguments", (_argument(param, ctx) for param in shown if param not in options))
    _print_panel(console, "Options", (_option(param, ctx) for param in options))
    if hasattr(command, "list_commands"):
        _print_panel(console, "Commands", _commands(command, ctx))
    if command.epilog:
        console.print(Padding(Group(*_spaced(_paragraphs(command.epilog))), 1))


def _usage(command: Any, ctx: Any) -> str:
    return " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])


def _paragraphs(text: str) -> Iterator[RenderableType]:
    """Yield the paragraphs of a help text; adjacent code paragraphs become one."""
    code: list[str] = []
    for paragraph in cleandoc(text).partition("\f")[0].split("\n\n"):
        if paragraph.startswith("    "):
            code.append(cleandoc(paragraph))
            continue
        if code:
            yield _code(code)
            code = []
        if paragraph.strip():
            yield marked(paragraph)
    if code:
        yield _code(code)


def _code(parts: list[str]) -> Padding:
    return Padding(Text("\n".join(parts), _CODE), (0, 0, 0, 2))


def marked(paragraph: str) -> Text:
    """Return one paragraph: lines are joined, except those of a list; code and emphasis are highlighted."""
    text = re.sub(r"\s*\n(?!- )\s*", " ", paragraph.strip())
    made, end = Text(), 0
    for found in _MARKED.finditer(text):
        made.append(text[end : found.start()])
        made.append(found[1] or found[2], _CODE if found[1] else "italic")
        end = found.end()
    return made.append(text[end:])


def _spaced(paragraphs: Iterable[RenderableType]) -> Iterator[RenderableType]:
    for index, paragraph in enumerate(paragraphs):
        if index:
            yield Text()
        yield paragraph


def _print_panel(console: Console, title: str, rows: Iterable[tuple[RenderableType, ...]]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        names, *kinds, said = table.columns
        names.no_wrap = True
        for column in kinds:
            column.max_width, column.overflow = _KIND_WIDTH, "fold"
        said.ratio = 1
        console.print(Panel(table, title=title, title_align="left", border_style="dim"))


def _argument(param: Any, ctx: Any) -> tuple[RenderableType, ...]:
    name, said = param.get_help_record(ctx)
    name, _, kind = name.partition(" ")
    return Text(name, _CODE), Text(kind, _KIND), _said(param, said)


def _option(param: Any, ctx: Any) -> tuple[RenderableType, ...]:
    left, said = param.get_help_record(ctx)
    found = _OPTION.fullmatch(left)
    names, kind = (found[1], found[2]) if found else (left, "")
    return Text(names, _CODE), Text(kind, _KIND), _said(param, said)


def _said(param: Any, said: str) -> Text:
    """Return an option's help; its source and other properties stand on separate lines."""
    own = param.help or ""
    made = marked(own)
    beside = said.removeprefix(own).strip().removeprefix("[").removesuffix("]")
    for item in filter(None, beside.split("; ")):
        made.append("\n" if made.plain else "").append(f"[{item}]", _SAID_BESIDE)
    return made


def _commands(group: Any, ctx: Any) -> Iterator[tuple[RenderableType, ...]]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if command is not None and not command.hidden:
            first = cleandoc(command.short_help or command.help or "").partition("\n\n")[0]
            yield Text(name, _CODE), marked(first)
