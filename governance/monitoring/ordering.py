"""Converts a recorded order to what a worker follows, and a person's request to an order.

record(enforcement_order(previous, "canary", tenants=["acme"], share="5%", until_us=…, actor="olga", reason="…"))
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from fractions import Fraction

from kvcustody.audit.evidence.processes.enforcement import EnforcementOrder
from kvcustody.audit.kinds import EnforcementOrdered
from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.staged_table import Stage
from kvcustody.governance.monitoring.enforcement import (
    CANARY,
    ENFORCE,
    MILLIONTHS,
    MODES,
    ORDER_DAYS_MAX,
    Enforcement,
    share_of,
)
from kvcustody.logger import get_logger
from kvcustody.times import SECOND_US

_log = get_logger(__name__)
_DAY_US = 86_400 * SECOND_US


def enforcement_order(
    previous: EnforcementOrder | None,
    mode: str,
    *,
    at_us: int,
    now_utc_us: int,
    tenants: Iterable[str] = (),
    share: str = "",
    until_us: int | None = None,
    actor: str,
    reason: str,
) -> EnforcementOrdered:
    """Return the checked order; a canary after a canary keeps its seed, so that a larger share only adds sessions.

    Raises `ConfigError`: whoever monitors says until when, at most three months ahead, and who orders it says why.
    """
    if mode not in MODES:
        raise ConfigError(f"enforcement: `{mode}` is none of {', '.join(MODES)}", mode=mode)
    if not actor or not reason:
        raise ConfigError("enforcement: an order needs its author and its reason")
    if mode == ENFORCE:
        if until_us is not None:
            raise ConfigError("enforcement: an order to enforce takes no end")
        until_us = 0
    elif until_us is None or not now_utc_us < until_us <= now_utc_us + ORDER_DAYS_MAX * _DAY_US:
        raise ConfigError(
            f"enforcement: `{mode}` needs an end in the future, at most {ORDER_DAYS_MAX} days ahead; from then on the "
            "policy is enforced"
        )
    seed = previous.seed if previous is not None and previous.seed else secrets.token_hex(16)
    order = EnforcementOrdered(
        at_us,
        mode,
        tuple(sorted(set(tenants))),
        int((share_of(share) if share else Fraction(0)) * MILLIONTHS),
        seed,
        until_us // SECOND_US,
        actor,
        reason,
    )
    stage = Stage(frozenset(order.tenants), Fraction(order.share_millionths, MILLIONTHS))
    Enforcement(mode, stage, seed, until_us, actor)  # says what does not fit together
    return order


def followed(order: EnforcementOrder) -> Enforcement:
    """Return what a worker follows; an unreadable order means enforcement, with the reason (`unread`)."""
    stage = Stage(frozenset(order.tenants), Fraction(order.share_millionths, MILLIONTHS))
    if order.mode != CANARY:
        stage = Stage()
    said = (order.actor, order.order, order.reason)
    try:
        return Enforcement(order.mode, stage, order.seed, order.until_us, *said)
    except ConfigError as problem:
        _log.error("an order on enforcement cannot be read", order=order.order, reason=problem.message)
        return Enforcement(ENFORCE, Stage(), "", 0, *said, unread=f"the order cannot be read: {problem.message}")
