"""The scheduler half of the connector: a request's owner, our tiers' content for it, and the blocks to keep.

1. A request whose `cache_salt` is none of ours stops the engine: the engine would share its blocks with whoever sends
   the same. The door derives salts; who reaches the engine past it has to be kept out. Requests that the engine makes
   for itself have none, and are neither kept nor found.
2. What the engine reuses of its own is looked at: whole blocks alone, and never under a salt that nobody had before.
   Anything else says that this engine does not keep salts apart, and stops it.
3. A salt that does not hold any more (a period or a subject's key is over) finds nothing, and nothing is kept of it.
4. What a step computes is taken from the engine's own words, which have to fit what was promised.
5. Blocks that this request computed are kept, each in the step that fills it. Blocks that it found, here or in the
   engine, were kept by the request that computed them. So no block lives longer because it was reused.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from kvcustody.errors import IsolationError
from kvcustody.governance.request import pack_tokens
from kvcustody.integrations.tensorrt_llm.derived_salt import Standing
from kvcustody.integrations.tensorrt_llm.engine_protocol import (
    EngineRequest,
    LoadOrder,
    SaveOrder,
    ScheduledRequest,
    ScheduledStep,
    StepOrders,
    has_other_content,
)
from kvcustody.integrations.tensorrt_llm.transfer_thread import Claim, ComputedRun, TransferThread
from kvcustody.logger import get_logger

_SALTS_MAX = 1 << 16
Learn = Callable[[Standing, Sequence[int], Sequence[bytes]], None]
_log = get_logger(__name__)


class TransferState:
    """The state of one request. `ceiling_us` 0: nothing of it is kept."""

    def __init__(self, salt: str, standing: Standing, chain: BlockChain, device_blocks: int) -> None:
        self.salt = salt
        self.standing = standing
        self.chain = chain
        self.device_blocks = device_blocks
        self.claim: Claim | None = None
        self.claimed_blocks = 0
        self.ceiling_us = 0
        self.blocks: list[int] = []  # the device's, as allocated
        self.seen_blocks: list[int] = []  # as scheduled
        self.saved = 0
        self.computed_tokens = 0  # that have KV after the last step
        self.learned = 0


class SchedulerHalf:
    """The scheduler half. Called on the engine's thread."""

    def __init__(self, thread: TransferThread, block_tokens: int, learn: Learn | None = None) -> None:
        """Prepare the half. `learn` is called with the KV events' hashes of blocks and their owners."""
        self._thread = thread
        self._block_tokens = block_tokens
        self._learn = learn
        self._states: dict[int, TransferState] = {}
        self._had: OrderedDict[str, None] = OrderedDict()  # salts under which the engine has computed something
        self._forgot = False
        self._once: dict[int, str] = {}  # salts of one request alone, by its id
        self._runs: dict[int, ComputedRun] = {}
        self._numbered = 0
        self.counts: Counter[str] = Counter()

    def matched(self, request: EngineRequest, computed_tokens: int) -> int:
        """Return how many tokens behind `computed_tokens` our tiers load.

        Raises:
            IsolationError: the salt is not the request's (rules 1, 2).
        """
        self._forget(request.request_id)  # the engine asks again for one that it had paused
        if request.is_dummy_request:
            return 0
        standing = self._standing(request)
        salt = request.cache_salt
        assert salt is not None, "it has a standing"
        self._check_reuse(salt, request.request_id, computed_tokens)
        self._note_salt(salt)
        if standing.once:
            self._once[request.request_id] = salt
        if computed_tokens and not standing.holds:
            self.counts["hits on the device under an expired salt"] += 1
        if has_other_content(request) or standing.label is None or not standing.holds:
            self.counts["blocks of this request are neither stored nor found"] += 1
            return 0
        tokens = request.get_tokens(0)
        chain = BlockChain(standing.domain, self._block_tokens)
        prompt = BlockChain(standing.domain, self._block_tokens)
        prompt.extend(tokens)
        depth, whole = computed_tokens // self._block_tokens, (len(tokens) - 1) // self._block_tokens
        state = self._states[request.request_id] = TransferState(salt, standing, chain, depth)
        if depth < whole:
            state.claim = self._thread.claim(standing, prompt.run(0, whole), depth)
        claim = state.claim
        state.claimed_blocks = 0 if claim is None else claim.blocks
        before = prompt.run(depth - 1, depth) if depth else None
        state.ceiling_us = self._thread.ceiling(
            standing, before if claim is None else None, None if claim is None else claim.ceiling_us
        )
        state.saved = depth + state.claimed_blocks
        self.counts["matched blocks"] += state.claimed_blocks
        return state.claimed_blocks * self._block_tokens

    def allocated(self, request_id: int, blocks: Sequence[int]) -> None:
        """Take the device's blocks of a request, from the first on."""
        state = self._states.get(request_id)
        if state is not None:
            state.blocks = [int(one) for one in blocks]

    def orders(self, step: ScheduledStep) -> StepOrders:
        """Return what the worker half loads before this step, and keeps after it."""
        loads: list[LoadOrder] = []
        saves: list[SaveOrder] = []
        for one in step.new_requests:
            self._scheduled(one, loads, saves, is_first=True)
        for one in step.cached_requests:
            self._scheduled(one, loads, saves, is_first=False)
        return StepOrders(tuple(loads), tuple(saves))

    def take_run(self, number: int) -> ComputedRun:
        """Return the names of a save order's blocks."""
        return self._runs.pop(number)

    def finished(self, request: EngineRequest) -> None:
        """Take note that a request has ended; a second call does nothing."""
        self._forget(request.request_id)
        once = self._once.pop(request.request_id, None)
        if once is not None:
            self._had.pop(once, None)

    def _forget(self, request_id: int) -> None:
        state = self._states.pop(request_id, None)
        if state is not None and state.claim is not None:
            self._thread.drop(state.claim.number)

    def _standing(self, request: EngineRequest) -> Standing:
        standing = self._thread.standing(request.cache_salt)
        if standing is None:
            raise IsolationError(
                f"request `{request.request_id}` came to TensorRT-LLM without a `cache_salt` of ours: it would share "
                "its blocks with whoever sends the same; put `TrtllmScopeMiddleware` before its server, in the same "
                "process (`TLLM_WORKER_USE_SINGLE_PROCESS=1`), and let nothing reach the engine past it",
                request=request.request_id,
            )
        return standing

    def _check_reuse(self, salt: str, request_id: int, computed_tokens: int) -> None:
        if computed_tokens % self._block_tokens:
            raise IsolationError(
                f"request `{request_id}`: the engine reused `{computed_tokens}` tokens, which are no whole blocks; set "
                "`kv_cache_config.enable_partial_reuse` to `False`",
                tokens=computed_tokens,
            )
        if computed_tokens and salt not in self._had:
            if self._forgot:  # somebody with many subjects must not stop the engine for the others
                self.counts["hits under a salt that is no longer known"] += 1
                return
            raise IsolationError(
                f"request `{request_id}`: the engine reused `{computed_tokens}` tokens under a salt that nobody had: "
                "it does not keep salts apart; use a release that does",
                tokens=computed_tokens,
            )

    def _note_salt(self, salt: str) -> None:
        self._had[salt] = None
        self._had.move_to_end(salt)
        if len(self._had) > _SALTS_MAX:
            self._had.popitem(last=False)
            self._forgot = True

    def _scheduled(
        self, scheduled: ScheduledRequest, loads: list[LoadOrder], saves: list[SaveOrder], *, is_first: bool
    ) -> None:
        state = self._states.get(scheduled.request_id)
        if state is None:
            return
        if scheduled.cache_salt != state.salt:
            raise IsolationError(
                f"request `{scheduled.request_id}` has another salt in its step than when it was matched",
                request=scheduled.request_id,
            )
        expected = state.device_blocks * self._block_tokens if is_first else state.computed_tokens
        if scheduled.computed_position != expected:
            raise IsolationError(
                f"request `{scheduled.request_id}`: the engine says that `{scheduled.computed_position}` tokens have "
                f"KV, and `{expected}` have: what is to be kept is not known; use a release that tells the first step "
                "without what a connector promised",
                request=scheduled.request_id,
            )
        state.chain.extend(scheduled.new_tokens)
        state.seen_blocks += [int(block) for block in scheduled.new_block_ids]
        if state.claim is not None:
            first = state.device_blocks
            blocks = state.blocks[first : first + state.claimed_blocks]
            if len(blocks) != state.claimed_blocks or blocks != state.seen_blocks[first : first + len(blocks)]:
                raise IsolationError(
                    f"request `{scheduled.request_id}`: the engine scheduled other blocks than it allocated for what "
                    "was promised",
                    request=scheduled.request_id,
                )
            loads.append(LoadOrder(scheduled.request_id, state.claim.number, tuple(blocks)))
            state.claim = None
        computed = scheduled.computed_position + scheduled.num_scheduled_tokens
        if is_first:
            computed += state.claimed_blocks * self._block_tokens
        state.computed_tokens = computed
        known = min(len(scheduled.block_hashes), state.chain.blocks)
        if self._learn is not None and known > state.learned:
            keys = [state.chain.run(at, at + 1) for at in range(state.learned, known)]
            self._learn(state.standing, scheduled.block_hashes[state.learned : known], keys)
            state.learned = known
        last = min(computed // self._block_tokens, state.chain.blocks, len(state.seen_blocks))
        if last > state.saved and state.ceiling_us:
            self._numbered += 1
            run = ComputedRun(
                state.standing,
                state.chain.run(state.saved, last),
                state.chain.parent(state.saved),
                state.saved,
                state.ceiling_us,
            )
            self._runs[self._numbered] = run
            saves.append(SaveOrder(scheduled.request_id, self._numbered, tuple(state.seen_blocks[state.saved : last])))
        state.saved = max(state.saved, last)


# The keys of a request's whole blocks: digests of all tokens up to each block's end, under a key of its domain.
#
#     chain = BlockChain(domain_salt, block_tokens)
#     chain.extend(tokens)
#     chain.keys  # 32 bytes for each whole block

KEY_BYTES = 32
_TOKEN_BYTES = 4


class BlockChain:
    """The keys of a request's whole blocks: digests of all tokens up to each one's end, under a key of its domain."""

    def __init__(self, domain_salt: str, block_tokens: int) -> None:
        self._state = hashlib.blake2b(digest_size=KEY_BYTES, key=bytes.fromhex(domain_salt), person=b"kvcustody trtllm")
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._rest = b""
        self.keys = bytearray()
        self.tokens = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens.

        Raises:
            ConfigError: they are no token ids.
        """
        data = self._rest + pack_tokens([int(token) for token in tokens])
        size = self._block_bytes
        whole = len(data) // size
        for at in range(0, whole * size, size):
            self._state.update(data[at : at + size])
            self.keys += self._state.copy().digest()
        self._rest = data[whole * size :]
        self.tokens += len(tokens)

    @property
    def blocks(self) -> int:
        """The number of whole blocks."""
        return len(self.keys) // KEY_BYTES

    def run(self, first: int, last: int) -> bytes:
        """Return the keys of blocks [first, last)."""
        return bytes(self.keys[KEY_BYTES * first : KEY_BYTES * last])

    def parent(self, first: int) -> bytes:
        """Return the key before block `first`; zeros at the chain's start."""
        return self.run(first - 1, first) if first else bytes(KEY_BYTES)
