"""What the tests' worlds are made of: ledgers, writers, key rings, policies, Governors and engine ports, one call each.

1. Every part is the real one. What is small is its size: blocks without memory, a key store in memory, a virtual clock.
2. A part takes what a test cares about and fills in the rest; two calls share nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kvcustody.allocator.external.pool import ExternalPool
from kvcustody.allocator.pool.memory_protocol import Memory, UnbackedMemory
from kvcustody.allocator.pool.options import PoolOptions
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.kinds import Event
from kvcustody.audit.store.database.dialect import file_of
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.write.event_writer import EventWriter, WriterSettings
from kvcustody.clock import Clock, SystemClock, VirtualClock
from kvcustody.governance.external.engine_port import EnginePort
from kvcustody.governance.governor.governor import Governor
from kvcustody.governance.governor.pools import Pools
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.ledger_protocol import CountingLedger, Ledger
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.testkit.conformance.deployment import KeepingLedger, MemoryKeyStore, table
from kvcustody.testkit.conformance.deployment import keyring as keyring_in_memory

__all__ = ["KeepingLedger", "MemoryKeyStore", "keyring_in_memory", "table"]

BORROWS = "{guaranteed: 0%, cap: 100%, borrow: true}"
_OPTIONS = PoolOptions()
QUICK = WriterSettings(interval_seconds=0.002, retry_seconds=0.02, durable_seconds=5.0)


# -- the ledger ---------------------------------------------------------------------------------------------------


@contextmanager
def ledger(migrated: Path, path: Path, **how: Any) -> Iterator[Engine]:
    """A SQLite ledger of this program's schema at `path`, with nothing in it."""
    shutil.copy(migrated, path)  # with its mode
    engine = open_store(path, **how)
    yield engine
    engine.dispose()


def ledger_file(store: Engine) -> Path:
    """The file of a SQLite ledger."""
    path = file_of(store)
    assert path is not None
    return path


def address_of(store: Engine) -> str:
    """What opens this ledger again, in another process too: its file, or its server's URL."""
    path = file_of(store)
    return store.url.render_as_string(hide_password=False) if path is None else str(path)


def writer(
    store: Engine,
    spill: Path,
    *,
    worker: str = "w",
    clock: Clock | None = None,
    settings: WriterSettings = QUICK,
    keys: SubjectKeys | None = None,
    clear_names: bool | None = None,
) -> EventWriter:
    """The writer of one process. Names are clear where there are no keys, unless `clear_names` says otherwise."""
    return EventWriter(
        store,
        worker=worker,
        clock=clock or SystemClock(),
        spill_directory=spill,
        settings=settings,
        subject_keys=keys,
        clear_names=keys is None if clear_names is None else clear_names,
    )


def record(store: Engine, spill: Path, events: Sequence[Event], **how: Any) -> None:
    """A process that puts these events on record and ends."""
    made = writer(store, spill, **how)
    made.submit(events)
    assert made.flush(60)
    made.close(60)


def worker_files(folder: Path, policy: Path | None = None) -> dict[str, Any]:
    """Where a worker's files are, all in one folder but for a policy that is named: settings by name."""
    return {
        "policy_path": folder / "policy.yaml" if policy is None else policy,
        "database_url": f"sqlite:///{folder}/ledger.db",
        "spill_path": folder / "spill",
        "root_key_path": folder / "root.key",
        "keyring_path": folder / "keys.json",
    }


# -- the policy ---------------------------------------------------------------------------------------------------


def policy(
    tenants: Iterable[str] | Mapping[str, str] = ("holder", "reader"),
    *,
    name: str = "small",
    profile: str = "shared",
    scope: str = "tenant",
    retention: str = "{idle: 1h, absolute: 8h, active_max: 2h}",
    scrub: str = "{within: 1s, verify: none}",
    action: str = "reuse",
    more: str = "",
) -> str:
    """A policy of one classification, `low`: tenants (each with its quota, or all borrowing), and further sections."""
    quotas = tenants if isinstance(tenants, Mapping) else dict.fromkeys(tenants, BORROWS)
    listed = "".join(f"  {tenant}: {{quota: {quota}}}\n" for tenant, quota in quotas.items())
    return f"""\
schema: kvcustody/policy@1
name: {name}
profile: {profile}
scope: {scope}
classifications: [low]
classify: [{{tenant: "*", as: low}}]
tenants:
{listed}rules: [{{id: own, effect: permit, action: {action}, when: {{reader: owner}}}}]
retention: {{low: {retention}}}
scrub: {{default: {scrub}}}
offload: {{low: never}}
{more}
audit:
  on_outage: {{decisions: deny, lifecycle: spill, own_hits: aggregate}}
"""


def grant(until: str = "2099-01-01") -> str:
    """A section by which `reader` may read what is `holder`'s."""
    return f"grants: [{{id: reads, owner: holder, reader: reader, at_most: low, until: {until}, reason: test}}]"


# -- who governs --------------------------------------------------------------------------------------------------


def keyring(folder: Path, clock: Clock) -> Keyring:
    """A keyring of `folder`, the same for whoever opens it again."""
    return Keyring(FileKeyStore(folder / "keys.json"), open_wrapping("generated", folder / "root.key"), clock)


def governor(
    decisions: DecisionTable,
    clock: Clock,
    *,
    ledger: Ledger | None = None,
    keys: Keyring | None = None,
    blocks: int = 256,
    memory: Callable[[int], Memory] | None = None,
    options: PoolOptions = _OPTIONS,
    kind: type[Governor] = Governor,
    **how: Any,
) -> Governor:
    """A Governor over blocks without memory, with keys of its own and a ledger that counts."""
    pools = Pools(memory or (lambda count: UnbackedMemory(count, 1, clock=clock)), blocks, options)
    ring = keys or keyring_in_memory(clock)
    return kind(pools, decisions, ring, CountingLedger() if ledger is None else ledger, clock=clock, **how)


class PortEngine:
    """The port's other side where it has nothing to do: it forgets what it is told to, and nothing runs long."""

    def __init__(self) -> None:
        self.evicted: list[int] = []

    def evict(self, blocks: Sequence[int]) -> None:
        self.evicted += blocks

    def abort(self, request_ids: Sequence[object], cause: str) -> None:
        raise AssertionError("nothing is aborted here")

    def withhold(self, blocks: Sequence[int]) -> None:
        raise AssertionError("nothing fails to verify here")

    def wake(self) -> None:
        pass


def port(
    decisions: DecisionTable,
    clock: Clock | None = None,
    *,
    engine: Any = None,
    ledger: Ledger | None = None,
    keys: Keyring | None = None,
    pool: ExternalPool | int = 64,
    block_tokens: int = 16,
    **how: Any,
) -> EnginePort:
    """An engine port over a pool of blocks whose first is nobody's."""
    clock = clock or VirtualClock()
    external = ExternalPool(pool, shards=1, bytes_per_block=1, reserved=[0]) if isinstance(pool, int) else pool
    return EnginePort(
        external,
        engine or PortEngine(),
        decisions,
        keys or keyring_in_memory(clock),
        CountingLedger() if ledger is None else ledger,
        clock=clock,
        block_tokens=block_tokens,
        **how,
    )
