"""Deletion coverage a second time: docs/concepts/deletion-coverage.md custody by custody, in plain Python.

Nothing is shared with the product: not its tables, its arithmetic or its reading of runs. Leaves go in as bytes,
figures come out. It is slow, and meant to be read beside the definition.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

OPEN = 1 << 62  # the release of a residency that was never released
LEVELS = ("launched", "retired", "sampled", "full")
VERDICTS = ("in_time", "late", "failed", "missing", "unproven", "overdue")
UNKNOWN = "unknown"
NOBODY = -1  # the writer of which no leaf says that it was handed the block
Key = tuple[int, int]  # pool, generation
Body = dict[str, Any]


class Chosen(NamedTuple):
    """What is counted."""

    since_us: int | None = None
    until_us: int | None = None
    tenant: str | None = None
    classification: str | None = None
    model: str | None = None
    tier: str | None = None


class Custody(NamedTuple):
    """One custody with its verdict; `due` is boot time."""

    incarnation: str
    pool: int
    generation: int
    block: int
    shards: int
    tenant: str
    classification: str
    verdict: str
    due: int
    disputed: bool = False
    ended_in_time: bool = False
    lag: int = -1
    level: str = ""
    size: int = 0
    fence: int = 0
    cause: str = ""
    ended: int = 0
    ceiling: int = 0
    within: int = 0
    writer: int = NOBODY

    @property
    def covered(self) -> bool:
        return self.verdict == "in_time" and not self.disputed


class Use(NamedTuple):
    """A residency used a block until `released`, and held it until `held`; `unasked` is that without erasures."""

    block: int
    residency: int
    written: bool
    released: int
    held: int
    unasked: int


NOWHERE = -1  # the index of a block that a leaf names by its generation alone


def listed(runs: Iterable[list[Any]]) -> Iterator[tuple[Key, int]]:
    """((pool, generation), block) of each block of a run list; generation 0 never was in custody."""
    for run in runs:
        if isinstance(run[0], list) or not isinstance(run[1], list):
            yield from short(run)
            continue
        first, deltas, counts, *pool = run
        block, generation = 0, int(first)
        for delta, count in zip(deltas, counts or [1] * len(deltas), strict=True):
            for _ in range(count):
                block += delta
                if int(first):
                    yield ((pool[0] if pool else 0), generation), block
                generation += 1


def short(run: list[Any]) -> Iterator[tuple[Key, int]]:
    """The same of a run whose generations are gaps and counts, with the blocks' differences where it has them."""
    (pool, *spans), *placed = run if isinstance(run[0], list) else (run,)
    generation, generations = 0, list[int]()
    for gap, count in zip(spans[::2], spans[1::2], strict=True):
        generations += range(generation + gap, generation + gap + count)
        generation += gap + count
    blocks = [NOWHERE] * len(generations)
    if placed:
        deltas, counts = placed
        steps = [delta for delta, count in zip(deltas, counts or [1] * len(deltas), strict=True) for _ in range(count)]
        blocks = list(accumulate(steps))
    yield from zip(((pool, each) for each in generations), blocks, strict=True)


