"""The processes of a fleet on this machine, each with its own log; they end in reverse order of their start.

with LocalProcesses(folder) as processes:
    processes.start("router", command)
    processes.wait_for("router", "http://127.0.0.1:30000/health")
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from kvcustody.errors import ConfigError
from kvcustody.files import PRIVATE
from kvcustody.http_exchange import read_bounded

_END_SECONDS = 40.0
_ANSWER_SECONDS, _ANSWER_BYTES_MAX = 5.0, 1 << 20
_SAID_MAX = 400


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE)


class LocalProcesses:
    """The running processes by name. `log_folder` is created when it does not exist."""

    def __init__(self, log_folder: Path) -> None:
        log_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = log_folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> int:
        """Start a process under a name and return its process id. The terminal's signals do not reach it.

        Raises `ConfigError` where the program does not start.
        """
        try:
            with open(self.log(name), "wb", opener=_private) as log:
                process = subprocess.Popen(  # noqa: S603 - programs that this package or its user names
                    [*command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=environment, cwd=folder, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"`{name}` does not start: {command[0]}: {error.strerror}") from None
        self._running[name] = process
        return process.pid

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self._folder / f"{name}.log"

    def check(self) -> None:
        """Raise `ConfigError` with the last output of a process that ended unexpectedly."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise ConfigError(f"`{name}` has ended with {process.returncode}: {self._last_words(name)}")

    def wait_for(
        self,
        name: str,
        url: str,
        *,
        seconds: float = 120.0,
        stop: threading.Event | None = None,
        is_ready: Callable[[httpx.Response], bool] = lambda answer: answer.status_code == 200,
    ) -> None:
        """Wait until `url` gives an answer that `is_ready` accepts.

        Raises `ConfigError` where a process ends or it takes too long, `KeyboardInterrupt` where `stop` is set.
        """
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(httpx.HTTPError), httpx.Client(timeout=_ANSWER_SECONDS) as client:
                asked = client.build_request("GET", url)
                if is_ready(read_bounded(client, asked, deadline_seconds=_ANSWER_SECONDS, bytes_max=_ANSWER_BYTES_MAX)):
                    return
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
            self.check()
            if time.monotonic() > until:
                raise ConfigError(f"`{name}` does not answer at {url} after {seconds:g} s: {self._last_words(name)}")
            time.sleep(0.1)

    def end(self, name: str) -> None:
        """End a process in order; kill it if it does not end in time."""
        process = self._running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End all processes, the last one first; a second call does nothing."""
        for name in reversed([*self._running]):
            self.end(name)

    def _last_words(self, name: str) -> str:
        lines = self.log(name).read_text(errors="replace").splitlines()
        telling = [line for line in lines if "Error" in line or "error" in line][-1:] or lines[-1:]
        return " ".join((telling or ["it said nothing"])[0].split())[-_SAID_MAX:]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ports on which nothing listens now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [int(each.getsockname()[1]) for each in sockets]
