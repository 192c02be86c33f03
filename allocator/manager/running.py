"""Sequences that run: what they have computed, the room they grow into, and their forks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcustody.allocator.manager.admission import ManagerAdmission
from kvcustody.allocator.pool.accounting import Account
from kvcustody.allocator.prefix.node import PathResidency
from kvcustody.allocator.prefix.sequence import Sequence
from kvcustody.errors import CapacityError, HandleError


class ManagerRunning(ManagerAdmission):
    """Publishes, extends and forks sequences."""

    def commit(self, sequence: Sequence, computed_tokens: int, now_us: int) -> None:
        """The first `computed_tokens` tokens have their K/V; publishes the whole blocks among them (L10)."""
        slot = sequence.slot
        if slot < 0:
            return
        if computed_tokens > int(self.decode.length[slot]):
            raise CapacityError(
                f"request `{sequence.id}`: `{computed_tokens}` tokens computed, "
                f"`{int(self.decode.length[slot])}` admitted"
            )
        self.decode.computed[slot] = computed_tokens
        self.publication.publish(sequence, computed_tokens // self.options.block_tokens, now_us)

    def extend_many(
        self, slots: NDArray[np.int64], tokens: NDArray[np.int32] | None, now_us: int
    ) -> list[Sequence]:
        """Make room for one more accepted token in each slot; all earlier ones are computed.

        `tokens`: their ids, int32 of the same shape, or None where the engine withholds them (then the blocks are
        never published). Returns the sequences that got no room; they are unchanged.
        """
        table, size = self.decode, self.options.block_tokens
        length = table.length[slots]
        if not length.all():
            raise HandleError(f"slots `{slots[length == 0].tolist()}` are not running")
        stalled = self._unshare(slots, now_us) if self._forked else []
        stalled += self._grow(slots[length >= table.capacity[slots]], now_us)
        if stalled:
            keep = ~np.isin(slots, [sequence.slot for sequence in stalled])
            slots, length = slots[keep], length[keep]
            tokens = None if tokens is None else tokens[keep]
        table.computed[slots] = length
        table.length[slots] = length + 1
        at = length % size
        if tokens is not None:
            table.pending[slots, at] = tokens
        for slot in slots[at == size - 1].tolist():
            self._key_block(slot, tokens is not None)
        return stalled

    def fill(self, sequence: Sequence, tokens: NDArray[np.int32] | None) -> None:
        """The last block of `sequence` is full, and all of it is computed.

        `tokens`: the ids that fill it, int32, as many as it had room for; None where the engine withholds them (then
        neither this block nor what follows is ever published). Raises `HandleError` where it has ended, `CapacityError`
        where the tokens do not end with the block or would be written into a tail that others share.
        """
        table, slot, size = self.decode, sequence.slot, self.options.block_tokens
        if slot < 0:
            raise HandleError(f"request `{sequence.id}` is not running", request_id=sequence.id)
        length, capacity = int(table.length[slot]), int(table.capacity[slot])
        missing = capacity - length
        if (
            (tokens is not None and len(tokens) != missing)
            or missing >= size
            or (missing and sequence.shared_tail is not None)
        ):
            raise CapacityError(
                f"request `{sequence.id}`: `{missing}` tokens fill its last block, not `{tokens}`; a block of its own "
                "begins with `extend_many`"
            )
        table.length[slot] = table.computed[slot] = capacity
        if missing:
            if tokens is not None:
                table.pending[slot, size - missing :] = tokens
            self._key_block(slot, tokens is not None)

    def _key_block(self, slot: int, is_known: bool) -> None:
        """Make the key of the block that `pending` holds in full; without its tokens the chain ends here."""
        sequence = self.decode.sequences[slot]
        if sequence is not None and sequence.spans:
            span = sequence.spans[-1]
            if span.state is not None and is_known:
                span.state.update(self.decode.pending[slot].tobytes())
                span.keys += span.state.digest()
            else:
                span.state = None

    def fork(self, parent: Sequence, id_: object, residency: PathResidency, now_us: int) -> Sequence:
        """A child on the same blocks; the first divergent write copies the partial tail (V1)."""
        if self.options.windows:
            raise CapacityError(f"request `{parent.id}`: a pool with sliding-window groups does not fork")
        computed = int(self.decode.computed[parent.slot])
        self.publication.publish(parent, computed // self.options.block_tokens, now_us)
        before = parent.shared_tail
        child = self.forks.fork(parent, id_, residency, now_us)
        if child.shared_tail is not None:
            self._forked += 1 if before is not None else 2
        return child

    def _unshare(self, slots: NDArray[np.int64], now_us: int) -> list[Sequence]:
        """Copy-on-write for those of `slots` that are about to write into a shared tail."""
        stalled: list[Sequence] = []
        for slot in slots.tolist():
            sequence = self.decode.sequences[slot]
            if sequence is None or sequence.shared_tail is None:
                continue
            tail, account = sequence.shared_tail, sequence.domain.owner
            if tail.refs > 1:
                if self.space.ensure(account, tail.length, now_us) is not None:
                    stalled.append(sequence)
                    continue
                self.forks.own_tail(sequence, self._take(account, tail.length), now_us)
            else:
                self.forks.own_tail(sequence, None, now_us)
            self._forked -= 1
        return stalled

    def _grow(self, slots: NDArray[np.int64], now_us: int) -> list[Sequence]:
        stalled: list[Sequence] = []
        table = self.decode
        by_account: dict[Account, list[Sequence]] = {}
        for slot in slots.tolist():
            sequence = table.sequences[slot]
            if sequence is not None:
                by_account.setdefault(sequence.domain.owner, []).append(sequence)
        groups = 1 + len(self.options.windows)
        for account, wanting in by_account.items():
            while wanting and self.space.ensure(account, len(wanting) * groups, now_us) is not None:
                stalled.append(wanting.pop())
            if not wanting:
                continue
            blocks = self._take(account, len(wanting) * groups)
            for i, sequence in enumerate(wanting):
                sequence.append(blocks[i : i + 1])
                table.capacity[sequence.slot] += self.options.block_tokens
                if groups > 1:
                    self.publication.extend_windows(sequence, blocks[len(wanting) + i :: len(wanting)])
        return stalled

    @staticmethod
    def withdraw(sequence: Sequence) -> None:
        """Nothing more of `sequence` is published, and it leaves no hold; it may run on."""
        for span in sequence.spans:
            span.keys, span.state = b"", None
        sequence.residency.may_hold = False
