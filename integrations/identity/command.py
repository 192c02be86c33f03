"""`kvcustody identity` checks an identity document; `kvcustody apikey engine` issues, revokes and lists API keys.

1. A new key is printed once, on stdout, and kept nowhere. An existing key is read from a descriptor, never from the
   arguments, which every process of the machine can read.
2. Nothing here shows a key, a digest or the salt of a key file.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from kvcustody.errors import ConfigError, IdentityError
from kvcustody.governance.identity.principal import check_identifier
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped

if TYPE_CHECKING:
    from kvcustody.governance.credentials.verification_keys import IssuerKeys

app = typer.Typer(
    no_args_is_help=True,
    help="Check the identity document of an engine, and every file that it names.",
    epilog="docs/how-to/operate/set-up-identity.md says how a request gets its tenant, and what the door answers.",
)
engine_keys = typer.Typer(
    no_args_is_help=True,
    help="Issue, list and revoke the API keys of an engine's tenants, in a file.",
    epilog="docs/how-to/operate/set-up-identity.md says how a request gets its tenant, and what the door answers.",
)


@app.callback()
def _identity() -> None:
    pass


DOCUMENT = Path("kvcustody-identity.yaml")
KEY_FILE = Path("api-keys.yaml")
_KEY_BYTES_MAX = 4096

_Document = Annotated[Path, typer.Argument(help="The identity document.", metavar="FILE")]
_KeyFile = Annotated[Path, typer.Option("--file", help="The file of API keys.", metavar="FILE")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.command(
    epilog="Examples:\n\n    kvcustody identity check\n\n"
    "    kvcustody identity check /etc/kvcustody/identity.yaml --json"
)
def check(file: _Document = DOCUMENT, *, as_json: _Json = False) -> None:
    """Read an identity document and every file that it names, as the API server would, and say what it lets in.

    Everything that is wrong is reported at once, each with file, line and column; the exit code is then 2.
    """
    description = describe(file)
    if as_json:
        _print_json(description)
        return
    print(f"usable: {file}")
    if description["api_keys"] is not None:
        print(f"API keys: {description['api_keys']['keys']} in {description['api_keys']['path']}")
    for issuer in description["issuers"]:
        speaks = "any tenant" if issuer["tenants"] is None else ", ".join(issuer["tenants"])
        print(f"issuer {issuer['name']}: {issuer['keys']} verification keys; speaks for {speaks}")
        for reason in issuer["left_out"]:
            print(f"left out: {reason}")
    print(f"open to everybody: {', '.join(description['open_paths']) or 'nothing'}")


@dataclass(frozen=True, kw_only=True)
class KeyOptions(ParameterGroup):
    """The key's claims about its requests."""

    subject: Annotated[str | None, typer.Option(help="Its user; without one, the tenant may assert one.")] = None
    classification: Annotated[str | None, typer.Option(help="Classification of its requests.")] = None
    route: Annotated[str | None, typer.Option(help="Route of its requests, as /v1/hr; else the path.")] = None
    issuer: Annotated[
        str | None, typer.Option(help="Issuer, which distinguishes equal tenant names; default `api-keys`.")
    ] = None
    operator: Annotated[bool, typer.Option("--operator", help="May also use administration paths.")] = False
    until: Annotated[str | None, typer.Option(help="A UTC date from which the key is refused.", metavar="DATE")] = None