class Life:
    """All leaves about one incarnation. Its times are on its own boot clock."""

    def __init__(self, uuid: str) -> None:
        self.uuid, self.offset_us, self.start, self.leaves = (
            uuid,
            0,
            Body(),
            defaultdict[str, list[Body]](list),
        )
        self.handed: dict[Key, int] | None = None

    def at(self, body: Body) -> int:
        """When a leaf was written; a successor's by way of UTC."""
        return int(body["boot_us"]) if body["incarnation"] == self.uuid else int(body["at_us"]) - self.offset_us

    def named(self, kind: str, key: str = "runs") -> Iterator[tuple[Key, int, Body]]:
        for body in self.leaves[kind]:
            for each, block in listed(body.get(key, ())):
                yield each, self.where(each, block), body

    def where(self, key: Key, block: int) -> int:
        """The index of a block, by who was handed it where a leaf names its generation alone."""
        if block != NOWHERE:
            return block
        if self.handed is None:
            self.handed = {}
            for kind, name in (
                ("residency-opened", "written"),
                ("residency-released", "runs"),
                ("blocks-released", "runs"),
            ):
                for body in self.leaves[kind]:
                    if kind != "blocks-released" or body["own"]:
                        for each, index in listed(body.get(name, ())):
                            self.handed.setdefault(each, index)
        return self.handed.get(key, NOWHERE)

    def people(self) -> dict[int, Body]:
        return {int(body["residency"]): body for body in self.leaves["residency-opened"] if body["part"] == 1}

    def narrowed(self) -> dict[int, int]:
        """A hold ends with the earliest deadline that an act names; one that an act does not list was over by then."""
        acts: dict[int, tuple[str, int, dict[int, int]]] = {}
        for body in self.leaves["holds-narrowed"]:
            act = acts.setdefault(int(body["sequence"]), (body["tenant"], int(body["boot_us"]), {}))
            act[2].update(zip(map(int, body["holds"]), map(int, body["until_boot_us"]), strict=True))
        ends: dict[int, int] = {}
        for body in self.leaves["residency-released"]:
            if body["part"] != 1 or body["incarnation"] != self.uuid:
                continue
            residency, until = int(body["residency"]), OPEN
            for sequence, (tenant, at, standing) in sorted(acts.items()):
                if tenant == body["tenant"] and sequence > int(body["sequence"]):
                    until = min(until, standing.get(residency, at))
                    if residency not in standing:
                        break
            ends[residency] = until
        return ends

    def erased(self, erasures: list[Body]) -> dict[int, int]:
        """When the first erasure ended the holds of each residency that it selects."""
        ends: dict[int, int] = {}
        for erasure in erasures:
            at, selector = int(erasure["at_us"]) - self.offset_us, erasure["selector"]
            for residency, person in self.people().items():
                fits = selector == "tenant" or (
                    selector in ("subject", "session") and person[selector] == erasure[selector]
                )
                if fits and erasure["tenant"] in (None, person["tenant"]) and int(person["boot_us"]) < at:
                    ends.setdefault(residency, at)
        return ends

    def uses(self, erasures: list[Body]) -> dict[Key, list[Use]]:
        narrowed, erased = self.narrowed(), self.erased(erasures)
        over: dict[int, tuple[int, int]] = {}
        said = {
            int(body["residency"]) for body in self.leaves["residency-released"] if body["incarnation"] == self.uuid
        }
        for body in self.leaves["residency-released"]:
            # What a successor said of a process that lives all the same does not count beside its own word.
            if body["part"] == 1 and (body["incarnation"] == self.uuid or int(body["residency"]) not in said):
                known = over.get(int(body["residency"]), (0, 0))
                over[int(body["residency"])] = (
                    max(known[0], self.at(body)),
                    max(known[1], int(body["hold_boot_us"])),
                )
        gone: dict[tuple[Key, int], list[tuple[int, int]]] = defaultdict(list)
        for key, _, body in self.named("blocks-released"):
            if not body["own"]:
                gone[key, int(body["residency"])].append((self.at(body), int(body["hold_boot_us"])))
        by_key: dict[Key, list[Use]] = defaultdict(list)

        def use(key: Key, block: int, body: Body, written: bool, ends: bool) -> None:
            residency, begun = int(body["residency"]), 0 if ends else self.at(body)
            released, hold = (self.at(body), int(body["hold_boot_us"])) if ends else over.get(residency, (OPEN, 0))
            after = [times for times in gone.get((key, residency), ()) if times[0] >= begun]
            if after:  # what it let go of it used until then, whatever else ended it
                released, hold = max(at for at, _ in after), max(held for _, held in after)
            hold = min(hold, narrowed.get(residency, OPEN))
            asked = min(hold, erased.get(residency, OPEN))
            by_key[key].append(Use(block, residency, written, released, max(released, asked), max(released, hold)))

        for kind, key_name, written, ends in (
            ("residency-opened", "runs", False, False), ("residency-opened", "written", True, False),
            ("blocks-attached", "runs", False, False), ("residency-released", "runs", True, True),
            ("blocks-released", "runs", None, True),
        ):  # fmt: skip
            for key, block, body in self.named(kind, key_name):
                use(key, block, body, bool(body["own"]) if written is None else written, ends)
        return by_key


