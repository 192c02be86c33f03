"""`kvcustody erasure` and `kvcustody scan` against a worker that serves: request, status, certificate, verify."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvcustody.allocator.pool.tensor_memory import TensorMemory, TensorSpec
from kvcustody.audit.tlog.signing_key import read_signing_key
from kvcustody.clock import SystemClock
from kvcustody.console import clock as command_clock
from kvcustody.console.main import app
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.identity.principal import identify
from kvcustody.governance.settings import load_settings
from kvcustody.governance.worker.worker import MemoryPlan, Worker, open_worker
from kvcustody.testkit.tiny_model import tiny_model
from kvcustody.times import moment_us
from standins import builders

MODEL = tiny_model(weights_digest="sha256:w", tokenizer_digest="sha256:t", chat_template="template-1", kv_layout="nhd")
SPEC = TensorSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype=torch.float16)
POLICY = Path(__file__).parents[2] / "policies" / "library" / "single-org.yaml"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An act on a ledger keeps its state where it is run."""
    monkeypatch.chdir(tmp_path)


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def worker(tmp_path: Path):  # type: ignore[no-untyped-def]
    settings = load_settings(
        **builders.worker_files(tmp_path, POLICY),
        scope_token_key_path=tmp_path / "scope.key",
        signing_key_path=tmp_path / "signing.key",
        erasure_poll_ms=20,
        checkpoint_seconds=0.1,
    )
    memory = MemoryPlan(lambda blocks: TensorMemory.allocate(blocks, SPEC), 64, 1, SPEC.bytes_per_block)
    with open_worker(settings, memory) as opened:
        yield opened


def serve(worker: Worker, subject: str) -> int:
    who = identify(issuer="idp", tenant="org", verified={"subject": subject})
    got = worker.governor.admit(who, MODEL, [len(subject) * 1000 + at for at in range(90)])
    assert isinstance(got, Admission), got
    worker.governor.commit([got.request_id], [90])
    worker.governor.release(got.request_id)
    worker.governor.step()
    return got.hit_tokens


def test_from_a_request_to_a_certificate_that_anybody_can_check(worker: Worker, tmp_path: Path) -> None:
    ledger = ("--ledger", f"sqlite:///{tmp_path}/ledger.db")
    assert [serve(worker, who) for who in ("ada-l", "ada-l", "robert")] == [0, 80, 0]
    words = ("erasure", "request", "--tenant", "org", "--subject", "ada-l", "--json")
    erasure = json.loads(run(*words, *ledger))["erasure"]
    assert json.loads(run("erasure", "status", erasure, "--json", *ledger))["waiting"] == ["worker-0"]
    until = time.monotonic() + 20
    while time.monotonic() < until:
        worker.governor.step()
        worker.writer.flush()
        if json.loads(run("erasure", "status", erasure, "--json", *ledger))["outcome"] == "complete":
            break
        time.sleep(0.05)
    assert "complete" in run("erasure", "status", erasure, *ledger)
    assert serve(worker, "ada-l") == 0 and serve(worker, "robert") == 80
    time.sleep(0.5)  # a checkpoint is signed
    certificate, page, opening = (tmp_path / name for name in ("c.json", "c.html", "o.json"))
    places = ("--out", str(certificate), "--html", str(page), "--opening", str(opening))
    key = ("--signing-key", str(tmp_path / "signing.key"))
    assert "complete" in run("erasure", "certificate", erasure, *key, *places, *ledger)
    vkey = tmp_path / "ledger.vkey"
    vkey.write_text(str(read_signing_key(tmp_path / "signing.key").verifier) + "\n")
    check = ("erasure", "verify", str(certificate), "--key", str(vkey))
    assert run(*check).startswith(f"ok: erasure {erasure} is complete")
    shown = json.loads(run(*check, "--opening", str(opening), "--json"))
    assert shown["ok"] and shown["opened"] and shown["figures"]["destroyed"] >= 5
    text = page.read_text()
    assert erasure in text and "ada-l" not in text and "Complete" in text and "http" not in text
    assert json.loads(opening.read_text())["selector"] == '{"subject":"ada-l","tenant":"org"}'
    certificate.write_bytes(certificate.read_bytes().replace(b'"complete"', b'"partial"', 1))
    assert "problem" in run(*check, code=2)
    assert erasure in run("erasure", "list", *ledger)
    (listed,) = json.loads(run("erasure", "list", "--json", *ledger))["items"]
    shown = json.loads(run("erasure", "status", erasure, "--json", *ledger))
    for one in (listed, shown.get("request", shown)):
        assert moment_us(one["deadline"]) == one["deadline_us"], "both forms of each moment"
    assert run("scan", "ledger", *ledger) == "nothing found\n"
    assert json.loads(run("scan", "findings", "--json", *ledger))["items"] == []


def test_a_worker_repairs_its_books_and_says_so(worker: Worker, tmp_path: Path) -> None:
    serve(worker, "ada-l")
    assert worker.recover().findings == ()
    next(iter(worker.governor.managers[0].tree.nodes())).holds += 1
    assert [one.outcome for one in worker.recover().findings] == ["recovered"]
    assert worker.recover().findings == () and worker.governor.check() == []
    worker.writer.flush()
    found = json.loads(run("scan", "findings", "--json", "--ledger", f"sqlite:///{tmp_path}/ledger.db"))
    assert [(one["orphan"], one["outcome"]) for one in found["items"]] == [("hold without residency", "recovered")]


class AnHourBack(SystemClock):
    """A wall clock that was set back after time had come further."""

    def utc_us(self) -> int:
        return super().utc_us() - 3_600_000_000


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "control"])
def test_a_deadline_that_has_passed_stays_passed_when_the_wall_clock_is_set_back(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    ledger = ("--ledger", f"sqlite:///{tmp_path}/ledger.db")
    serve(worker, "ada")
    who = ("--tenant", "org", "--subject", "ada", "--deadline-seconds", "1")
    asked = json.loads(run("erasure", "request", *who, *ledger, "--json"))["erasure"]
    time.sleep(1.2)
    path = tmp_path / "time.json"
    if kept:
        DeadlineClock(SystemClock(), path)
    monkeypatch.setenv("KVCUSTODY_CLOCK_PATH", str(path))
    (tmp_path / "apart").mkdir()
    monkeypatch.chdir(tmp_path / "apart")  # whoever asked for it kept the time in the working directory
    monkeypatch.setattr(command_clock, "SystemClock", AnHourBack)
    found = json.loads(run("erasure", "status", asked, *ledger, "--json"))
    assert bool(found["unreachable"]) is kept, found


def test_a_malformed_request_is_one_line(tmp_path: Path) -> None:
    run("erasure", "request", "--subject", "ada-l", code=2)
    run("erasure", "request", "--tenant", "a", "--label", "region", code=2)
    run("erasure", "verify", str(tmp_path / "none.json"), "--key", "x", code=2)


def test_a_dead_worker_is_named_and_closed(worker: Worker, tmp_path: Path) -> None:
    ledger = ("--ledger", f"sqlite:///{tmp_path}/ledger.db")
    run("scan", "close-dead", "worker-0", "--spill", str(tmp_path / "spill"), *ledger, code=2)
    assert "nothing" in run("scan", "close-dead", "other", "--spill", str(tmp_path / "other"), *ledger)
