"""A vLLM engine in its own processes, plain or governed, with the demonstration's other configuration.

1. Plain and governed engines differ by their connector and its settings, and by the writer of the salt. A governed
   engine has its API server's door in front of it, and every request passes the door with its tenant's API key.
2. What was started is ended: the processes form a group, which is killed if it does not end by itself.
3. Everything is local: no network but loopback, no download.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcustody.errors import ConfigError
from kvcustody.testkit.demo.deployment import Deployment, FrontDoor
from kvcustody.testkit.demo.engine import Served, Values

MODULE = "kvcustody.testkit.demo.vllm_process"
GOVERNED = {"kv_connector": "KVCustody", "kv_role": "kv_both"}
START_SECONDS = 600.0
ANSWER_SECONDS = 120.0
STOP_SECONDS = 60.0
_REFUSAL = re.compile(r"KVC\d+: (connector .+)")
_LOCAL = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


class EngineRefusedError(Exception):
    """Governance refused the engine's start; the message says why."""


class VllmDemoEngine:
    """One engine: `launch` starts it and `ready` waits for it, so that several can start together."""

    block_tokens: int

    def __init__(
        self, folder: Path, deployment: Deployment | None = None, transfer: dict[str, Any] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        self._is_ready = False
        self._gate = FrontDoor(deployment) if deployment is not None else None
        self._log = folder / "engine.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVCUSTODY_")}
        environment |= _LOCAL | {"VLLM_PLUGINS": "" if deployment is None else "kvcustody"}
        if deployment is not None:
            environment |= deployment.environment()
            transfer = transfer or GOVERNED
        self._environment = environment
        self._arguments = [str(folder), json.dumps(transfer)]
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def launch(self) -> None:
        """Start the engine's processes. Ensure first that `close` will be called (rule 2)."""
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "rb", buffering=0)
        with _undisturbed(), self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and a module of ours
                [sys.executable, "-m", MODULE, str(writing), *self._arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                pass_fds=(writing,),
                start_new_session=True,
            )
            os.close(writing)

    def ready(self) -> VllmDemoEngine:
        """Wait until the engine serves.

        Raises:
            EngineRefusedError: governance refused it.
            ConfigError: it ended; the message has the end of its log.
        """
        self.block_tokens = int(self._answer(START_SECONDS)["block_tokens"])
        self._is_ready = True
        return self

    def serve(self, tenant: str, prompts: Sequence[Sequence[int]], salt: str | None = None) -> list[Served]:
        """Serve as `Engine` says."""
        bodies: list[dict[str, object]] = []
        for prompt in prompts:
            body: dict[str, object] = {"model": "demo", "prompt": list(prompt), "max_tokens": 1}
            if salt is not None:
                body["cache_salt"] = salt
            bodies.append(body if self._gate is None else self._gate.pass_on(tenant, body))
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(bodies).encode() + b"\n")
        self._process.stdin.flush()
        return [_served(row) for row in self._answer(ANSWER_SECONDS)]

    def stop(self) -> None:
        """Ask the engine to end, without waiting for it."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if not self._is_ready:  # it does not listen yet
            self._signal(signal.SIGTERM)

    def close(self) -> None:
        """End all the engine's processes (rule 2)."""
        self.stop()
        if self._process is None:
            return
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._answers.close()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, seconds: float) -> Any:
        """Return the next line from the process."""
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise ConfigError(f"vllm has not answered within {seconds:.0f} s: {self._end_of_log()}")
                read = self._answers.read(1 << 20)
                if not read:
                    self._explain_end()
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _explain_end(self) -> None:
        refusal = _REFUSAL.search(self._log.read_text(errors="replace"))
        if refusal is not None:
            raise EngineRefusedError(refusal[1])
        raise ConfigError(f"vllm has ended: {self._end_of_log()}")

    def _end_of_log(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        ours = [line for line in lines if re.search(r"KVC\d+: ", line)]  # the root cause, where governance names it
        errors = ours[:1] or [line for line in lines if re.search(r"\w+(Error|Exception)\b", line)] or lines
        return " ".join((errors or ["it wrote nothing"])[-1].split())[-300:]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay signals that would end this process until the block ends, so that no started process is forgotten."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: asked.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        if asked:
            signal.raise_signal(asked[0])


def _served(row: dict[str, Any]) -> Served:
    found, left = _values(row["found"]), _values(row["left"])
    return Served(row["cached"], row["computed"], row["block"], row["nonzero"], found, left)


def _values(text: str) -> Values:
    return np.frombuffer(base64.b64decode(text), np.float32)