# Of a leaf that holds several: the list, the kind, what its places say. Moments count back from the item's own, and
# that one from the leaf's.
ITEMS = (
    ("released", "residency-released", "boot_us residency cause runs hold_boot_us"),
    ("passed", "blocks-released", "boot_us residency cause runs own hold_boot_us"),
    (
        "ended",
        "custody-ended",
        "boot_us classification runs cause due_boot_us ended_boot_us retired_boot_us scrub_within_us ceiling_boot_us",
    ),
    (
        "scrubbed",
        "receipt",
        "boot_us launch shard method device bytes started_boot_us ended_boot_us level share_ppm verified result runs",
    ),
)


def items_of(body: Body) -> Iterator[Body]:
    """The leaf, or what it holds, each as a leaf of its own."""
    if body["kind"] != "custody-changed":
        yield body
        return
    for name, kind, places in ITEMS:
        for item in body.get(name, []):
            whole = Body(body) | {"kind": kind, "part": 1, "parts": 1}
            for place, value in zip(places.split(), item, strict=True):
                since = int((body if place == "boot_us" else whole)["boot_us"])
                ago = place.endswith("boot_us")
                whole[place] = (0 if value is None else since - int(value)) if ago else value
            whole["at_us"] = int(body["at_us"]) - int(body["boot_us"]) + whole["boot_us"]
            whole["blocks"] = sum(1 for _ in listed(whole["runs"]))
            yield whole


class History:
    """Leaves by the incarnation that they are about, and the requests to erase."""

    def __init__(self, leaves: Iterable[bytes]) -> None:
        self.lives: dict[str, Life] = {}
        self.erasures: list[Body] = []
        self.leaves = self.last_us = 0
        for body in map(json.loads, leaves):
            self.leaves, self.last_us = self.leaves + 1, max(self.last_us, int(body["at_us"]))
            writer = self.life(body["incarnation"])
            writer.offset_us = int(body["at_us"]) - int(body["boot_us"])
            for each in items_of(body):
                self.life(each.get("of_incarnation") or each["incarnation"]).leaves[each["kind"]].append(each)
            if body["kind"] == "worker-started":
                writer.start = body
            elif body["kind"] == "erasure-requested":
                self.erasures.append(body)
        self.erasures.sort(key=lambda body: int(body["at_us"]))

    def life(self, uuid: str) -> Life:
        return self.lives.setdefault(uuid, Life(uuid))


def judge(history: History, chosen: Chosen = Chosen(), *, as_of_us: int | None = None) -> Iterator[Custody]:  # noqa: B008
    """Every chosen custody: of each incarnation those that ended, then those that are overdue."""
    now_us = history.last_us if as_of_us is None else as_of_us
    for uuid in sorted(history.lives):
        yield from _Judge(history.lives[uuid], history.erasures, chosen).run(now_us)


