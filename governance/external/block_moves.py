"""What an engine did with its blocks, told block by block, in the order in which it happened (engine_port, T4–T6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcustody.allocator.external.residency import ForeignResidency
from kvcustody.allocator.pool.block_state import Blocks
from kvcustody.allocator.prefix.node import NEVER_US
from kvcustody.governance.admission_outcome import AdmissionRefused
from kvcustody.governance.decisions.access_plan import Plan
from kvcustody.governance.external import custody_events as port_evidence
from kvcustody.governance.external.admission_and_lookup import PortReading
from kvcustody.governance.external.block_keys import KeyChain
from kvcustody.governance.request import Tokens, read_prompt


class PortMoves(PortReading):
    """Hand-outs, attaches, publications, releases; each may be told late, with the instant of its happening."""

    # -- what the engine did ------------------------------------------------------------------------------------------

    def attached(
        self, residency: ForeignResidency, blocks: Sequence[int], *, at_us: int | None = None
    ) -> None:
        """The engine took references on these cached or running blocks for the request.

        `at_us`, here and below: when it did, on the boot-time clock, where that is not now (T5).
        """
        if blocks:
            now_us = self._clock.now_us() if at_us is None else at_us
            self.pool.attach(residency, np.array(blocks, dtype=np.int64))
            self._begin(residency, now_us)

    def handed_out(
        self, residency: ForeignResidency, blocks: Sequence[int], *, at_us: int | None = None
    ) -> None:
        """The engine gave these blocks to the request; what they held is scrubbed before the coming step (T4)."""
        if not blocks:
            return
        which: Blocks = np.array(blocks, dtype=np.int64)
        now_us = self._clock.now_us() if at_us is None else at_us
        boundary = residency.segment_blocks
        if boundary:
            self._hand_out_by_domain(residency, which, boundary, now_us)
        else:
            self.pool.hand_out(residency, which, residency.domain, now_us)
        self._begin(residency, now_us)

    def handed_out_each(self, residencies: Sequence[ForeignResidency], blocks: Sequence[int]) -> None:
        """`handed_out` of one block each, to requests that have begun: the growth of a decode step."""
        if blocks:
            self.pool.hand_out_each(residencies, np.array(blocks, dtype=np.int64), self._clock.now_us())

    def _hand_out_by_domain(
        self, residency: ForeignResidency, blocks: Blocks, boundary: int, now_us: int
    ) -> None:
        """Blocks of a declared segment belong to its domain, and are charged to its owner."""
        segment = residency.segment_domain
        assert segment is not None
        have = len(residency.attached) + sum(len(run) for run, _ in residency.handed)
        inside = max(0, min(boundary - have, len(blocks)))
        if inside:
            self.pool.hand_out(residency, blocks[:inside], segment, now_us)
        if inside < len(blocks):
            self.pool.hand_out(residency, blocks[inside:], residency.domain, now_us)

    def _begin(self, residency: ForeignResidency, now_us: int) -> None:
        if not residency.is_opened:
            residency.is_opened = True
            residency.began_us = now_us
            self._starting.append(residency)
            plan = residency.facts
            if isinstance(plan, Plan) and plan.active_us < NEVER_US:
                self._active.push(residency.began_us + plan.active_us, residency)

    def published(
        self, residency: ForeignResidency, blocks: Sequence[int], before: int = -1, *, chained: bool = True
    ) -> None:
        """These blocks are in the engine's index under the request's keys; the first continues block `before`.

        `chained` False: blocks of a layer group whose children are reachable without them (a sliding window).
        """
        if not blocks:
            return
        if not residency.publishes or residency.granted_blocks > len(residency.attached):
            self._engine.evict(blocks)  # not in the owner's domain, and in nobody's without a decision
            return
        self.pool.publish(np.array(blocks, dtype=np.int64), before, chained=chained)

    def published_each(self, blocks: Sequence[int], before: Sequence[int]) -> None:
        """`published` of one block each, all of requests that publish: what a decode step filled."""
        if blocks:
            self.pool.publish_each(blocks, before)

    def unpublished(self, blocks: Sequence[int], cause: str = "evicted") -> None:
        """The engine forgot these blocks' keys by itself; the unreferenced ones end."""
        if blocks:
            self._catch_up()
            which = np.array(blocks, dtype=np.int64)
            self._obey(self.pool.unpublish(which, cause, self._clock.now_us()))

    def let_go(self, residency: ForeignResidency, blocks: Sequence[int]) -> None:
        """A running request gave these blocks back, as a sliding window does."""
        if blocks:
            self._record_starting()
            which = np.array(blocks, dtype=np.int64)
            self._obey(self.pool.let_go(residency, which, self._clock.now_us()))

    def release(
        self,
        residency: ForeignResidency,
        cause: str = "finished",
        *,
        at_us: int | None = None,
        fence: int | None = None,
    ) -> bool:
        """The request ended, or was preempted; False where it had ended already (L4).

        `fence`: the newest one that was open when it ended, 0 for none, where that is not now (T5).
        """
        if self._running.get(residency.request_id) is not residency:  # or a resumed one has its place
            return False
        del self._running[residency.request_id]
        account = residency.account
        if residency.is_reserved:
            account.charge_active(-residency.reserved_blocks)
            residency.is_reserved = False
        if not residency.is_opened:
            residency.is_running = False
            return True
        self._record_starting()
        now_us = self._clock.now_us() if at_us is None else at_us
        written = port_evidence.written(residency, self.pool)
        forget = self.pool.release(residency, cause, now_us, fence)
        self._outbox.append(port_evidence.released(residency, written, cause, now_us))
        forget += self.pool.over_residencies(account, now_us)
        self._obey(forget)
        return True

    def keeps_until(self, residency: ForeignResidency, at_us: int, *, others: int = 0) -> int:
        """Until when its release at that instant, after `others` of its tenant, leaves all its blocks in the index.

        On the boot-time clock; 0 where it may take some out.
        """
        domain, account = residency.domain, residency.account
        if (
            residency.publishes
            and not residency.is_mixed
            and domain.cacheable
            and domain.is_open
            and len(account.residencies) + others < account.residency_cap
        ):
            return min(at_us + domain.idle_us, residency.ceiling_us, residency.began_us + domain.absolute_us)
        return 0

    def resume(self, residency: ForeignResidency, tokens: Tokens) -> ForeignResidency | AdmissionRefused:
        """A preempted, released request waits to run again: its successor, with every token it has by now.

        The identity was verified at arrival; policy, keys and quota are those of the moment of its look-up.
        """
        if residency.request_id in self._running:
            return AdmissionRefused(residency.request_id, "request id is in use")
        again = self.pool.residency(
            residency.account,
            residency.domain,
            residency.principal,
            residency.facts,
            residency.request_id,
            self._clock.now_us(),
        )
        again.reserved_blocks = residency.reserved_blocks
        again.trace = residency.trace
        chain = residency.keys
        if isinstance(chain, KeyChain):
            prompt = read_prompt(tokens, self.block_tokens, chain.prompt.extras, keep_last=self._keep_last)
            again.keys = KeyChain(prompt, single_group=chain.single_group, epoch=-1)
        else:
            again.publishes = False
        self._running[again.request_id] = again
        return again
