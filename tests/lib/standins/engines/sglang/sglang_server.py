"""SGLang's HTTP server over the tiny model on a loopback port, governed or plain, and a client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from standins.engines.sglang.sglang_engine import CPU_SETTINGS, OPTIONS
from standins.engines.vllm.deployment import Deployment
from standins.engines.vllm.http_server import MODEL

START_SECONDS = 180
_FLAGS = ("disable_cuda_graph", "disable_overlap_schedule", "skip_server_warmup")


class SglangServer:
    """One server with its scheduler and detokenizer, in a process group of its own. What they print goes to `log`."""

    def __init__(self, model: Path, folder: Path, *, deployment: Deployment | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enable-cache-report"]
        command += ["--served-model-name", MODEL]
        for name, value in OPTIONS.items():
            flag = "--" + name.replace("_", "-")
            command += [flag] if name in _FLAGS else [flag, str(value)]
        settings = {**os.environ, **CPU_SETTINGS}
        if deployment is not None:
            command += ["--radix-cache-backend", "kvcustody"]
            settings |= deployment.environment()
        self.log = folder / f"server-{self.port}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if self.client.get("/health").status_code in (200, 401, 503):
                    return
            except httpx.TransportError:
                time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"the server did not start: {self.log.read_text()[-3000:]}")

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """One request."""
        return self.client.post(
            path, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )

    def stop(self) -> None:
        """SIGTERM, as a supervisor does; the rest of its group goes with it."""
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
