"""The whole Governor as a peer: identity, policy, keys, look-up, blocks, residency, evidence, release.

1. Nothing is left out of the timed path except what runs on other threads or devices: events enter the writer's
   own queue in it, and `drain` turns them into canonical leaves; blocks change state in it, their memory is not there.
2. The principal is one object, as an authenticated connection keeps it; every decision is made per request.
3. With n read domains, n - 1 tenants grant theirs, which each request searches after its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from time import monotonic, thread_time_ns
from typing import NamedTuple

import numpy as np

from kvcustody.allocator.pool.block_state import BlockState
from kvcustody.allocator.pool.memory_protocol import UnbackedMemory
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.audit.evidence.subjects.pseudonym_directory import SubjectDirectory
from kvcustody.audit.kinds import Event
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.batch_encoder import BatchEncoder
from kvcustody.audit.write.event_queue import EventQueue, TenantShares
from kvcustody.audit.write.event_writer import WriterSettings
from kvcustody.clock import Clock, SystemClock
from kvcustody.governance.admission_outcome import Admission
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.identity.principal import Principal, identify
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.governance.settings import Settings
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.tenants import Issuers
from kvcustody.testkit.tiny_model import tiny_model

ISSUER, READER = "idp", "reader"
RESERVE_LOW, RESERVE_HIGH = 1024, 2048  # blocks, at any size of pool
MODEL = tiny_model(kv_dtype="bf16", attention={"heads": 8})


class RequestPhases(NamedTuple):
    """Thread CPU time of a request's four calls."""

    admit_ns: int
    commit_ns: int
    release_ns: int
    step_ns: int


class DecodePhases(NamedTuple):
    """Thread CPU time of a decode step's two calls."""

    extend_ns: int
    step_ns: int


class Shelf:
    """A ledger that keeps events, or drops them."""

    admitting = recording = True

    def __init__(self, *, keeping: bool = True) -> None:
        self._keeping = keeping
        self.shares = TenantShares()
        self.events: list[Event] = []

    def issuers(self) -> Issuers:
        """Name nobody."""
        return Issuers()

    def submit(self, events: Sequence[Event], /) -> int:
        """Keep the events, or drop them."""
        if self._keeping:
            self.events += events
        return 0

    def submit_durable(self, event: Event, /) -> int:
        """Keep one event, or drop it."""
        return self.submit([event])


class LeafMaker(Shelf):
    """The writer's queue and the writer's batches, without its thread and its database.

    The writer encodes what waits when `WriterSettings.batch` events do, or when the first has waited for
    `ledger_batch_ms`; four batches at most. So does `drain`, on the caller's thread. Leaves after every request
    would cost several times as much, and would leave colder caches to the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._batch = WriterSettings().batch
        self._wait_seconds = Settings.model_fields["ledger_batch_ms"].default / 1000
        self._queue = EventQueue(
            SystemClock(),
            self.shares,
            capacity=WriterSettings().capacity,
            batch=self._batch,
            count_seconds=WriterSettings().count_seconds,
        )
        self._encoder = BatchEncoder(Context("0" * 32, 0, SubjectDirectory(clear_names=True)))
        self._forming_since: float | None = None

    def submit(self, events: Sequence[Event], /) -> int:
        """Queue the events as the writer does."""
        return self._queue.submit(events)

    def drain(self, *, whole: bool = False) -> int:
        """Make leaves of a batch that is due, or of the `whole` queue; returns how many."""
        waiting = len(self._queue)
        if not (whole or waiting >= self._batch):
            now = monotonic()
            if not waiting or self._forming_since is None:
                self._forming_since = now if waiting else None
                return 0
            if now - self._forming_since < self._wait_seconds:
                return 0
        self._forming_since = None
        leaves = 0
        while items := self._queue.take(4 * self._batch)[0]:
            self._encoder.encode(items)
            leaves += len(items)
        return leaves


class GovernedPeer:
    """One Governor over one pool of `pool_blocks` blocks; satisfies `workload.Peer`."""

    def __init__(self, pool_blocks: int, block_tokens: int, read_domains: int = 1) -> None:
        self._ledger = LeafMaker()
        self.governor = govern(pool_blocks, block_tokens, self._ledger, read_domains=read_domains)
        self._principal = principal(READER)
        self._slots = np.empty(0, dtype=np.int64)
        self._open_grants(read_domains)

    def run_request(self, tokens: list[int]) -> int:
        """Admit, compute, release, and the engine step that hands evidence over; returns the tokens that hit."""
        governor = self.governor
        admission = self._admit(tokens)
        governor.commit([admission.request_id], [len(tokens)])
        governor.release(admission.request_id)
        governor.step()
        return admission.hit_tokens

    def phases(self, tokens: list[int]) -> RequestPhases:
        """The same request with its calls timed apart."""
        governor = self.governor
        start = thread_time_ns()
        admission = self._admit(tokens)
        admitted = thread_time_ns()
        governor.commit([admission.request_id], [len(tokens)])
        committed = thread_time_ns()
        governor.release(admission.request_id)
        released = thread_time_ns()
        governor.step()
        return RequestPhases(admitted - start, committed - admitted, released - committed, thread_time_ns() - released)

    def warm(self, tokens: list[int]) -> None:
        """Leave `tokens` cached and unreferenced."""
        self.run_request(tokens)

    def cached_blocks(self) -> int:
        """Blocks in the CACHED state."""
        return self.governor.managers[0].pool.counts[BlockState.CACHED]

    def drain(self, *, whole: bool = False) -> int:
        """Make canonical leaves of the events that wait, where the writer would; returns how many."""
        return self._ledger.drain(whole=whole)

    def decode_setup(self, prompts: list[list[int]]) -> None:
        """Start one running sequence per prompt, its prompt computed."""
        ids = [self._admit(tokens).request_id for tokens in prompts]
        self.governor.commit(ids, [len(tokens) for tokens in prompts])
        self.governor.step()
        self._slots = self.governor.slots(ids)

    def decode_step(self, tokens: list[int]) -> None:
        """One accepted token for every running sequence, then the engine step."""
        self._extend(tokens)
        self.governor.step()

    def decode_phases(self, tokens: list[int]) -> DecodePhases:
        """The same step with its calls timed apart."""
        start = thread_time_ns()
        self._extend(tokens)
        extended = thread_time_ns()
        self.governor.step()
        return DecodePhases(extended - start, thread_time_ns() - extended)

    def _extend(self, tokens: list[int]) -> None:
        if self.governor.extend_slots(self._slots, np.array(tokens, dtype=np.int32)):
            raise RuntimeError("the pool is too small for this decode")

    def _admit(self, tokens: list[int]) -> Admission:
        admission = self.governor.admit(self._principal, MODEL, tokens)
        if not isinstance(admission, Admission):
            raise RuntimeError(f"not admitted: {admission}")
        return admission

    def _open_grants(self, read_domains: int) -> None:
        """Owners' keys exist once they have been seen; a grant serves once its first use is recorded."""
        less_than_a_block = [1, 2, 3]
        for owner in owners(read_domains):
            serve(self.governor, principal(owner), less_than_a_block)
        for _ in range(2):
            serve(self.governor, self._principal, less_than_a_block)
            self.governor.settle()


