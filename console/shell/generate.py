"""Makes the manual page and the completions that the wheel installs, from the commands.

    python -m kvcustody.console.shell.generate            # writes packaging/share; the build runs it

The page has every command of this distribution, whichever extras are installed where it is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcustody._version import __version__
from kvcustody.console.command_table import every_command
from kvcustody.console.main import COMMANDS, Kvcustody, app
from kvcustody.files import write_file

PLACE = Path(__file__).resolve().parents[2] / "packaging" / "share"
_SHELLS = {"bash": "bash/kvcustody", "zsh": "zsh/_kvcustody", "fish": "fish/kvcustody.fish"}


def shell_files() -> dict[str, str]:
    """Return every file by its path below `packaging/share`."""
    return {"kvcustody.1": manual()} | {path: completion(shell) for shell, path in _SHELLS.items()}


def completion(shell: str) -> str:
    """Return the script with which a shell completes `kvcustody`, as `--show-completion` prints it."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(prog_name="kvcustody", complete_var="_KVCUSTODY_COMPLETE", shell=shell)
    return script.strip() + "\n"


def manual() -> str:
    """Return the manual page in man(7) macros."""
    lines = [
        f'.TH KVCUSTODY 1 "" "kvcustody {__version__}" "User commands"',
        ".SH NAME",
        "kvcustody \\- custody of LLM key/value caches",
        ".SH SYNOPSIS",
        ".B kvcustody",
        ".I command",
        "[options]",
        ".SH DESCRIPTION",
        _text(str(app.info.help)),
        ".PP",
        "Every command takes \\fB\\-h\\fR. It ends with 0 when it was done, with 2 when it could not be, with 130 when "
        "it was interrupted, and with 1 when it answers a question with no. \\fB\\-\\-json\\fR prints one document.",
        ".SH COMMANDS",
    ]
    for name, lazy in COMMANDS.items():
        lines += [".TP", f".B {_text(name)}", _text(lazy.summary)]
    lines.append(".SH OPTIONS")
    for name, command in every_command():
        lines += _command(name, command)
    return "\n".join([*lines, ".SH SEE ALSO", "The pages under docs/ of the source.", ""])


def _command(name: str, command: Any) -> Iterator[str]:
    yield f".SS {_text('kvcustody ' + name)}"
    yield _text((command.help or "").partition("\n\n")[0])
    for parameter in command.params:
        flags = ", ".join(parameter.opts) if str(parameter.opts[0]).startswith("-") else parameter.name.upper()
        yield ".TP"
        yield f".B {_text(flags)}"
        yield _text(parameter.help or "")


def _text(text: str) -> str:
    """Return text for roff: one line, no macro at its beginning."""
    plain = re.sub(r"`([^`]*)`", r"\1", " ".join(text.split()))
    plain = plain.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + plain if plain.startswith((".", "'")) else plain


def main() -> None:
    """Write the files."""
    Kvcustody.needs = {}
    for path, text in shell_files().items():
        target = PLACE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, text.encode(), mode=0o644)


if __name__ == "__main__":
    main()
