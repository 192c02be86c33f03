"""Mutants of governance itself, which every adapter can run beside its own.

`PORT` are those of the engine port and its pool, for engines that allocate by themselves; `ANYWHERE` are those of what
the Governor and the port have in common.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.external.scrub_queue import ScrubQueue
from kvcustody.allocator.pool.block_state import CACHED, NEVER_US
from kvcustody.governance.credentials import scope_token
from kvcustody.governance.credentials.spent_tokens import SpentTokens
from kvcustody.governance.decisions import access_plan as plan
from kvcustody.governance.decisions.access_plan import PlanCache
from kvcustody.governance.decisions.reuse_decision import ReuseDecider
from kvcustody.governance.external import engine_books as port_erasure
from kvcustody.governance.identity.domain_spec import DomainSpec, tenant_owner
from kvcustody.governance.keys.domain_key_cache import DomainKeys
from kvcustody.testkit.conformance.mutants.runner import Mutant, constant, patch, together, without

# -- keys and identity -------------------------------------------------------------------------------------------------

unscoped_keys = patch(
    DomainKeys, "state", lambda original: lambda self, spec: hashlib.blake2b(key=b"0" * 32, digest_size=32)
)


def _everyone(original: Any) -> Any:
    """Give everyone the domain of one tenant, which has its own key, so that nothing else is wrong."""

    def own_domain(principal: Any, **fields: Any) -> DomainSpec | None:
        spec: DomainSpec | None = original(principal, **fields)
        if spec is None:
            return None
        return replace(spec, tenant="alpha", subject="everyone" if spec.subject is not None else None)

    return own_domain


def _no_owner(original: Any) -> Any:
    """Give the key ring an epoch for the tenant that everyone's domain names."""

    def make(self: PlanCache[Any], key: Any, now_utc_us: int) -> Any:
        self._keyring.ensure([tenant_owner(key[0].issuer, "alpha")])
        return original(self, key, now_utc_us)

    return make


everyone = together(patch(plan, "own_domain", _everyone), patch(PlanCache, "_make", _no_owner))

_blind = SimpleNamespace(compare_digest=lambda a, b: True)


def _never_expires(original: Any) -> Any:
    def verify(self: Any, data: bytes) -> Any:
        clock, latest = self._clock, self._latest_ms
        issued = scope_token._HEAD.unpack_from(data)[5:7] if len(data) > scope_token._HEAD.size else (0, 0)
        self._clock = SimpleNamespace(utc_us=lambda: 1000 * (issued[0] << 32 | issued[1]))
        self._latest_ms = 0
        try:
            return original(self, data)
        finally:
            self._clock, self._latest_ms = clock, latest

    return verify


def _cached_plans(original: Any) -> Any:
    """Answer with the first plan forever, in whichever book."""
    kept: dict[Any, Any] = {}

    def answer(self: PlanCache[Any], key: Any, now_utc_us: int) -> Any:
        own = kept.setdefault(id(self._keyring), {})
        if key not in own:
            own[key] = original(self, key, now_utc_us)
        return own[key]

    return answer


def _cached_permits(original: Any) -> Any:
    """Permit forever what was permitted once."""
    kept: set[Any] = set()

    def may(self: ReuseDecider, plan: Any, entry: Any, tally: Any, moment: Any) -> bool:
        key = (id(entry.chain.domain), entry.id)
        if key not in kept and original(self, plan, entry, tally, moment):
            kept.add(key)
        return key in kept

    return may


ANYWHERE = (
    Mutant("scope dropped at admission", everyone),
    Mutant("unscoped keys", unscoped_keys),
    Mutant("forged identity accepted", patch(scope_token, "hmac", lambda original: _blind)),
    Mutant("expired identity accepted", patch(scope_token.ScopeTokens, "_verify", _never_expires)),
    Mutant("replayed identity accepted", constant(SpentTokens, "spend", 0)),
    Mutant(
        "grant cached past its revocation",
        together(
            patch(PlanCache, "plan", _cached_plans),
            patch(ReuseDecider, "may", _cached_permits),
            constant(PlanCache, "drop", None),
        ),
    ),
)

# -- the engine port and its pool --------------------------------------------------------------------------------------


def _attachable(*, domain: bool = True, deadline: bool = True, ceiling: bool = True) -> Any:
    """Skip one comparison when a block is checked again at attach."""

    def make(original: Any) -> Any:
        def attachable(self: ExternalPool, blocks: Any, expected: Any, now_us: int) -> int:
            fine = self.indexed[blocks].copy()
            if domain:
                fine &= self.tag[blocks] == expected
            if ceiling:
                fine &= self.ceiling_us[blocks] > now_us
            if deadline:
                idle = self.refs[blocks] == 0
                fine &= ~idle | ((self.state[blocks] == CACHED) & (self.hold_until_us[blocks] > now_us))
            return len(blocks) if fine.all() else int(fine.argmin())

        return attachable

    return make


def _same_generation(original: Any) -> Any:
    def hand_out(self: ExternalPool, residency: Any, blocks: Any, domain: Any, now_us: int) -> None:
        original(self, residency, blocks, domain, now_us)
        self.generation[blocks] = np.arange(1, len(blocks) + 1)
        residency.handed[-1] = (blocks, 1)

    return hand_out


def _sliding(original: Any) -> Any:
    def attach(self: ExternalPool, residency: Any, blocks: Any, now_us: int) -> None:
        for block in blocks.tolist():
            absolute_us = self.domains[int(self.tag[block])].absolute_us
            self.ceiling_us[block] = now_us + absolute_us if absolute_us < NEVER_US else NEVER_US
        original(self, residency, blocks, now_us)

    return attach


def _without_tail(original: Any) -> Any:
    def add(self: ScrubQueue, custody: Any) -> None:
        if custody.cause not in ("finished", "aborted", "disconnected"):
            original(self, custody)

    return add


PORT = (
    Mutant(
        "scope dropped at look-up",
        together(unscoped_keys, patch(ExternalPool, "attachable", _attachable(domain=False))),
    ),
    Mutant("generation not bumped", patch(ExternalPool, "hand_out", _same_generation)),
    Mutant("scrub skips the tail", patch(ScrubQueue, "add", _without_tail)),
    Mutant("late sweep serves the expired", patch(ExternalPool, "attachable", _attachable(deadline=False))),
    Mutant("ceiling moved by attach", patch(ExternalPool, "attach", _sliding)),
    Mutant(
        "running block past its ceiling attached",
        patch(ExternalPool, "attachable", _attachable(ceiling=False)),
    ),
    Mutant(
        "hold renewed by foreign reader",
        patch(ExternalPool, "_holdable", lambda original: lambda self, tags, account: tags >= 0),
    ),
    Mutant("erase misses cached", patch(port_erasure._Covered, "__init__", without("holds", "domains"))),
    Mutant("erase misses running", patch(port_erasure._Covered, "__init__", without("running"))),
)
