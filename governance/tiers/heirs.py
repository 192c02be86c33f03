"""The holder of a tier that outlives its process, and whether the previous one died: a note in the tier's own place.

1. A holder writes its name there once it has gone through what was there. When it stops in order, it writes that it
   stopped. The next holder takes a predecessor for dead if it reads no such stop, or cannot read the note. Whoever has
   the store can write there too. Names go on record, so a name that is not short and printable counts as nobody's.
2. An heir is the next process of the same worker, or of a worker in the same placement group. The group without a name
   does not count. In a store that workers share, an heir is the next process of the same worker. It may also be a
   process that names the dead one in its settings (`remote_tier_heir_of`) and is the first to take over
   (`stores.remote_store`).
3. The policy decides which copies an heir takes over (`on_worker_death`). Nobody else takes any of a dead worker's
   copies.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from kvcustody.governance.edge.door_token import GROUP

_NAME_CHARACTERS = 256
RESTORED, ENDED = "restored", "ended"


class TierHolder(NamedTuple):
    """A process that has a tier: its worker's name, its placement group, and its incarnation."""

    worker: str
    group: str
    incarnation: str

    def written(self, *, is_stopped: bool = False) -> bytes:
        """Return the note's text."""
        return json.dumps({**self._asdict(), "stopped": is_stopped}).encode()


UNKNOWN: Final = TierHolder("", "", "")


class WorkerDeath(NamedTuple):
    """The previous holder died; `is_heir`: whether the new one is its heir (rule 2)."""

    holder: TierHolder
    is_heir: bool


def death_before(written: bytes, holder: TierHolder) -> WorkerDeath | None:
    """Return the previous holder's death from its note; None: it stopped in order."""
    try:
        said = json.loads(written)
        before = TierHolder(*(str(said[name]) for name in TierHolder._fields))
        if not all(len(name) <= _NAME_CHARACTERS and name.isprintable() for name in before):
            raise ValueError("holds no names")
        if said["stopped"] is True:
            return None
    except (ValueError, KeyError, TypeError, RecursionError):
        before = UNKNOWN
    same_worker = bool(before.worker) and before.worker == holder.worker
    same_group = before.group not in ("", GROUP) and before.group == holder.group
    return WorkerDeath(before, same_worker or same_group)
