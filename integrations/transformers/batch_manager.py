"""The engine's manager, governed: it keeps its cache in custody across sessions and files a claim with each request."""

from __future__ import annotations

import secrets
from contextvars import ContextVar
from typing import Any

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from kvcustody.integrations.transformers.claims import Claim, Claims

ACTING: ContextVar[Claim | None] = ContextVar("kvcustody_acting", default=None)


class GovernedManager(ContinuousBatchingManager):  # type: ignore[misc, unused-ignore]
    """The engine's manager, which keeps its governed cache across sessions and files a claim with each request."""

    claims: Claims

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, *rest: Any, **options: Any
    ) -> str | None:
        """The engine's `add_request`; inside `GovernedBatching.acting` the request is that principal's."""
        claim = ACTING.get()
        if claim is not None:
            request_id = request_id or f"req_{secrets.token_hex(8)}"
            self.claims.file(request_id, claim)
        added: str | None = super().add_request(input_ids, request_id, *rest, **options)
        if added is None and claim is not None and request_id is not None:
            self.claims.withdraw(request_id)
        return added

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = True,
        hard_stop: bool = False,
    ) -> None:
        """Stop the loop; the cache stays, in custody, whatever the caller asks (M2)."""
        super().stop(block=block, timeout=timeout, keep_for_next_session=True, hard_stop=hard_stop)

    def destroy(self) -> None:
        """Stop the loop; only `GovernedBatching.close` ends custody."""
        if self.is_running():
            self.stop()
