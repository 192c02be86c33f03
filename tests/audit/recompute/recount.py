"""Recount: the definition of coverage (docs/audit/coverage.md) applied to a history, one incarnation after the other.

1. A hold ends at the earliest of its deadline, an erasure and an act that narrowed what its tenant holds; what a
   residency does not hold, nothing ends.
2. A verdict is `verdict.verdicts_on`'s; the recorded due time covers only where it is the recomputed.
3. A hold lasts no longer than an erasure, or than a narrowing act says that its process wrote after its release; one
   that such an act does not list was over by then.
4. A period takes a custody by its recomputed due time; by the recorded one where a use of it never ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvcustody.errors import LedgerError
from recompute.columns import Directory, Flags, Groups, Numbers, Statements
from recompute.facts import DEVICE_TIER, OPEN, ErasureFact, Person
from recompute.figures import Judged, Recount, count_up
from recompute.history import History, RecomputedLife, StatementPlaces
from recompute.verdicts import (
    IN_TIME,
    OVERDUE,
    Ends,
    ErasedCustodies,
    Receipts,
    UseTotals,
    verdicts_on,
)


def ended_by_erasures(life: RecomputedLife, erasures: Sequence[ErasureFact]) -> dict[int, int]:
    """For each residency that an erasure selects, when its hold ended at the latest."""
    made: dict[int, int] = {}
    people = life.persons() if erasures else {}
    for erasure in erasures:
        at = erasure.at_us - life.offset_us
        for residency, person in people.items():
            if person.opened < at and _covers(erasure, person):
                made.setdefault(residency, at)
    return made


def ended_by_narrowing(life: RecomputedLife) -> dict[int, int]:
    """For each residency that was released before a narrowing of its tenant's holds, when its hold ended at the latest.

    One walk over releases and acts in the order of their process; a hold leaves it with the first act that misses it.
    """
    if not life.narrowings:
        return {}
    made: dict[int, int] = {}
    standing: dict[str, list[int]] = {}
    moments: list[tuple[int, int, str]] = [
        (place, residency, tenant) for residency, (place, tenant) in life.left().items()
    ]
    moments += [(place, -1, act.tenant) for place, act in life.narrowings.items()]
    for place, residency, tenant in sorted(moments):
        here = standing.setdefault(tenant, [])
        if residency >= 0:
            here.append(residency)
            continue
        act = life.narrowings[place]
        for one in here:
            made[one] = min(made.get(one, OPEN), act.standing.get(one, act.at))
        here[:] = [one for one in here if one in act.standing]
    return made


def _covers(erasure: ErasureFact, person: Person) -> bool:
    if erasure.tenant not in (None, person.tenant):
        return False
    if erasure.selector == "tenant":
        return True
    if erasure.selector == "subject":
        return person.subject == erasure.subject
    if erasure.selector == "session":
        return person.session == erasure.session
    return False  # a domain or model is not in a residency's leaf; the end carries the cause


UNKNOWN = "unknown"


class Chosen(NamedTuple):
    """What is counted: custody due in [since, until) UTC microseconds, of one tenant, classification, model, tier."""

    since_us: int | None = None
    until_us: int | None = None
    tenant: str | None = None
    classification: str | None = None
    model: str | None = None
    tier: str | None = None


EVERYTHING = Chosen()


def recount(history: History, chosen: Chosen = EVERYTHING, *, as_of_us: int | None = None) -> Recount:
    """Every figure of coverage, from a history alone; raises `LedgerError` for a tier that no leaf records."""
    found = count_up(judge(history, chosen, as_of_us=as_of_us))
    found.leaves, found.as_of_us = history.leaves, history.last_us if as_of_us is None else as_of_us
    return found


def judge(history: History, chosen: Chosen = EVERYTHING, *, as_of_us: int | None = None) -> Iterator[Judged]:
    """Every chosen custody that ended or is overdue, with its verdict; raises as `recount` does."""
    if chosen.tier not in (None, DEVICE_TIER):
        raise LedgerError(f"tier `{chosen.tier}` holds no custody in this ledger, only `{DEVICE_TIER}` does")
    now_us = history.last_us if as_of_us is None else as_of_us
    erasures = sorted(history.erasures, key=lambda item: item.at_us)
    for uuid in sorted(history.lives):
        yield _Judge(history.lives[uuid], erasures, chosen).run(now_us)


class _Custodies(NamedTuple):
    """Custodies: of each the place of its generation in `RecomputedLife.named`, its block, and its owner."""

    place: Numbers
    block: Numbers
    owner: Numbers

    def of(self, said: StatementPlaces, places: int) -> tuple[Numbers, Numbers, Flags]:
        """The entries that are about these generations: which, about which custody, and whether of its very block."""
        number = np.full(places, -1)
        number[self.place] = np.arange(len(self.place))
        custody = number[said.place]
        which = np.flatnonzero(custody >= 0)
        return which, custody[which], self.block[custody[which]] == said.block[which]


class _Held(NamedTuple):
    """Every entry of `RecomputedLife.uses`: its end, and until when it held, without erasures and with them."""

    released: Numbers
    unasked: Numbers
    until: Numbers


class _Judge:
    """One pass over the custodies of one incarnation."""

    def __init__(self, life: RecomputedLife, erasures: Sequence[ErasureFact], chosen: Chosen) -> None:
        self._life = life
        self._chosen = chosen
        self._places = len(life.named.pool)
        self._people = Directory(life.people["residency"])
        self._held = self._holds(ended_by_narrowing(life), ended_by_erasures(life, erasures))
        self._asked: dict[int, int] = {}  # by the number of its name
        for erasure in erasures:
            self._asked.setdefault(life.names[erasure.erasure], erasure.at_us - life.offset_us)

    def run(self, now_us: int) -> Judged:
        """Both halves: custody that ended, and what is overdue."""
        ended, overdue = self._ended(), self._overdue(now_us - self._life.offset_us)
        columns: list[Any] = [np.concatenate(pair) for pair in zip(ended, overdue, strict=True)]
        return Judged(self._life.uuid, self._life.names.texts(), self._life.shards or 1, *columns)

    def _ended(self) -> list[Any]:
        life, ends = self._life, self._life.ends
        said, row = self._first_ends()
        owned = _Custodies(said.place, said.block, ends["tenant"][row])
        uses = self._uses(owned)
        ceiling = ends["ceiling"][row]
        stated = Ends(
            ends["due"][row],
            ends["ended"][row],
            ends["retired"][row],
            np.where(ceiling == 0, OPEN, ceiling),
            ends["within"][row],
            ends["dead"][row] == 1,
        )
        found = verdicts_on(stated, uses, self._requests(owned), self._receipts(owned), life.shards)
        kept = self._is_in_period(np.where(found.due < OPEN, found.due, stated.due))
        kept &= self._is_of_model(uses.writer)
        columns = (
            *(life.named.pool[said.place], life.named.generation[said.place], said.block),
            *(owned.owner, ends["classification"][row], found.name),
            *((found.name == IN_TIME) & ~found.disputed, found.due),
            *(stated.ended <= found.due + stated.within, found.disputed),
            *(found.lag, found.level, found.size, np.maximum(0, stated.retired - stated.ended)),
        )
        return [column[kept] for column in columns]

    def _first_ends(self) -> tuple[StatementPlaces, Numbers]:
        """Of each generation the end that counts, among those of the chosen tenant and classification."""
        ends, said = self._life.ends, self._life.named.ends
        kept = self._selects(ends["tenant"], ends["classification"])[said.row]
        said = StatementPlaces(*(column[kept] for column in said))
        rank = np.empty(ends.rows, np.int64)
        rank[np.lexsort((ends["part"], ends["sequence"], ends["foreign"]))] = np.arange(ends.rows)
        order = np.lexsort((rank[said.row], said.place))
        order = order[np.diff(said.place[order], prepend=-1) > 0]
        said = StatementPlaces(*(column[order] for column in said))
        return said, said.row

    def _overdue(self, now: int) -> list[Any]:
        """Custody that was handed out and whose end nobody recorded: overdue once it is due."""
        life, said = self._life, self._life.named.uses
        residency = life.uses["residency"][said.row]
        has_ended = np.zeros(self._places, np.bool_)
        has_ended[life.named.ends.place] = True
        open_ = np.flatnonzero((life.uses["written"][said.row] == 1) & ~has_ended[said.place])
        order = open_[np.lexsort((residency[open_], said.place[open_]))]
        first = order[np.diff(said.place[order], prepend=-1) > 0]
        place, block = said.place[first], said.block[first]
        person, unknown = self._people.find(residency[first]), life.names[UNKNOWN]
        who = [self._of_people(name, person, unknown) for name in ("tenant", "classification")]
        uses = self._uses(_Custodies(place, block, who[0]))
        due = uses.every
        kept = (due < now) & self._selects(*who) & self._is_in_period(due) & self._is_of_model(uses.writer)
        no, nothing, never = np.zeros(len(due), np.bool_), np.zeros(len(due), np.int64), np.full(len(due), -1)
        columns = (
            *(life.named.pool[place], life.named.generation[place], block, *who, np.full(len(due), OVERDUE)),
            *(no, due, no, no, never, never, nothing, nothing),
        )
        return [column[kept] for column in columns]

    def _holds(self, narrowed: Mapping[int, int], erased: Mapping[int, int]) -> _Held:
        """When each use ended, and until when it held (rule 3)."""
        uses, row = self._life.uses, self._life.named.uses.row
        # By its leaf, where that says so; else by the latest that releases of its residency say.
        final = self._life.released
        ids, of = np.unique(final["residency"], return_inverse=True)
        releases, found = Groups(of, len(ids)), Directory(ids).find(uses["residency"])
        at, until = (
            np.append(releases.most(final[name]), none) for name, none in (("at", OPEN), ("hold", 0))
        )
        is_over = uses["over"] == 1
        released = np.where(is_over, uses["until"], at[found])[row]
        hold = np.where(is_over, uses["hold"], until[found])[row]
        self._early_releases(released, hold)
        hold = np.minimum(hold, _limits(uses["residency"], narrowed)[row])
        asked = np.minimum(hold, _limits(uses["residency"], erased)[row])
        return _Held(released, np.maximum(released, hold), np.maximum(released, asked))

    def _early_releases(self, released: Numbers, hold: Numbers) -> None:
        """What a residency let go of after it began to use it, it used until then, whatever else ended it."""
        life, used, gone = self._life, self._life.named.uses, self._life.named.gone
        if not len(gone.row):
            return
        ids, of = np.unique(
            np.concatenate((life.uses["residency"], life.gone["residency"])), return_inverse=True
        )
        mine = used.place * len(ids) + of[: life.uses.rows][used.row]
        theirs = gone.place * len(ids) + of[life.uses.rows :][gone.row]
        order = np.argsort(theirs, kind="stable")
        low, high = (np.searchsorted(theirs[order], mine, side=side) for side in ("left", "right"))
        count = high - low
        use = np.repeat(np.arange(len(mine)), count)
        nth = np.arange(len(use)) - np.repeat(np.cumsum(count) - count, count)
        row = gone.row[order[np.repeat(low, count) + nth]]
        after = life.gone["at"][row] >= life.uses["begun"][used.row[use]]
        use, row = use[after], row[after]
        groups = Groups(use, len(mine))
        for times, name in ((released, "at"), (hold, "hold")):
            times[groups.named] = groups.most(life.gone[name][row], -OPEN)[groups.named]

    def _uses(self, owned: _Custodies) -> UseTotals:
        """What every use of each custody's very block adds up to."""
        uses, held, said = self._life.uses, self._held, self._life.named.uses
        which, custody, is_this = owned.of(said, self._places)
        which, custody = which[is_this], custody[is_this]
        row = said.row[which]
        residency, written = uses["residency"][row], uses["written"][row] == 1
        user = self._of_people("tenant", self._people.find(uses["residency"]), -1)
        is_own = user[row] == owned.owner[custody]
        every, own = Groups(custody, len(owned.place)), Groups(custody[is_own], len(owned.place))
        writers = Groups(custody[written], len(owned.place))
        return UseTotals(
            every.most(held.released[which]),
            own.most(held.until[which[is_own]]),
            every.most(held.until[which]),
            own.most(held.unasked[which[is_own]]),
            every.most(held.unasked[which]),
            writers.least(residency[written], OPEN),
        )

    def _requests(self, owned: _Custodies) -> ErasedCustodies:
        """Erasures that were asked for and whose effect lists a custody."""
        said, names = self._life.named.covered, self._life.covered["erasure"]
        which, custody, is_this = owned.of(said, self._places)
        at = np.array([self._asked.get(name, -1) for name in names.tolist()], np.int64)
        known = (
            np.array([name in self._asked for name in names.tolist()], np.bool_)[said.row[which]] & is_this
        )
        return ErasedCustodies(custody[known], at[said.row[which[known]]])

    def _receipts(self, owned: _Custodies) -> Receipts:
        said, proofs = self._life.named.proofs, self._life.proofs
        which, custody, is_this = owned.of(said, self._places)
        row = said.row[which]
        columns = [proofs[name][row] for name in ("shard", "started", "ended", "level", "good")]
        shard, started, ended, level, good = columns
        return Receipts(custody, is_this, shard, started, ended, level, good == 1, _bytes_each(proofs)[row])

    def _of_people(self, name: str, person: Numbers, nobody: int) -> Numbers:
        """A column of people, by row; `nobody` where that is -1."""
        return np.append(self._life.people[name], nobody)[person]

    def _selects(self, tenant: Numbers, classification: Numbers) -> Flags:
        kept: Flags = np.ones(len(tenant), np.bool_)
        for wanted, column in ((self._chosen.tenant, tenant), (self._chosen.classification, classification)):
            if wanted is not None:
                kept &= column == self._life.names[wanted]
        return kept

    def _is_of_model(self, writer: Numbers) -> Flags:
        """Whether the residency that the block was handed to is of the chosen model; "unknown" where no leaf says."""
        names, wanted = self._life.names, self._chosen.model
        if wanted is None:
            return np.ones(len(writer), np.bool_)
        model = self._of_people("model", self._people.find(writer), names[UNKNOWN])
        is_wanted: Flags = np.where(model == names[""], names[UNKNOWN], model) == names[wanted]
        return is_wanted

    def _is_in_period(self, due: Numbers) -> Flags:
        since, until, offset_us = self._chosen.since_us, self._chosen.until_us, self._life.offset_us
        kept: Flags = np.ones(len(due), np.bool_)
        if since is not None:
            kept &= due >= since - offset_us
        if until is not None:
            kept &= due < until - offset_us
        return kept


def _limits(residency: Numbers, latest: Mapping[int, int]) -> Numbers:
    """Of each residency until when its hold lasts at most; OPEN where nothing limits it."""
    if not latest:
        return np.full(len(residency), OPEN)
    found = Directory(np.array(list(latest), np.int64)).find(residency)
    return np.append(np.array(list(latest.values()), np.int64), OPEN)[found]


def _bytes_each(proofs: Statements) -> Numbers:
    """The bytes a block of each receipt; of a part, what falls to the blocks that it lists."""
    size, blocks, here = proofs["bytes"], proofs["blocks"], proofs.listed()
    each = size // np.maximum(1, blocks)
    for row in np.flatnonzero((blocks != here) | (blocks == 0)).tolist():
        count, listed = int(blocks[row]), int(here[row])
        each[row] = int(size[row]) * listed // count // listed if count and listed else 0
    return each
