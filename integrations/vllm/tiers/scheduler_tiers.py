"""The scheduler's half of tiers: which published blocks leave, which are loaded for a request, and when each may.

    tiers.published(governed, first, blocks, keys)   # blocks of a request entered the index
    tiers.released(governed)                         # it gave its blocks back: what is left of its run may leave
    tiers.restorable(request, governed, depth)       # blocks that a load would bring behind a hit
    tiers.allocated(governed)                        # it has its blocks: the load leaves with this step
    order = tiers.take_jobs(); tiers.settle()        # with a step's order, and when all of it was told
    tiers.receive(replies)

1. A block is copied as it is before the step that carries the job writes anything. So a job may leave only with a step
   behind the one that computes its blocks (`settle`). A job that had to wait for its turn leaves only if none of its
   blocks has ended meanwhile.
2. Blocks that leave belong to the request's own domain, or to a segment that the request begins with and computed. A
   copy has its blocks' times: it is due when their last use was long enough ago, and no later than their ceiling.
   Blocks that come back carry both times, and so do blocks that are computed from them. Blocks that a grant opened
   neither leave nor come back for their reader. The reader's own blocks behind them have keys that go through theirs.
   So those are found again only behind the same blocks, once these are attached.
3. A request that waits for a load holds its blocks. A request whose load failed once computes. A copy that is due when
   the engine takes it counts as not loaded (`drop_late`).
4. At most as many stores are under way as the workers have buffers for, so serving never waits for a tier. A load is
   made where it is expected to be faster than computing. The estimate uses the time that earlier loads took, from their
   request's blocks to the answer. Nothing is tried on an urgent request. Instead, a worker occasionally reads an object
   that no request needs.
5. Nothing comes back behind a hole. So when a run of a chain goes to a tier, the runs before it that were not stored go
   there too. This holds as long as their blocks are in the pool.
6. Copies that another worker stored in a shared store are looked up before the first load (`shared_lookups`). Where the
   store's labels do not agree with a domain, nothing of the domain leaves or comes back.
7. A change of policy or keys reaches the workers with the next step. Until then, no copy that the change ends is looked
   up without the policy's permission.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvcustody.allocator.pool.block_state import ACTIVE, CACHED, Blocks
from kvcustody.audit.evidence.coverage.conservation import TierCounts
from kvcustody.clock import MICROSECONDS
from kvcustody.errors import ConfigError, IsolationError, NoKeyError
from kvcustody.governance.custody.books import CopyTiers
from kvcustody.governance.decisions.access_plan import DomainLabel, label_of
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.external.block_keys import LazyKeys
from kvcustody.governance.keys.shred_keys import ShredKeys
from kvcustody.governance.orphans.finding import Finding
from kvcustody.governance.tiers.copies.index import PublishedRun
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves
from kvcustody.governance.tiers.heirs import TierHolder
from kvcustody.governance.tiers.seal_keys import SealKeys
from kvcustody.governance.tiers.tier import CopyCounts, Restored, in_time
from kvcustody.governance.tiers.tier_link import (
    Moved,
    Outcome,
    TierLink,
    TransferChoice,
    decided,
    tier_figures,
)
from kvcustody.governance.tiers.tier_rules import Tables, TierRules
from kvcustody.integrations.vllm.open_custody import NULL_BLOCK
from kvcustody.integrations.vllm.tiers.copy_directory import CopyDirectory, FoundCopies, TierCount
from kvcustody.integrations.vllm.tiers.copy_plans import (
    NOT_THERE,
    ChainSpan,
    LateBlocks,
    LeavingPart,
    LeavingRun,
    PlannedLoad,
    PlannedPart,
    RunningStore,
    UnsavedRun,
    choice_for_part,
)
from kvcustody.integrations.vllm.tiers.layer_groups import NO_KEY, ONE_GROUP, CopiedGroup
from kvcustody.integrations.vllm.tiers.scheduler_handover import SchedulerHandover
from kvcustody.integrations.vllm.tiers.shared_lookups import SharedLookups, SoughtRun
from kvcustody.integrations.vllm.tiers.tier_messages import (
    CloseTier,
    CompareCopies,
    CopyJob,
    CopyReply,
    CopyRule,
    FetchCopies,
    ForgetTenant,
    LoadCopies,
    LoadPart,
    NarrowCopies,
    OpenTier,
    ProbeCopy,
    Rules,
    SoughtChain,
    StoreCopy,
)
from kvcustody.policies.document.model import Tier

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvcustody.allocator.external.residency import ExternalResidency
    from kvcustody.governance.external.engine_port import EnginePort
    from kvcustody.governance.settings import Settings
    from kvcustody.governance.tiers.stores.open_remote import RemotePlan
    from kvcustody.integrations.vllm.scheduler.governed_request import GovernedRequest

_LATER = 0  # the number of a job that has none yet
_STORES_MAX = 64  # under way at once
_WAITING_MAX = 4096  # runs that wait for their turn; the oldest are not kept beyond it
_EXPIRE_PAUSE_US = 250_000
_TO_ITS_END = 1 << 62
_ENDS_TRIED = 16  # of a hit of several layer groups


class RunningLoad(NamedTuple):
    """A load whose job the workers have."""

    governed: GovernedRequest
    residency: ExternalResidency
    planned: PlannedLoad
    blocks: list[int]
    began_us: int


class SchedulerTiers(CopyTiers):
    """The tiers of one engine. Called on the engine's thread."""

    def __init__(
        self,
        tiers: tuple[str, ...],
        port: EnginePort,
        shred: ShredKeys,
        *,
        object_blocks: int,
        block_tokens: int,
        shards: int,
        groups: tuple[CopiedGroup, ...] = ONE_GROUP,
        holder: TierHolder | None = None,
        always: bool = False,
        settings: Settings | None = None,
        remote: RemotePlan | None = None,
    ) -> None:
        """Open the tiers. `always`: move whatever is permitted, at any cost. `settings`: those about hand-overs to
        other workers. `remote`: the store that workers share, where there is one.

        Raises a `CustodyError` where what hand-overs need cannot be read.
        """
        self._port = port
        self._keyring = keyring = port.keyring
        self._keys = SealKeys(keyring, shred)
        self._shred = shred
        self._policy = TierRules(
            lambda: port.tables,
            port.authorize,
            lambda: port.restricted,
            lambda: port.custody.is_over(port.clock.now_us()),
        )
        self._step = object_blocks
        self._block_tokens = block_tokens
        self._shards = shards
        self._groups = groups
        self._numbers = 0
        self._jobs: list[CopyJob] = []
        self._fresh: list[LeavingRun] = []
        self._unsettled: list[UnsavedRun] = []  # with blocks that a step may have yet to compute
        self._waiting: deque[LeavingRun] = deque(maxlen=_WAITING_MAX)
        self._refused: OrderedDict[tuple[str, bytes], LeavingRun] = OrderedDict()  # by tier and last key
        self._open: dict[int, set[int]] = {}  # jobs, with the shards that have not answered
        self._label_of: dict[int, DomainLabel] = {}  # by job, of what it stores
        self._stores: set[int] = set()
        self._loads: dict[int, tuple[RunningLoad, list[tuple[Restored, ...]]]] = {}
        self._storing: dict[int, tuple[RunningStore, int]] = {}  # by job, with the longest that a shard took
        self._left_alone: set[str] = set()  # tiers that a request in a hurry did not wait for
        self._probes: dict[int, tuple[str, int, int]] = {}  # by job: of which tier, since when, bytes
        self._comparisons: dict[int, tuple[int, list[Finding]]] = {}  # by job: since when, and what was found
        self._links = {tier: TierLink(always=always) for tier in tiers}
        self._capacity = dict.fromkeys(tiers, 0)
        self._block_bytes = port.pool.bytes_per_block
        self._buffers = 0  # for stores, of the worker that has fewest
        self._layout: dict[str, bytes] = {}
        self._rules_of: Tables | None = None
        self._key_changes = keyring.changes
        self._expire_us = 0
        self._counts: dict[tuple[str, int], CopyCounts] = {}  # by tier and shard, as they told last
        self._steps: dict[str, Counter[str]] = {tier: Counter() for tier in tiers}
        self._failed: Counter[str] = Counter()
        self._opened_shards: set[int] = set()  # which said how many keys were in their file again
        self.directories = {
            tier: CopyDirectory(tier, shards, self._send, returned_keys=shred.returned) for tier in tiers
        }
        self._remote = remote
        self._lookups: SharedLookups | None = None
        if remote is not None:
            shared = Tier.REMOTE.value
            self._lookups = SharedLookups(
                shared,
                self.directories[shared],
                self._links[shared],
                self._send,
                port.clock,
                wait_us=int(remote.timeout_seconds * MICROSECONDS),
            )
        self.handover: SchedulerHandover | None = None
        if settings is not None and settings.handover_peers_path is not None:
            if len(groups) > 1:
                raise ConfigError("setting `handover_peers_path`: a model of several layer groups is not handed over")
            life = holder.incarnation if holder is not None else ""
            self.handover = SchedulerHandover(
                settings, tiers[0], life, port, self._keys, self._send, self._rule, block_tokens=block_tokens
            )
        for tier in tiers:
            rules = self._all_rules(tier)
            self._send(OpenTier(_LATER, tier, block_tokens, rules, holder))

    # -- what leaves ----------------------------------------------------------------------------------------------

    def published(
        self,
        governed: GovernedRequest,
        first: int,
        blocks: Sequence[Sequence[int]],
        keys: Sequence[bytes],
    ) -> None:
        """Take entries of a request's tables from `first` on, by layer group, that are indexed under these keys."""
        residency = governed.residency
        if residency is None or residency.monitored is not None or not self._port.may_publish(residency):
            return
        shared = residency.segment_blocks
        if first < shared < first + len(keys):
            at = shared - first
            self.published(governed, first, [of_group[:at] for of_group in blocks], keys[:at])
            self.published(governed, shared, [of_group[at:] for of_group in blocks], keys[at:])
            return
        run = governed.unsaved
        if run is None or run.end != first:
            if run is not None:
                self._cut(governed, run, run.end, self._fresh)
            parent = governed.request.block_hashes[first - 1] if first else NO_KEY
            run = governed.unsaved = UnsavedRun(first, parent, len(self._groups))
        run.keys.extend(keys)
        for group, of_group in enumerate(blocks):
            run.blocks[group].extend(of_group)
            if len(blocks) > 1:
                run.generations[group].extend(self._port.pool.generation[list(of_group)].tolist())
        self._unsettled.append(run)
        if len(blocks) > 1:
            for end in self._window_ends(governed, run, len(keys)):
                self._cut(governed, run, end, self._fresh)
        boundary = run.end if run.end == shared else run.end - run.end % self._step
        if boundary > run.first:
            self._cut(governed, run, boundary, self._fresh)

    def _window_ends(self, governed: GovernedRequest, run: UnsavedRun, added: int) -> list[int]:
        """Return where a hit may end that no object does yet: every window's blocks are there, and later ones are not.

        Of the last ones that were added only at the end of a prompt, where others begin alike.
        """
        windows = [run.blocks[one.number] for one in self._groups if one.window_blocks is not None]
        if not windows:
            return []
        first = max(1, len(run.keys) - added)
        there = [all(blocks[at] != NOT_THERE for blocks in windows) for at in range(first - 1, len(run.keys))]
        ends = [
            run.first + first + at for at, (one, behind) in enumerate(itertools.pairwise(there)) if one and not behind
        ]
        prompt_end = (governed.request.num_prompt_tokens - 1) // self._block_tokens
        return [*ends, run.end] if there[-1] and run.end == prompt_end else ends

    def released(self, governed: GovernedRequest) -> None:
        """Take note that the request ended or was preempted: its published blocks were computed by steps that have
        left.

        Of one that is preempted while a step is scheduled, what that step was to compute never is.
        """
        run, governed.unsaved = governed.unsaved, None
        residency, is_over = governed.residency, governed.request.is_finished()
        if not is_over:
            self._fresh = [one for one in self._fresh if one.residency is not residency]
        if run is None or residency is None:
            return
        end = run.end if is_over else min(run.settled, run.end)
        if end > run.first:
            self._cut(governed, run, end, self._waiting)

    def _cut(
        self,
        governed: GovernedRequest,
        run: UnsavedRun,
        end: int,
        into: list[LeavingRun] | deque[LeavingRun],
    ) -> None:
        """Cut the blocks before `end` into runs that leave, one per object."""
        residency = governed.residency
        assert residency is not None
        now_us = self._port.clock.now_us()
        while run.first < end:
            domain = residency.domain
            if run.first < residency.segment_blocks and residency.segment_domain is not None:
                domain = residency.segment_domain  # a run ends where the segment does
            count = min(end, run.first - run.first % self._step + self._step) - run.first
            parts = [self._part(group, run, count, domain.tag) for group in self._groups]
            leaving_parts = tuple(part for part in parts if part is not None)
            if leaving_parts:
                blocks = np.concatenate([part.blocks for part in leaving_parts])
                born_us = int(self._port.pool.born_us[blocks].min())
                ceiling_us = int(self._port.pool.ceiling_us[blocks].min())
                due_us = now_us + domain.idle_us
                place = (residency, run.first, count, leaving_parts)
                keys = (run.parent, run.keys[count - 1])
                leaving = LeavingRun(domain, *place, born_us, ceiling_us, due_us, *keys)
                if governed.hands_to:
                    leaving = leaving._replace(awaited_by=next(iter(self.directories)))
                into.append(leaving)
            run.drop(count)

    def _part(self, group: CopiedGroup, run: UnsavedRun, count: int, tag: int) -> LeavingPart | None:
        """Return one group's part of an object for the run's first blocks; None where a block of it is missing.

        Of a window that had passed the first of them it holds those behind: a hit that ends later needs no more.
        """
        pool, at = self._port.pool, group.first_needed(run.first, run.first + count) - run.first
        of_group = run.blocks[group.number]
        while group.window_blocks is not None and at < count and of_group[at] == NOT_THERE:
            at += 1
        listed = of_group[at:count]
        if not listed or NOT_THERE in listed:
            return None
        blocks = np.array(listed, dtype=np.int64)
        generations = pool.generation[blocks]
        if not (pool.tag[blocks] == tag).all():
            return None
        if len(self._groups) > 1:
            known = run.generations[group.number][at:count]
            if generations.tolist() != known or not self._are_kept(blocks):
                return None
        parent = run.keys[at - 1] if at else run.parent
        keys = group.keys(run.keys[at:count])
        return LeavingPart(keys, group.key(parent), run.first + at, blocks, generations)

    def take_jobs(self) -> tuple[CopyJob, ...]:
        """Return the jobs that leave with the step under construction (rule 1)."""
        self._look()
        if self.handover is not None:
            self.handover.looked()
        waiting = self._waiting
        each = len(self.directories) * len(self._groups)
        while waiting and len(self._stores) + each <= min(self._buffers, max(_STORES_MAX, each)):
            self._leave(waiting.popleft())
        if waiting:
            self._waiting = deque((run for run in waiting if self._is_intact(run)), maxlen=_WAITING_MAX)
        jobs, self._jobs = self._jobs, []
        return tuple(jobs)

    def settle(self) -> None:
        """Settle everything reported so far: it was computed by steps that have left, or leaves with the one just
        built.
        """
        for unsaved in self._unsettled:
            unsaved.settled = unsaved.end
        self._unsettled.clear()
        fresh, self._fresh = self._fresh, []
        self._waiting += [run for run in fresh if self._is_intact(run)]

    def _is_intact(self, run: LeavingRun) -> bool:
        generation = self._port.pool.generation
        return all(
            (generation[part.blocks] == part.generations).all() and self._are_kept(part.blocks) for part in run.parts
        )

    def _are_kept(self, blocks: Blocks) -> bool:
        states = self._port.pool.state[blocks]
        return bool(((states == ACTIVE) | (states == CACHED)).all())

    def _leave(self, run: LeavingRun) -> None:
        label, now_us = label_of(run.domain), self._port.clock.now_us()
        due_us = min(run.ceiling_us, run.due_us)
        if not run.domain.may_be_copied or due_us <= now_us:
            return
        for tier in self.directories if run.awaited_by is None else (run.awaited_by,):
            directory, rule = self.directories[tier], self._rule(tier, label.tenant, label.classification)
            names = [self._name(tier, label, part.keys[-len(NO_KEY) :]) for part in run.parts]
            parts = [
                part
                for part, name in zip(run.parts, names, strict=True)
                if name is not None and not directory.has(name, now_us, len(part.blocks))
            ]
            if not rule.limit.absolute_us or not self._agrees(tier, label):
                continue
            if not parts:
                self._await(tier, run)
                continue
            blocks = sum(len(part.blocks) for part in parts)
            size, recompute_us = blocks * self._block_bytes, self._recompute_us(run.length, run.depth)
            is_awaited = run.awaited_by is not None
            choice = self._links[tier].choose_store(size, recompute_us, is_awaited=is_awaited)
            if not choice.moves:
                self._decide("store", Moved(tier, label.tenant, 0, blocks, size), choice)
                self._refuse(tier, run)
                continue
            for part in parts:
                self._store(tier, label, run, part, rule, choice_for_part(choice, len(part.blocks), blocks))
            self._await(tier, run)

    def _refuse(self, tier: str, run: LeavingRun) -> None:
        """Remember a refused run, because a later one of its chain may be stored (rule 5)."""
        self._refused[tier, run.key] = run
        if len(self._refused) > _WAITING_MAX:
            self._refused.popitem(last=False)

    def _await(self, tier: str, run: LeavingRun) -> None:
        """Send the refused run before this one next, where its blocks are still there."""
        before = self._refused.pop((tier, run.parent), None)
        if before is not None and self._is_intact(before):
            self._waiting.appendleft(before._replace(awaited_by=tier))

    def _store(
        self,
        tier: str,
        label: DomainLabel,
        run: LeavingRun,
        part: LeavingPart,
        rule: CopyRule,
        choice: TransferChoice,
    ) -> None:
        job = StoreCopy(
            _LATER,
            tier,
            PublishedRun(
                label,
                part.keys,
                part.parent,
                part.depth,
                run.born_us,
                run.ceiling_us,
                min(run.ceiling_us, run.due_us),
            ),
            rule,
            part.blocks.tolist(),
        )
        count = len(part.blocks)
        number = self._send(job, label)
        self._stores.add(number)
        moved = Moved(tier, label.tenant, 0, count, count * self._block_bytes)
        self._storing[number] = (RunningStore(moved, choice), 0)

    # -- what comes back ------------------------------------------------------------------------------------------

    def restorable(self, request: Request, governed: GovernedRequest, depth: int) -> int:
        """Return how many blocks a load would bring from `depth` of the chain on; the plan holds until the next
        call.
        """
        governed.planned = None
        spans, residency = self._readable(governed, depth), governed.residency
        if residency is None or not spans:
            return 0
        specs = [label_of(span.domain).spec for span in spans]
        if not any(
            spec is not None and directory.may_have(spec)
            for spec in specs[:1]
            for directory in self.directories.values()
        ):
            return 0
        best, now_us = self._best(spans, _keys_of(request)), self._port.clock.now_us()
        if best is None:
            return 0
        recompute_us = self._recompute_us(best.until - depth, depth)
        latency = governed.hints.latency
        looking = governed.looking
        choice = self._links[best.tier].choose_restore(
            best.size,
            recompute_us,
            now_us,
            looks=True,
            is_tried=looking is not None and looking.reason == "tried",
            latency=latency,
        )
        if looking is not None and choice.transfer_us:
            choice = choice._replace(transfer_us=choice.transfer_us + looking.expected_us)
        if not choice.moves:
            governed.skips_tiers = True
            if latency == "interactive":
                self._left_alone.add(best.tier)
            moved = Moved(best.tier, residency.tenant, residency.id, best.blocks, best.size)
            self._decide("restore", moved, choice, latency=latency)
            return 0
        looked_us = 0 if looking is None else looking.took_us
        governed.planned = best._replace(choice=choice, looked_us=looked_us)
        return best.until - depth

    def must_look(self, request: Request, governed: GovernedRequest, depth: int) -> bool:
        """Return whether the request must wait for a look-up in the shared store; begins the look-up."""
        lookups = self._lookups
        if lookups is None:
            return False
        if governed.looking is None and not governed.has_looked:
            governed.has_looked = True
            runs, reason = self._sought(lookups.tier, request, governed, depth)
            lookups.begin(governed, runs, reason)
        return lookups.must_wait(governed)

    def _sought(
        self, tier: str, request: Request, governed: GovernedRequest, depth: int
    ) -> tuple[list[SoughtRun], str]:
        """Return the request's blocks that no tier here is known to have, with the look-up's reason; nothing without a
        reason.
        """
        spans = self._readable(governed, depth)
        if not spans or tier not in self._layout:
            return [], ""
        keys = _keys_of(request)
        known = self._best(spans, keys)
        known_until = depth if known is None else known.until
        missing = spans[-1].last - known_until
        runs = self._runs_behind(known_until, tier, spans, keys) if missing > 0 else []
        if not runs:
            return [], ""
        last = spans[-1].last
        blocks = sum(last - group.first_needed(known_until, last) for group in self._groups)
        size = blocks * self._block_bytes // self._shards
        recompute_us, now_us = self._recompute_us(missing, known_until), self._port.clock.now_us()
        reason = self._links[tier].choose_look(size, recompute_us, now_us, governed.hints.latency)
        return (runs if reason else []), reason

    def _runs_behind(
        self, known_until: int, tier: str, spans: Sequence[ChainSpan], keys: Sequence[bytes]
    ) -> list[SoughtRun]:
        """Return what to look up in each domain, as far as its blocks may be in this tier."""
        runs: list[SoughtRun] = []
        for span in spans:
            label, at = label_of(span.domain), max(known_until, span.first)
            if len(self._groups) > 1:  # what is known of one group may be of use with another worker's of the others
                at = span.first
            rule = self._rule(tier, label.tenant, label.classification)
            whole = min(len(keys), span.whole)
            if max(known_until, at) >= span.last or label.spec is None or not rule.limit.absolute_us:
                continue
            if not self._agrees(tier, label):
                break
            first = max(0, at - at % self._step - 1)  # an object may begin before
            next_end = min(whole, at - at % self._step + self._step)
            name_at = self._names_by_group(tier, label, keys)
            asked_first = next(group.number for group in self._groups if group.window_blocks is None)
            try:
                next_name = name_at(asked_first, next_end)
            except NoKeyError:  # the epoch was destroyed, say
                break
            chains = tuple(SoughtChain(group, group.keys(keys[first:whole])) for group in self._groups)
            runs.append(SoughtRun(label, rule, first, at, span.last, chains, name_at, next_name))
        return runs

    def _readable(self, governed: GovernedRequest, depth: int) -> list[ChainSpan]:
        """Return the domains of the blocks behind a hit, as far as a load may bring them now."""
        residency, limit = governed.residency, governed.readable_tokens // self._block_tokens
        if residency is None or governed.skips_tiers or depth >= limit or residency.monitored is not None:
            return []
        if depth < residency.granted_blocks:
            return []  # what is between is its owner's, and its own is behind that
        return self._spans(residency, depth, limit)

    def _best(self, spans: Sequence[ChainSpan], keys: Sequence[bytes]) -> PlannedLoad | None:
        """Return the longest hit from a tier's copies; among equal ones, that of the first tier."""
        best: PlannedLoad | None = None
        for tier in self.directories:
            try:
                found = self._find(tier, spans, keys)
            except NoKeyError:  # the epoch was destroyed, say
                return None
            if found is not None and (best is None or found.until > best.until):
                best = found
        return best

    def _agrees(self, tier: str, label: DomainLabel) -> bool:
        """Return whether a tier is where blocks of this domain may be."""
        return self._remote is None or tier != Tier.REMOTE or self._policy.agrees(label, self._remote.place)

    def _spans(self, residency: ExternalResidency, depth: int, limit: int) -> list[ChainSpan]:
        """Return the domains of the blocks behind `depth`, in order, as far as the request may read each now."""
        shared = residency.segment_blocks
        spans = [ChainSpan(residency.domain, max(depth, shared), limit, _TO_ITS_END)]
        if residency.segment_domain is not None and depth < shared:
            spans.insert(0, ChainSpan(residency.segment_domain, depth, min(shared, limit), shared))
        may = [self._port.may_restore(residency, span.domain) for span in spans]
        return spans[: may.index(False)] if False in may else spans

    def _find(self, tier: str, spans: Sequence[ChainSpan], keys: Sequence[bytes]) -> PlannedLoad | None:
        """Return the longest hit from one tier's copies in these domains."""
        parts, size, depth = list[PlannedPart](), 0, spans[0].first
        directory, until = self.directories[tier], spans[0].first
        for span in spans:
            label = label_of(span.domain)
            spec = label.spec
            rule = self._rule(tier, label.tenant, label.classification)
            if spec is None or until < span.first or not rule.limit.absolute_us:
                break
            if not directory.may_have(spec) or not self._agrees(tier, label):
                break
            found = self._find_in(tier, span, keys)
            if found is None:
                break
            parts += found.parts
            size += found.size
            until = found.until
            if until < span.last:
                break
        return PlannedLoad(tier, tuple(parts), depth, until, size) if until > depth else None

    def _find_in(self, tier: str, span: ChainSpan, keys: Sequence[bytes]) -> PlannedLoad | None:
        """Return the longest hit in one domain.

        Of one group the last object may be longer than is wanted. Of several a hit ends where an object of each
        full-attention group does, and windows are looked for before a few of the last such ends.
        """
        directory, now_us = self.directories[tier], self._port.clock.now_us()
        domain, depth, limit, whole_chain = span
        label = label_of(domain)

        def longest(group: CopiedGroup, first: int, whole: int) -> FoundCopies:
            return directory.longest(self._names(tier, label, keys, group), first, whole, self._step, now_us)

        whole_groups = [group for group in self._groups if group.window_blocks is None]
        copies_by_group = {group: longest(group, depth, min(len(keys), whole_chain)) for group in whole_groups}
        if len(self._groups) == 1:
            ((group, copies),) = copies_by_group.items()
            until = min(copies.ends[-1], limit) if copies.ends else depth
            part = PlannedPart(group.number, domain, copies.names, copies.ends, depth, until)
            return PlannedLoad(tier, (part,), depth, until, copies.size) if until > depth else None
        ends = set(range(depth + 1, limit + 1)).intersection(*(copies.ends for copies in copies_by_group.values()))
        for until in sorted(ends, reverse=True)[:_ENDS_TRIED]:
            parts, size = [], 0
            for group in self._groups:
                first = group.first_needed(depth, until)
                copies = (
                    copies_by_group[group].until(until) if group in copies_by_group else longest(group, first, until)
                )
                if not copies.ends or copies.ends[-1] != until:
                    break
                parts.append(PlannedPart(group.number, domain, copies.names, copies.ends, first, until))
                size += copies.size
            else:
                return PlannedLoad(tier, tuple(parts), depth, until, size)
        return None

    def allocated(self, governed: GovernedRequest) -> None:
        """Take the blocks for the planned load, which leaves with this step."""
        planned, governed.planned = governed.planned, None
        residency = governed.residency
        if planned is None or residency is None:
            raise IsolationError(f"`{governed.request_id}` was given blocks for a load that nobody planned")
        keys, parts = governed.request.block_hashes, []
        for number, domain, _, ends, depth, until in planned.parts:
            blocks = governed.tables[number][depth:until]
            if len(blocks) < until - depth or NULL_BLOCK in blocks:
                raise IsolationError(f"`{governed.request_id}` was not given the blocks of a load")
            first = max(0, depth - depth % self._step - 1)  # an object may begin before `depth`
            of_group = self._groups[number].keys(keys[first : ends[-1]])
            parts.append(LoadPart(label_of(domain), first, of_group, depth, list(blocks)))
        number = self._send(
            LoadCopies(
                _LATER,
                planned.tier,
                governed.request_id,
                tuple(parts),
                together=len(self._groups) > 1,
            )
        )
        governed.restored_blocks = planned.until - planned.depth
        blocks = [block for part in parts for block in part.blocks]
        self._loads[number] = (RunningLoad(governed, residency, planned, blocks, self._port.clock.now_us()), [])

    def is_loading(self, governed: GovernedRequest) -> bool:
        """Return whether workers may still write into the request's blocks."""
        return any(loading.governed is governed for loading, _ in self._loads.values())

    # -- answers --------------------------------------------------------------------------------------------------

    def drop_late(self, replies: list[CopyReply]) -> LateBlocks:
        """Remove what is due by now from these replies before the engine attaches it; `receive` gets the rest."""
        late, now_us = LateBlocks(set(), set()), self._port.clock.now_us()
        for at, reply in enumerate(replies):
            if reply.number not in self._loads:
                continue
            loading, _ = self._loads[reply.number]
            restored = tuple(in_time(reply.restored, now_us))
            if restored == reply.restored:
                continue
            replies[at] = reply._replace(restored=restored)
            if len(self._groups) > 1:  # vLLM computes all of it
                late.requests.add(loading.governed.request_id)
            else:
                late.blocks.update(loading.blocks[sum(one.blocks for one in restored) :])
        return late

    def receive(self, replies: Sequence[CopyReply]) -> None:
        """Take the workers' replies."""
        for reply in replies:
            directory = self.directories[reply.tier]
            events = self._numbered(reply)
            directory.tell(events, self._label_of.get(reply.number))
            for event in events:
                self._steps[reply.tier][f"{event.step} {event.cause}".strip()] += 1
            self._record(reply.tier, events)
            if self.handover is not None:
                for given in reply.given:
                    self.handover.given(given)
                if reply.fetched is not None:
                    self.handover.fetched(reply.number, reply.fetched)
            if self._lookups is not None:
                self._lookups.answered(reply.number, reply.sought)
            if reply.counts is not None:
                self._counts[reply.tier, reply.shard] = reply.counts
            directory.answered(reply.number, reply.shard, reply.erased)
            if reply.opened is not None:
                opened = reply.opened
                self._layout[reply.tier] = opened.layout
                self._buffers = min(self._buffers or opened.buffers, opened.buffers)
                self._capacity[reply.tier] += opened.capacity_bytes
                if reply.shard not in self._opened_shards:  # its tiers share one file of keys
                    self._opened_shards.add(reply.shard)
                    self._port.erasures.record_returned(opened.returned_keys)
            self._port.erasures.record_returned(reply.returned_keys)
            if reply.number in self._storing:
                storing, longest_us = self._storing[reply.number]
                self._storing[reply.number] = (storing, max(longest_us, reply.took_us))
            if reply.number in self._probes:
                tier, began_us, size = self._probes[reply.number]
                self._probes[reply.number] = (tier, began_us, max(size, reply.probed))
            if reply.number in self._comparisons:
                self._comparisons[reply.number][1].extend(reply.found)
            if reply.number in self._loads:
                self._loads[reply.number][1].append(reply.restored)
            self._answered(reply, directory)

    def _answered(self, reply: CopyReply, directory: CopyDirectory) -> None:
        open_shards = self._open.get(reply.number)
        if open_shards is None:
            return
        open_shards.discard(reply.shard)
        if open_shards:
            return
        del self._open[reply.number]
        self._label_of.pop(reply.number, None)
        self._stores.discard(reply.number)
        directory.job_is_over(reply.number)
        if self.handover is not None:
            self.handover.is_over(reply.number)
        if self._lookups is not None:
            self._lookups.is_over(reply.number)
        loading = self._loads.pop(reply.number, None)
        if loading is not None:
            self._loaded(*loading)
        probe = self._probes.pop(reply.number, None)
        if probe is not None and probe[2]:
            tier, began_us, size = probe
            self._links[tier].restores.learn(size, self._port.clock.now_us() - began_us)
        comparison = self._comparisons.pop(reply.number, None)
        if comparison is not None:
            began_us, found = comparison
            self._port.record_elsewhere(found, began_us)
        storing = self._storing.pop(reply.number, None)
        if storing is not None:
            self._stored(*storing, has=any(event.step == "stored" for event in reply.events))

    def _stored(self, storing: RunningStore, took_us: int, *, has: bool) -> None:
        """Handle a store that all shards have answered; `has`: the last one has it."""
        moved = storing.moved
        if has:
            self._links[moved.tier].stored(moved.size, moved.blocks, took_us)
        self._decide("store", moved, storing.choice, "done" if has else "failed", took_us)

    def _recompute_us(self, blocks: int, depth: int) -> float | None:
        """Return the expected time to compute these blocks; None where it is unknown."""
        cost, tokens = self._port.measures.cost, self._block_tokens
        return cost.seconds_of(blocks * tokens, depth * tokens) * 1e6 if cost.is_known else None

    def _decide(
        self,
        action: str,
        moved: Moved,
        choice: TransferChoice,
        outcome: str = "",
        actual_us: int = 0,
        part_blocks: int = 0,
        latency: str = "",
    ) -> None:
        """Record a decision."""
        now_us = self._port.clock.now_us()
        cost = Outcome(outcome, actual_us, part_blocks)
        self._port.record_copies([decided(now_us, action, moved, choice, cost, latency)])

    def _loaded(self, loading: RunningLoad, by_shard: list[tuple[Restored, ...]]) -> None:
        """Handle a load that all shards have answered: loaded blocks keep their copies' age, and a failed request
        computes.
        """
        governed, residency, planned = loading.governed, loading.residency, loading.planned
        asked = len(loading.blocks)
        came = usable_blocks = min(sum(one.blocks for one in restored) for restored in by_shard)
        if len(self._groups) > 1 and usable_blocks < asked:  # vLLM computes all of it (`failed_requests`)
            usable_blocks = 0
        took_us = self._port.clock.now_us() - loading.began_us
        self._links[planned.tier].restored(planned.size, usable_blocks, took_us, asked=asked)
        took_us += planned.looked_us
        outcome = "done" if usable_blocks == asked else "partial" if usable_blocks else "failed"
        assert planned.choice is not None, "a plan is of a choice"
        moved = Moved(planned.tier, residency.tenant, residency.id, asked, planned.size)
        part = usable_blocks if usable_blocks < asked else 0
        latency = governed.hints.latency
        self._decide("restore", moved, planned.choice, outcome, took_us, part, latency)
        if part or not usable_blocks:
            self._failed[planned.tier] += 1
            governed.skips_tiers = True
            governed.restored_blocks = usable_blocks
            now_us = self._port.clock.now_us()
            self.directories[planned.tier].pass_over(planned.missing(came), now_us)
        if governed.residency is residency:
            self._port.restored(
                residency,
                loading.blocks[:usable_blocks],
                min((one.born_us for restored in by_shard for one in restored), default=0),
                min((one.ceiling_us for restored in by_shard for one in restored), default=0),
            )

    def _numbered(self, reply: CopyReply) -> list[CopyEvent]:
        """Return a reply's events with the shard in their numbers, which are unique only within a shard."""
        return [
            event._replace(number=event.number * self._shards + reply.shard if event.number else 0)
            for event in reply.events
        ]

    def _record(self, tier: str, events: list[CopyEvent]) -> None:
        if events:
            which = Tier(tier)
            within = lambda *whose: self._policy.limit(which, *whose).within_us  # noqa: E731 - of two texts
            self._port.record_copies(copy_leaves(tier, events, within))

    def counts(self) -> tuple[TierCounts, ...]:
        """Return the workers' own counters by tier, all shards together, for conservation."""
        return tuple(TierCounts(tier, *self._sums(tier)[:-1]) for tier in self.directories)

    def _sums(self, tier: str) -> CopyCounts:
        """Return the counters of all shards together."""
        counts = [one for (name, _), one in self._counts.items() if name == tier]
        sums = [sum(values) for values in zip(*counts, strict=True)] or [0] * len(CopyCounts._fields)
        return CopyCounts(*sums)

    def figures(self) -> dict[str, float]:
        """Return each tier's work and content, by the keys of `metrics.MEASURES`."""
        found: dict[str, float] = {}
        for tier, link in self._links.items():
            found |= tier_figures(link.use(tier), self._sums(tier), self._capacity[tier])
        return found

    def forget_tenant(self, tenant: str) -> None:
        """End the copies of an unlisted tenant that has left."""
        for tier, directory in self.directories.items():
            directory.return_borrowed(Selector(tenant=tenant))
            self._send(ForgetTenant(_LATER, tier, tenant))

    # -- time, policy, keys ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Handle what has changed since the last step."""
        if self._have_rules_changed:
            self._key_changes = self._keyring.changes
            self._rules_of = self._port.tables
            for tier, directory in self.directories.items():
                rules = self._all_rules(tier)
                coming = set[tuple[str, str]]() if self.handover is None else self.handover.pairs
                rules |= {pair: self._rule(tier, *pair) for pair in coming.union(directory.pairs)}
                directory.return_borrowed(Selector())
                self._send(NarrowCopies(_LATER, tier, rules))
        now_us = self._port.clock.now_us()
        for tier in [tier for tier in self._left_alone if self._links[tier].watch.due(now_us)]:
            self._left_alone.discard(tier)
            self._probes[self._send(ProbeCopy(_LATER, tier))] = (tier, now_us, 0)
        if now_us < self._expire_us:
            return
        for directory in self.directories.values():
            due_us = directory.next_due_us()
            if due_us is not None and due_us <= now_us:
                self._expire_us = now_us + _EXPIRE_PAUSE_US
                directory.expire(now_us)

    @property
    def _have_rules_changed(self) -> bool:
        return self._port.tables != self._rules_of or self._keyring.changes != self._key_changes

    @property
    def has_work(self) -> bool:
        """Whether a step would carry something, or fetch an answer."""
        if self._jobs or self._open or self._fresh or self._waiting:
            return True
        if self._have_rules_changed:
            return True
        due_us = self.next_due_us()
        return due_us is not None and due_us <= self._port.clock.now_us()

    def next_due_us(self) -> int | None:
        """Return when a copy is due next, or must be requested again."""
        dues = [directory.next_due_us() for directory in self.directories.values()]
        due_us = min((due for due in dues if due is not None), default=None)
        due_us = None if due_us is None else max(due_us, self._expire_us)
        look_us = None if self.handover is None else self.handover.next_look_us()
        return min((due for due in (due_us, look_us) if due is not None), default=None)

    def by_tier(self) -> list[TierCount]:
        """Return each tier's work and content."""
        return [
            TierCount(
                tier,
                len(directory),
                directory.size,
                dict(self._steps[tier]),
                self._links[tier].restored_blocks,
                self._failed[tier],
                self._links[tier].against,
            )
            for tier, directory in self.directories.items()
        ]

    def closing_jobs(self) -> tuple[CopyJob, ...]:
        """Return the last jobs of the workers."""
        self._jobs = []
        for tier in self.directories:
            self._send(CloseTier(_LATER, tier))
        jobs, self._jobs = self._jobs, []
        return tuple(jobs)

    def close(self) -> None:
        """Forget the keys."""
        self._keys.close()
        self._shred.close()

    # -- rules ----------------------------------------------------------------------------------------------------

    def _rule(self, tier: str, tenant: str, classification: str) -> CopyRule:
        """Return what the active revision permits a tenant's blocks in a tier; the permit is recorded by then."""
        limit = self._policy.limit(Tier(tier), tenant, classification)
        return CopyRule(limit, self._policy.share(tenant))

    def _all_rules(self, tier: str) -> Rules:
        """Return the rules of every tenant that the policy names."""
        return {
            (tenant, name): self._rule(tier, tenant, name)
            for tenant in self._policy.tenants
            for name in self._port.table.policy.classifications
        }

    # -- names and jobs -------------------------------------------------------------------------------------------

    def _name(self, tier: str, label: DomainLabel, last: bytes) -> bytes | None:
        layout = self._layout.get(tier)
        if layout is None or label.spec is None or label.is_monitored:
            return None
        try:
            return self._keys.name(label.spec, last, shard=0, layout=layout)
        except NoKeyError:
            return None

    def _names(
        self, tier: str, label: DomainLabel, keys: Sequence[bytes], group: CopiedGroup
    ) -> Callable[[int], bytes]:
        layout, spec, naming = self._layout[tier], label.spec, self._keys.name
        assert spec is not None

        def name_at(end: int) -> bytes:
            return naming(spec, group.key(keys[end - 1]), shard=0, layout=layout)

        return name_at

    def _names_by_group(self, tier: str, label: DomainLabel, keys: Sequence[bytes]) -> Callable[[int, int], bytes]:
        names = {group.number: self._names(tier, label, keys, group) for group in self._groups}
        return lambda group, end: names[group](end)

    def _send(self, job: CopyJob, label: DomainLabel | None = None) -> int:
        """Send a job to every worker and return its number. `label`: the owner of the copies that it makes."""
        self._numbers += 1
        number = self._numbers
        self._jobs.append(job._replace(number=number))
        self._open[number] = set(range(self._shards))
        if isinstance(job, CompareCopies):
            self._comparisons[number] = (self._port.clock.now_us(), [])
        if isinstance(job, FetchCopies):
            label = job.label
        if label is not None:
            self._label_of[number] = label
        return number


def _keys_of(request: Request) -> Sequence[bytes]:
    """Return the keys of all the request's whole blocks."""
    keys: Sequence[bytes] = request.block_hashes
    if type(keys) is LazyKeys:
        keys = request.block_hashes = keys.complete()
    return keys