def govern(
    pool_blocks: int,
    block_tokens: int,
    ledger: Ledger,
    *,
    read_domains: int = 1,
    tenants: Sequence[str] = (),
    clock: Clock | None = None,
    sweep_batch: int = 256,
) -> Governor:
    """A Governor under the benchmark's policy, with keys of its own and no memory behind its blocks."""
    clock = clock or SystemClock()
    folder = Path(tempfile.mkdtemp(dir=key_folder().name))
    keyring = Keyring(FileKeyStore(folder / "keys.json"), open_wrapping("generated", folder / "root.key"), clock)
    options = PoolOptions(
        block_tokens=block_tokens,
        reserve_low=RESERVE_LOW,
        reserve_high=RESERVE_HIGH,
        sweep_batch=sweep_batch,
    )
    pools = Pools(
        lambda blocks: UnbackedMemory(blocks, 0, clock=clock),
        pool_blocks,
        options,
        residencies_max=1 << 30,  # one tenant stands for all here
    )
    return Governor(pools, policy_table(read_domains, clock, tenants), keyring, ledger, clock=clock)


@cache
def key_folder() -> tempfile.TemporaryDirectory[str]:
    """Where this process keeps its throw-away keys; gone with the process."""
    return tempfile.TemporaryDirectory()


def policy_table(read_domains: int, clock: Clock, tenants: Sequence[str] = ()) -> DecisionTable:
    """Tenant scope, long deadlines, and a live grant from each further owner to the reader; `tenants` have none."""
    now = datetime.fromtimestamp(clock.utc_us() / 1_000_000, UTC)
    from_day, until_day = (now - timedelta(days=30)).date(), (now + timedelta(days=300)).date()
    others = "".join(
        f"\n  {name}: {{quota: {{guaranteed: 0%, cap: 100%, borrow: true}}}}"
        for name in [*owners(read_domains), *tenants]
    )
    grants = "".join(
        f"\n  - {{id: read-{owner}, owner: {owner}, reader: {READER}, at_most: internal, "
        f"from: {from_day}, until: {until_day}, reason: measurement}}"
        for owner in owners(read_domains)
    )
    text = f"""schema: kvcustody/policy@1
name: benchmark
profile: shared
scope: tenant
classifications: [internal]
classify:
  - {{tenant: "*", as: internal}}
tenants:
  {READER}: {{quota: {{guaranteed: 90%, cap: 100%, borrow: true}}}}{others}
rules:
  - {{id: own-reuse, effect: permit, action: reuse, when: {{reader: owner}}}}
retention:
  internal: {{idle: 1d, absolute: 7d, active_max: 1d}}
scrub:
  default: {{within: 10s, verify: none}}
offload:
  internal: never
audit:
  on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""
    if grants:
        text += f"grants:{grants}\n"
    return compile_policy(load_policy(text, name="benchmark.yaml"), revision=1)


def owners(read_domains: int) -> list[str]:
    """The tenants that grant their domains to the reader."""
    return [f"owner-{number}" for number in range(1, read_domains)]


def principal(tenant: str) -> Principal:
    """An authenticated member of a tenant."""
    return identify(issuer=ISSUER, tenant=tenant, verified={"subject": "alice"})


def serve(governor: Governor, who: Principal, tokens: Sequence[int] | np.ndarray) -> int:
    """One request's whole path; returns the tokens that hit."""
    admission = governor.admit(who, MODEL, tokens)
    if not isinstance(admission, Admission):
        raise RuntimeError(f"not admitted: {admission}")
    governor.commit([admission.request_id], [len(tokens)])
    governor.release(admission.request_id)
    governor.step()
    return admission.hit_tokens