@engine_keys.command(
    "issue",
    epilog="Examples:\n\n    kvcustody apikey engine issue acme-ci --tenant acme\n\n"
    "    kvcustody apikey engine issue hr-bot --tenant acme --subject hr-bot --classification confidential "
    "--until 2027-04-01\n\n"
    "    kvcustody apikey engine issue acme-old --tenant acme --key-fd 0 < old-key.txt",
)
@grouped
def issue(
    *,
    name: Annotated[str, typer.Argument(help="The key's name, here and in the log.")],
    tenant: Annotated[str, typer.Option(help="The tenant of its requests.")],
    file: _KeyFile = KEY_FILE,
    speaks: KeyOptions,
    key_fd: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=(1 << 31) - 1,
            help="Adopt an existing key, read from this descriptor; 0 is stdin.",
            metavar="FD",
        ),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Add an API key to a file, made if absent, and print the key. It is shown once and kept nowhere.

    The file holds a digest under a random salt. A running server takes the key within a second of its next request.
    """
    from kvcustody.governance.credentials.api_key_file import add_key

    given = {
        "name": name,
        "tenant": tenant,
        "subject": speaks.subject,
        "classification": speaks.classification,
        "route": speaks.route,
        "issuer": speaks.issuer,
        "operator": speaks.operator or None,
        "until": None if speaks.until is None else _date(speaks.until),
    }
    _check_folder(file)
    adopted = None if key_fd is None else _read_key(key_fd)
    entry: dict[str, object] = {field: value for field, value in given.items() if value is not None}
    _check_names(entry)
    with _writing(file):
        key = add_key(file, entry, key=adopted)
    shown = key if adopted is None else None
    if as_json:
        _print_json({"name": name, "tenant": tenant, "path": str(file), "key": shown})
        return
    print(f"added: {name} for tenant {tenant} in {file}", file=sys.stderr)
    if shown is not None:
        print(shown)


@engine_keys.command(epilog="Example: `kvcustody apikey engine revoke acme-ci --file /etc/kvcustody/api-keys.yaml`")
def revoke(
    name: Annotated[str, typer.Argument(help="The key's name, as `list` shows it.")],
    *,
    file: _KeyFile = KEY_FILE,
    as_json: _Json = False,
) -> None:
    """Remove an API key. A running server refuses it within a second of its next request.

    What its tenant has in the cache stays, under the tenant's deadlines; erasing it is another matter.
    """
    from kvcustody.governance.credentials.api_key_file import revoke_key

    _check_file(file)
    with _writing(file):
        revoke_key(file, name)
    if as_json:
        _print_json({"name": name, "path": str(file), "status": "revoked"})
    else:
        print(f"revoked: {name} in {file}")


@engine_keys.command(
    "list", epilog="Example: `kvcustody apikey engine list --file /etc/kvcustody/api-keys.yaml --json`"
)
def list_keys(*, file: _KeyFile = KEY_FILE, as_json: _Json = False) -> None:
    """List the API keys of a file: names and whom they speak for, never a key or its digest."""
    _check_file(file)
    rows = _rows(file)
    if as_json:
        _print_json({"path": str(file), "keys": rows})
        return
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    columns = ("name", "tenant", "subject", "classification", "route", "issuer", "until")
    for column in (*columns, "state"):
        table.add_column(column)
    for row in rows:
        state = "past its date" if row["past"] else "operator" if row["operator"] else "in use"
        table.add_row(*(row[column] or "" for column in columns), state)
    Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False).print(table)


def describe(file: Path) -> dict[str, Any]:
    """Return what an identity document admits.

    Raises:
        ConfigError: lists every error in it and in the files that it names.
    """
    from kvcustody.governance.credentials.api_key_file import read_keys
    from kvcustody.integrations.identity.identity_document import load_identity

    document = load_identity(file)
    keys: dict[str, Any] | None = None
    wrong: list[str] = []
    if document.api_keys is not None:
        path = file.parent / document.api_keys.path
        try:
            keys = {"path": str(path), "keys": len(read_keys(path).keys)}
        except ConfigError as error:
            wrong.append(error.message)
    issuers = []
    for entry in document.issuers:
        try:
            issuer_keys = _verification_keys(file.parent / entry.keys)
        except ConfigError as error:
            wrong.append(error.message)
            continue
        tenants = None if entry.tenants is None else list(entry.tenants)
        issuers.append(
            {
                "name": entry.called,
                "issuer": entry.issuer,
                "keys": len(issuer_keys.keys),
                "left_out": list(issuer_keys.left_out),
                "tenants": tenants,
            }
        )
    if wrong:
        raise ConfigError("\n".join(wrong))
    return {
        "path": str(file),
        "status": "usable",
        "api_keys": keys,
        "issuers": issuers,
        "open_paths": list(document.open_paths),
        "served_paths": list(document.served_paths),
    }


def _verification_keys(path: Path) -> IssuerKeys:
    try:
        from kvcustody.governance.credentials.verification_keys import read_verification_keys
    except ImportError as error:
        raise ConfigError(
            f"{path}: JSON Web Tokens need `{error.name}`; pip install 'kvcustody[vllm]'", path=path
        ) from None
    return read_verification_keys(path)


def _rows(file: Path) -> list[dict[str, Any]]:
    from kvcustody.governance.credentials.api_key_file import read_keys

    today = datetime.datetime.now(datetime.UTC).date()
    return [
        {
            **entry.model_dump(mode="json", exclude={"digest"}),
            "past": entry.until is not None and entry.until <= today,
        }
        for entry in read_keys(file).keys
    ]


def _read_key(descriptor: int) -> str:
    """Return the first line behind a descriptor (rule 1)."""
    try:
        with os.fdopen(descriptor, "rb", closefd=descriptor > 2) as file:
            data = file.read(_KEY_BYTES_MAX + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--key-fd: descriptor `{descriptor}` gives no text") from None
    if len(data) > _KEY_BYTES_MAX or len(text.splitlines()) != 1:
        raise ConfigError(f"--key-fd: descriptor `{descriptor}` must give one line, the key")
    return text.strip()


def _date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ConfigError(f"--until: `{text}` is not a date; write it as 2027-04-01") from None


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written ({error.strerror}); check its folder's mode", path=file) from None


def _check_names(entry: dict[str, object]) -> None:
    """Report problems by option, because the key file would report them by line."""
    for field, value in entry.items():
        if not isinstance(value, str) or field == "until":
            continue
        option = "the name" if field == "name" else f"--{field}"
        try:
            check_identifier(field, value)
        except IdentityError as error:
            raise ConfigError(f"{option}: {error.operands['reason']}") from None
        if field == "route" and not value.startswith("/"):
            raise ConfigError(f"{option}: must begin with `/`, as a path")


def _check_folder(file: Path) -> None:
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: no such folder; create it, without access for others", path=file)


def _check_file(file: Path) -> None:
    if not file.exists():
        raise ConfigError(f"{file}: does not exist; name the file with --file, or create it with `issue`", path=file)


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
