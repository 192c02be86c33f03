"""The sealed tiers of one engine process, all used by one thread: found copies are opened at once and claimed.

    claim = thread.claim(standing, keys, depth)     # opened content; None: nothing is there
    with thread.hold(claim.number) as content: …    # while it is copied to the device
    thread.keep(run)                                # what the device computed, sealed

1. The engine relies on a promise of tokens, and a promise cannot be withdrawn. So blocks are promised when they are
   opened, not when they are found. A load never overlaps an erasure or a deadline. While a claim is open, the worker
   takes no step, until the engine was quiet for `_QUIET_SECONDS` or `_CLAIM_SECONDS` have passed.
2. A claim that nobody held by then is zeroed. Its load fails, which stops the engine: nothing else would be correct. So
   a block is not promised if it is due before a claim must be held.
3. Blocks are not kept if their request's subject was erased since. Neither are blocks behind one whose permitted
   lifetime is unknown. A block lives no longer than the one before it.
4. Every buffer with content is zeroed after use.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import NamedTuple

from kvcustody.clock import MICROSECONDS
from kvcustody.errors import IsolationError
from kvcustody.governance.decisions.access_plan import owed_by
from kvcustody.governance.edge.erase_epochs import KnownEpochs
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.request import NO_HINTS, Hints
from kvcustody.governance.settings import Settings
from kvcustody.governance.tiers.copies.index import KEY_BYTES, PublishedRun, shred_name
from kvcustody.governance.tiers.tier import in_time
from kvcustody.integrations.lmcache.custody_thread import Chunks, CustodyThread
from kvcustody.integrations.tensorrt_llm.derived_salt import DerivedSalts, Standing
from kvcustody.logger import get_logger
from kvcustody.policies.document.model import Policy

_QUIET_SECONDS, _CLAIM_SECONDS = 5.0, 60.0
PROMISE_US = int(_CLAIM_SECONDS * MICROSECONDS)  # that what is promised lives at least
_ANSWER_SECONDS = 60.0
_CEILINGS_MAX = 1 << 20
_log = get_logger(__name__)


class Claim(NamedTuple):
    """One request's opened blocks, which wait for the device. `ceiling_us`: that of the shortest-lived."""

    number: int
    blocks: int
    ceiling_us: int


class ComputedRun(NamedTuple):
    """Whole blocks that the device computed for a request with this standing."""

    standing: Standing
    keys: bytes
    parent: bytes
    depth: int
    ceiling_us: int


class _OpenClaim:
    def __init__(self, content: list[bytearray]) -> None:
        self.content = content
        self.until = monotonic() + _CLAIM_SECONDS
        self.is_held = False

    def zero(self) -> None:
        for part in self.content:
            part[:] = bytes(len(part))


def short_lived(policy: Policy) -> list[str]:
    """Return the classifications whose retention is shorter than what this connector promises."""
    kept = zip(policy.classifications, policy.retention, policy.offload, strict=True)
    return [
        name
        for name, times, offload in kept
        if offload.tiers and 0 < min(times.idle_us, times.absolute_us) <= PROMISE_US
    ]


