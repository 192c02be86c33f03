"""`kvcustody report` and `kvcustody subject`: files, digests, what is refused, and one person's page."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvcustody.audit.kinds import (
    CustodyEnded,
    ErasureRequested,
    ReceiptRecorded,
    ResidencyOpened,
    ResidencyReleased,
    WorkerStarted,
)
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import SystemClock, VirtualClock
from kvcustody.console.main import app
from kvcustody.migrations.upgrade import upgrade
from standins import builders

POLICY = Path(__file__).parents[3] / "policies" / "library" / "regulated-saas.yaml"
HOUR = 3_600_000_000


def opened(at: int, number: int, tenant: str, subject: str, run: Run, *, asserted: bool = False) -> ResidencyOpened:
    return ResidencyOpened(
        at, number, tenant, subject, f"chat-{number}", asserted, "internal", (1,), (), ("own-scope",), 3,
        at + HOUR, (run,), "ab" * 8,
    )  # fmt: skip


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Ada of acme: one custody ended and wiped, one held for an hour, one running; Bob of acme; Ada of labs."""
    path = tmp_path / "ledger.db"
    engine = open_store(path)
    upgrade(engine)
    runs = [Run(np.arange(4) + 10 * number, 1 + 4 * number) for number in range(5)]
    proof = ("memset", "cpu", 4096 * 4, 550, 600, "full", 1.0, 4, "ok", (runs[0],))
    events = [
        WorkerStarted(1, "w", 64, 1, 4096, "cpu", "test"),
        opened(100, 1, "acme", "ada", runs[0]),
        ResidencyReleased(200, 1, "acme", "finish", (), 500),
        CustodyEnded(510, "acme", "internal", (runs[0],), "expired", 500, 500, 200, 1000, 900),
        ReceiptRecorded(600, 1, 0, "acme", *proof),
        opened(700, 2, "acme", "ada", runs[1], asserted=True),
        ResidencyReleased(800, 2, "acme", "finish", (), HOUR),
        opened(900, 3, "acme", "ada", runs[2]),
        opened(910, 4, "acme", "bob", runs[3]),
        opened(920, 5, "labs", "ada", runs[4]),
        ErasureRequested(950, "e-1", "acme", "subject", "bob", None, HOUR, "dpo"),
    ]
    builders.record(engine, tmp_path / "spill", events, clock=VirtualClock())
    key = SigningKey.generate("ledger.example/test")
    CheckpointSigner(engine, [key], memory=tmp_path / "signed", clock=SystemClock()).sign_once()
    (tmp_path / "ledger.vkey").write_text(f"{key.verifier}\n")
    engine.dispose()
    return path


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, [str(item) for item in arguments])
    assert found.exit_code == code, found.output
    return found.output


@pytest.mark.system("the report command writes a report that its own check or its own rerun refuses")
def test_a_report_is_written_verified_and_made_again(ledger: Path, tmp_path: Path) -> None:
    out = tmp_path / "q1"
    common = ("report", "make", "--framework", "gdpr", "--ledger", ledger, "--policy", POLICY)
    first = json.loads(run(*common, "--out", out, "--json"))
    data = (out / "report.json").read_bytes()
    assert first["digest"] == hashlib.sha256(data).hexdigest() and first["recount_agrees"] is True
    assert sorted(path.name for path in out.iterdir()) == first["files"]
    body = json.loads(data)
    assert body["proof"]["holds"] is True and body["proof"]["is_active"] is False
    again = tmp_path / "again"
    words = first["rerun"].split()[1:]
    assert words[-2:] == ["--policy", "regulated-saas.yaml"]
    run(*words[:-1], str(POLICY), "--ledger", ledger, "--out", again)
    for name in first["files"]:
        assert (again / name).read_bytes() == (out / name).read_bytes(), name
    key = tmp_path / "ledger.vkey"
    check = ("report", "verify", out / "report.json", "--key", key, "--digest", first["digest"])
    assert "no key signed the report" in run(*check, code=1), "and nothing shows its figures"
    assert "sound, except for what was not checked" in run(*check, "--ledger", ledger)
    for against in (("--ledger", tmp_path / "none.db"), ("--export", tmp_path / "none")):
        unknown = run(*check, *against, code=2)  # that says nothing of the report
        assert "the document cannot be checked against" in unknown and "not sound" not in unknown.split(":")[0]
        assert unknown.count("\n") == 1
    (out / "report.json").write_bytes(data.replace(b'"covered":true', b'"covered":false'))
    unsound = run("report", "verify", out / "report.json", "--key", key, "--digest", first["digest"], code=1)
    assert "problem: the SHA-256 is" in unsound and "not sound" in unsound


