"""The owner of a request id (`RequestClaims`), and the adapter's facts about an admitted request (`RequestRecord`).

A claim is stated before the request enters the engine, and consumed once by it. The engine knows a request, its
children, its handler and its results by an id that its client chose, so:

1. An id is one request's of one principal until its last result was handed over (`end`). Whoever asks for it meanwhile
   is refused before anything is queued, and leaves nothing.
2. A forked child inherits by being forked, and keeps its parent's id in use. No client may choose a child's id.
3. A request without a claim is nobody's: it is admitted for the anonymous principal, and its blocks can be found by
   no other request, whatever the policy shares. A policy that admits no such tenant refuses it.
4. `reported_tokens <= room_tokens`; the latter is what its block table holds: a token beyond it waits for a block.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping
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
CANCEL_MARK = "cancel "  # before an id: its cancellation, which the engine has yet to carry out
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
        """Return the same claim with a secret key: it reuses nothing, and serves only its own forks."""
        nonce = PromptEmbeddings(secrets.token_bytes(32), (), "private")
        return self._replace(extras={0: frame(nonce)})


class _UsedId:
    """An id in use: `open_names` are its request, children and cancellations that have not ended."""

    __slots__ = ("open_names", "owner")

    def __init__(self, owner: Principal | None) -> None:
        self.owner = owner
        self.open_names: set[str] = set()


class RequestClaims:
    """The owners of ids, and claims that wait for their request. Any thread may call; the engine's thread takes."""

    def __init__(self, anonymous: Principal = ANONYMOUS) -> None:
        self._anonymous = RequestClaim(anonymous)
        self._waiting: dict[str, RequestClaim] = {}
        self._used: dict[str, _UsedId] = {}
        self._lock = threading.Lock()

    def file(self, request_id: str, claim: RequestClaim) -> None:
        """State the owner of the next request with this id.

        Raises `IdentityError` where the id is claimed or in use, or poses as a child.
        """
        with self._lock:
            self._check_free(request_id, claim.principal)
            self._waiting[request_id] = claim

    def enter(self, request_id: str, claim: RequestClaim | None) -> None:
        """Register a request that is about to be queued, under its own claim or the one filed for it.

        Raises `IdentityError` as `file` does.
        """
        with self._lock:
            filed = self._waiting.get(request_id) if claim is None else None
            owner = claim or filed
            self._check_free(request_id, None if owner is None else owner.principal, is_filed=filed is not None)
            used = self._used.setdefault(request_id, _UsedId(None if owner is None else owner.principal))
            used.open_names.add(request_id)
            if claim is not None:
                self._waiting[request_id] = claim

    def reserve(self, request_id: str, principal: Principal | None) -> None:
        """Reserve results of this id for `principal`'s handler: no one else may use the id until `end`.

        Raises `IdentityError` as `file` does.
        """
        with self._lock:
            self._check_free(request_id, principal)
            self._used.setdefault(request_id, _UsedId(principal))

    def _check_free(self, request_id: str, principal: Principal | None, *, is_filed: bool = False) -> None:
        if CHILD_MARK in request_id:
            raise IdentityError(f"request id `{request_id}` poses as a forked child", field="request_id")
        used = self._used.get(request_id)
        if used is not None and (used.open_names or used.owner != principal):
            raise IdentityError(f"request id `{request_id}` is in use", field="request_id")
        if request_id in self._waiting and not is_filed:
            raise IdentityError(f"request id `{request_id}` is claimed already", field="request_id")

    def keep_open(self, request_id: str, names: Iterable[str]) -> None:
        """Keep an id in use until its forked children, or its cancellation, have ended."""
        with self._lock:
            used = self._used.get(request_id.partition(CHILD_MARK)[0])
            if used is not None and used.open_names:
                used.open_names.update(names)

    def end(self, name: str) -> None:
        """End an id's request or child after its last result, or without one; a second call does nothing."""
        request_id = name.partition(CHILD_MARK)[0].removeprefix(CANCEL_MARK)
        with self._lock:
            if name == request_id:
                self._waiting.pop(name, None)
            used = self._used.get(request_id)
            if used is not None:
                used.open_names.discard(name)
                if not used.open_names:
                    del self._used[request_id]

    def is_others(self, request_id: str, claim: RequestClaim | None) -> bool:
        """Return whether an id belongs to another than this claim's owner; without a claim the server acts."""
        with self._lock:
            used = self._used.get(request_id.partition(CHILD_MARK)[0])
            return claim is not None and used is not None and used.owner != claim.principal

    def take(self, request_id: str) -> RequestClaim:
        """Return the claim of a request that enters now; a private one without an owner where there is none (rule
        3).
        """
        with self._lock:
            claim = self._waiting.pop(request_id, None)
        return self._anonymous.private() if claim is None else claim

    def is_nobodys(self, claim: RequestClaim) -> bool:
        """Return whether a claim stands for "no claim"."""
        return claim.principal is self._anonymous.principal


class RequestRecord:
    """One admitted request: the Governor knows `reported_tokens`, and its blocks can hold `room_tokens`."""

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