class _Judge:
    def __init__(self, life: Life, erasures: list[Body], chosen: Chosen) -> None:
        self.life, self.chosen = life, chosen
        self.people, self.uses = life.people(), life.uses(erasures)
        self.shards = int(life.start.get("shards") or 0)
        asked: dict[str, int] = {}
        for body in erasures:
            asked.setdefault(body["erasure"], int(body["at_us"]) - life.offset_us)
        self.assigned: dict[Key, Body] = {
            key: {"tenant": body["owner"], "classification": body["classification"]}
            for key, _, body in life.named("blocks-assigned")
        }
        self.requests: dict[tuple[Key, int], list[int]] = defaultdict(list)
        for key, block, body in life.named("erasure-applied"):
            if body["erasure"] in asked:
                self.requests[key, block].append(asked[body["erasure"]])
        self.receipts: dict[Key, list[tuple[int, Body, int]]] = defaultdict(list)
        for body in life.leaves["receipt"]:
            here = sum(1 for _ in listed(body["runs"]))
            total = int(body["blocks"])
            each = int(body["bytes"]) * here // total // here if here and total else 0
            for key, block in listed(body["runs"]):
                self.receipts[key].append((life.where(key, block), body, each))

    def run(self, now_us: int) -> Iterator[Custody]:
        firsts: dict[Key, tuple[int, Body]] = {}
        for key, block, body in sorted(self.life.named("custody-ended"), key=lambda found: self._rank(found[2])):
            if self._selects(body["tenant"], body["classification"]):
                firsts.setdefault(key, (block, body))
        made = [self._ended(key, *firsts[key]) for key in sorted(firsts)]
        yield from (custody for custody in made if custody)
        ended = {key for key, _, _ in self.life.named("custody-ended")}
        for key in sorted(self.uses.keys() - ended):
            custody = self._overdue(key, now_us - self.life.offset_us)
            if custody:
                yield custody

    def _rank(self, body: Body) -> tuple[bool, int, int]:
        return body["incarnation"] != self.life.uuid, int(body["sequence"]), int(body["part"])

    def _ended(self, key: Key, block: int, body: Body) -> Custody | None:
        claimed, ended, retired = (int(body[f"{name}_boot_us"]) for name in ("due", "ended", "retired"))
        within, bound = int(body["scrub_within_us"]), min(int(body["ceiling_boot_us"]) or OPEN, ended)
        uses = [use for use in self.uses.get(key, ()) if use.block == block]
        own = [use for use in uses if self.people.get(use.residency, {}).get("tenant") == body["tenant"]]
        last = max((use.released for use in uses), default=0)
        writer = min((use.residency for use in uses if use.written), default=OPEN)

        def due_by(ends: Iterable[int], asked: int = OPEN) -> int:
            return max(last, min(bound, max(ends, default=0), asked))

        requests = self.requests.get((key, block), ())
        due = due_by(use.held for use in own)
        others = {
            due_by(use.held for use in uses),
            *(due_by((use.held for use in own), at) for at in requests),
        }
        unheard = {due_by(some) for some in ([use.unasked for use in own], [use.unasked for use in uses])}
        unheard |= {due_by((use.unasked for use in own), at) for at in requests}
        if writer == OPEN or claimed in others:
            due = claimed
        disputed = claimed != due and claimed not in unheard
        proofs, named = self._proofs(key, block, max(last, retired))
        at_period = (due if due < OPEN else claimed) + self.life.offset_us
        if not (self._in_period(at_period) and self._of_model(writer)):
            return None
        verdict, destroyed = self._verdict(body, writer, proofs, named)
        since, over = max(due, retired), max((proof[0] for proof in proofs.values()), default=0)
        custody = Custody(
            *(self.life.uuid, *key, block, max(1, self.shards), body["tenant"], body["classification"]),
            "late" if destroyed and over > since + within else verdict,
            due, disputed, ended <= due + within, fence=max(0, retired - ended), cause=body["cause"], ended=ended,
            ceiling=int(body["ceiling_boot_us"]), within=within, writer=NOBODY if writer == OPEN else writer,
        )  # fmt: skip
        if not destroyed:
            return custody
        level = LEVELS[min(level for _, level, _ in proofs.values())]
        size = sum(size for _, _, size in proofs.values())
        return custody._replace(lag=max(0, over - since), level=level, size=size)

    def _proofs(self, key: Key, block: int, last_use: int) -> tuple[dict[int, tuple[int, int, int]], set[int]]:
        """Of each shard the first receipt that counts, (ended, level, bytes); and the shards that have any."""
        proofs: dict[int, tuple[int, int, int]] = {}
        named = set()
        for of, body, size in self.receipts.get(key, ()):
            shard, began, over = (int(body[name]) for name in ("shard", "started_boot_us", "ended_boot_us"))
            if not 0 <= shard < max(1, self.shards):
                continue
            named.add(shard)
            good = body["result"] == "ok" and body["level"] in LEVELS and of == block
            if good and last_use <= began <= over:
                unread = body["level"] == "sampled" and (body["part"] > 1 or not body["verified"])
                proof = (over, LEVELS.index("retired" if unread else body["level"]), size)
                proofs[shard] = min(proof, proofs.get(shard, proof))
        return proofs, named

    def _verdict(self, body: Body, writer: int, proofs: dict[int, Any], named: set[int]) -> tuple[str, bool]:
        if body["cause"].startswith("unproven") or writer == OPEN or not self.shards:
            return "unproven", False
        if len(proofs) == self.shards:
            return "in_time", True
        return ("failed" if len(named) > len(proofs) else "missing"), False

    def _overdue(self, key: Key, now: int) -> Custody | None:
        written = [use for use in self.uses[key] if use.written]
        if not written:
            return None
        first = min(written, key=lambda use: use.residency)
        due = max(use.held for use in self.uses[key] if use.block == first.block)
        person = self.assigned.get(key) or self.people.get(first.residency, {})
        who = person.get("tenant", UNKNOWN), person.get("classification", UNKNOWN)
        kept = self._in_period(due + self.life.offset_us) and self._of_model(first.residency)
        if due >= now or not kept or not self._selects(*who):
            return None
        return Custody(self.life.uuid, *key, first.block, max(1, self.shards), *who, "overdue", due)

    def _selects(self, tenant: str, classification: str) -> bool:
        return self.chosen.tenant in (None, tenant) and self.chosen.classification in (None, classification)

    def _in_period(self, at_us: int) -> bool:
        since, until = self.chosen.since_us, self.chosen.until_us
        return (since is None or at_us >= since) and (until is None or at_us < until)

    def _of_model(self, writer: int) -> bool:
        return self.chosen.model in (None, self.people.get(writer, {}).get("model") or UNKNOWN)


