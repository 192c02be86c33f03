"""The key of reports on a ledger at work: enrolled, handed over, and what each may sign; the command's whole way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signing_key import SigningKey, create_signing_key, read_signing_key
from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.report_signing_key import (
    open_report_key,
    recorded_report_keys,
    rotate_report_key,
    signed_report,
)
from standins.audit.documents import verify_report
from standins.console.read_page import Literal, read_page

ORIGIN = "ledger.example/keys"
CLOCK = SystemClock()


class Ledger:
    def __init__(self, store: Engine, writer: Any, world: Callable[..., Any], folder: Path) -> None:
        self.store, self.writer, self.file = store, writer, folder / "report.key"
        self.log_key = SigningKey.generate(ORIGIN)
        self.memory = folder / "signed"
        self.old = open_report_key(self.file, ORIGIN, store, writer, CLOCK)
        writer.submit(list(world(4).run(60).events))
        self.sign()

    def sign(self) -> int:
        assert self.writer.flush()
        CheckpointSigner(self.store, [self.log_key], memory=self.memory, clock=CLOCK).sign_once()
        with self.store.connect() as connection:
            return newest_checkpoint(connection)

    def report(self, key: SigningKey, size: int) -> Report:
        with self.store.connect() as connection:
            asked = ReportParameters("soc2", size, *period(connection, size, None, None), sample=1)
            return signed_report(connection, build_report(connection, asked), key)

    def problems(self, report: Report) -> tuple[str, ...]:
        return verify_report(report.to_bytes(), [str(self.log_key.verifier)]).problems


@pytest.fixture
def ledger(store: Engine, make_writer: Callable[..., Any], world: Callable[..., Any], tmp_path: Path) -> Ledger:
    return Ledger(store, make_writer(store), world, tmp_path)


def test_a_key_that_handed_over_signs_nothing_newer(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ledger.sign()
    of_old = ledger.report(ledger.old, before)
    assert ledger.problems(of_old) == ()
    assert open_report_key(ledger.file, ORIGIN, ledger.store, ledger.writer, CLOCK) == ledger.old
    new = rotate_report_key(ledger.file, ledger.store, ledger.writer, CLOCK, "custodian")
    after = ledger.sign()
    assert after > before and read_signing_key(ledger.file) == new
    assert ledger.file.with_name(f"report.key.{ledger.old.verifier.key_id.hex()}").exists()
    assert ledger.report(new, before).digest() == of_old.digest(), "the same report, by the next key"
    assert ledger.problems(ledger.report(new, after)) == ledger.problems(of_old) == ()

    # Whoever has the old key signs a newer report, and leaves out that it handed over, or not.
    signature, newer = of_old.signature, ledger.report(new, after)
    assert signature is not None and newer.signature is not None
    from kvcustody.audit.reports.signing import document_signature

    monkeypatch.setattr(document_signature, "enrolment_leaves", enrolled_first(document_signature.enrolment_leaves))
    forged = ledger.report(ledger.old, after)
    monkeypatch.undo()
    whole = forged.replace(signature=forged.signature._replace(enrolments=newer.signature.enrolments))  # type: ignore[union-attr]
    assert any("no leaf of the ledger names" in text or "handed over" in text for text in ledger.problems(whole))
    told = verify_report(forged.to_bytes(), [str(ledger.log_key.verifier)])
    assert told.ok and "signature.enrolments" in {each.path for each in told.unchecked}


def enrolled_first(read: Callable[..., Any]) -> Callable[..., Any]:
    return lambda connection: read(connection)[:1]


def test_a_file_with_another_key_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    create_signing_key(tmp_path / "other.key", f"{ORIGIN}/report")
    with pytest.raises(ConfigError, match="does not hold the key"):
        open_report_key(tmp_path / "other.key", ORIGIN, ledger.store, ledger.writer, CLOCK)
    with pytest.raises(ConfigError, match="does not exist"):
        open_report_key(tmp_path / "none.key", ORIGIN, ledger.store, ledger.writer, CLOCK)
    assert [period.key for period in recorded_report_keys(ledger.store)] == [ledger.old.verifier], "control"


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


@pytest.mark.system("the commands from a key to a verified report break")
def test_the_commands_from_a_key_to_a_report_that_was_changed(
    store: Engine, make_writer: Callable[..., Any], world: Callable[..., Any], tmp_path: Path
) -> None:
    if store.dialect.name != "sqlite":
        pytest.skip("the commands name a file")
    ledger = ("--ledger", str(tmp_path / "ledger.db"))
    writer = make_writer(store)
    writer.submit(list(world(4).run(60).events))
    assert writer.flush()
    run("audit", "sign", "--signing-key", str(tmp_path / "log.key"), *ledger)
    key = tmp_path / "log.vkey"
    key.write_text(json.loads(run("audit", "keys", "--json", *ledger))["keys"][0]["key"])
    out, file = str(tmp_path / "report"), str(tmp_path / "report.key")
    make = ("report", "make", "--framework", "gdpr", "--out", out, "--signing-key", file, *ledger)
    assert "no key signs reports" in run(*make, code=2)
    run("report", "enrol-key", "--signing-key", file, "--actor", "dana", *ledger)
    run("audit", "sign", "--signing-key", str(tmp_path / "log.key"), *ledger)
    run(*make)
    verify = ("report", "verify", out, "--key", str(key))
    run("audit", "export", str(tmp_path / "export"), *ledger)
    said = run(*verify, "--export", str(tmp_path / "export"))
    assert "every figure made again from the export" in said and "report.pdf" in said
    assert "not checked: boundary.witnessed" in said and "not checked: total" not in said
    assert "not checked: total" in run(*verify), "without an export"
    assert "every figure made again from the ledger" in run(*verify, *ledger)
    page = tmp_path / "report" / "report.html"
    given = {"FOLDER": out, "ledger.vkey": str(key), "EXPORT": str(tmp_path / "again"), "LEDGER": ledger[1]}
    blocks = read_page(page.read_text()).section("Sign-off and re-run").blocks
    lines = [line for block in blocks if isinstance(block, Literal) for line in block.text.splitlines()]
    as_printed = [line for line in lines if line.startswith(("kvcustody audit", "kvcustody report verify"))]
    assert len(as_printed) == 5, "what the report says of itself is so"
    for line in as_printed:
        words = [word.replace("FOLDER", out) if "/" in word else given.get(word, word) for word in line.split()]
        run(*words[1:], *(ledger if "export" in words[:3] else ()))
    page.write_text(page.read_text().replace("Limitations", "Limits", 1))
    assert "`report.html` is not what the signed report gives" in run(*verify, code=1)
    run("report", "rotate-key", "--signing-key", file, "--actor", "dana", *ledger)
    run("audit", "sign", "--signing-key", str(tmp_path / "log.key"), *ledger)
    run(*make)
    assert json.loads(run(*verify, *ledger, "--json"))["ok"] is True
