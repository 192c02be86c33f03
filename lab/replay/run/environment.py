"""The environment of a replay: clock, keys, tensors, ledger and Governor, opened in order and closed in reverse.

1. The ledger is the user's file and is only ever appended to. What is replayed ends at now and says that it is no
   engine at work: `origin` in the leaf of its start.
2. Keys live as long as the replay: what it cached, no later process can find.
3. However it ends, what it wrote is signed with the ledger's own key, as a control plane would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from sqlalchemy import Engine, select
from sqlalchemy.exc import SQLAlchemyError

from kvcustody._version import __version__
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys, open_subject_keys
from kvcustody.audit.kinds import Event, PolicyActivated, WorkerStarted
from kvcustody.audit.store.database.engine import ledger_error, open_store
from kvcustody.audit.store.schema.ledger import incarnations, workers
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.write.event_queue import TenantShares
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.errors import LedgerError
from kvcustody.governance.decisions.segment_matcher import declare
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.identity.model_identity import ModelIdentity
from kvcustody.governance.keys.checkpoint_signing_key import check_unused, recorded_keys, sign_ledger
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.governance.observability.prefill_cost import DeclaredRate
from kvcustody.governance.tiers.open_tiers import BlockShape, TierPlan, open_tiers
from kvcustody.governance.tiers.tier import SealedTier
from kvcustody.governance.tiers.tier_rules import TierRules
from kvcustody.lab.replay.options import EnvironmentOptions, read_policy
from kvcustody.lab.replay.run.marked_tensors import PatternCache, ReplayCacheShape
from kvcustody.lab.replay.run.model_identity import replay_model
from kvcustody.lab.replay.run.observer import ReplayObserver
from kvcustody.lab.replay.run.throwaway_keys import TemporaryKeys
from kvcustody.lab.replay.run.virtual_clock import ReplayClock
from kvcustody.lab.replay.traces.token_ids import Tokens
from kvcustody.lab.replay.workload.tenant_assignment import ISSUER
from kvcustody.migrations.upgrade import upgrade
from kvcustody.policies.document.model import Offload, Policy, Tier, TierLimit
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.tenants import Issuers

WORKER = "replay"
CLOSE_SECONDS = 5.0
_WITHIN_US = 1_000_000  # after a copy in the tier was due
PLACEHOLDER = 64 * "0"
"""The digest of a library policy's example segment; a replay declares its house prompt in its place."""


@dataclass(frozen=True, slots=True)
class ReplayEnvironment:
    """The open environment of a replay."""

    governor: Governor
    policy: Policy
    model: ModelIdentity
    clock: ReplayClock
    cache: PatternCache
    observer: ReplayObserver
    writer: EventWriter
    engine: Engine


class ObservedLedger:
    """The ledger with an observer: both get every event, the ledger first."""

    def __init__(self, ledger: Ledger, observer: ReplayObserver) -> None:
        self._ledger = ledger
        self._observer = observer

    @property
    def admitting(self) -> bool:
        """Whether the ledger admits requests."""
        return self._ledger.admitting

    @property
    def recording(self) -> bool:
        """Whether the ledger records."""
        return self._ledger.recording

    @property
    def shares(self) -> TenantShares:
        """The shares that the ledger has."""
        return self._ledger.shares

    def issuers(self) -> Issuers:
        """Return the ledger's issuers."""
        return self._ledger.issuers()

    def submit(self, batch: Sequence[Event], /) -> int:
        """Queue events, then fold them in."""
        sequence = self._ledger.submit(batch)
        self._observer.see(batch)
        return sequence

    def submit_durable(self, event: Event, /) -> int:
        """Record a class A event."""
        return self._ledger.submit_durable(event)


@contextmanager
def open_environment(
    options: EnvironmentOptions, house_prompt: Tokens | None = None, *, origin: str, past_us: int
) -> Iterator[ReplayEnvironment]:
    """Open the environment.

    Raises:
        CustodyError: a part cannot be opened; the parts that were open are closed again.

    The replay's clock starts `past_us` ago; `origin` is what its start says of everything that it records.
    """
    policy = read_policy(options.policy)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # the replay's writes are small: waking threads costs more than they save
        engine = open_store(options.database)
        stack.callback(engine.dispose)
        upgrade(engine)
        if not recorded_keys(engine):
            check_unused(options.signing_key_file)
        spill = options.database.with_name(options.database.name + ".spill")
        keys = open_subject_keys(options.database, None, clear=False)
        assert keys is not None, "a replay's ledger is a file"
        stack.callback(keys.close)
        _close_dead(engine, spill, keys)
        stack.callback(_sign, engine, options)
        clock = ReplayClock(SystemClock().utc_us(), past_us)
        temporary = TemporaryKeys(clock)
        keyring = stack.enter_context(temporary)
        model = replay_model(options.block_tokens)
        policy = _declared(policy, house_prompt, keyring, model)
        if options.host_tier_bytes:
            policy = _offloading(policy)
        cache = PatternCache(options.pool_blocks, shape_for(options.block_tokens), device=options.device, clock=clock)
        writer = EventWriter(engine, worker=WORKER, clock=clock, spill_directory=spill, subject_keys=keys)
        stack.callback(writer.close, CLOSE_SECONDS)
        observer = ReplayObserver(options.pool_blocks)
        table = compile_policy(policy, revision=1)
        _announce(writer, table, cache, clock, origin)
        governor = Governor(
            Pools(lambda _: cache.memory, options.pool_blocks, pool_options(options)),
            table,
            keyring,
            ObservedLedger(writer, observer),
            clock=clock,
            tiers=_tiers(options, cache, keyring, temporary, clock, stack),
            recompute=DeclaredRate(options.recompute_tokens_per_second),
        )
        yield ReplayEnvironment(governor, policy, model, clock, cache, observer, writer, engine)


