"""Draws the sender of each request (tenant, subject, classification) and the subjects who ask for erasure, by seed.

1. Labels depend on (seed, unit key) alone, never on order or on block ids: the trace decides what could be shared,
   the labels who shares it.
2. A unit (session, lineage or project) belongs to one tenant; tenants follow the given weights, heaviest first.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import orjson

from kvcustody.errors import ConfigError
from kvcustody.lab.replay.traces.model import Key, TraceRequest
from kvcustody.lab.replay.traces.seeded_draws import draw, name_digest

Unit = Literal["session", "lineage", "project"]

CLASSIFICATION_SHARES = (("public", 0.10), ("internal", 0.55), ("confidential", 0.25), ("restricted", 0.10))


class Label(NamedTuple):
    """The sender of a request; `tenant` is its rank by weight (0 is the heaviest).

    `classification` is None where the policy decides it: for tenants that the trace names.
    """

    tenant: int
    subject: str
    session: Key
    classification: str | None


class ErasureLabel(NamedTuple):
    """A subject's request at `at_us` that all their data is erased."""

    at_us: int
    subject: str


class Labeller:
    """Draws labels for a population of tenants. `named`: the tenants that requests name themselves, by rank."""

    def __init__(
        self,
        weights: Sequence[float],
        *,
        tenants: int,
        seed: int,
        unit: Unit = "session",
        named: Sequence[str] = (),
    ) -> None:
        if tenants < 1 or tenants > len(weights):
            raise ConfigError(f"`{tenants}` tenants: the weights name {len(weights)}; use 1 to {len(weights)}")
        heaviest = np.sort(np.asarray(weights, dtype=np.float64))[::-1][:tenants]
        if not heaviest[0] > 0 or heaviest[-1] < 0:
            raise ConfigError(f"tenant weights must not be negative, got `{heaviest[-1]}`")
        self.tenants, self.seed, self.unit = tenants, seed, unit
        self._rank_of = {name: rank for rank, name in enumerate(named)}
        self._cumulative: list[float] = np.cumsum(heaviest / heaviest.sum()).tolist()
        self._steps: list[float] = np.cumsum([share for _, share in CLASSIFICATION_SHARES]).tolist()
        self._tenant_of: dict[Key, int] = {}
        self._class_of: dict[Key, str] = {}

    def label(self, request: TraceRequest) -> Label:
        """Return the label of one request; what the request itself names is not drawn."""
        tenant = self.tenant(self._unit_key(request)) if request.tenant is None else self._rank_of[request.tenant]
        subject = request.subject
        if subject is None:
            owner = request.session if self.unit == "session" else request.lineage
            subject = name_digest(self.seed, "subj", tenant, owner, size=6).hex()
        level = self.classification(request.session) if request.tenant is None else None
        return Label(tenant, subject, request.session, level)

    def tenant(self, key: Key) -> int:
        """Return the tenant that the unit `key` belongs to."""
        if key not in self._tenant_of:
            rank = bisect.bisect_left(self._cumulative, draw(self.seed, "tenant", key))
            self._tenant_of[key] = min(self.tenants - 1, rank)
        return self._tenant_of[key]

    def classification(self, session: Key) -> str:
        """Return the classification of a session's requests."""
        if session not in self._class_of:
            step = bisect.bisect_right(self._steps, draw(self.seed, "class", session))
            self._class_of[session] = CLASSIFICATION_SHARES[min(step, len(self._steps) - 1)][0]
        return self._class_of[session]

    def _unit_key(self, request: TraceRequest) -> Key:
        if self.unit == "session":
            return request.session
        return request.lineage if self.unit == "lineage" else request.project


def zipf_weights(tenants: int, exponent: float = 1.1) -> list[float]:
    """Return weights of a Zipf population, for runs without a weights file."""
    return [rank**-exponent for rank in range(1, tenants + 1)]


def load_weights(path: Path, model: str = "language/m-large") -> list[float]:
    """Return per-client request totals of one model from a client-skew file; raises `ConfigError`."""
    fix = 'expected {"models": {name: [{"total": requests, ...}, ...]}}'
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read weights `{path}`: {error.strerror or error}", path=str(path)) from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error.msg}); {fix}", path=str(path)) from None
    try:
        totals = [float(client["total"]) for client in document["models"][model]]
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{path}: no totals for model `{model}`; {fix}", path=str(path), model=model) from None
    return totals
