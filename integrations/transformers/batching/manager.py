"""The engine's manager, governed: it keeps its cache in custody across sessions and files a claim for each request.

1. An id is its owner's (`request_claims`): its results, its handler and its cancellation too. It is free again when its
   last result was taken from the queue, when its handler had it, or when it was cancelled.
2. An id that nobody chose cannot be guessed, so nobody can be in its way.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from queue import Queue
from time import monotonic
from typing import Any

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from kvcustody.errors import ConfigError, HandleError, IdentityError
from kvcustody.integrations.transformers.batching.request_claims import (
    CANCEL_MARK,
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


class ResultQueue(Queue[Any]):
    """The engine's queue of results; taking a final result frees its id."""

    def __init__(self, claims: RequestClaims) -> None:
        super().__init__()
        self._claims = claims

    def _get(self) -> Any:
        return self._taken(super()._get())

    def _taken(self, result: Any) -> Any:
        if result.is_finished():
            self._claims.end(result.request_id)
        return result

    def find(self, request_id: str, timeout_seconds: float | None) -> Any:
        """Return the first result of this id and leave all others; None where none comes in time."""
        until = None if timeout_seconds is None else monotonic() + timeout_seconds
        with self.not_empty:
            while True:
                for at, result in enumerate(self.queue):
                    if result.request_id == request_id:
                        del self.queue[at]
                        return self._taken(result)
                left = None if until is None else until - monotonic()
                if left is not None and left <= 0:
                    return None
                self.not_empty.wait(left)


class GovernedManager(ContinuousBatchingManager):  # type: ignore[misc, unused-ignore]
    """The engine's manager, with a governed cache across sessions and a claim for each request."""

    claims: RequestClaims
    turn: Turn | None = None  # of the custody, once there is one

    def warmup(self) -> None:
        """Warm up as the engine does, without an owner: dummy batches run and graphs are captured."""
        with self.turn.alone() if self.turn is not None else nullcontext():
            super().warmup()

    def guard_captures(self, turn: Turn) -> None:
        """Do no custody while the engine records a graph, in its warm-up or later.

        Raises `ConfigError` where the engine records graphs in a way that this adapter does not know.
        """
        self.turn = turn
        runner: Any = getattr(self.batch_processor, "model_runner", None)
        capture = getattr(runner, "_capture_graph", None)
        if capture is not None:
            runner._capture_graph = _announced(capture)
        elif any(self.continuous_batching_config.cuda_graph_booleans):
            raise ConfigError("this transformers records CUDA graphs in an unknown place; set `use_cuda_graph=False`")

    def bind_ids(self, claims: RequestClaims) -> None:
        """Bind ids to their owners. Call it before the first request (rule 1, rule 2)."""
        self.claims = claims
        self.output_router.output_queue = ResultQueue(claims)
        self._request_counter = secrets.randbelow(1 << 62)

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, *rest: Any, **options: Any
    ) -> str | None:
        """Add a request as the engine does; inside `GovernedBatching.acting` it is that principal's.

        Raises `IdentityError` where the id is claimed or in use: nothing is queued then.
        """
        request_id = request_id or f"req_{secrets.token_hex(8)}"
        self.claims.enter(request_id, ACTING.get())
        added: str | None = None
        try:
            added = super().add_request(input_ids, request_id, *rest, **options)
        finally:
            if added is None:
                self.end(request_id)
        return added

    def end(self, name: str) -> None:
        """End a request that has no result to take."""
        with self.output_router._lock:
            self.output_router.result_handlers.pop(name, None)
        self.claims.end(name)

    def register_result_handler(self, request_id: str, callback: Callable[[Any], object]) -> None:
        """Register a handler as the engine does, for the acting principal.

        Raises:
            IdentityError: the id is another's, or in use.
        """
        claim = ACTING.get()
        if CHILD_MARK not in request_id:
            self.claims.reserve(request_id, None if claim is None else claim.principal)
        elif self.claims.is_others(request_id, claim):
            raise IdentityError(f"request id `{request_id}` is in use", field="request_id")

        def handed_over(result: Any) -> None:
            callback(result)
            if result.is_finished():  # behind the engine's own end of the handler
                asyncio.get_running_loop().call_soon(self.claims.end, request_id)

        super().register_result_handler(request_id, handed_over)

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request as the engine does; do nothing where the id is not the acting principal's."""
        if not self.claims.is_others(request_id, ACTING.get()):
            self.claims.keep_open(request_id, (CANCEL_MARK + request_id,))
            super().cancel_request(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Any:
        """Return the engine's result; None where the id is not the acting principal's."""
        if request_id is None:
            return super().get_result(timeout=timeout)
        if self.claims.is_others(request_id, ACTING.get()):
            return None
        results = self.output_router.output_queue
        assert isinstance(results, ResultQueue), "bound before the first request"
        has_ended = self._generation_thread is None or self.background_thread_status.fatal_error is not None
        return results.find(request_id, 0 if results.empty() and has_ended else timeout)

    def collect(self, ids: Sequence[str]) -> dict[str, Any]:
        """Wait for these requests' results and their forks'; forks come before their parent.

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
        """Stop the loop; the cache stays in custody, whatever the caller requests (rule 2 of `governed_batching`)."""
        super().stop(block=block, timeout=timeout, keep_for_next_session=True, hard_stop=hard_stop)

    def destroy(self) -> None:
        """Stop the loop; only `GovernedBatching.close` ends custody."""
        if self.is_running():
            self.stop()
