"""`vllm serve` over the tiny model on a loopback port, governed or plain, and a client that keeps what it got."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from standins.engines.vllm.deployment import CONNECTOR, MIDDLEWARE, Deployment
from standins.engines.vllm.engine_site import PROBE
from standins.engines.vllm.local_engine import BLOCK, BLOCKS

START_SECONDS = 240
MODEL = "tiny"


class Reply(NamedTuple):
    """One HTTP answer. `text` is what the client read, byte for byte, of one response or of a whole stream."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        """The answer's document."""
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The documents of a stream, with its end marker."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def cached_tokens(self) -> int:
        """What the server says was found."""
        usage = self.events[-2]["usage"] if self.text.startswith("data: ") else self.json["usage"]
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class HttpServer:
    """One server process with its EngineCore and worker. Everything that they print goes to `log`."""

    def __init__(
        self,
        model: Path,
        site: Sequence[str],
        folder: Path,
        *,
        deployment: Deployment | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.deployment = deployment
        self.log = folder / f"server-{time.monotonic_ns()}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL]
        command += ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "512", "--seed", "0"]
        command += [
            "--block-size",
            str(BLOCK),
            "--num-gpu-blocks-override",
            str(BLOCKS),
            "--max-num-seqs",
            "8",
        ]
        command += [
            "--enable-prompt-tokens-details",
            "--worker-extension-cls",
            f"{PROBE}.WorkerProbe",
            *flags,
        ]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "probe",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([*site, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        if deployment is not None:
            command += ["--kv-transfer-config", json.dumps(CONNECTOR), "--middleware", MIDDLEWARE]
            command += ["--shutdown-timeout", "20"]  # vLLM's default kills the engine at once
            settings |= {**deployment.environment(), "VLLM_PLUGINS": "probe,kvcustody"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | settings,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=180)

    def wait(self) -> HttpServer:
        """Until it serves; raises with the end of its log if it does not."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if self._client.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.3)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def post(self, path: str, body: dict[str, Any], *, tenant: str | None = None, **headers: str) -> Reply:
        """A request of a tenant, or of nobody; a stream is read to its end."""
        with self._client.stream(
            "POST", path, json={"model": MODEL, **body}, headers=self._headers(tenant, headers)
        ) as got:
            return Reply(got.status_code, "".join(got.iter_text()))

    def begin(self, path: str, body: dict[str, Any], *, tenant: str | None = None) -> Iterator[str]:
        """A stream that the caller may leave; closing the iterator closes the connection."""
        named = self._headers(tenant, {})
        with self._client.stream("POST", path, json={"model": MODEL, "stream": True, **body}, headers=named) as got:
            yield from got.iter_text()

    def get(self, path: str, *, operator: bool = False) -> Reply:
        """A plain GET, of nobody or with an operator's key."""
        headers = {}
        if operator and self.deployment is not None:
            headers["Authorization"] = f"Bearer {self.deployment.operator_key()}"
        got = self._client.get(path, headers=headers)
        return Reply(got.status_code, got.text)

    def _headers(self, tenant: str | None, headers: dict[str, str]) -> dict[str, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if tenant is None or self.deployment is None:
            return named
        key = {"authorization": f"Bearer {self.deployment.api_key(tenant)}"}
        return {"x-kvcustody-subject": "s", **key, **named}

    def close(self) -> str:
        """Stop it, and return everything that it printed."""
        self._client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)
        return self.log.read_text(errors="replace")
