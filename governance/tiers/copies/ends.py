"""Ends of a tier's copies, and their proof (`tiers.tier`, rules 2, 3 and 9)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice

import numpy as np

from kvcustody.audit.kinds import KEY_DESTROYED
from kvcustody.errors import StoreError
from kvcustody.governance.erasure.selector import Selector, may_hold
from kvcustody.governance.erasure.tier_protocol import CompletedErasure, TierErased
from kvcustody.governance.tiers.copies.index import NEVER_US, CopyIndex, CopyOwner, EndedCopy, shred_name
from kvcustody.governance.tiers.seal.object_layout import NO_SHRED
from kvcustody.governance.tiers.stores.store_protocol import Locked

SEEK_AGAIN_US = 1_000_000  # of a name that nobody had stored
_KNOWN_MIN = 1024  # domains and shred keys that are known before those of nothing are forgotten
_REMEMBERED = 1000
_ENDS, _DELETES = 2_048, 512  # copies whose key is gone, and bytes that wait: so many in one call
_UNSEEN = -1
_ASK_AGAIN_US = 100_000  # of a store that could not delete


class CopyEnds:
    """Ends copies of one index, and reports it."""

    def __init__(self, index: CopyIndex) -> None:
        self._index = index
        self._rows, self._clock, self._keys, self._shred = index.rows, index.clock, index.keys, index.shred
        self.waiting: dict[bytes, EndedCopy | None] = {}  # not found any more, and still in the store
        self.lost: dict[bytes, EndedCopy] = {}  # nor in the store: the end of their key will prove theirs
        self.adopted: set[bytes] = set()  # of what is here, what an earlier process stored
        self._erased: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._unanswered: set[bytes] = set()  # of what waits, what a delete was asked for that did not answer
        self._locked: dict[bytes, int] = {}  # of what waits, until when the store keeps it (UTC)
        self.erasures = deque[tuple[Selector, int]](maxlen=_REMEMBERED)  # and when (UTC) they came
        self.ended = self.destroyed = self.evidence = 0
        self._has_more = False  # of what waits than one call deletes
        self._keyless: set[int] = set()  # domains whose epoch is destroyed, with copies that are to be ended
        self._ask_again_us, self._shreds_seen = 0, index.shred.changes()

    def is_due(self, now_us: int) -> bool:
        """Whether `expire` may have work at this boot time."""
        return (
            self._clock.of_boot(now_us) >= self._index.due_us
            or self._shred.changes() != self._shreds_seen
            or bool(self._keyless)
            or (bool(self.waiting) and now_us >= self._ask_again_us)
        )

    def expire(self) -> int:
        """End every copy that is due or whose keys are destroyed, and the keys of ended buckets; returns the number."""
        now_us, index = self._clock.now_us(), self._rows
        rows = index.rows(index.column("due_us") <= now_us)
        self.end(rows, "ceiling")
        gone = {receipt.key.id for receipt in self._shred.destroy_due(now_us)}
        living = self._shred.living()
        self._shreds_seen = self._shred.changes()
        ids = {key.id for key in living} | {NO_SHRED}
        dead = [number for number, id_ in enumerate(self._index.shreds) if id_ not in ids]
        ended = 0
        if dead:  # by an erasure elsewhere, or by whoever has the file
            theirs = np.isin(index.column("subject"), dead) | np.isin(index.column("bucket"), dead)
            rows_left = index.rows(theirs)
            ended = self._end_with_key(rows_left)
            if ended < len(rows_left):
                self._shreds_seen = _UNSEEN
        ended += self._end_keyless()
        if gone:
            self._tell_destroyed(gone)
        self._keys.drop_gone()
        self.delete([])
        self._ask_again_us = self._next_ask_us()
        due = index.column("due_us")[index.column("living") > 0]
        self._index.due_us = min(
            int(due.min(initial=NEVER_US)), *(key.until_us for key in living if key.until_us), NEVER_US
        )
        if len(self._index.owners) + len(self._index.shreds) > _KNOWN_MIN + 4 * len(index) and not self._keyless:
            self._index.forget_unused()
        return len(rows) + ended

    def _end_keyless(self) -> int:
        """End some of what is of destroyed epochs, whose copies nobody finds or opens; how many."""
        if not self._keyless:
            return 0
        rows = self._rows.rows(np.isin(self._rows.column("domain"), list(self._keyless)))
        ended = self._end_with_key(rows)
        if ended == len(rows):
            self._keyless.clear()
        return ended

    def _next_ask_us(self) -> int:
        """When what waits is asked for again, in boot time: soon, but for what is locked; at once, where more does."""
        if self._has_more:
            return self._clock.boot_us()
        if len(self._locked) < len(self.waiting) or not self._locked:
            return self._clock.boot_us() + _ASK_AGAIN_US
        return max(self._clock.boot_us() + _ASK_AGAIN_US, self._clock.to_boot(min(self._locked.values())))

    def narrow(self) -> int:
        """End copies that a changed policy, keyring or shred-key file no longer permits; returns the number.

        What may stay is due no later than the tier's present `absolute`, counted from now.
        """
        now_us, ended = self._clock.now_us(), 0
        self._keys.drop_gone()
        for number, owner in enumerate(self._index.owners):
            theirs = self._rows.column("domain") == number
            if not theirs.any():
                continue
            label = owner.label
            if label is not None and label.spec is not None and not self._keys.has_epoch(label.spec):
                self._keyless.add(number)
                continue
            absolute_us = self._index.terms.limit(owner.tenant, owner.classification).absolute_us
            if not absolute_us:
                rows = self._rows.rows(theirs)
                self.end(rows, "policy")
                ended += len(rows)
                continue
            for row in self._rows.rows(theirs & (self._rows.column("due_us") > now_us + absolute_us)):
                self._rows.shorten(row, now_us + absolute_us)
                self._index.due_us = min(self._index.due_us, now_us + absolute_us)
        return ended + self._end_keyless()

    def end_tenant(self, tenant: str) -> int:
        """End the copies of a tenant that has left; returns the number."""
        numbers = [number for number, owner in enumerate(self._index.owners) if owner.tenant == tenant]
        rows = self._rows.rows(np.isin(self._rows.column("domain"), numbers))
        self.end(rows, "evicted")
        return len(rows)

    def _end_with_key(self, rows: list[int]) -> int:
        """A key was destroyed: nobody opens these, whatever becomes of their bytes. The first `_ENDS`; how many."""
        rows = rows[:_ENDS]
        names = self.forget_rows(rows, KEY_DESTROYED)
        for name in names:
            ended = self.waiting[name]
            assert ended is not None
            self.waiting[name] = self._destroyed_of(name, ended, KEY_DESTROYED)
        self.delete([])
        return len(rows)

    def erase(self, erasure: str, selector: Selector, before_us: int) -> TierErased:
        """End every copy that the selector may cover: the index first, then its subjects' keys, then the bytes.

        Copies that were stored after `before_us` end too: a cache may always be emptied sooner. So do those of wider
        domains of the tenant: who wrote a block of them is known to the ledger, not to a tier.
        """
        ids = self._subject_keys(selector)
        chosen = [number for number, owner in enumerate(self._index.owners) if _may_be_of(owner, selector, ids)]
        rows = self._rows.rows(np.isin(self._rows.column("domain"), chosen))
        own = [row for row in rows if self._rows.value("number", row)]
        objects, size = self._erased.get(erasure, (0, 0))
        objects += len(own)
        size += sum(self._rows.value("size", row) for row in own)
        self._erased[erasure] = (objects, size)
        self._erased.move_to_end(erasure)
        while len(self._erased) > _REMEMBERED:
            self._erased.popitem(last=False)
        # What others stored before is not found again, whether they have ended it or not, nor taken when it comes.
        self.erasures.append((selector, self._clock.now_us()))
        ids = {self._index.owners[number].subject for number in chosen} if ids is None else ids
        self.forget_rows(rows, "erased", erasure)
        if selector.ends_keys:
            living = {id_ for id_ in ids if self._shred.is_living(id_)}
            for id_ in living:
                self._shred.destroy(id_)
            self._tell_destroyed(living)
        self._keys.drop_gone()
        self.delete([])
        return self._erased_so_far(erasure, selector, objects, size)

    def erase_returned(self, complete: CompletedErasure) -> int:
        """Repeat an erasure whose older keys came back; returns the number of keys.

        It destroyed every such key: one that is there was put back with an older copy of the file.
        """
        erasure, selector, at_us = complete
        ids = self._subject_keys(selector)
        if ids is None and selector == Selector(tenant=selector.tenant):
            ids = {owner.subject for owner in self._index.owners if _may_be_of(owner, selector, None)}
        older = {key.id for key in self._shred.living() if key.created_us < at_us}
        if returned := older & (ids or set()):
            self.erase(erasure, selector, self._clock.to_boot(at_us))
        return len(returned)

    def _subject_keys(self, selector: Selector) -> set[bytes] | None:
        """Of the keys that what may be the selector's is sealed under; None: it names no subject."""
        if selector.subject is None or selector.tenant is None:
            return None
        names = (shred_name(selector.tenant, selector.subject), shred_name(selector.tenant, None))
        return {key.id for key in map(self._shred.find_subject, names) if key is not None}

    def _erased_so_far(self, erasure: str, selector: Selector, objects: int, size: int) -> TierErased:
        """Of the copies that an erasure ended, those whose bytes the store may still have wait."""
        waiting = waiting_bytes = unsure = 0
        for ended in chain(self.waiting.values(), self.lost.values()):
            if ended is not None and ended.erasure == erasure:
                waiting, waiting_bytes = waiting + 1, waiting_bytes + ended.size
            elif ended is None or not ended.tenant or selector.tenant in (None, ended.tenant):
                unsure += 1
        return TierErased(objects - waiting, size - waiting_bytes, waiting, unsure=unsure)

    def destroy(self, keys: Collection[bytes]) -> int:
        """End these objects, known or not; returns how many the store had."""
        rows = [row for row in map(self._rows.find, keys) if row >= 0]
        self.forget_rows(rows, "orphan")
        return self.delete(keys)

    def forget(self, keys: Collection[bytes]) -> int:
        """Remove these from the index; returns how many it had."""
        rows = [row for row in map(self._rows.find, keys) if row >= 0]
        self.forget_rows(rows, "orphan")
        self.delete([])
        return len(rows)

    def end(self, rows: list[int], cause: str) -> None:
        """Make these unfindable; the store deletes their bytes now, as far as it can."""
        self.forget_rows(rows, cause)
        self.delete([])

    def forget_rows(self, rows: list[int], cause: str, erasure: str = "") -> list[bytes]:
        """Make these unfindable; their bytes wait for the store."""
        names, index = [], self._rows
        for row in rows:
            name, known = index.name(row), index.row(row)
            if not known.number:  # another worker's: its owner ends it
                index.remove(row)
                self._index.unfound_until[name] = self._clock.now_us() + SEEK_AGAIN_US
                self._index.borrowed, self._index.borrowed_bytes = (
                    self._index.borrowed - 1,
                    self._index.borrowed_bytes - known.size,
                )
                self._index.let_go += 1
                continue
            owner = self._index.owners[known.domain]
            shreds = (self._index.shreds[known.subject], self._index.shreds[known.bucket])
            ended = EndedCopy(
                known.number,
                owner.tenant,
                owner.classification,
                known.blocks,
                known.size,
                known.due_us if self._may_wait(cause) else min(known.due_us, self._clock.now_us()),
                shreds,
                erasure,
            )
            self._index.tell("ended", name, ended, cause)
            self.ended += 1
            self._index.held[owner.tenant] -= self._index.store.taken(known.size)
            self.waiting[name] = ended
            index.remove(row)
            names.append(name)
        return names

    def _may_wait(self, cause: str) -> bool:
        """Whether the end of a copy's key, in its own time, is the first that proves its end, and early enough."""
        return self._index.store.ends_by == KEY_DESTROYED and cause == "evicted"

    def delete(self, names: Iterable[bytes]) -> int:
        """Delete these and at most `_DELETES` of those waiting; failed ones wait at the end."""
        asked = list(names)
        for name in asked:
            self.waiting.setdefault(name, None)
        now_us, chosen = self._clock.now_us(), set(asked)
        others = (name for name in self.waiting if name not in chosen and self._locked.get(name, 0) <= now_us)
        asked += islice(others, _DELETES)
        self._has_more = False
        if not asked:
            return 0
        try:
            gone = self._index.store.delete(asked)
        except StoreError:
            if self._index.store.is_shared:  # what is absent when it answers again, this may have ended
                self._unanswered.update(asked)
            return 0
        for one in gone.locked:
            self._note_lock(one)
        absent, stays = set(gone.absent), {*gone.failed, *(one.name for one in gone.locked)}
        for name in [name for name in asked if name not in stays]:
            self._locked.pop(name, None)
            ended = self.waiting.pop(name)
            if ended is None:
                self._unanswered.discard(name)
                continue
            was_ended = name not in absent or name in self._unanswered
            self._unanswered.discard(name)
            if was_ended and self._index.store.ends_by != KEY_DESTROYED:
                self._destroyed_of(name, ended, self._index.store.ends_by)
            elif not ended.is_destroyed:
                self.lost[name] = ended
        for name in stays:
            self.waiting[name] = self.waiting.pop(name)
        self._has_more = len(asked) > len(stays) and len(self.waiting) > len(stays)
        return gone.objects

    def delete_all(self) -> int:
        """Delete waiting objects, as far as the store can now."""
        count = self.delete([])
        while self._has_more:
            count += self.delete([])
        return count

    def _note_lock(self, locked: Locked) -> None:
        """The store keeps what ended until then: told once for each date."""
        name, until_us = locked
        ended = self.waiting.get(name)
        if self._locked.get(name) != until_us and ended is not None and ended.number:
            self._index.tell("locked", name, ended._replace(due_us=until_us))
        self._locked[name] = until_us

    def _tell_destroyed(self, shreds: set[bytes]) -> None:
        """Keys are destroyed: what waits under them cannot be opened by anybody any more."""
        for where in (self.waiting, self.lost):
            for name, ended in list(where.items()):
                if ended is not None and not shreds.isdisjoint(ended.shreds) and not ended.is_destroyed:
                    where[name] = self._destroyed_of(name, ended, KEY_DESTROYED)
        self.lost = {name: ended for name, ended in self.lost.items() if not ended.is_destroyed}

    def _destroyed_of(self, name: bytes, ended: EndedCopy, evidence: str) -> EndedCopy:
        self._index.tell("destroyed", name, ended, evidence)
        if ended.number:
            self.evidence += 1
            self.destroyed += not ended.is_destroyed
            if name in self.adopted:  # what the process before stored under this name is proved with it
                self._index.tell("destroyed", name, ended._replace(number=0), evidence)
                if evidence == self._index.store.ends_by:
                    self.adopted.discard(name)
        return ended._replace(is_destroyed=True)

    def unproven(self) -> Iterator[EndedCopy]:
        """Ended copies whose bytes the store may still have or has lost."""
        for ended in chain(self.waiting.values(), self.lost.values()):
            if ended is not None and ended.number:
                yield ended


def _may_be_of(owner: CopyOwner, selector: Selector, keys: set[bytes] | None) -> bool:
    """Whether copies of a domain may have what somebody inside the selector wrote.

    Of one that an earlier process stored only its tenant and its shred key are known: `keys` are the selector's.
    """
    if owner.label is not None:
        return may_hold(selector, owner.label)
    return (selector.tenant is None or selector.tenant == owner.tenant) and (keys is None or owner.subject in keys)
