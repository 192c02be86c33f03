"""`kvcustody policy init`, `fmt` and `schema`: start a policy, format it, complete it in an editor."""

from __future__ import annotations

import difflib
import stat
import sys
from pathlib import Path
from typing import Annotated

import orjson
import typer

from kvcustody.console.command import Json, print_json, say
from kvcustody.console.policy.validate import EXIT_NO, Files
from kvcustody.errors import ConfigError, PolicyError
from kvcustody.files import READABLE, write_file
from kvcustody.policies import library
from kvcustody.policies.workbench.format import fmt
from kvcustody.policies.workbench.init_policy import start
from kvcustody.policies.workbench.json_schema import schema
from kvcustody.policies.workbench.validate import read_source


def add_to(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(name="init", epilog=_INIT)(init_command)
    app.command(name="fmt", epilog=_FMT)(fmt_command)
    app.command(name="schema", epilog=_SCHEMA)(schema_command)


_INIT = (
    "Examples:\n\n    kvcustody policy init\n\n"
    "    kvcustody policy init --from regulated-saas --name acme-cloud --tenant acme --tenant globex"
)
From = Annotated[
    str | None,
    typer.Option("--from", help="A library policy; asked for if left out.", autocompletion=library.names),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the file if there is one.")]
Name = Annotated[str | None, typer.Option("--name", help="What the policy is called.")]
Tenant = Annotated[list[str] | None, typer.Option("--tenant", help="A tenant in place of the examples; repeatable.")]
Target = Annotated[Path, typer.Argument(help="The new file.", metavar="FILE")]


def init_command(
    file: Target = Path("policy.yaml"),
    *,
    template: From = None,
    name: Name = None,
    tenant: Tenant = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Start a policy from one of the library: single-org, regulated-saas or public-api.

    Asks for what is not given, where there is somebody to ask. An existing file is overwritten with --force alone.
    """
    if file.exists() and not force:
        raise ConfigError(f"file `{file}` exists; name another one, or overwrite it with --force", path=file)
    asking = _somebody_to_ask() and not as_json and template is None
    template = template or _choose(asking)
    if asking:
        name = name or typer.prompt("name of the policy", default=template)
        tenant = tenant or typer.prompt("tenants, separated by spaces (empty: keep the examples)", default="").split()
    text = start(template, name=name, tenants=tenant or ())
    try:
        write_file(file, text.encode(), mode=READABLE, exclusive=not force)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise PolicyError(f"file `{file}` cannot be written: {reason}", path=file) from error
    if as_json:
        print_json({"path": str(file), "template": template, "name": name or template, "tenants": tenant or []})
    else:
        say(f"written: {file}, from {template}; next: kvcustody policy validate {file}")


def _somebody_to_ask() -> bool:
    return sys.stdin.isatty()


def _choose(asking: bool) -> str:
    if not asking:
        raise ConfigError(f"`--from` is missing; the library has {', '.join(library.names())}")
    for entry in library.names():
        say(f"{entry}: {library.load(entry).description}")
    while (name := str(typer.prompt("library policy", default="single-org"))) not in library.names():
        say(f"{name}: no such library policy")
    return name


_FMT = "Examples:\n\n    kvcustody policy fmt policy.yaml --write\n\n    kvcustody policy fmt policies/*.yaml --check"
Write = Annotated[bool, typer.Option("--write", help="Write the files instead of printing the changes.")]
Check = Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 where something would change.")]


def fmt_command(files: Files, *, write: Write = False, check: Check = False, as_json: Json = False) -> None:
    """Lay policies out in one way: comments stay, and what they say never changes (their digest is compared).

    Prints the changes as a diff; --write makes them. A file whose layout cannot be changed safely is left as it is.
    """
    rows = []
    for path in files:
        text = policy_text(path)
        done = fmt(text, name=str(path))
        rows.append({"file": str(path), "changed": done.changed, "left": done.left})
        if done.left:
            say(f"{path}: left as it is: {done.left}", file=sys.stderr)
        if write and done.changed:
            replace_file(path, done.text)
        elif not as_json and not check and done.changed:
            lines = difflib.unified_diff(text.splitlines(True), done.text.splitlines(True), str(path), str(path))
            sys.stdout.write("".join(lines))
        if not as_json and (write or check):
            verb = "formatted" if write else "would change"
            say(f"{path}: {verb if done.changed else 'unchanged'}")
    if as_json:
        print_json(rows)
    if check and any(row["changed"] for row in rows):
        raise typer.Exit(EXIT_NO)


def policy_text(path: Path) -> str:
    """Return a policy file's text.

    Raises:
        PolicyError: it cannot be read.
    """
    try:
        return read_source(path).decode()
    except UnicodeDecodeError:
        raise PolicyError(f"policy `{path}` is not UTF-8; see `kvcustody policy validate`", path=path) from None


def replace_file(path: Path, text: str) -> None:
    """Replace a policy file's text; its permissions stay as strict as they were."""
    try:
        write_file(path, text.encode(), mode=stat.S_IMODE(path.stat().st_mode))
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise PolicyError(f"policy `{path}` cannot be written: {reason}", path=path) from error


_SCHEMA = (
    "Examples:\n\n    kvcustody policy schema --out policy.schema.json\n\n"
    "then, as the first line of a policy:  # yaml-language-server: $schema=policy.schema.json"
)
SchemaOut = Annotated[Path | None, typer.Option("--out", help="Write the schema here instead of printing it.")]


def schema_command(*, out: SchemaOut = None, as_json: Json = False) -> None:
    """Print the JSON Schema of the policy language, with descriptions: completion and checks for editors."""
    if out is None:
        print_json(schema())
        return
    try:
        data = orjson.dumps(schema(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        write_file(out, data, mode=READABLE)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise PolicyError(f"schema `{out}` cannot be written: {reason}", path=out) from error
    if as_json:
        print_json({"path": str(out)})
    else:
        say(f"written: {out}")
