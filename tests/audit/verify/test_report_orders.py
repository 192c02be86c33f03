"""A report, and a record of processing, says how many orders carry a signature; with a trust, each one is verified."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from typer.testing import CliRunner

from kvcustody.audit.evidence.processes.orders import orders_to_sign
from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.document import Document
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.audit.verify.documents.document_check import DocumentCheck, MadeAgain
from kvcustody.clock import VirtualClock
from kvcustody.console.main import app
from kvcustody.console.policy.orders import order_signature
from kvcustody.governance.processing.build_record import RecordRequest, build_record, signed_record
from kvcustody.governance.processing.record import CONTROLLER, ControllerStatement
from kvcustody.governance.release.trust import write_trust
from kvcustody.policies.reading.load_policy import load_policy
from standins import builders
from standins.audit import falsified
from standins.audit.documents import report_again, says_orders_unchecked, verify_record, verify_report
from standins.audit.ledgers import report_ledger
from standins.erasure.signing import EVE, OLGA, opened_as, orders, put

READERS = orders(ledger=report_ledger.ORIGIN)
POLICY = builders.policy()
NOT_COUNTED = "its verdicts rest on an order that does not count: `erasure-requested` in `tenant/tenant-1`"


class Reported:
    """A ledger with one erasure that nobody signed when it was asked for, and that `key` signs later; its report."""

    def __init__(self, store: Engine, folder: Path, world: Callable[..., Any], key: SigningKey | None) -> None:
        self.store, self.export = store, folder / "export"
        seal = report_ledger.fill(store, world, folder)
        self.vkeys = [str(seal.verifier)]
        if key is not None:
            with opened_as(store, READERS).connect() as connection:
                [order] = orders_to_sign(connection)
            clock = VirtualClock(utc_us=falsified.OFFSET_US + 10**9)
            own = orders(key, ledger=report_ledger.ORIGIN)
            put(store, folder, clock, lambda at_us: order_signature(order, at_us, "olga", "test"), own)
            report_ledger.sign(store, seal, folder)
        write_export(self.export, LedgerSource(store), made_at_us=1)

    def report(self, tenant: str | None = None) -> Report:
        with self.store.connect() as connection:
            size = newest_checkpoint(connection)
            times = period(connection, size, None, None)
            asked = ReportParameters("cc-fdp-rip", size, *times, sample=4, tenant=tenant)
            return report_ledger.signed(connection, build_report(connection, asked))

    def record(self) -> Document:
        with self.store.connect() as connection:
            size = newest_checkpoint(connection)
            asked = RecordRequest(CONTROLLER, size, *period(connection, size, None, None), ControllerStatement())
            made = build_record(connection, asked, given=load_policy(POLICY, name="given"))
            return signed_record(connection, made, report_ledger.REPORT_KEY)

    def check_record(self, source: str, record: Document, *, trusted: bool) -> DocumentCheck:
        how: dict[str, Any] = {"given": load_policy(POLICY, name="given")}
        how["orders"] = READERS if trusted else None
        if source == "export":
            return verify_record(record.to_bytes(), self.vkeys, source=self.export, **how)
        with self.store.connect() as connection:
            return verify_record(record.to_bytes(), self.vkeys, source=connection, **how)

    def again(self, source: str, report: Report, *, trusted: bool) -> MadeAgain:
        signed = READERS if trusted else None
        if source == "export":
            return report_again(self.export, report, self.vkeys, signed)
        with self.store.connect() as connection:
            return report_again(connection, report, self.vkeys, signed)


@pytest.mark.parametrize("source", ["export", "ledger"])
@pytest.mark.parametrize(("signer", "counts"), [(None, False), (EVE, False), (OLGA, True)])
def test_an_order_that_no_trusted_key_signed_is_a_problem(
    any_store: Engine,
    tmp_path: Path,
    world_class: Callable[..., Any],
    source: str,
    signer: SigningKey | None,
    counts: bool,
) -> None:
    """Control: without a trust the same report is sound, and says that the orders were not checked."""
    ledger = Reported(any_store, tmp_path, world_class, signer)
    report = ledger.report()
    data = report.to_bytes()
    later = 0 if signer is None else 1
    assert f"Of 1 order on record 0 carry a signature, and {later} more" in report["boundary"].orders
    blind = verify_report(data, ledger.vkeys, source=ledger.again(source, report, trusted=False))
    assert blind.ok and says_orders_unchecked(blind), blind.problems
    found = verify_report(data, ledger.vkeys, source=ledger.again(source, report, trusted=True))
    assert not says_orders_unchecked(found)
    assert found.ok is counts, found.problems
    named = {problem.partition(" (")[0] for problem in found.problems}
    forged = {NOT_COUNTED.replace("erasure-requested", "order-signed")} if signer is EVE else set()
    assert named == (set() if counts else {NOT_COUNTED, *forged})


@pytest.mark.parametrize("source", ["export", "ledger"])
@pytest.mark.parametrize(("signer", "counts"), [(None, False), (OLGA, True)])
def test_a_record_of_processing_rests_on_the_same_orders(
    any_store: Engine,
    tmp_path: Path,
    world_class: Callable[..., Any],
    source: str,
    signer: SigningKey | None,
    counts: bool,
) -> None:
    """Control: without a trust the same record is sound, and says that the orders were not checked."""
    ledger = Reported(any_store, tmp_path, world_class, signer)
    record = ledger.record()
    assert record.facts["orders"] == ledger.report()["boundary"].orders != ""
    blind = ledger.check_record(source, record, trusted=False)
    assert blind.ok and says_orders_unchecked(blind), blind.problems
    found = ledger.check_record(source, record, trusted=True)
    assert not says_orders_unchecked(found)
    assert [problem.partition(" (")[0] for problem in found.problems] == ([] if counts else [NOT_COUNTED])


def test_a_tenants_own_report_counts_the_orders_of_its_own_log(
    any_store: Engine, tmp_path: Path, world_class: Callable[..., Any]
) -> None:
    ledger = Reported(any_store, tmp_path, world_class, None)
    own, other = ledger.report("tenant-1"), ledger.report("tenant-2")
    assert "Of 1 order" in own["boundary"].orders and "on record" not in other["boundary"].orders
    for report, counts in ((own, False), (other, True)):
        again = ledger.again("ledger", report, trusted=True)
        assert verify_report(report.to_bytes(), ledger.vkeys, source=again).ok is counts


def test_a_report_alone_shows_no_order(any_store: Engine, tmp_path: Path, world_class: Callable[..., Any]) -> None:
    ledger = Reported(any_store, tmp_path, world_class, None)
    assert says_orders_unchecked(verify_report(ledger.report().to_bytes(), ledger.vkeys))


@pytest.mark.parametrize("document", ["report.json", "ropa.json"])
@pytest.mark.parametrize("signer", [EVE, OLGA])
def test_the_command_verifies_orders_by_a_trust_configuration(
    any_store: Engine, tmp_path: Path, world_class: Callable[..., Any], signer: SigningKey, document: str
) -> None:
    ledger = Reported(any_store, tmp_path, world_class, signer)
    made = ledger.record() if document == "ropa.json" else ledger.report()
    (tmp_path / document).write_bytes(made.to_bytes())
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "vkey").write_text(ledger.vkeys[0])
    roles = ((EVE, "author"), (SigningKey.generate("ben"), "approver"), (OLGA, "orders"))
    rows = [(str(key.verifier), role, None) for key, role in roles]
    (tmp_path / "trust.toml").write_text(write_trust("prod", rows))
    verify = ["report", "verify", str(tmp_path / document), "--key", str(tmp_path / "vkey"), "--json"]
    verify += ["--export", str(ledger.export), "--policy", str(tmp_path / "policy.yaml")]
    assert CliRunner().invoke(app, verify).exit_code == 0, "control: nobody asks whose orders count"
    found = CliRunner().invoke(app, [*verify, "--trust", str(tmp_path / "trust.toml")])
    assert found.exit_code == (0 if signer is OLGA else 1), found.output
    assert (NOT_COUNTED in " ".join(json.loads(found.output)["problems"])) is (signer is EVE)