class TransferThread(CustodyThread):
    """The transfer thread of one engine process."""

    def __init__(self, settings: Settings) -> None:
        """Raises `ConfigError` that names a setting that is missing."""
        super().__init__(settings)
        self.salts = DerivedSalts(reuses_on_device=not settings.strict)
        self.model: ModelIdentity | None = None
        self.counts: Counter[str] = Counter()
        self._claims: dict[int, _OpenClaim] = {}
        self._claims_lock = threading.Lock()
        self._active_at = monotonic()  # when the engine last asked for a claim, or took one
        self._numbers = itertools.count(1)
        self._ceilings: OrderedDict[bytes, int] = OrderedDict()

    def _opened(self, stack: ExitStack) -> Chunks:
        """Return the opened worker; log retentions in the policy that are too short for this connector."""
        chunks = super()._opened(stack)
        short = short_lived(chunks.governor.table.policy)
        if short:
            _log.warning(
                "blocks that expire before a promised load would end are not loaded from tiers",
                classifications=short,
                promise_seconds=_CLAIM_SECONDS,
            )
        return chunks

    def step_worker(self, chunks: Chunks) -> None:
        """Run the worker's step, except while a claim is open (rule 1)."""
        now = monotonic()
        with self._claims_lock:
            for number, one in list(self._claims.items()):
                if not one.is_held and now >= min(one.until, self._active_at + _QUIET_SECONDS):
                    one.zero()
                    del self._claims[number]
                    _log.error("claimed blocks were never loaded", claim=number)
            if self._claims:
                return
        super().step_worker(chunks)

    def close(self) -> None:
        """Stop the worker and zero unclaimed content; content that is being copied zeroes itself."""
        super().close()
        with self._claims_lock:
            for number, one in list(self._claims.items()):
                if not one.is_held:
                    one.zero()
                    del self._claims[number]

    # -- asked by the engine's thread and the door ----------------------------------------------------------------

    def derive(self, principal: Principal, hints: Hints = NO_HINTS) -> str:
        """Return a request's salt (`derived_salt`).

        Raises:
            CustodyError: there is none.
        """
        model = self.model
        assert model is not None, "the model is known before the first request"
        return self.run(lambda chunks: self.salts.derive(chunks, principal, model, hints)).result(_ANSWER_SECONDS)

    def known_epochs(self) -> KnownEpochs | None:
        """Return the worker's erase epochs for events; None before the first ones."""
        return self.run(lambda chunks: chunks.governor.epochs.known).result(_ANSWER_SECONDS)

    def standing(self, salt: object) -> Standing | None:
        """Return a salt's owner."""
        return self.run(lambda chunks: self.salts.standing(chunks, salt)).result(_ANSWER_SECONDS)

    def claim(self, standing: Standing, keys: bytes, depth: int) -> Claim | None:
        """Open what continues from `depth`; None where nothing does."""
        return self.run(lambda chunks: self._claim(chunks, standing, keys, depth)).result(_ANSWER_SECONDS)

    def ceiling(self, standing: Standing, before: bytes | None, claimed_us: int | None) -> int:
        """Return until when a request's computed blocks may live; 0: they are not kept (rule 3). `before`: the
        preceding block.
        """
        return self.run(lambda chunks: self._ceiling(chunks, standing, before, claimed_us)).result(_ANSWER_SECONDS)

    def keep(self, run: ComputedRun, content: bytearray) -> int:
        """Seal computed blocks and return how many are new. A failed block is not kept. `content` is zeroed."""
        try:
            return self.run(lambda chunks: self._keep(chunks, run, memoryview(content))).result(_ANSWER_SECONDS)
        except Exception as error:  # whatever it was: it is computed again
            _log.error("blocks could not be stored", error=repr(error))
            return 0
        finally:
            content[:] = bytes(len(content))

    @contextmanager
    def hold(self, number: int) -> Iterator[list[bytearray]]:
        """Yield a claim's content while it is copied.

        Raises:
            IsolationError: the claim is gone (rule 2).
        """
        with self._claims_lock:
            claim = self._claims.get(number)
            if claim is None:
                raise IsolationError(
                    f"claim `{number}`: blocks that were promised to the engine are gone; it is stopped, for it would "
                    "take what is in them for theirs",
                    claim=number,
                )
            claim.is_held = True
            self._active_at = monotonic()
        try:
            yield claim.content
        finally:
            self.drop(number)

    def drop(self, number: int) -> None:
        """Zero a claim that has ended, or that is not wanted any more; a second call does nothing."""
        with self._claims_lock:
            one = self._claims.pop(number, None)
        if one is not None:
            one.zero()

    # -- on the thread ----------------------------------------------------------------------------------------------

    def _claim(self, chunks: Chunks, standing: Standing, keys: bytes, depth: int) -> Claim | None:
        label, size, now_us = standing.label, chunks.chunk_bytes, chunks.governor.clock.now_us
        if label is None or not standing.holds:
            return None
        parts: list[bytearray] = []
        at, ceiling_us, goes_on = depth, 1 << 62, True
        while goes_on:
            goes_on = False
            for tier in chunks.tiers:
                copies = tier.lookup(label, keys, at)
                if not copies:
                    continue
                part, first = bytearray(sum(one.blocks for one in copies) * size), at

                def write(
                    to: int,
                    count: int,
                    skip: int,
                    data: memoryview,
                    part: bytearray = part,
                    first: int = first,
                ) -> None:
                    begin = (to - first) * size
                    part[begin : begin + count * size] = data[skip * size : (skip + count) * size]

                come = in_time(tier.load(label, keys, at, copies, write), now_us() + PROMISE_US)
                blocks = sum(one.blocks for one in come)
                part[blocks * size :] = bytes(len(part) - blocks * size)
                if blocks:
                    parts.append(part)
                    ceiling_us = min(ceiling_us, *(one.ceiling_us for one in come))
                    at, goes_on = at + blocks, True
        if at == depth:
            return None
        for depth_of in range(depth, at):
            self._remember(keys[KEY_BYTES * depth_of : KEY_BYTES * (depth_of + 1)], ceiling_us)
        claim = Claim(next(self._numbers), at - depth, ceiling_us)
        with self._claims_lock:
            self._claims[claim.number] = _OpenClaim(parts)
            self._active_at = monotonic()
        self.counts["claimed blocks"] += claim.blocks
        return claim

    def _ceiling(self, chunks: Chunks, standing: Standing, before: bytes | None, claimed_us: int | None) -> int:
        label = standing.label
        if label is None or not standing.holds:
            return 0
        own_us = chunks.governor.clock.now_us() + owed_by(chunks.governor.table, label.tenant, label.level).absolute_us
        if before is not None:
            known = self._ceilings.get(before)
            if known is None:
                return 0
            own_us = min(own_us, known)
        return own_us if claimed_us is None else min(own_us, claimed_us)

    def _keep(self, chunks: Chunks, run: ComputedRun, content: memoryview) -> int:
        label, size = run.standing.label, chunks.chunk_bytes
        if label is None or len(content) != len(run.keys) // KEY_BYTES * size:
            return 0
        if chunks.shred.of_subject(shred_name(label.tenant, label.subject), label.tenant).id != run.standing.subject:
            self.counts["refused: erased"] += 1
            return 0
        now_us = chunks.governor.clock.now_us()
        owed = owed_by(chunks.governor.table, label.tenant, label.level)
        due_us = min(run.ceiling_us, now_us + owed.idle_us)
        published = PublishedRun(label, run.keys, run.parent, run.depth, now_us, run.ceiling_us, due_us)

        def read(first: int, count: int, into: memoryview) -> None:
            into[:] = content[first * size : (first + count) * size]

        for at in range(0, len(run.keys), KEY_BYTES):
            self._remember(run.keys[at : at + KEY_BYTES], run.ceiling_us)
        for tier in chunks.tiers:
            if tier.admits(label):
                kept = tier.store(published, read)
                self.counts["kept blocks"] += kept
                return kept
        self.counts["refused: policy"] += 1
        return 0

    def _remember(self, key: bytes, ceiling_us: int) -> None:
        self._ceilings[key] = ceiling_us
        self._ceilings.move_to_end(key)
        if len(self._ceilings) > _CEILINGS_MAX:
            self._ceilings.popitem(last=False)
