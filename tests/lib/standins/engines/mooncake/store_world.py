"""A Mooncake master and clients of it, each a process, over TCP on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import mooncake

_CLIENT = """
import json, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
made = store.setup(local_hostname="127.0.0.1", metadata_server="P2PHANDSHAKE", global_segment_size=int(sys.argv[3]),
    local_buffer_size=16 << 20, protocol="tcp", rdma_devices="", master_server_addr=sys.argv[1], tenant_id=sys.argv[2])
print(json.dumps(["", made]), flush=True)
for line in sys.stdin:
    name, *arguments = json.loads(line)
    if name == "put":
        arguments[1] = arguments[1].encode()
    found = getattr(store, name)(*arguments)
    print(json.dumps(["", found.decode() if isinstance(found, bytes) else found]), flush=True)
import os
os._exit(0)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Master:
    """A master process. tenants: those with a quota, which turns tenancy on; None: it is off."""

    def __init__(self, folder: Path, tenants: list[str] | None, *, lease_ms: int = 200) -> None:
        port, metrics, events = free_port(), free_port(), free_port()
        self.address, self.events = f"127.0.0.1:{port}", f"tcp://127.0.0.1:{events}"
        self.http = f"http://127.0.0.1:{metrics}"
        command = [
            str(Path(mooncake.__file__).parent / "mooncake_master"),
            *(
                "--rpc_address=127.0.0.1",
                f"--rpc_port={port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
            ),
            *(
                f"--default_kv_lease_ttl={lease_ms}",
                "--enable_metric_reporting=false",
                "--enable_kv_events=true",
            ),
            *(f"--kv_events_bind_endpoint={self.events}", "--kv_events_backend_id=pool-0"),
        ]
        if tenants is not None:
            quotas = folder / "quotas.yaml"
            rows = "".join(f"  - name: {name}\n    quota: 100MB\n" for name in tenants)
            quotas.write_text(f"version: 1\ntenants:\n{rows}")
            command += ["--enable_multi_tenants=true", "--tenant_quota_connector_type=file"]
            command.append(f"--tenant_quota_connector_uri={quotas}")
        self._log = (folder / "master.log").open("w")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        until = time.monotonic() + 30
        while not self._answers(port):
            assert self._process.poll() is None and time.monotonic() < until, (folder / "master.log").read_text()
            time.sleep(0.05)

    @staticmethod
    def _answers(port: int) -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


class Client:
    """One tenant's client, which gives so much memory: `store("put", "key", "value")` calls its method of that name."""

    def __init__(self, master: Master, tenant: str, *, memory_bytes: int = 32 << 20) -> None:
        command = [sys.executable, "-c", _CLIENT, master.address, tenant, str(memory_bytes)]
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        self._process = subprocess.Popen(command, text=True, env={**os.environ, "GLOG_minloglevel": "2"}, **pipes)
        self.setup = self._answer()

    def __call__(self, *call: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('["'):
                return json.loads(line)[1]
        raise AssertionError(f"the client ended: {self._process.wait(20)}")

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(20)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