def test_mistakes_are_one_line(ledger: Path, tmp_path: Path) -> None:
    make = ("report", "make", "--ledger", ledger, "--out", tmp_path / "out")
    for arguments, what in (
        ((*make, "--framework", "iso-9001"), "is none of"),
        ((*make, "--framework", "soc2", "--format", "docx"), "names none of"),
        ((*make, "--framework", "soc2", "--as-of", "99"), "no checkpoint of `99`"),
        ((*make, "--framework", "soc2", "--since", "2030-01-01"), "period is empty"),
        ((*make, "--framework", "soc2", "--policy", tmp_path / "none.yaml"), "No such file"),
        (("report", "verify", tmp_path / "none.json", "--key", tmp_path / "ledger.vkey"), "No such file"),
        (("report", "verify", ledger, "--key", ledger), "key"),
    ):
        output = run(*arguments, code=2)
        assert what in output and output.count("\n") == 1, output
    assert not (tmp_path / "out").exists()


def test_what_is_held_of_one_subject_why_and_until_when(ledger: Path, tmp_path: Path) -> None:
    page = tmp_path / "page" / "ada.html"
    arguments = (
        "subject",
        "show",
        "--ledger",
        ledger,
        "--tenant",
        "acme",
        "--subject",
        "ada",
        "--html",
        page,
    )
    report = json.loads(run(*arguments, "--at", "2026-01-01T00:30:00", "--json"))
    states = {item["residency"]: item for item in report["holdings"]}
    assert {number: item["state"] for number, item in states.items()} == {1: "ended", 2: "held", 3: "running"}
    assert [states[number]["in_custody"] for number in (1, 2, 3)] == [0, 4, 4]
    assert states[2]["asserted"] is True and states[2]["reasons"] == ["own-scope"] and states[2]["revision"] == 3
    assert states[2]["until_us"] - report["now_us"] > 0 and report["held_blocks"] == 8
    assert (report["evidence"]["due"], report["evidence"]["covered"]) == (4, 4)
    assert report["erasures"] == [], "Bob's erasure is not Ada's"
    later = json.loads(run(*arguments, "--at", "2026-01-01T02:00:00", "--json"))
    assert {item["residency"]: item["state"] for item in later["holdings"]}[2] == "ending"
    assert later["evidence"]["overdue"] == 4, "held past its time, and no end on record"
    text = page.read_text()
    named = re.findall(r"(?<![0-9a-z+/])(?:ada|bob)(?![0-9a-z+/])", text, re.IGNORECASE)  # not inside a hash
    assert not named and "<script" not in text
    assert all(name in text for name in report["pseudonyms"][:1]) or states[2]["pseudonym"] in text


def test_another_subject_has_another_page(ledger: Path) -> None:
    bob = json.loads(run("subject", "show", "--ledger", ledger, "--tenant", "acme", "--subject", "bob", "--json"))
    assert [item["residency"] for item in bob["holdings"]] == [4]
    assert [(item["erasure"], item["selector"]) for item in bob["erasures"]] == [("e-1", "subject")]
    labs = json.loads(run("subject", "show", "--ledger", ledger, "--tenant", "labs", "--subject", "ada", "--json"))
    assert [item["residency"] for item in labs["holdings"]] == [5]
    assert "nothing is on record" in run("subject", "show", "--ledger", ledger, "--tenant", "acme", "--subject", "eve")
    assert "in custody" in run("subject", "show", "--ledger", ledger, "--tenant", "acme", "--subject", "ada")


def test_the_record_of_processing_activities(ledger: Path, tmp_path: Path) -> None:
    out = tmp_path / "ropa"
    options: tuple[Any, ...] = ("--controller", "=Example AG", "--format", "html,pdf,json,csv", "--out", out)
    found = json.loads(run("report", "ropa", "--ledger", ledger, "--policy", POLICY, *options, "--json"))
    record = found["record"]
    assert found["files"] == ["ropa.csv", "ropa.html", "ropa.json", "ropa.pdf"]
    assert record["controller"] == "=Example AG" and record["purposes"] == "to be stated by the controller"
    assert record["time_limits"][0]["classification"] == "public"
    assert record["due"] >= record["covered"] == 4
    rows = list(csv.reader(io.StringIO((out / "ropa.csv").read_text())))
    named = rows[0].index("controller")
    assert len(rows) == 1 + len(record["time_limits"]) and rows[1][named] == "'=Example AG"
    page = (out / "ropa.html").read_text()
    assert "to be stated by the controller" in page and "Time limits (f)" in page


def test_the_frameworks_are_listed() -> None:
    found = json.loads(run("report", "frameworks", "--json"))
    assert {"nist-800-53", "gdpr", "pci-dss"} <= {item["id"] for item in found["items"]}
    assert "SC-4" in run("report", "frameworks")
