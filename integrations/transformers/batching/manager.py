"""The engine's manager, governed: it keeps its cache in custody across sessions and files a claim with each request."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from kvcustody.errors import ConfigError, HandleError
from kvcustody.integrations.transformers.batching.request_claims import (
    CHILD_MARK,
    RequestClaim,
    RequestClaims,
)
from kvcustody.integrations.transformers.batching.thread_turn import Turn
from kvcustody.kernels.streams import capturing

ACTING: ContextVar[RequestClaim | None] = ContextVar("kvcustody_acting", default=None)


def _announced(capture: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(capture)
    def capture_graph(*args: Any, **kwargs: Any) -> None:
        with capturing():
            capture(*args, **kwargs)

    return capture_graph


class GovernedManager(ContinuousBatchingManager):  # type: ignore[misc, unused-ignore]
    """The engine's manager, which keeps its governed cache across sessions and files a claim with each request."""

    claims: RequestClaims
    turn: Turn | None = None  # of the custody, once there is one

    def warmup(self) -> None:
        """The engine's warm-up, in nobody's turn: dummy batches run and graphs are captured."""
        with self.turn.alone() if self.turn is not None else nullcontext():
            super().warmup()

    def guard_captures(self, turn: Turn) -> None:
        """From now on no custody is done while the engine records a graph, in its warm-up or later.

        Raises `ConfigError` where the engine records graphs in a way that this adapter does not know.
        """
        self.turn = turn
        runner: Any = getattr(self.batch_processor, "model_runner", None)
        capture = getattr(runner, "_capture_graph", None)
        if capture is not None:
            runner._capture_graph = _announced(capture)
        elif any(self.continuous_batching_config.cuda_graph_booleans):
            raise ConfigError(
                "this transformers records CUDA graphs in a place that is not known; set `use_cuda_graph=False`"
            )

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

    def collect(self, ids: Sequence[str]) -> dict[str, Any]:
        """Wait for the results of these requests and of their forks; forks come before their parent.

        Raises `HandleError` where the loop ends before.
        """
        forks = range(self.num_return_sequences - 1)
        wanted = [name for one in ids for name in (*(f"{one}{CHILD_MARK}{n}" for n in forks), one)]
        results: dict[str, Any] = {}
        # The prompt of a request that is refused is never forked: its children have no results.
        while not all(one in results for one in ids) or any(
            name not in results for name in wanted if results[name.partition(CHILD_MARK)[0]].error is None
        ):
            result = self.get_result(timeout=1)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None and not self.is_running():
                raise HandleError("the serving loop has failed; see its log")
        return {name: results[name] for name in wanted if name in results}

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = True,
        hard_stop: bool = False,
    ) -> None:
        """Stop the loop; the cache stays, in custody, whatever the caller asks (rule 2 of `governed_batching`)."""
        super().stop(block=block, timeout=timeout, keep_for_next_session=True, hard_stop=hard_stop)

    def destroy(self) -> None:
        """Stop the loop; only `GovernedBatching.close` ends custody."""
        if self.is_running():
            self.stop()
