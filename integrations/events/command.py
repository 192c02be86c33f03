"""`kvcustody observe`: watches an ungoverned engine and reports what it holds past its deadline."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvcustody.errors import ConfigError
from kvcustody.governance.service.operations.parameter_groups import ParameterGroup, grouped
from kvcustody.policies import library
from kvcustody.policies.document.problem_codes import CODES
from kvcustody.policies.document.problems import PolicyRejected
from kvcustody.policies.document.yaml_document import read_values
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable

EPILOG = """
Examples:

    kvcustody observe --endpoint tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --policy policy.yaml

    kvcustody observe --policy regulated-saas --salts salts.yaml --ledger kvcustody.db

    kvcustody observe --policy policy.yaml --seconds 60 --json
"""

_STEP_MS = 200
_SALTS_BYTES_MAX = 16 << 20
_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class StreamOptions(ParameterGroup):
    """The event stream to read."""

    endpoint: Annotated[str, typer.Option(help="Where the engine publishes.")] = "tcp://127.0.0.1:5557"
    replay: Annotated[
        str | None, typer.Option(help="Where the engine replays missed batches; without it, gaps are not filled.")
    ] = None
    topic: Annotated[str, typer.Option(help="The engine's topic.")] = ""
    name: Annotated[str, typer.Option(help="Name of the observed engine, also in the ledger.")] = "observed-0"


@dataclass(frozen=True, kw_only=True)
class AttributionOptions(ParameterGroup):
    """How blocks are attributed to tenants."""

    salts: Annotated[
        Path | None, typer.Option(help="Which tenant has which salts: a YAML file, `acme: [salt, …]`.")
    ] = None
    trust_scope: Annotated[
        bool, typer.Option(help="Read tenants from the stream; only for streams that kvcustody publishes.")
    ] = False
    unattributed: Annotated[
        str | None, typer.Option(help="Classification of blocks without a tenant; default: the highest.")
    ] = None


@grouped
def observe(
    *,
    policy: Annotated[str, typer.Option(help="The policy whose deadlines count: a file, or a library name.")],
    stream: StreamOptions,
    whose: AttributionOptions,
    ledger: Annotated[
        str | None,
        typer.Option(
            help="Record here: an SQLite file by its path or URL, or a PostgreSQL server by its URL. Default: nowhere.",
            metavar="PATH|URL",
        ),
    ] = None,
    spill: Annotated[Path, typer.Option(help="Folder for records while the ledger is unavailable.")] = Path(
        "kvcustody-observe.spill"
    ),
    blocks_max: Annotated[int, typer.Option(min=1, help="Most blocks to keep track of.")] = 1_000_000,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after this time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")] = False,
) -> None:
    """Watch a vLLM engine's KV events: who holds blocks, until when they may, and what is overdue.

    Nothing is enforced. The engine is believed: a block that it does not tell of is not seen, and a removal says that
    the block left its index, not that its memory was overwritten. Stop with Ctrl-C.
    """
    try:
        from kvcustody.integrations.events.observer import WatchOptions, open_observer
    except ImportError as error:
        raise ConfigError(
            f"`observe` needs `{error.name}`: pip install 'kvcustody[events]'", module=error.name
        ) from None
    watch = WatchOptions(
        stream.endpoint,
        _table(policy),
        stream.name,
        stream.replay,
        stream.topic,
        {} if whose.salts is None else read_salts(whose.salts),
        whose.trust_scope,
        whose.unattributed,
        blocks_max,
        ledger,
        spill,
    )
    until = time.monotonic() + (float("inf") if seconds is None else seconds)
    with _stoppable() as stopped, open_observer(watch) as observer:
        with _shown(quiet=as_json) as show:
            while not stopped() and time.monotonic() < until:
                observer.step(_STEP_MS)
                show(observer.status)
        observer.flush()
        last = observer.status()
    if as_json:
        sys.stdout.write(orjson.dumps(last, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(render(last))
    if stopped() == signal.SIGINT:
        raise typer.Exit(_INTERRUPTED)


def read_salts(path: Path) -> dict[str, str]:
    """Read salts by tenant from a YAML mapping and return tenants by salt.

    Raises:
        ConfigError: the file is wrong; the message quotes no salt.
    """
    try:
        if path.stat().st_size > _SALTS_BYTES_MAX:
            raise ConfigError(f"salts `{path}`: larger than 16 MiB", path=path)
        content = path.read_bytes()
        data = read_values(content, str(path), bytes_max=_SALTS_BYTES_MAX, nodes_max=_SALTS_BYTES_MAX).value
    except OSError as error:
        raise ConfigError(f"salts `{path}`: {error.strerror}", path=path) from None
    except PolicyRejected as error:  # its messages quote what may be a salt
        line, code = error.problems[0].line, error.problems[0].code
        reason = CODES[code].title
        raise ConfigError(f"salts `{path}`: line {line}: {reason} ({code})", path=path) from None
    tenant_of: dict[str, str] = {}
    for tenant, found in data.items() if isinstance(data, dict) else [(None, None)]:
        if not (isinstance(tenant, str) and isinstance(found, list) and all(isinstance(s, str) and s for s in found)):
            raise ConfigError(f"salts `{path}`: must map each tenant to a list of its salts, as text", path=path)
        for salt in found:
            if tenant_of.setdefault(salt, tenant) != tenant:
                raise ConfigError(f"salts `{path}`: `{tenant}` and `{tenant_of[salt]}` share a salt", path=path)
    return tenant_of


def render(status: dict[str, Any]) -> Group:
    """Return the status for a terminal."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for at, column in enumerate(("tenant", "chains", "blocks", "overdue chains", "overdue blocks")):
        table.add_column(column, justify="right" if at else "left")
    for row in status["tenants"]:
        values = list(row.values())
        style = "red" if row["overdue_blocks"] else None
        table.add_row(values[0] or "unattributed", *(f"{value:,}" for value in values[1:]), style=style)
    connection = status["connection"]
    state = "connected" if connection["connected"] else "not connected"
    head = Text(f"{status['engine']} at {status['endpoint']}: observed, not enforced", style="bold")
    counts = (
        f"{state}; {status['batches']:,} batches, {status['missed_batches']:,} missed, "
        f"{connection['disconnects']:,} disconnects, {status['restarts']:,} restarts, "
        f"{status['malformed'] + status['unknown']:,} unreadable"
    )
    lines: list[RenderableType] = [head, Text(counts), table]
    if status["unused_residencies"]:
        lines.append(Text(f"{status['unused_residencies']:,} chains: no use seen within their idle time", style="dim"))
    if status["unsure"]:
        lines.append(Text(f"counts are unsure: {status['unsure']}", style="yellow"))
    if status["recording"] is False:
        lines.append(Text("the ledger cannot record", style="red"))
    return Group(*lines)


def _table(name: str) -> DecisionTable:
    if name in library.names():
        return compile_policy(library.load(name), revision=1)
    try:
        text = Path(name).read_bytes()
    except OSError as error:
        known = ", ".join(library.names())
        reason = error.strerror or error
        raise ConfigError(f"policy `{name}`: {reason}; the library has {known}", path=name) from None
    return compile_policy(load_policy(text, name=name), revision=1)


@contextmanager
def _stoppable() -> Iterator[Callable[[], int]]:
    """Yield the signal that requested a stop, 0 while none has; a second one acts at once."""
    asked = 0
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, ask) for number in numbers]
    try:
        yield lambda: asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _shown(*, quiet: bool) -> Iterator[Callable[[Callable[[], dict[str, Any]]], None]]:
    """Yield a live view on stderr, at most once a second; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda status: None
        return
    due = 0.0
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def show(status: Callable[[], dict[str, Any]]) -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + 1.0
                live.update(render(status()), refresh=True)

        yield show
