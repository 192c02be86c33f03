"""Erasure in an engine that allocates by itself (governance.erasure, Z1–Z3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcustody.allocator.block import ACTIVE, CACHED
from kvcustody.allocator.domain import Domain
from kvcustody.allocator.foreign_pool import ForeignPool
from kvcustody.allocator.foreign_residency import ForeignResidency
from kvcustody.governance.erasure import Erased, Selector, check_selector, matches_label, matches_plan
from kvcustody.governance.plan import DomainLabel, Plan

if TYPE_CHECKING:
    from kvcustody.governance.engine_port import EngineControl, EnginePort


def erase(port: EnginePort, engine: EngineControl, selector: Selector) -> Erased:
    """End what the selector covers. Raises `ConfigError` for an empty selector or a subject without its tenant."""
    check_selector(selector)
    pool, now_us = port.pool, port.clock.now_us()
    before = _live(pool)
    doomed, kept = _domains(pool, selector)
    for domain in doomed:
        domain.is_open = False  # nothing attaches from here on, whatever the engine does next
    aborted = [residency for residency in port.running.values() if _matches(selector, residency)]
    for residency in aborted:
        residency.publishes = False  # and it leaves no hold
    if aborted:
        engine.abort([residency.request_id for residency in aborted], "erased")
    forget: list[int] = []
    holds = [
        hold
        for account in pool.accounts.values()
        if selector.tenant is None or account.name == selector.tenant
        for hold in list(account.residencies.values())
        if isinstance(hold, ForeignResidency) and _matches(selector, hold)
    ]
    for hold in holds:
        if hold.is_held:
            forget += pool.lapse(hold, "erased", now_us)
    if holds:
        pool.recount_holds()
    tags = [domain.tag for domain in doomed]
    if tags:
        forget += pool.end_cached(np.flatnonzero(np.isin(pool.tag, tags)), "erased", now_us)
    if forget:
        engine.evict(forget)
    reason = "held by another residency of the same domain" if kept else ""
    return Erased(len(aborted), len(holds), before - _live(pool), kept, reason)


def _live(pool: ForeignPool) -> int:
    return int(np.count_nonzero((pool.state == ACTIVE) | (pool.state == CACHED)))


def _domains(pool: ForeignPool, selector: Selector) -> tuple[list[Domain], int]:
    """Domains that belong to the selector alone, and how many blocks stay in wider ones for other holders."""
    live = (pool.state == ACTIVE) | (pool.state == CACHED)
    doomed: list[Domain] = []
    kept = 0
    for tag, domain in pool.domains.items():
        label = domain.label
        assert isinstance(label, DomainLabel)
        if matches_label(selector, label):
            doomed.append(domain)
        elif selector.subject is not None and label.tenant == selector.tenant and label.subject is None:
            kept += int(np.count_nonzero(live & (pool.tag == tag)))
    return doomed, kept


def _matches(selector: Selector, residency: ForeignResidency) -> bool:
    return isinstance(residency.facts, Plan) and matches_plan(selector, residency.facts)
