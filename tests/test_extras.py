"""Each extra in an empty environment, from the wheel: its first job is done (`make soak`; it installs torch twice)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from standins.packaged import ROOT, run, wheels  # noqa: F401 - a fixture

pytestmark = pytest.mark.soak
IDENTITY = "schema: kvcustody/identity@1\napi_keys: {path: keys.yaml}\n"


class Place:
    """An environment of its own, with the wheel and one extra."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder, self.bin = folder, folder / "venv" / "bin"
        venv.create(folder / "venv")
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "KVCUSTODY_"))}
        what = f"{wheel}[{extra}]" if extra else str(wheel)
        pip = (
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--python",
            str(self.bin / "python"),
        )
        run(
            *pip,
            "install",
            "--quiet",
            "--no-compile",
            "-c",
            str(ROOT / "constraints.txt"),
            what,
            env=self.env,
        )

    def do(self, *command: str) -> str:
        """A command of the program there; it ends with 0."""
        return run(str(self.bin / "kvcustody"), *command, cwd=self.folder, env=self.env)

    def python(self, program: str) -> str:
        """A program there."""
        return run(str(self.bin / "python"), "-c", program, cwd=self.folder, env=self.env)

    @contextmanager
    def running(self, *command: str, ends: int = 0) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on until it is asked to end, and then ends with `ends`."""
        process = subprocess.Popen(
            [str(self.bin / "kvcustody"), *command],
            cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        yield process
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
        assert process.returncode == ends, said

    def ledger(self) -> str:
        """A ledger with evidence in it, which the environment of the tests has made."""
        program = str(Path(sys.executable).with_name("kvcustody"))
        run(program, "replay", "--limit", "40", "--pool-blocks", "512", cwd=self.folder, env=self.env)
        return "kvcustody.db"


def base(place: Place) -> None:
    place.do("policy", "init", "--from", "regulated-saas", "policy.yaml")
    assert "policy.yaml" in place.do("policy", "validate", "policy.yaml")
    ledger = place.ledger()
    assert "sound" in place.do("audit", "fsck", "--ledger", ledger)
    place.do("report", "make", "--framework", "soc2", "--ledger", ledger, "--format", "html,json", "--out", "r")
    assert (place.folder / "r" / "report.html").stat().st_size > 10_000


def engine(place: Place) -> None:
    assert "broken invariants" in place.do("replay", "--limit", "40", "--pool-blocks", "512")


def service(place: Place) -> None:
    place.do("init", "--ledger", "sqlite:///plane.db")
    (place.folder / "service.toml").write_text(
        f'database_url = "sqlite:///{place.folder}/plane.db"\nstate_path = "state"\nlisten = "127.0.0.1:0"\n'
        f'signing_key_path = "{place.folder}/signing.key"\n'
    )
    with place.running("serve", "--config", "service.toml") as process:
        time.sleep(8)
        assert process.poll() is None, process.stdout.read() if process.stdout else ""


def reports(place: Place) -> None:
    ledger = place.ledger()
    place.do("report", "make", "--framework", "gdpr", "--ledger", ledger, "--format", "pdf", "--out", "r")
    assert (place.folder / "r" / "report.pdf").read_bytes().startswith(b"%PDF")


def parquet(place: Place) -> None:
    place.do("audit", "export", "--ledger", place.ledger(), "--format", "parquet", "there")
    assert list((place.folder / "there").rglob("*.parquet"))


def events(place: Place) -> None:
    with place.running("observe", "--policy", "regulated-saas", "--endpoint", "tcp://127.0.0.1:9", ends=130) as process:
        time.sleep(6)
        assert process.poll() is None, process.stdout.read() if process.stdout else ""


def vllm(place: Place) -> None:
    (place.folder / "identity.yaml").write_text(IDENTITY)
    place.do("apikey", "engine", "issue", "acme-ci", "--tenant", "acme", "--file", "keys.yaml")
    assert place.do("identity", "check", "identity.yaml")
    place.python("import jwt, zmq, kvcustody.integrations.identity.from_settings")


def postgres(place: Place) -> None:
    asked = [
        str(place.bin / "kvcustody"),
        "audit",
        "fsck",
        "--ledger",
        "postgresql+psycopg://u@127.0.0.1:9/x",
    ]
    done = subprocess.run(asked, cwd=place.folder, env=place.env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "install" not in done.stderr, done.stderr


def everything(place: Place) -> None:
    process = subprocess.run(
        [str(place.bin / "kvcustody"), "up", "--json", "--seconds", "8"],
        cwd=place.folder, env=place.env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["url"].startswith("http://127.0.0.1:")


JOBS = {
    "": base,
    "engine": engine,
    "service": service,
    "reports": reports,
    "parquet": parquet,
    "events": events,
    "vllm": vllm,
    "postgres": postgres,
    "timestamp": lambda place: place.python("import rfc3161_client, kvcustody.audit.tlog"),
    "otel": lambda place: place.python("import opentelemetry.sdk, kvcustody.governance"),
    "all": everything,
}


@pytest.mark.parametrize("extra", JOBS, ids=lambda extra: extra or "base")
def test_the_first_job_of_an_extra_is_done_in_an_empty_environment(
    wheels: tuple[Path, Path],  # noqa: F811
    tmp_path: Path,
    extra: str,
) -> None:
    JOBS[extra](Place(tmp_path, wheels[0], extra))
