"""The commands of `kvcustody clock`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcustody.audit.kinds import ClockConfirmed
from kvcustody.audit.write.record_operator_act import record_operator_act
from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.console.command import Json, print_json, say
from kvcustody.console.opening import writing
from kvcustody.console.options import DEFAULT, Ledger
from kvcustody.deadline_clock import ClockState, DeadlineClock
from kvcustody.errors import ConfigError
from kvcustody.governance.observability.logs import configure
from kvcustody.governance.service.access.local_administration import local_name
from kvcustody.governance.service.settings import load_service_settings
from kvcustody.governance.settings import load_settings
from kvcustody.times import readable

_DAY_SECONDS = 86_400
app = typer.Typer(
    no_args_is_help=True,
    help="The clock for deadlines: show it, and confirm this machine's clock.",
    epilog="A clock step never revives data that has ended (docs/how-to/operate/handle-an-incident.md).",
)
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="The clock file; default: the setting `clock_path`.",
        metavar="FILE",
    ),
]


@app.command(name="show", epilog="Example: `kvcustody clock show --json`")
def show(*, file: File = None, as_json: Json = False) -> None:
    """Where time is, and how far this machine's clock is ahead of it or behind it."""
    _print(_open(file).state(), as_json)


@app.command(name="confirm", epilog="Example: `kvcustody clock confirm --reason 'the RTC battery was replaced'`")
def confirm(
    *,
    reason: Annotated[str, typer.Option(help="Why the clock is right; it is recorded.")],
    file: File = None,
    ledger: Ledger = DEFAULT,
    as_json: Json = False,
) -> None:
    """Believe this machine's clock, which is further ahead than a clock steps by itself.

    On record first. Every deadline before its time is over from then on, for good; processes of this machine that keep
    time in the same file follow within seconds. Where a control plane keeps the ledger, an operator confirms it there
    (`kvcustody service confirm-clock`), and workers follow.
    """
    clock = _open(file)
    now = clock.state()
    if not now.in_doubt:
        raise ConfigError("this machine's clock is not in doubt, so there is nothing to confirm")
    with writing(ledger) as engine:
        record_operator_act(
            engine,
            lambda at_us: ClockConfirmed(at_us, now.ahead_us // MICROSECONDS, local_name(), reason),
            clock=clock,
        )
    clock.confirm()
    _print(clock.state(), as_json)


def deadline_us() -> int:
    """Return the time of deadlines on this machine in UTC µs, from what a worker and a service keep as the settings
    say.

    By the wall clock where nobody keeps time here.
    """
    both = (load_settings(), load_service_settings())
    deadlines = [
        DeadlineClock(
            SystemClock(),
            each.clock_file,
            jump_seconds=each.clock_jump_seconds_max,
            away_seconds=each.clock_away_days_max * _DAY_SECONDS,
        ).utc_us()
        for each in both
        if each.clock_file.exists()
    ]
    return max(deadlines, default=SystemClock().utc_us())


def _open(file: Path | None) -> DeadlineClock:
    configure("error", "console")
    settings = load_settings()
    path = settings.clock_file if file is None else file
    if not path.exists():
        raise ConfigError(f"clock file `{path}` does not exist: no process has stored a time there", path=path)
    jump, away = settings.clock_jump_seconds_max, settings.clock_away_days_max * _DAY_SECONDS
    return DeadlineClock(SystemClock(), path, jump_seconds=jump, away_seconds=away)


def _print(state: ClockState, as_json: bool) -> None:
    if as_json:
        print_json(state._asdict())
        return
    say(f"deadlines   {readable(state.now_us)} UTC")
    apart = state.ahead_us or -state.behind_us
    say(f"this clock  {readable(state.wall_us)} UTC ({apart / MICROSECONDS:+.3f} s)")
    if state.in_doubt:
        say("in doubt: no new grant takes effect; correct the clock, or run `kvcustody clock confirm`")
