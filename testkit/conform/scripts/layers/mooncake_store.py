"""When one tenant removes everything, do another's objects stay in Mooncake's store, and are keys separate per tenant?

    python mooncake_store.py tenant-wipe        # needs: mooncake-transfer-engine (or its build without CUDA)

A master and two tenants' clients, each a process, over TCP on loopback; objects go to files as well where those are
asked for. Tenancy is on.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OBJECTS, BYTES = 8, 1 << 20
FILES = {
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_FSDIR": "objects",
}
CLIENT = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
store.setup(local_hostname="127.0.0.1", metadata_server="P2PHANDSHAKE", global_segment_size=64 << 20,
    local_buffer_size=32 << 20, protocol="tcp", rdma_devices="", master_server_addr=sys.argv[1], tenant_id=sys.argv[2],
    enable_ssd_offload=True, ssd_offload_path=sys.argv[3])
print(json.dumps(["", 0]), flush=True)
for line in sys.stdin:
    name, *given = json.loads(line)
    if name == "put":
        given[1] = given[1].encode() * (1 << 20)
    found = getattr(store, name)(*given)
    found = len(found) if isinstance(found, bytes) else found
    print(json.dumps(["", found]), flush=True)
os._exit(0)
"""


class Tenant:
    """A tenant's client: `tenant("get", key)` calls the client's method of that name."""

    def __init__(self, master: str, name: str, folder: Path, place: str = "") -> None:
        files = folder / (place or name)
        files.mkdir()
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-c", CLIENT, master, name, str(files)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "GLOG_minloglevel": "2",
                "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(files),
                **FILES,
            },
        )
        self._answer()

    def __call__(self, *call: Any) -> Any:
        """Return the method's result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('["'):
                return json.loads(line)[1]
        raise RuntimeError("a client ended")

    def close(self) -> None:
        """End the client."""
        self._process.kill()
        self._process.wait(20)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _master(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    import mooncake

    port = _free_port()
    quotas = folder / "quotas.yaml"
    quotas.write_text(
        "version: 1\ntenants:\n" + "".join(f"  - name: {name}\n    quota: 64MB\n" for name in ("acme", "beta"))
    )
    process = subprocess.Popen(  # noqa: S603 - the product's own
        [
            str(Path(str(mooncake.__file__)).parent / "mooncake_master"),
            *("--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"),
            *(f"--metrics_port={_free_port()}", "--default_kv_lease_ttl=200", "--enable_offload=true"),
            *("--enable_multi_tenants=true", "--tenant_quota_connector_type=file"),
            f"--tenant_quota_connector_uri={quotas}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return process, f"127.0.0.1:{port}"
        except OSError:
            time.sleep(0.05)
    process.kill()
    raise RuntimeError("the master did not start")


def _sizes(tenant: Tenant) -> list[int]:
    return [int(tenant("get", f"key-{number}") or 0) for number in range(OBJECTS)]


def _files(folder: Path, name: str) -> int:
    return sum(path.stat().st_size for path in (folder / name).rglob("*") if path.is_file())


def main(case: str) -> dict[str, Any]:
    """Return what was seen."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        master, address = _master(folder)
        tenants: list[Tenant] = []
        try:
            tenants.extend(Tenant(address, name, folder) for name in ("acme", "beta"))
            acme, beta = tenants
            for number in range(OBJECTS):
                acme("put", f"key-{number}", "a")
            assert sum(size > 0 for size in _sizes(acme)) == OBJECTS, "own objects come back"
            if case == "salt-dropped":
                foreign = sum(size > 0 for size in _sizes(beta))
                return {
                    "found": foreign > 0,
                    "evidence": f"{foreign} of {OBJECTS} of another tenant's keys were found",
                }
            if case == "tenant-by-own-word":
                tenants.append(stranger := Tenant(address, "acme", folder, "a process of its own"))
                read = sum(size > 0 for size in _sizes(stranger))
                return {
                    "found": read > 0,
                    "evidence": f"{read} of {OBJECTS} objects came to a client that named itself `acme`",
                }
            assert case == "tenant-wipe"
            for number in range(OBJECTS):
                beta("put", f"key-{number}", "b")
            time.sleep(12)  # objects go to files behind
            before = _files(folder, "acme")
            time.sleep(2)
            assert before and _files(folder, "acme") == before, "own files stay where nobody removes anything"
            beta("remove_all", True)
            time.sleep(2)
            left, after = sum(size > 0 for size in _sizes(acme)), _files(folder, "acme")
            return {
                "found": left < OBJECTS or after < before,
                "evidence": f"{left} of {OBJECTS} objects of the other tenant are left, and {after:,} of {before:,} "
                "bytes in its files",
            }
        finally:
            for tenant in tenants:
                tenant.close()
            master.kill()
            master.wait(20)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
