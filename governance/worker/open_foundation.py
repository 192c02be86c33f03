"""What every worker stands on, opened in order: the policy, the keys and the ledger, with the worker on record.

- Nothing is admitted before the worker and its policy are on record; a dead predecessor's custody is closed first.
- A policy of another profile than the deployment promises is refused.
- Where the settings name a control plane, policy, ledger and erasures come over its API (control_plane.opening). A
  start while it is away is on record in the local spill first.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from kvcustody.audit.evidence.processes.orders import AUTHENTICATED, NOT_AUTHENTICATED
from kvcustody.audit.kinds import OrphanFound, WorkerStarted
from kvcustody.audit.kinds.control_events import FROM_CONTROL_PLANE, SIGNED
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.database.signed_orders import NO_KEY, RefusedOrder, SignedOrders, authenticate
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.witness.client import read_addresses
from kvcustody.audit.tlog.witness.submitter import WitnessSubmitter
from kvcustody.audit.write.event_writer import (
    ENGINE_DURABLE_SECONDS,
    EventWriter,
    LedgerWriter,
    WriterSettings,
)
from kvcustody.deadline_clock import DeadlineClock
from kvcustody.errors import LedgerError
from kvcustody.files import private_folder
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.opening import (
    connect,
    open_inbox,
    open_remote_ledger,
    remote_startup_policy,
)
from kvcustody.governance.edge.custody_lease import lease_seconds, spread
from kvcustody.governance.erasure.erasure_inbox import ErasureInbox
from kvcustody.governance.keys import core_dumps
from kvcustody.governance.keys.checkpoint_signing_key import memory_of, open_signing_key
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore
from kvcustody.governance.release.order_signing import read_signed_orders
from kvcustody.governance.release.startup_policy import (
    StartupPolicy,
    activation_events,
    events_beside_activation,
    open_startup_policy,
)
from kvcustody.governance.settings import Settings, unknown_variables
from kvcustody.governance.worker.plugins import open_root_key, software
from kvcustody.logger import get_logger
from kvcustody.migrations.upgrade import upgrade
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.workbench.lint.without_effect import PoolOwner, without_effect

_START_SECONDS = 5.0  # that the ledger may take for what is on record before the first request
_log = get_logger(__name__)


class Foundation(NamedTuple):
    """What a worker stands on, open; `signer` is None where another process signs the checkpoints."""

    standing: StartupPolicy
    keyring: Keyring
    writer: LedgerWriter
    signer: CheckpointSigner | None
    inbox: ErasureInbox
    connection: ControlPlaneConnection | None = None  # to the control plane, where there is one


class _Memory(NamedTuple):
    blocks: int
    shards: int
    bytes_per_block: int
    device: str
    origin: str


def open_foundation(
    settings: Settings,
    clock: DeadlineClock,
    stack: ExitStack,
    *,
    blocks: int,
    shards: int,
    bytes_per_block: int,
    device: str,
    origin: str = "",
) -> Foundation:
    """Open everything and put the worker on record; `stack` closes it again. Raises a `CustodyError` that says what."""
    core_dumps.disable_core_dumps(strict=settings.strict)
    ignored = unknown_variables()
    if ignored:
        _log.warning("variables that match no setting are ignored", variables=ignored)
    port = open_root_key(settings)
    keyring = Keyring(FileKeyStore(settings.keyring_path), port, clock)
    stack.callback(keyring.close)
    memory = _Memory(blocks, shards, bytes_per_block, device, origin)
    if settings.control_plane:
        return _behind_control_plane(settings, clock, stack, keyring, memory)
    engine = open_store(settings.database_url)
    stack.callback(engine.dispose)
    authenticate(engine, orders := _signed_orders(settings))
    upgrade(engine)
    standing = open_startup_policy(settings, engine, clock)
    writer = _writer(settings, engine, clock)
    stack.callback(writer.close)
    started = _started(settings, standing, clock, memory)
    _announce(writer, settings, standing.table, started._replace(orders="" if orders is None else SIGNED))
    signer = _signer(settings, engine, writer, clock)
    if signer is not None:
        signer.start()
        stack.callback(signer.close)
        stack.callback(writer.flush)  # what is written by then is signed
        _take_to_witnesses(settings, engine, stack)

    def on_refused(refused: RefusedOrder) -> None:
        writer.submit([_finding(refused, clock.now_us())])

    inbox = ErasureInbox(
        engine,
        settings.worker_name,
        writer.offset_us,
        writer.subject_keys,
        orders=orders,
        on_refused=on_refused,
    )
    return Foundation(standing, keyring, writer, signer, inbox)


def _behind_control_plane(
    settings: Settings,
    clock: DeadlineClock,
    stack: ExitStack,
    keyring: Keyring,
    memory: _Memory,
) -> Foundation:
    """The same over the API; the control plane signs."""
    connection = connect(settings, stack)
    standing = remote_startup_policy(settings, connection, clock)
    writer = open_remote_ledger(settings, connection, clock)
    stack.callback(writer.close)
    started = _started(settings, standing, clock, memory)._replace(orders=FROM_CONTROL_PLANE)
    if writer.down:  # what is stated again widens nothing: it may be recorded behind its effect
        about = (standing.table, started.at_us, settings.worker_name)
        writer.submit([started, *activation_events(*about), *events_beside_activation(*about)])
        if not writer.flush():
            raise LedgerError("the start of this worker cannot be recorded: the spill is full or not writable")
    else:
        _announce(writer, settings, standing.table, started)
    lease = spread(custody_lease(settings, standing.table))
    inbox = open_inbox(settings, connection, writer.offset_us, clock, lease)
    return Foundation(standing, keyring, writer, None, inbox, connection)


def custody_lease(settings: Settings, table: DecisionTable) -> int:
    """Seconds for which a worker reuses without word of erasures, by its settings and its first policy."""
    return lease_seconds(settings.custody_lease_seconds, table.policy.erasure.within_us)


def _signed_orders(settings: Settings) -> SignedOrders | None:
    """Whose orders this worker follows, said aloud at its start."""
    trust = Path(settings.policy_trust) if settings.policy_trust else None
    orders = read_signed_orders(trust, settings.ledger_origin, settings.order_key_path)
    if orders is None:
        _log.warning("orders are not authenticated", why=NOT_AUTHENTICATED)
    else:
        _log.info("orders are authenticated", why=AUTHENTICATED, signs=orders.may_sign)
        if not orders.may_sign:
            _log.warning("orders are refused", why=NO_KEY)
    return orders


def _finding(refused: RefusedOrder, at_us: int) -> OrphanFound:
    """What goes on record of an order that this worker does not follow."""
    return OrphanFound(at_us, 0, 1, "unsigned order", str(refused), None, 0, (), "not followed", "reported")


def _writer(settings: Settings, engine: Engine, clock: DeadlineClock) -> EventWriter:
    private_folder(settings.spill_path)
    return EventWriter(
        engine,
        worker=settings.worker_name,
        clock=clock,
        spill_directory=settings.spill_path,
        settings=WriterSettings(
            durable_seconds=ENGINE_DURABLE_SECONDS,
            interval_seconds=settings.ledger_batch_ms / 1000,
            spill_bytes=int(settings.spill_bytes_max),
            root_interval_seconds=settings.root_interval_seconds,
            replay_share=settings.replay_share,
        ),
        subject_keys=settings.open_subject_keys(),
        clear_names=settings.subject_names == "clear",
    )


def _started(settings: Settings, standing: StartupPolicy, clock: DeadlineClock, memory: _Memory) -> WorkerStarted:
    now_us = clock.now_us()
    return WorkerStarted(
        now_us,
        settings.worker_name,
        memory.blocks,
        memory.shards,
        memory.bytes_per_block,
        memory.device,
        software(settings),
        standing.table.revision,
        origin=memory.origin,
    )


def _signer(settings: Settings, engine: Engine, writer: EventWriter, clock: DeadlineClock) -> CheckpointSigner | None:
    """The signer of this ledger's checkpoints, its key on record; None where another process signs."""
    path = settings.signing_key_file
    key = open_signing_key(
        path, settings.ledger_origin, engine, writer, clock, KeyKind.named(settings.signing_key_kind)
    )
    if key is None:
        return None
    memory = memory_of(path)
    seconds = settings.checkpoint_seconds
    return CheckpointSigner(engine, [key], memory=memory, clock=clock, interval_seconds=seconds)


def _take_to_witnesses(settings: Settings, engine: Engine, stack: ExitStack) -> None:
    """Checkpoints go to the configured witnesses, behind everything else."""
    if settings.witnesses_path is not None:
        submitter = WitnessSubmitter(engine, read_addresses(settings.witnesses_path))
        submitter.start()
        stack.callback(submitter.close)


def _announce(writer: LedgerWriter, settings: Settings, table: DecisionTable, started: WorkerStarted) -> None:
    """The worker and its policy, on record before the first request."""
    about = (table, started.at_us, settings.worker_name)
    writer.submit([started, *events_beside_activation(*about)])
    for event in activation_events(*about):
        writer.submit_durable(event, timeout_seconds=_START_SECONDS)


def warn_of_idle_fields(table: DecisionTable, owner: PoolOwner, tiers: Collection[str] = ()) -> None:
    """Log what in the policy does nothing beside this engine and with these tiers, so that nobody relies on it."""
    for mark, code, why in without_effect(table.policy, owner, tiers):
        _log.warning("policy field without effect", code=code, line=mark.line, why=why)
