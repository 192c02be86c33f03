"""Which requests a worker enforces its policy for, and which it only monitors.

    enforcement = Enforcement(Stage(frozenset({"acme"}), Fraction(1, 20)), seed="…", until_utc_us=…, actor="olga")
    enforcement.enforces(Requester("globex", "globex", "ann", None), "request-7", now)

It is an order beside the policy, and no part of it: what is tried is the very revision that will be enforced.

- The policy is enforced where nothing else was ordered, where a worker does not allow it, and from an order's end on.
- The share is of sessions; of subjects where a request has no session, of requests where it has neither. Whether one is
  in it follows from the order's seed and its own name: the same on every worker and after a restart. A larger share
  under the same seed holds all that a smaller one held.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.staged_table import Stage
from kvcustody.policies.document.model import Profile

MONITOR, CANARY, ENFORCE = "monitor", "canary", "enforce"
MODES = (MONITOR, CANARY, ENFORCE)
MONITORED = "(monitored)"  # among a residency's reasons; no rule, grant or segment can be called so
ORDER_DAYS_MAX = 92
MILLIONTHS = 1_000_000
_HEX = frozenset("0123456789abcdef")


class Requester(NamedTuple):
    """Who sent a request: `tenant` as the policy names it; None without a proven identity."""

    tenant: str | None
    subject: str | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Enforcement:
    """The requesters for whom the policy is enforced until `until_utc_us`; afterwards everybody."""

    mode: str = ENFORCE
    stage: Stage = field(default_factory=Stage)
    seed: str = ""
    until_utc_us: int = 0
    actor: str = ""
    order: int = 0  # its place in the system log
    reason: str = ""
    unread: str = ""  # why the order cannot be read: the policy is enforced

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"enforcement: `{self.mode}` is none of {', '.join(MODES)}")
        if self.mode != ENFORCE and not (self.seed and self.until_utc_us and self.actor):
            raise ConfigError("enforcement: an order to monitor needs its author, its seed and its end")
        staged = bool(self.stage.tenants or self.stage.share)
        if staged != (self.mode == CANARY):
            raise ConfigError("enforcement: only a canary may name tenants or a share of other sessions")
        if set(self.seed) - _HEX or len(self.seed) % 2:
            raise ConfigError("enforcement: the seed of an order must be hexadecimal")
        if not 0 <= self.stage.share < 1:
            raise ConfigError("enforcement: the share of a canary must be at least 0 and below 1")

    @property
    def monitors(self) -> bool:
        """Whether any request is only monitored."""
        return self.mode != ENFORCE

    def enforces(self, who: Requester, request_id: Hashable) -> bool:
        """Whether the policy is enforced for a request."""
        if self.mode != CANARY:
            return self.mode == ENFORCE
        if who.tenant in self.stage.tenants:
            return True
        return Fraction(self._place(who, request_id), 1 << 64) < self.stage.share

    def whole_tenant(self, tenant: str | None) -> bool | None:
        """Whether all of a tenant's requests are enforced (True) or monitored (False); None: some of them."""
        if self.mode != CANARY:
            return self.mode == ENFORCE
        if tenant in self.stage.tenants:
            return True
        return None if self.stage.share else False

    def _place(self, who: Requester, request_id: Hashable) -> int:
        if who.session is not None:
            unit = ("session", who.session)
        elif who.subject is not None:
            unit = ("subject", who.subject)
        else:
            unit = ("request", repr(request_id))
        name = "\n".join((unit[0], repr(who.tenant), unit[1])).encode()
        return int.from_bytes(hmac.digest(bytes.fromhex(self.seed), name, hashlib.sha256)[:8], "big")

    def __str__(self) -> str:
        return f"{self.mode} {self.stage}".rstrip()


ENFORCED = Enforcement()


def share_of(text: str) -> Fraction:
    """Parse a share such as `5%`. Raises `ConfigError`."""
    try:
        share = Fraction(text.removesuffix("%")) / 100
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not text.endswith("%") or not 0 < share < 1 or (share * MILLIONTHS).denominator != 1:
        raise ConfigError(
            f"`{text}` is not a share: write for example `5%`, above 0 and below 100, with at most four decimals"
        )
    return share


def refusal(enforcement: Enforcement, *, allowed: bool, profile: Profile) -> str:
    """Return why a worker enforces in spite of an order; empty where it follows the order."""
    if not enforcement.monitors:
        return ""
    if profile is not Profile.SHARED:
        return f"profile {profile.value}"
    return "" if allowed else "not allowed here"
