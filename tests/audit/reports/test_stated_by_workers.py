"""A report names the policies and tenants that only workers state, without a release or issuer on record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from kvcustody.audit.kinds import BARE, Event, IssuerAssigned, ReleaseStep
from kvcustody.audit.reports.build_report import build_report, newest_checkpoint, period
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.parameters import ReportParameters
from kvcustody.clock import VirtualClock
from standins import builders
from standins.audit import falsified
from standins.audit.ledgers import report_ledger

DIGEST = "sha256:" + "cd" * 32  # of the policy that a worker of `report_ledger` states
POLICY = "No release on record put `regulated-saas` revision 1 into effect"
TENANTS = "No issuer on record has"


def reported(store: Engine, folder: Path, world: Callable[..., Any], *more: Event) -> Report:
    """A report of a ledger to which a control plane added leaves."""
    seal = report_ledger.fill(store, world, folder)
    clock = VirtualClock(utc_us=falsified.OFFSET_US + 10**9)
    builders.record(store, folder / "plane", list(more), worker="plane", clock=clock)
    report_ledger.sign(store, seal, folder)
    with store.connect() as connection:
        size = newest_checkpoint(connection)
        times = period(connection, size, None, None)
        return build_report(connection, ReportParameters("cc-fdp-rip", size, *times, sample=4))


def step(action: str = "activated", revision: int = 1, digest: str = DIGEST) -> Event:
    return ReleaseStep(7, 3, action, revision, digest, "ab" * 32, "grace")


@pytest.mark.parametrize(
    ("released", "is_released"),
    [
        (step(), True),
        (step("approved"), False),
        (step(revision=2), False),
        (step(digest="sha256:" + "ee" * 32), False),
    ],
    ids=["this document", "not in effect", "another revision", "another document"],
)
def test_a_policy_is_released_where_a_step_puts_its_document_into_effect(
    any_store: Engine, tmp_path: Path, world_class: Callable[..., Any], released: Event, is_released: bool
) -> None:
    report = reported(any_store, tmp_path, world_class, released)
    assert [item.released for item in report["boundary"].policies] == [is_released]
    assert any(said.startswith(POLICY) for said in report["limitations"]) is not is_released


@pytest.mark.parametrize(
    ("issuer", "is_assigned"),
    [
        (IssuerAssigned(7, "https://idp.example", BARE, "grace"), True),
        (IssuerAssigned(7, "https://idp.example", "qualified", "grace"), False),
    ],
)
def test_tenants_whose_issuer_nobody_assigned_are_named(
    any_store: Engine, tmp_path: Path, world_class: Callable[..., Any], issuer: Event, is_assigned: bool
) -> None:
    report = reported(any_store, tmp_path, world_class, issuer)
    said = [text for text in report["limitations"] if text.startswith(TENANTS)]
    assert bool(said) is not is_assigned
    assert is_assigned or "tenant-0, tenant-1" in said[0]
