"""What every worker stands on, opened in order: the policy, the keys and the ledger, with the worker on record.

N1  Nothing is admitted before the worker and its policy are on record; a dead predecessor's custody is closed first.
N2  A policy of another profile than the deployment promises is refused.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from sqlalchemy import Engine

import kvcustody
from kvcustody.audit.checkpoint_signer import CheckpointSigner
from kvcustody.audit.events import WorkerStarted
from kvcustody.audit.store import open_store
from kvcustody.audit.subject_keys import SubjectKeys
from kvcustody.audit.witness.client import read_addresses
from kvcustody.audit.witness.submitter import WitnessSubmitter
from kvcustody.audit.writer import EventWriter, WriterSettings
from kvcustody.clock import Clock
from kvcustody.governance import core_dumps
from kvcustody.governance.checkpoint_keys import open_signing_key
from kvcustody.governance.key_store import FileKeyStore
from kvcustody.governance.keyring import Keyring
from kvcustody.governance.release.standing import Standing, activations, open_standing
from kvcustody.governance.settings import Settings
from kvcustody.governance.wrapping import open_wrapping
from kvcustody.migrations.upgrade import upgrade
from kvcustody.policies.table import DecisionTable


class Foundation(NamedTuple):
    """An open policy, keyring and ledger; `signer` is None where another process signs the checkpoints."""

    standing: Standing
    keyring: Keyring
    writer: EventWriter
    signer: CheckpointSigner | None


def open_foundation(
    settings: Settings,
    clock: Clock,
    stack: ExitStack,
    *,
    blocks: int,
    shards: int,
    bytes_per_block: int,
    device: str,
) -> Foundation:
    """Open everything and put the worker on record; `stack` closes it again. Raises a `CustodyError` that says what."""
    core_dumps.guard(strict=settings.strict)
    port = open_wrapping(settings.root_key_source, settings.root_key_path, strict=settings.strict)
    keyring = Keyring(FileKeyStore(settings.keyring_path), port, clock)
    stack.callback(keyring.close)
    engine = open_store(settings.database_url)
    stack.callback(engine.dispose)
    upgrade(engine)
    standing = open_standing(settings, engine, clock)
    table = standing.table
    sizes = WriterSettings(spill_bytes=int(settings.spill_bytes_max))
    settings.spill_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    writer = EventWriter(
        engine,
        worker=settings.worker_name,
        clock=clock,
        spill_directory=settings.spill_path,
        settings=sizes,
        subject_keys=None
        if settings.subject_keys_url is None
        else SubjectKeys.open(settings.subject_keys_url),
    )
    stack.callback(writer.close)
    started = WorkerStarted(
        clock.now_us(),
        settings.worker_name,
        blocks,
        shards,
        bytes_per_block,
        device,
        f"kvcustody {kvcustody.__version__}",
        table.revision,
    )
    _announce(writer, settings, table, started)
    signer = _signer(settings, engine, writer, clock)
    if signer is not None:
        signer.start()
        stack.callback(signer.close)
        stack.callback(writer.flush)  # what is written by then is signed
        _take_to_witnesses(settings, engine, stack)
    return Foundation(standing, keyring, writer, signer)


def _signer(settings: Settings, engine: Engine, writer: EventWriter, clock: Clock) -> CheckpointSigner | None:
    """The signer of this ledger's checkpoints, its key on record; None where another process signs."""
    path = settings.signing_key_file
    key = open_signing_key(path, settings.ledger_origin, engine, writer, clock)
    if key is None:
        return None
    memory = path.with_name(path.name + ".last")
    seconds = settings.checkpoint_seconds
    return CheckpointSigner(engine, [key], memory=memory, clock=clock, interval_seconds=seconds)


def _take_to_witnesses(settings: Settings, engine: Engine, stack: ExitStack) -> None:
    """Checkpoints go to the configured witnesses, behind everything else."""
    if settings.witnesses_path is not None:
        submitter = WitnessSubmitter(engine, read_addresses(settings.witnesses_path))
        submitter.start()
        stack.callback(submitter.close)


def _announce(writer: EventWriter, settings: Settings, table: DecisionTable, started: WorkerStarted) -> None:
    """The worker and its policy, on record before the first request (N1)."""
    writer.submit([started])
    for event in activations(table, started.at_us, settings.worker_name):
        writer.submit_durable(event)
