"""One request of the engine that was admitted, as the adapter remembers it until its release.

D1  `told <= room`, and `room` is what its block table holds: a token beyond it waits for a block.
"""

from __future__ import annotations

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Account
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.integrations.transformers.batching.request_claims import RequestClaim


class RequestRecord:
    """One admitted request. `told`: tokens that the Governor knows of; `room`: tokens that its blocks can hold."""

    __slots__ = (
        "account",
        "claim",
        "handle",
        "hit_tokens",
        "manager",
        "prompt",
        "room",
        "slot",
        "table",
        "told",
    )

    def __init__(
        self,
        admission: Admission,
        claim: RequestClaim,
        plan: Plan[BlockManager],
        prompt: int,
        table: list[int],
        room: int,
    ) -> None:
        self.handle = admission.request_id
        self.slot = admission.slot
        self.hit_tokens = admission.hit_tokens
        self.claim = claim
        self.account: Account = plan.account
        self.manager: BlockManager = plan.manager
        self.prompt = prompt
        self.told = prompt
        self.room = room
        self.table = table
