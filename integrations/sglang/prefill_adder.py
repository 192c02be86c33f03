"""SGLang's admission of waiting requests to a prefill batch, with the policy's word on each."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

_MADE: dict[type, type] = {}


def governed_adder(own: type[Any]) -> type[Any]:
    """A subclass of SGLang's adder: who must wait waits alone, and who is taken has attached what it found."""
    made = _MADE.get(own)
    if made is None:

        class GovernedPrefillAdder(own):  # type: ignore[misc]
            def add_one_req(self, req: Any, *given: Any, **named: Any) -> Any:
                if not self.tree_cache.may_start(req):
                    return AddReqResult.CONTINUE  # the next one's turn
                return super().add_one_req(req, *given, **named)

            def _commit_prefill_admission(self, req: Any, *given: Any, **named: Any) -> None:
                super()._commit_prefill_admission(req, *given, **named)
                self.tree_cache.begin(req)

        made = _MADE[own] = GovernedPrefillAdder
    return made
