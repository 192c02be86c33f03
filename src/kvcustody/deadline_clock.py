"""The one time by which deadlines are compared: UTC that never steps back, and never far ahead unless somebody says so.

    clock = DeadlineClock(SystemClock(), Path("kvcustody-clock.json"))
    clock.start()                # keep the floor in its file
    clock.utc_us() >= until_us   # once true, true for good

1. Between two looks UTC runs on the boot clock. A wall clock that is behind changes nothing.
2. A wall clock that is ahead is followed, in all of one boot by no more than `jump_us`; after a boot, which no clock of
   this machine bridges, at first by `away_us`. Further ahead the clock is `in_doubt` and goes on by the boot clock,
   until the wall clock is back, somebody confirms it, or a time from elsewhere agrees with it.
3. The floor is durable: a file that the processes of a machine share, each taking over what another accepted. A process
   that is killed, and a machine that then starts again, lose at most `KEEP_SECONDS`; within one boot nothing is lost.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from kvcustody.clock import MICROSECONDS, Clock, SystemClock
from kvcustody.errors import ConfigError
from kvcustody.files import write_file
from kvcustody.logger import get_logger

JUMP_SECONDS = 3_600
AWAY_SECONDS = 30 * 86_400
KEEP_SECONDS = 1.0
_log = get_logger(__name__)


class ClockState(NamedTuple):
    """The time of deadlines and the wall clock, and how far that is ahead of it or behind it."""

    now_us: int
    wall_us: int
    in_doubt: bool
    ahead_us: int
    behind_us: int


@dataclass(frozen=True, slots=True)
class TimeFloor:
    """What is kept: that it was `utc_us` at `boot_us` of a boot, and the UTC up to which a look may take that moment.

    `is_anchored`: the wall clock was accepted in this boot, so its limit is that of steps, not of an absence.
    """

    boot: str
    boot_us: int
    utc_us: int
    limit_us: int
    is_anchored: bool


class DeadlineClock:
    """A `Clock` for everything that has a deadline. Thread-safe."""

    def __init__(
        self,
        wall: Clock,
        path: Path | None = None,
        *,
        jump_seconds: int = JUMP_SECONDS,
        away_seconds: int = AWAY_SECONDS,
    ) -> None:
        """Raises `ConfigError` for a file that cannot be kept or is no floor: a step back would go unseen."""
        self._wall = wall
        self.boot = wall.boot
        self.now_us: Callable[[], int] = wall.now_us  # boot time in microseconds
        self._path = path
        self._jump_us, self._away_us = jump_seconds * MICROSECONDS, away_seconds * MICROSECONDS
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.in_doubt = False
        kept = None
        if path is not None:
            with _locked(path):
                kept = read_floor(path)
        self.offset_us, self._limit_us, self._is_anchored = self._begin(kept)
        self.look()
        self.keep()

    @classmethod
    def of(cls, clock: Clock | None) -> DeadlineClock:
        """The clock itself where it is one, else one over it, or over the system's."""
        return clock if isinstance(clock, DeadlineClock) else cls(clock or SystemClock())

    def utc_us(self) -> int:
        """UTC in microseconds, as deadlines know it: it never decreases."""
        self.look()
        return self.now_us() + self.offset_us

    def look(self) -> None:
        """Take over the wall clock's time as far as the rules let it. Who adds `offset_us` itself looks at times."""
        wall_us = self._wall.utc_us()  # before the boot clock: what comes between makes it look early, never late
        ahead_us = wall_us - self.now_us()
        if ahead_us <= self.offset_us:
            self._set_doubt(False, 0)
        elif ahead_us <= self._limit_us:
            self._accept(ahead_us)
        else:
            self._set_doubt(True, ahead_us - self.offset_us)

    def agree(self, utc_us: int) -> None:
        """Somebody else's time, of now. Where it agrees with a wall clock that is in doubt, that is right after all."""
        if self.in_doubt and abs(self._wall.utc_us() - utc_us) <= self._jump_us:
            _log.warning("the wall clock is confirmed by the control plane")
            self.confirm()

    def confirm(self) -> None:
        """Somebody says that the wall clock is right, however far ahead it is. Whoever calls has it on record first."""
        with self._lock:
            ahead_us = self._wall.utc_us() - self.now_us()
            self.offset_us = max(self.offset_us, ahead_us)
            self._limit_us, self._is_anchored = self.offset_us + self._jump_us, True
        self._set_doubt(False, 0)
        self.keep()

    def state(self) -> ClockState:
        """Where the two clocks stand."""
        self.look()
        now_us, wall_us = self.now_us() + self.offset_us, self._wall.utc_us()
        apart = wall_us - now_us
        return ClockState(now_us, wall_us, self.in_doubt, max(0, apart), max(0, -apart))

    # -- what is kept -------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Make the floor durable, and take over what another process accepted (rule 3)."""
        if self._path is None:
            return
        with _locked(self._path):
            kept = read_floor(self._path)
            with self._lock:
                if kept is not None and kept.boot == self.boot and kept.boot_us <= self.now_us():
                    self.offset_us = max(self.offset_us, kept.utc_us - kept.boot_us)
                    self._limit_us = max(self._limit_us, kept.limit_us - kept.boot_us, self.offset_us)
                boot_us = self.now_us()
                floor = TimeFloor(
                    self.boot,
                    boot_us,
                    boot_us + self.offset_us,
                    boot_us + self._limit_us,
                    self._is_anchored,
                )
            _write(self._path, floor)

    def start(self) -> None:
        """Look and keep from now on, on a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._run, name="kvcustody-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Keep the floor a last time; a second time changes nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._keep_or_say()

    def _run(self) -> None:
        while not self._stop.wait(KEEP_SECONDS):
            self.look()
            self._keep_or_say()

    def _keep_or_say(self) -> None:
        try:
            self.keep()
        except ConfigError as error:
            _log.error("the floor of time is not kept", problem=error.message)

    def _begin(self, kept: TimeFloor | None) -> tuple[int, int, bool]:
        """The offset, its limit, and whether the wall clock was accepted in this boot."""
        boot_us = self.now_us()
        if kept is None:
            offset_us = self._wall.utc_us() - boot_us
            return offset_us, offset_us + self._jump_us, True
        if kept.boot == self.boot and kept.boot_us <= boot_us:
            return kept.utc_us - kept.boot_us, kept.limit_us - kept.boot_us, kept.is_anchored
        offset_us = kept.utc_us - boot_us
        return offset_us, offset_us + self._away_us, False

    def _accept(self, ahead_us: int) -> None:
        with self._lock:
            self.offset_us = max(self.offset_us, ahead_us)
            if not self._is_anchored:
                self._limit_us, self._is_anchored = self.offset_us + self._jump_us, True
        self._set_doubt(False, 0)

    def _set_doubt(self, in_doubt: bool, ahead_us: int) -> None:
        if in_doubt == self.in_doubt:
            return
        self.in_doubt = in_doubt
        if in_doubt:
            _log.error(
                "the wall clock is far ahead of the boot clock: deadlines run on that, and no grant is opened anew, "
                "until the clock is set right or `kvcustody clock confirm` says that it is",
                ahead_seconds=ahead_us // MICROSECONDS,
            )
        else:
            _log.warning("the wall clock is no longer in doubt")


def open_deadline_clock(
    wall: Clock | None, path: Path, stack: ExitStack, *, jump_seconds: int, away_seconds: int
) -> DeadlineClock:
    """The clock of a process, kept until `stack` ends; one that is given open already stays its owner's."""
    if isinstance(wall, DeadlineClock):
        return wall
    clock = DeadlineClock(wall or SystemClock(), path, jump_seconds=jump_seconds, away_seconds=away_seconds)
    clock.start()
    stack.callback(clock.close)
    return clock


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time reads and writes the floor; raises `ConfigError`."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unkept(path, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_floor(path: Path) -> TimeFloor | None:
    """What is kept in a file; None where there is none. Raises `ConfigError` for one that is damaged."""
    try:
        data = json.loads(path.read_bytes())
        floor = TimeFloor(**data)
        numbers = (floor.boot_us, floor.utc_us, floor.limit_us)
        if any(type(number) is not int for number in numbers) or type(floor.boot) is not str:
            raise ValueError("not a floor of time")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unkept(path, error) from None
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(
            f"clock file `{path}` is damaged: put back its last copy, or remove it after checking that this machine's "
            "clock is right",
            path=path,
        ) from None
    return floor


def _write(path: Path, floor: TimeFloor) -> None:
    try:
        write_file(path, json.dumps(asdict(floor)).encode())
    except OSError as error:
        raise _unkept(path, error) from None


def _unkept(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"clock file `{path}` cannot be kept: {error.strerror}", path=path)