class Figures(dict[str, int]):
    """Counts of units (block, generation, shard), by the names of `CoverageRow`."""

    __getattr__ = dict.__getitem__


def figures(custodies: Iterable[Custody]) -> Figures:
    """Every figure of a row, of these custodies."""
    names = (
        "due",
        "ended_in_time",
        "covered",
        *VERDICTS,
        "disputed",
        *(f"{level}_bytes" for level in LEVELS),
    )
    total = Figures(dict.fromkeys((*names, "reread_blocks", "fence_us_max"), 0))
    for one in custodies:
        for name, counts in (("due", True), (one.verdict, True), ("covered", one.covered),
                             ("ended_in_time", one.ended_in_time), ("disputed", one.disputed),
                             ("reread_blocks", one.level == "full")):  # fmt: skip
            total[name] += one.shards * counts
        if one.level:
            total[f"{one.level}_bytes"] += one.size
        total["fence_us_max"] = max(total["fence_us_max"], one.fence)
    return total


def lag_us(custodies: Iterable[Custody], percent: int) -> int:
    """The lag that `percent` % of destroyed custodies did not exceed (nearest rank); 0 where none was destroyed."""
    lags = sorted(one.lag for one in custodies if one.lag >= 0)
    return lags[-(-len(lags) * percent // 100) - 1] if lags else 0


def population_digest(custodies: Iterable[Custody]) -> str:
    """SHA-256: of each incarnation its id, then seven numbers a custody in the order of the population."""
    digest, incarnation = hashlib.sha256(), ""
    for one in custodies:
        if one.incarnation != incarnation:
            incarnation = one.incarnation
            digest.update(incarnation.encode() + b"\n")
        verdict = VERDICTS.index(one.verdict)
        numbers = (one.pool, one.generation, one.block, one.due, verdict, one.covered, one.shards)
        digest.update(b"".join(int(number).to_bytes(8, "big", signed=True) for number in numbers))
    return digest.hexdigest()


def unaccounted(history: History) -> tuple[int, int, int]:
    """Residencies without an opening; generations that nothing lists as handed out; wiped custody without an end."""
    strange = missing = stray = 0
    for life in history.lives.values():
        uses = life.uses([])
        about = {use.residency for each in uses.values() for use in each}
        about |= {int(body["residency"]) for body in life.leaves["residency-released"] if body["part"] == 1}
        strange += len(about - life.people().keys())
        ended, wiped, covered = (
            {key for key, _, _ in life.named(kind)} for kind in ("custody-ended", "receipt", "erasure-applied")
        )
        stray += len(wiped - ended)
        handed_out = {key for key, each in uses.items() if any(use.written for use in each)}
        reached = dict.fromkeys((pool for pool, _ in handed_out), int(life.start.get("generation") or 0))
        for pool, generation in sorted(uses.keys() | ended | wiped | covered):
            start = int(life.start.get("generation") or 0)
            before = reached.get(pool, start)
            missing += max(0, generation - max(before, start) - 1) + ((pool, generation) not in handed_out)
            reached[pool] = generation
    return strange, missing, stray
