"""What admission answers: admitted, refused, or deferred. A denied reuse is a miss, never a refusal."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Admission(NamedTuple):
    """A request is in. `blocks` is its block table so far (int64, read-only); `hit_tokens` need no prefill."""

    request_id: Hashable
    hit_tokens: int
    blocks: NDArray[np.int64]
    slot: int


class AdmissionRefused(NamedTuple):
    """A request can never be served as it is; `reason` names what to change and nobody else's state."""

    request_id: Hashable
    reason: str


class Deferred(NamedTuple):
    """A request must wait; it changed nothing for anybody else. Reasons: over-quota, pool-full, ledger."""

    request_id: Hashable
    reason: str


AdmissionOutcome = Admission | AdmissionRefused | Deferred