def _offloading(policy: Policy) -> Policy:
    """Return the policy with a host tier that takes every classification except the strictest, for the blocks' full
    retention.
    """
    here = [
        Offload((Tier.HOST,), True, (TierLimit(Tier.HOST, kept.absolute_us, _WITHIN_US),))
        for kept in policy.retention[:-1]
    ]
    return replace(policy, offload=(*here, policy.offload[-1]))


def _tiers(
    options: EnvironmentOptions,
    cache: PatternCache,
    keyring: Keyring,
    temporary: TemporaryKeys,
    clock: ReplayClock,
    stack: ExitStack,
) -> Callable[[TierRules], list[SealedTier]] | None:
    if not options.host_tier_bytes:
        return None
    shape = BlockShape(cache.memory.bytes_per_block, 1, options.block_tokens)
    plan = TierPlan(temporary.place / "shred.keys", options.host_tier_bytes)
    return partial(open_tiers, plan, shape, keyring, temporary.port, clock, stack)


def shape_for(block_tokens: int) -> ReplayCacheShape:
    """Return the stand-in model's shape: 2 KiB per token for serving-sized blocks, 32 bytes for traces' large
    blocks.
    """
    if block_tokens <= 32:
        return ReplayCacheShape(block_tokens=block_tokens)
    return ReplayCacheShape(layers=1, kv_heads=1, head_dim=8, block_tokens=block_tokens)


def pool_options(options: EnvironmentOptions) -> PoolOptions:
    """Return options with a clean reserve of 2 to 4 % of the pool, and scrub launches of about 1 %."""
    blocks = options.pool_blocks
    return PoolOptions(
        block_tokens=options.block_tokens,
        reserve_low=blocks // 50,
        reserve_high=blocks // 25,
        evict_ahead=max(1, blocks // 100),
        scrub_batch=max(1, blocks // 100),
    )


def _close_dead(engine: Engine, spill: Path, keys: SubjectKeys) -> None:
    """Close the records of a replay that was killed, before this replay's clock starts earlier than that death."""
    query = (
        select(incarnations.c.id)
        .join(workers, workers.c.id == incarnations.c.worker)
        .where(workers.c.name == WORKER, incarnations.c.end.is_(None))
    )
    with engine.connect() as connection:
        if connection.execute(query).first() is None:
            return
    clock = SystemClock()
    with EventWriter(engine, worker=WORKER, clock=clock, spill_directory=spill, subject_keys=keys):
        pass  # opening it closes what was left


def _sign(engine: Engine, options: EnvironmentOptions) -> None:
    """Sign the ledger (rule 3).

    Raises:
        LedgerError: it cannot be signed.
    """
    kind = KeyKind.named(options.signing_key_kind)
    try:
        sign_ledger(options.signing_key_file, options.ledger_origin, engine, SystemClock(), kind)
    except SQLAlchemyError as problem:
        raise ledger_error(engine, problem) from problem
    except OSError as problem:
        raise LedgerError(f"what was replayed is not signed: {problem}") from problem


def _declared(policy: Policy, text: Tokens | None, keyring: Keyring, model: ModelIdentity) -> Policy:
    """Return the policy with its example segments declared for `text`, as `policy segment add` declares an
    operator's.
    """
    segments = []
    for segment in policy.segments:
        if text is not None and segment.digest == PLACEHOLDER:
            owner = tenant_owner(ISSUER, segment.owner)
            keyring.ensure([owner])
            made = declare(keyring, owner, text, model=model.digest, block_tokens=model.block_tokens)
            segments.append(replace(segment, digest=made.digest, tokens=made.tokens))
        else:
            segments.append(segment)
    return replace(policy, segments=tuple(segments), source="")


def _announce(writer: EventWriter, table: DecisionTable, cache: PatternCache, clock: ReplayClock, origin: str) -> None:
    """Record the worker and its policy before the first request."""
    memory, now_us = cache.memory, clock.now_us()
    software = f"kvcustody {__version__}"
    device = str(cache.device)
    started = WorkerStarted(
        now_us,
        WORKER,
        memory.blocks,
        memory.shards,
        memory.bytes_per_block,
        device,
        software,
        table.revision,
        origin=origin,
    )
    writer.submit([started])
    policy = table.policy
    writer.submit_durable(
        PolicyActivated(now_us, table.revision, policy.name, policy.profile.value, table.digest, "replay")
    )
