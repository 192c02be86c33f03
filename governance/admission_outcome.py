"""What admission answers: admitted, refused, or deferred. A denied reuse is a miss, never a refusal."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Admission(NamedTuple):
    """A request is in. `blocks` is its block table so far (int64, read-only); `hit_tokens` need no prefill.

    `earlier_tokens` of them are its own work from before it was preempted, or its parent's: no benefit of the cache.
    """

    request_id: Hashable
    hit_tokens: int
    blocks: NDArray[np.int64]
    slot: int
    earlier_tokens: int = 0


_TOO_LARGE = "prompt and new tokens need"


class AdmissionRefused(NamedTuple):
    """A request can never be served as it is; `reason` names what to change and nobody else's state."""

    request_id: Hashable
    reason: str

    @classmethod
    def too_large(cls, request_id: Hashable, needed: int, most: int) -> AdmissionRefused:
        """Refuse a request that could not run even alone: it needs more blocks than its tenant may have."""
        return cls(request_id, f"{_TOO_LARGE} `{needed}` blocks, the tenant may have `{most}`; ask for fewer tokens")

    @property
    def is_too_large(self) -> bool:
        """Whether the request needs more blocks than its tenant can ever have."""
        return self.reason.startswith(_TOO_LARGE)


class Deferred(NamedTuple):
    """A request must wait; it changed nothing for anybody else. Reasons: over-quota, pool-full, ledger."""

    request_id: Hashable
    reason: str


AdmissionOutcome = Admission | AdmissionRefused | Deferred
