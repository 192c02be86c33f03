"""LMCache's own server on loopback, with an adapter for its second tier, or without."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 64
OURS = {
    "type": "plugin",
    "module_path": "kvcustody.integrations.lmcache.l2_adapter",
    "class_name": "CustodyL2Adapter",
    "adapter_params": {"chunk_tokens": CHUNK_TOKENS},
}

READ_SECONDS = 6
GOVERNED = (
    "--l2-store-policy", "skip_l1", "--l1-read-ttl-seconds", str(READ_SECONDS),
    "--server-module", json.dumps({"module_path": "kvcustody.integrations.lmcache.server_module"}),
)  # fmt: skip


class LMCacheServer:
    """A process; `kill` or `close` it."""

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        adapter: dict[str, Any] | None = OURS,
        *more: str,
        port: int = 0,
        program: tuple[str, ...] = ("lmcache", "server"),
    ) -> None:
        """`port`: where an earlier one was; `program`: what takes the arguments of `lmcache server`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.http = port or free_port(), free_port()
        command = [
            str(Path(sys.executable).parent / program[0]), *program[1:],
            "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(self.http), "--l1-size-gb", "0.25",
            "--eviction-policy", "LRU", "--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "engine_driven",
        ]  # fmt: skip
        if adapter is OURS and not more:
            more = GOVERNED
        if adapter is not None:
            command += ["--l2-adapter", json.dumps(adapter)]
        command += more
        quiet = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_DISABLE_BANNER": "1"}
        self.log = folder / f"server-{self.port}.log"
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONHASHSEED": "0", **quiet, **environment},
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )
        self.pid = self._process.pid
        self._wait()

    def _wait(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
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
        """What the server says of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def connector(self) -> dict[str, Any]:
        """Its entry among vLLM's connectors."""
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
        """With no warning."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """As an operator would."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def free_port() -> int:
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
