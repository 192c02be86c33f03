"""LMCache's own server on loopback, started as an operator does, on the kit's clock where a case sets one.

    server = LMCacheServer(folder, settings, OURS, *GOVERNED, chunk_tokens=64)
    server.connector()                               # its entry among vLLM's connectors
    server.close()

`python -m kvcustody.testkit.lmcache.server CLOCK …` is `python -m kvcustody.integrations.lmcache.server …`, but
kvcustody's time in it is what the file CLOCK says (`ToldClock`): LMCache's own timers run by the machine's clock.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from kvcustody.clock import Clock, SystemClock
from kvcustody.files import write_file

_START_SECONDS, _END_SECONDS = 300.0, 20.0  # its imports take a minute and more on a busy machine
_TIMES = struct.Struct("<qq")
READ_SECONDS = 6
GOVERNED = (
    "--l2-store-policy", "skip_l1", "--l1-read-ttl-seconds", str(READ_SECONDS),
    "--server-module", json.dumps({"module_path": "kvcustody.integrations.lmcache.server_module"}),
)  # fmt: skip


def our_adapter(chunk_tokens: int) -> dict[str, Any]:
    """Return our second tier's entry for `--l2-adapter`."""
    return {
        "type": "plugin",
        "module_path": "kvcustody.integrations.lmcache.l2_adapter",
        "class_name": "CustodyL2Adapter",
        "adapter_params": {"chunk_tokens": chunk_tokens},
    }


class LMCacheServer:
    """The server's process; `kill` or `close` it."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        adapter: Mapping[str, Any] | None,
        *more: str,
        chunk_tokens: int,
        port: int = 0,
        program: tuple[str, ...] = ("lmcache", "server"),
    ) -> None:
        """Start the server. `port`: an earlier server's; `program`: a program that takes the arguments of `lmcache
        server`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.http = port or _free_port(), _free_port()
        self.http_key = secrets.token_hex(16)  # asked for by LMCache 0.5.7 and later
        command = [
            str(Path(sys.executable).parent / program[0]), *program[1:],
            "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(self.http), "--l1-size-gb", "0.25",
            "--eviction-policy", "LRU", "--chunk-size", str(chunk_tokens), "--supported-transfer-mode", "engine_driven",
        ]  # fmt: skip
        if adapter is not None:
            command += ["--l2-adapter", json.dumps(adapter)]
        command += more
        key = {"LMCACHE_HTTP_API_KEY": self.http_key}
        quiet = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1"}
        self.log = folder / f"server-{self.port}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - of this environment
                command,
                env={**os.environ, "PYTHONHASHSEED": "0", **key, **quiet, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.pid
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise AssertionError(f"the server ended: {self.log.read_text()[-3000:]}")
            try:
                with socket.create_connection(("127.0.0.1", self.http), timeout=1):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"the server does not answer: {self.log.read_text()[-3000:]}")

    def status(self) -> dict[str, Any]:
        """Return the server's own status."""
        connection = HTTPConnection("127.0.0.1", self.http, timeout=10)
        with closing(connection):
            connection.request("GET", "/status", headers={"Authorization": f"Bearer {self.http_key}"})
            found: dict[str, Any] = json.load(connection.getresponse())
        return found

    def connector(self) -> dict[str, Any]:
        """Return its entry among vLLM's connectors."""
        where = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self.port,
            "lmcache.mp.mq_timeout": 5.0,
        }
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": where,
        }

    def kill(self) -> None:
        """Kill the server without warning."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Stop the server as an operator does."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class ToldClock:
    """A clock that one process sets for another, in a file that both map."""

    def __init__(self, path: Path, *, writes: bool = False) -> None:
        if writes:
            write_file(path, bytes(_TIMES.size))
        with path.open("r+b") as file:
            self._times = mmap.mmap(file.fileno(), _TIMES.size)

    def tell(self, clock: Clock) -> None:
        """Set the clock to `clock`."""
        self._times[:] = _TIMES.pack(clock.now_us(), clock.utc_us())

    def now_us(self) -> int:
        """Return the boot time set last."""
        return int(_TIMES.unpack(self._times[:])[0])

    def utc_us(self) -> int:
        """Return the UTC set last."""
        return int(_TIMES.unpack(self._times[:])[1])


def _free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _serve_by(path: Path, arguments: list[str]) -> None:
    """Run LMCache's command with our serde, with every clock of ours set by the file."""
    from lmcache.cli.main import main

    from kvcustody.integrations.lmcache.sealed_serde import register

    register()
    told = ToldClock(path)
    SystemClock.now_us = lambda _: told.now_us()  # type: ignore[assignment, method-assign]
    SystemClock.utc_us = lambda _: told.utc_us()  # type: ignore[assignment, method-assign]
    sys.argv = ["lmcache", "server", *arguments]
    sys.exit(main())


if __name__ == "__main__":
    _serve_by(Path(sys.argv[1]), sys.argv[2:])
