"""Erasure in this process: end all custody of a selector, now, in every state.

Z1  Running requests of the selector are aborted, their holds lapse, and their blocks are on the way to CLEAN.
Z2  A block that another lawful holder still holds stays, and is counted with the reason.
Z3  The owner tenant's erasure overrides readers that came through a grant: their continuations become unreachable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcustody.allocator.domain import Domain
from kvcustody.allocator.manager import BlockManager
from kvcustody.allocator.node import Node
from kvcustody.allocator.residency import Residency
from kvcustody.errors import ConfigError
from kvcustody.governance.plan import DomainLabel, Plan

if TYPE_CHECKING:
    from kvcustody.governance.governor import Governor


class Selector(NamedTuple):
    """What to erase: a tenant, narrowed by subject or session, or a model's digest. At least one part is needed."""

    tenant: str | None = None
    subject: str | None = None
    session: str | None = None
    model: bytes | None = None


class Erased(NamedTuple):
    """What one process did. Blocks are counted over all layer groups."""

    aborted_requests: int
    lapsed_residencies: int
    ended_blocks: int
    remaining_blocks: int
    remaining_reason: str


def erase(governor: Governor, selector: Selector) -> Erased:
    """End what the selector covers. Raises `ConfigError` for an empty selector or a subject without its tenant."""
    check_selector(selector)
    aborted = [
        request_id
        for request_id, live in governor.running.items()
        if matches_plan(selector, _plan_of(live.residency))
    ]
    for request_id in aborted:
        governor.release(request_id, "erased")
    lapsed = ended = remaining = 0
    now_us = governor.clock.now_us()
    for manager in governor.managers:
        before = manager.live_blocks()
        lapsed += _lapse(manager, selector, now_us)
        doomed, kept = _domains(manager, selector)
        for domain in doomed:
            domain.is_open = False
        for node in _roots_of(manager, doomed):
            if node.refs == 0:
                manager.tree.end_subtree(node, "erased", now_us, now_us)
        manager.tree.flush(now_us)
        ended += before - manager.live_blocks()
        remaining += kept
    reason = "held by another residency of the same domain" if remaining else ""
    return Erased(len(aborted), lapsed, ended, remaining, reason)


def check_selector(selector: Selector) -> None:
    """Raise `ConfigError` for an empty selector or a subject or session without its tenant."""
    if selector == Selector():
        raise ConfigError("an erasure needs a tenant, a subject, a session or a model")
    if (selector.subject or selector.session) and not selector.tenant:
        raise ConfigError("an erasure by subject or session needs its tenant")


def _lapse(manager: BlockManager, selector: Selector, now_us: int) -> int:
    lapsed = 0
    for account in manager.accounts.values():
        if selector.tenant is not None and account.name != selector.tenant:
            continue
        for hold in [hold for hold in account.residencies.values() if _matches_hold(selector, hold)]:
            if hold.is_held:
                manager.tree.lapse(hold, "erased", now_us)
                lapsed += 1
    manager.tree.flush(now_us)
    return lapsed


def _domains(manager: BlockManager, selector: Selector) -> tuple[set[Domain], int]:
    """Domains that belong to the selector alone, and how many blocks stay in wider ones for other holders."""
    doomed: set[Domain] = set()
    kept = 0
    for node in manager.tree.nodes():
        label = node.domain.label
        assert isinstance(label, DomainLabel)
        if matches_label(selector, label):
            doomed.add(node.domain)
        elif selector.subject is not None and label.tenant == selector.tenant and label.subject is None:
            kept += node.block_count
    return doomed, kept


def _roots_of(manager: BlockManager, doomed: set[Domain]) -> list[Node]:
    """The topmost nodes in these domains; what is below them ends with them."""
    return [
        node
        for node in manager.tree.nodes()
        if node.domain in doomed and (node.parent is None or node.parent.domain not in doomed)
    ]


def matches_plan(selector: Selector, plan: Plan) -> bool:
    """Whether a request of this standing is inside the selector."""
    label = plan.own.domain.label
    assert isinstance(label, DomainLabel)
    principal = plan.principal
    return (
        (selector.tenant is None or plan.tenant == selector.tenant)
        and (selector.subject is None or principal.subject == selector.subject)
        and (selector.session is None or principal.session == selector.session)
        and (selector.model is None or (label.spec is not None and label.spec.model == selector.model))
    )


def _matches_hold(selector: Selector, hold: Residency) -> bool:
    return matches_plan(selector, _plan_of(hold))


def _plan_of(residency: Residency) -> Plan:
    assert isinstance(residency.facts, Plan)
    return residency.facts


def matches_label(selector: Selector, label: DomainLabel) -> bool:
    """Whether a whole domain is inside the selector."""
    return (
        (selector.tenant is None or label.tenant == selector.tenant)
        and (selector.subject is None or label.subject == selector.subject)
        and (selector.session is None or label.session == selector.session)
        and (selector.model is None or (label.spec is not None and label.spec.model == selector.model))
    )
