"""What a tenant's administrator names and writes does not command the terminal of whoever lists it."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from kvcustody.console.api.api_commands import show
from kvcustody.console.command import make_table, print_json, printable, say
from standins.architecture.parsed import parsed

ROOT = Path(__file__).resolve().parents[2] / "console"
HOSTILE = {
    "colour": "\x1b[31mred",
    "title": "\x1b]0;owned\x07",
    "link": "\x1b]8;;http://evil.example\x1b\\here",
    "c1": "\x9b2J",
    "line": "first\r\x1b[2Ksecond",
    "row": "one\ntwo",
    "turned": "\u202eevil",
    "isolate": "\u2066x\u2069",
    "delete": "\x7f",
}
WRITE_BYTES = {
    "serve/command.py": "words of its own",
    "principal/shared.py": "a key, to whoever asked for it",
    "policy/init_fmt_schema.py": "the difference of a file that its user has",
    "audit/query.py": "a leaf and its proof, byte for byte",
    "render/pdf_process.py": "JSON, to the process that began it",
    "api/api_commands.py": "a file that was asked for, byte for byte",
    "command.py": "JSON with escapes",
}
COMMANDS = {*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u202e", "\u2066", "\u2069"} - {"\n"}


def shown_of(table: Table) -> str:
    """What a terminal without colours gets."""
    written = io.StringIO()
    Console(file=written, width=200, force_terminal=True, no_color=True, color_system=None).print(table)
    return written.getvalue()


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_table_shows_every_text_and_obeys_none(text: str) -> None:
    table = make_table(f"of {text}", "name", f"of {text}", left=2)
    table.add_row(text, "plain")
    shown = shown_of(table)
    assert not COMMANDS & set(shown), "no command reaches the terminal"
    assert printable(text) in shown and "plain" in shown
    assert len(shown.strip().splitlines()) == 3, "no text makes a line of its own"


def test_names_are_no_markup() -> None:
    table = make_table("tenants", "name")
    table.add_row("[link=http://evil.example]here[/link] [bold]x[/]")
    assert "[link=http://evil.example]here[/link] [bold]x[/]" in shown_of(table)


def test_without_the_printer_the_terminal_is_commanded() -> None:
    """Positive control: a table of `rich` as it is."""
    table = Table("name")
    table.add_row(HOSTILE["colour"])
    assert "\x1b" in shown_of(table)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_document_says_the_same_and_commands_nothing(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": text, text: [text]})
    said = capsys.readouterr().out
    assert not COMMANDS & set(said)
    assert json.loads(said) == {"name": text, text: [text]}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_an_answer_of_the_api_commands_nothing(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ({"name": text}, {"items": [text]}, {"items": [{"name": text, "more": [text]}]}):
        show(value)
        assert not COMMANDS & set(capsys.readouterr().out), value


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_line_shows_every_text_and_obeys_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Control: printed as it is, it reaches the terminal."""
    say(f"requested by {text}", text, file=sys.stderr)
    said = capsys.readouterr().err
    assert not COMMANDS & set(said) and "requested by" in said
    print(text)
    assert text in capsys.readouterr().out


def test_every_command_says_its_lines_with_the_one_printer() -> None:
    """What a command prints may have a name of a tenant or a principal in it: none prints past `say`."""
    says = 0
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        says += calls.count("say")
        allowed = 1 if path.relative_to(ROOT).as_posix() == "terminal/lines.py" else 0
        assert calls.count("print") == allowed, f"{path} prints past `say`"
        writes = {call for call in calls if call in ("sys.stdout.write", "sys.stderr.write", "typer.echo")}
        assert not writes or path.relative_to(ROOT).as_posix() in WRITE_BYTES, f"{path} writes past `say`"
    assert says > 150


ARGUMENT = "\x1b]0;owned\x07\x9b2J"


WORDS = [
    ["erasure", "show", ARGUMENT], ["policy", "library", ARGUMENT], ["policy", "validate", ARGUMENT],
    ["worker", "close", ARGUMENT], ["case", "show", ARGUMENT], ["subject", "show", ARGUMENT], ["coverage", ARGUMENT],
    ["principal", "disable", ARGUMENT], ["audit", "query", "--tenant", ARGUMENT], [ARGUMENT],
]  # fmt: skip
ENDED = "-- ended: "
PROGRAM = f"""
import sys
from kvcustody.console.main import app
for words in {WORDS!r}:
    sys.argv[1:] = words
    try:
        app()
    except SystemExit as end:
        print({ENDED!r} + str(end.code), flush=True)
        print({ENDED!r}, file=sys.stderr, flush=True)
"""


def test_a_name_in_a_commands_words_commands_nothing(tmp_path: Path) -> None:
    """Whatever a command says of a name that it cannot use: each in turn, as a shell would call it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=tmp_path)
    said, told = done.stdout.split(ENDED), done.stderr.split(ENDED)
    codes = [int(part.split(maxsplit=1)[0]) for part in said[1:]]
    assert codes == [2] * len(WORDS), done
    for words, out, error in zip(WORDS, said, told, strict=False):
        assert "error" in error.lower() or "owned" in out + error, (words, out, error)
    assert not COMMANDS & set(done.stdout + done.stderr), done


def test_every_list_command_prints_with_the_one_printer() -> None:
    """Whoever adds rows made the table with `make_table`; nobody makes one of `rich`'s, or prints markup in cells."""
    printers = 0
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name == "terminal":  # the printer itself, and help, whose texts are all ours
            continue
        tree = parsed(path)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        of_rich = any(isinstance(node, ast.ImportFrom) and node.module == "rich.table" for node in ast.walk(tree))
        made = [call for call in calls if ast.unparse(call.func) in ("Table", "Table.grid")]
        if of_rich:
            assert not made, f"{path} makes a table of its own"
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_row":
                if ast.unparse(call.func.value) == "super()":
                    continue
                printers += 1
                assert "make_table" in path.read_text(encoding="utf-8"), f"{path} has rows, and no `make_table`"
                for cell in call.args:
                    text = ast.unparse(cell)
                    assert "[/]" not in text and "[bold" not in text, f"{path}: markup in a cell: {text}"
    assert printers > 40
