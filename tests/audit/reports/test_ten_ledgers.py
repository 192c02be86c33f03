"""The auditor's program under examples/ agrees with a report on each of ten ledgers, good and bad."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reperform
from sqlalchemy import Engine

from kvcustody.audit.exports.export_writer import write_export
from kvcustody.audit.exports.ledger_source import LedgerSource
from kvcustody.audit.kinds import Event
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.audit.tlog.signing_key import SigningKey
from standins.audit import falsified
from standins.audit.documents import signed_by_reports_key
from standins.audit.ledgers import report_ledger, tiered_ledger

World = Callable[..., Any]
Fill = Callable[[Engine, World, Path], tuple[SigningKey, SigningKey]]  # the keys of the log and of its reports


def of_histories(make: Callable[[World], list[list[Event]]]) -> Fill:
    """A ledger of these histories, in the first of which the report's key is made."""

    def fill(store: Engine, world: World, folder: Path) -> tuple[SigningKey, SigningKey]:
        (started, *others), *more = make(world)
        every = [[started, report_ledger.REPORT_KEY_MADE, *others], *more]
        return report_ledger.fill_with(store, every, folder), report_ledger.REPORT_KEY

    return fill


def forged(forge: falsified.Forge) -> Fill:
    """A history in which one covered custody is not what it was, and the same history as it was."""

    def make(world: World) -> list[list[Event]]:
        chance, events = random.Random(5), world(5, narrows=True).run(200).events
        units = falsified.covered_units(events)
        return [forge([*events], chance.choice(units), chance), events]

    return of_histories(make)


def reports(store: Engine, world: World, folder: Path) -> tuple[SigningKey, SigningKey]:
    return report_ledger.fill(store, world, folder), report_ledger.REPORT_KEY


def tiers(store: Engine, world: World, folder: Path) -> tuple[SigningKey, SigningKey]:
    tiered_ledger.fill(store, world, folder)
    return tiered_ledger.OLD, tiered_ledger.REPORT_KEY


LEDGERS: dict[str, Fill] = {
    "three workers, an erasure, a gap": reports,
    "tiers, a death, people's requests": tiers,
    "one tenant on four shards": of_histories(lambda world: [world(1, tenants=1, shards=4).run(200).events]),
    "twelve tenants": of_histories(lambda world: [world(2, tenants=12, blocks=160).run(400).events]),
    "narrowed holds": of_histories(lambda world: [world(3, narrows=True).run(300).events]),
    "five processes": of_histories(lambda world: [world(seed).run(80).events for seed in range(4, 9)]),
    "a receipt less": forged(falsified.dropped_receipt),
    "a receipt of another generation": forged(falsified.wrong_generation),
    "an altered time": forged(falsified.altered_time),
    "an extended deadline": forged(falsified.extended_deadline),
}


@pytest.mark.system
@pytest.mark.parametrize("name", LEDGERS)
def test_it_agrees_with_a_report_on_each_ledger(name: str, store: Engine, world: World, tmp_path: Path) -> None:
    key, signs = LEDGERS[name](store, world, tmp_path)
    write_export(tmp_path / "export", LedgerSource(store), made_at_us=1)
    with store.connect() as connection:
        size = newest_checkpoint(connection)
        asked = ReportParameters("gdpr", size, *period(connection, size, None, None))
        report = build_report(connection, asked)
        report = signed_by_reports_key(connection, report, signs)
    body = json.loads(report.to_bytes())
    found = reperform.compare(tmp_path / "export", body, str(key.verifier))
    assert [line for same, line in found.lines if not same] == []
    assert body["total"]["due"] > 50 and len(found.lines) > 200, "void: there is little to agree on"
    body["total"]["in_time"] += 1
    assert not reperform.compare(tmp_path / "export", body, str(key.verifier)).ok, "control"


def test_there_are_ten_ledgers() -> None:
    assert len(LEDGERS) == 10
