"""The options that commands share, each declared once: ledger, control plane, selection, and time.

Importing this costs nothing: what opens a ledger or a connection is in `opening`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvcustody import times
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup

DEFAULT = "sqlite:///kvcustody.db"
_LEDGER = "an SQLite file by its path or URL, or a PostgreSQL server by its URL"
_SERVER, _LEDGER_VARIABLE = "KVCUSTODY_SERVER", "KVCUSTODY_DATABASE_URL"


def _is_not_another(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Refuse the default ledger where a control plane is named that this command cannot ask: it has another ledger."""
    source = ctx.get_parameter_source(str(param.name))
    is_default = source is not None and source.name == "DEFAULT"
    if is_default and os.environ.get(_SERVER) and all(one.name != "server" for one in ctx.command.params):
        raise ConfigError(
            f"`{ctx.command_path}` reads a ledger, not a control plane, and {_SERVER} names one: name its ledger with "
            f"--ledger, or {_LEDGER_VARIABLE}"
        )
    return value


Ledger = Annotated[
    str,
    typer.Option(
        "--ledger",
        envvar=_LEDGER_VARIABLE,
        callback=_is_not_another,
        help=f"The ledger: {_LEDGER}.",
        show_envvar=True,
        metavar="PATH|URL",
    ),
]
GivenLedger = Annotated[  # of a command that does without, or that takes it from its settings
    str | None, typer.Option("--ledger", help=f"A ledger: {_LEDGER}.", metavar="PATH|URL")
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="KVCUSTODY_SERVICE_CONFIG",
        help="Settings of the service: TOML or YAML; environment variables override them.",
        metavar="FILE",
    ),
]
SettledLedger = Annotated[
    str | None,
    typer.Option("--ledger", help=f"The ledger: {_LEDGER}; overrides the settings.", metavar="PATH|URL"),
]
As = Annotated[
    str | None,
    typer.Option("--as", help="On the ledger itself: act as this enrolled principal.", metavar="NAME"),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar=_SERVER,
        help="Use this control plane: https://HOST:PORT, http://127.0.0.1:PORT or unix:PATH.",
        metavar="URL",
    ),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        envvar="KVCUSTODY_API_KEY_FILE",
        help="File of mode 0600 with the key for --server.",
        metavar="FILE",
    ),
]
Authority = Annotated[
    Path | None,
    typer.Option("--ca", envvar="KVCUSTODY_SERVER_CA", help="PEM of the server's authority.", metavar="FILE"),
]
Keys = Annotated[
    list[str],
    typer.Option("--key", help="A public key of the ledger (`name+id+base64`), or a file that holds it."),
]
Witnesses = Annotated[
    list[str], typer.Option("--witness", help="A witness's public key, or a file; may be given again.")
]
SubjectStore = Annotated[
    str | None,
    typer.Option(
        "--subject-keys",
        envvar="KVCUSTODY_SUBJECT_KEYS_URL",
        help="The store of subject keys, as a URL (default: the one beside a SQLite ledger).",
    ),
]


class SubjectNames(StrEnum):
    """The values of the setting `subject_names`."""

    SEALED = "sealed"
    CLEAR = "clear"


NamesOfSubjects = Annotated[
    SubjectNames | None,
    typer.Option(
        "--subject-names",
        envvar="KVCUSTODY_SUBJECT_NAMES",
        help="`clear`: the ledger is one whose workers keep subjects' names as they are.",
    ),
]
Since = Annotated[str | None, typer.Option(help="Custody due from this UTC date or time on (ISO 8601).")]
Until = Annotated[str | None, typer.Option(help="Custody due before this UTC date or time.")]
PeriodEnd = Annotated[str | None, typer.Option("--until", help="Up to this one, not included; now.")]
OldestFirst = Annotated[bool, typer.Option("--oldest-first", help="The oldest first, not the newest.")]
ActKey = Annotated[str | None, typer.Option("--idempotency-key", help="The act's own key; default: a new one.")]
SigningKeyFile = Annotated[
    Path | None, typer.Option("--signing-key", help="The file of the key that signs.", metavar="FILE")
]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant's custody.")]
Class = Annotated[str | None, typer.Option(help="Only this classification.")]
Model = Annotated[str | None, typer.Option(help="Only this model, as leaves name it (16 hexadecimal digits).")]
Tier = Annotated[
    str | None,
    typer.Option(help="Only this tier: `device` (blocks), or copies in `host`, `nvme` or `remote`."),
]
At = Annotated[int | None, typer.Option("--as-of", help="The ledger as this checkpoint left it (its root log size).")]


@dataclass(frozen=True, kw_only=True)
class ControlPlane(ParameterGroup):
    """The control plane to call instead of reading a ledger; none where `server` is None."""

    server: Server = None
    key_file: KeyFile = None
    authority: Authority = None


@dataclass(frozen=True, kw_only=True)
class ServiceSource(ParameterGroup):
    """The ledger that a service's settings name, or a control plane to call instead."""

    ctx: typer.Context
    plane: ControlPlane
    config: Config = None
    ledger: SettledLedger = None
    as_name: As = None
    subject_keys: SubjectStore = None


@dataclass(frozen=True, kw_only=True)
class ActSource(ServiceSource):
    """Where an act is recorded, and the act's own key: repeating it changes nothing and gives the same answer."""

    key: ActKey = None


@dataclass(frozen=True, kw_only=True)
class DuePeriod(ParameterGroup):
    """A period in which custody is due."""

    since: Since = None
    until: Until = None


def moment_us(text: str | None, option: str = "time") -> int | None:
    """UTC µs from ISO 8601 (a date is its midnight; without an offset it is UTC); None for None."""
    if text is None:
        return None
    try:
        return times.moment_us(text)
    except ValueError:
        raise ConfigError(
            f"{option} `{text}` is no ISO 8601 date or time; write `2026-11-20` or `2026-11-20T14:00:00Z`",
            text=text,
        ) from None


def period_us(since: str | None, until: str | None, *, span_us: int = 0) -> tuple[int, int]:
    """Return the period from `--since` to `--until`, which defaults to now; UTC µs.

    Without `--since` it is `span_us` long, or refused where that is 0. Raises `ConfigError`.
    """
    since_us, until_us = moment_us(since, "--since"), moment_us(until, "--until")
    until_us = SystemClock().utc_us() if until_us is None else until_us
    if since_us is None:
        if not span_us:
            raise ConfigError("--since is needed: the beginning of the period")
        since_us = until_us - span_us
    if until_us <= since_us:
        raise ConfigError(f"--until `{times.readable(until_us)}` is not after --since `{times.readable(since_us)}`")
    return since_us, until_us
