"""Who a request id belongs to (`RequestClaims`), and what the adapter remembers of an admitted one (`RequestRecord`).

A claim is stated before the request enters the engine, and consumed once by it.

1. An id has at most one claim, and a claim serves one request: a second request under the id has none.
2. A forked child inherits by being forked; an id that merely looks like a child's inherits nothing.
3. A request without a claim is nobody's: it is admitted for the anonymous principal, and its blocks can be found by
   no other request, whatever the policy shares. A policy that admits no such tenant refuses it.
4. `reported_tokens <= room_tokens`; the latter is what its block table holds: a token beyond it waits for a block.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from typing import NamedTuple

from kvcustody.allocator.manager.block_manager import BlockManager
from kvcustody.allocator.pool.accounting import Account
from kvcustody.errors import IdentityError
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.governance.identity.extra_content import PromptEmbeddings, frame
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.ids import TenantId
from kvcustody.tenants import OWN

ANONYMOUS = Principal(OWN, TenantId("anonymous"))
CHILD_MARK = "__child#"
_NOTHING: Mapping[int, bytes] = {}


class RequestClaim(NamedTuple):
    """On whose behalf a request runs. `extras`: content that keys its blocks besides the tokens; `trace`: the W3C trace
    id that it came with (`Governor.admit`)."""

    principal: Principal
    route: str | None = None
    hints: Hints = NO_HINTS
    extras: Mapping[int, bytes] = _NOTHING
    trace: str = ""

    @property
    def is_private(self) -> bool:
        """Whether no other request can ever find this one's blocks."""
        return bool(self.extras)

    def private(self) -> RequestClaim:
        """The same claim, keyed by something that nobody knows: it reuses nothing, and serves its own forks alone."""
        nonce = PromptEmbeddings(secrets.token_bytes(32), (), "private")
        return self._replace(extras={0: frame(nonce)})


class RequestClaims:
    """Claims that wait for their request. Any thread may file; the engine's thread takes."""

    def __init__(self, anonymous: Principal = ANONYMOUS) -> None:
        self._anonymous = RequestClaim(anonymous)
        self._waiting: dict[str, RequestClaim] = {}
        self._lock = threading.Lock()

    def file(self, request_id: str, claim: RequestClaim) -> None:
        """State whose `request_id` is. Raises `IdentityError` where it is claimed, or poses as a child."""
        if CHILD_MARK in request_id:
            raise IdentityError(f"request id `{request_id}` poses as a forked child", field="request_id")
        with self._lock:
            if request_id in self._waiting:
                raise IdentityError(f"request id `{request_id}` is claimed already", field="request_id")
            self._waiting[request_id] = claim

    def withdraw(self, request_id: str) -> None:
        """Forget a claim whose request never entered."""
        with self._lock:
            self._waiting.pop(request_id, None)

    def take(self, request_id: str) -> RequestClaim:
        """The claim of a request that enters now; a private one of nobody's where there is none (rule 3)."""
        with self._lock:
            claim = self._waiting.pop(request_id, None)
        return self._anonymous.private() if claim is None else claim

    def is_nobodys(self, claim: RequestClaim) -> bool:
        """Whether a claim stands for there being none."""
        return claim.principal is self._anonymous.principal


class RequestRecord:
    """One admitted request: `reported_tokens` are known to the Governor, its blocks can hold `room_tokens`."""

    __slots__ = (
        "account",
        "claim",
        "handle",
        "hit_tokens",
        "manager",
        "prompt",
        "reported_tokens",
        "room_tokens",
        "slot",
        "tables",
    )

    def __init__(
        self,
        admission: Admission,
        claim: RequestClaim,
        plan: Plan[BlockManager],
        prompt: int,
        tables: list[list[int]],
        room_tokens: int,
    ) -> None:
        self.handle = admission.request_id
        self.slot = admission.slot
        self.hit_tokens = admission.hit_tokens
        self.claim = claim
        self.account: Account = plan.account
        self.manager: BlockManager = plan.manager
        self.prompt = prompt
        self.reported_tokens = prompt
        self.room_tokens = room_tokens
        self.tables = tables  # the engine's own, one for each allocator
