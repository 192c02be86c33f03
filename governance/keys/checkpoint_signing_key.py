"""The key that signs the ledger's checkpoints. It is created once, recorded before it signs, and replaced only by a
recorded handover.

- A signing key is in a file of its own, apart from the root key and every data key. It signs for the ledger whose
  leaves name it. A ledger that another key signs for is left to that key: nothing here forks its signatures.
- A handover is a class A event that both keys signed. It is durable before the new key's file replaces the old one. A
  crash between the two is repaired at the next start.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import orjson
from sqlalchemy import Engine, select

from kvcustody.audit.kinds import LogBroken, SigningKeyRecorded
from kvcustody.audit.leaf.merkle import EMPTY
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.checkpoint import parse_checkpoint
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner, behind_handover, last_signed
from kvcustody.audit.tlog.database_proofs import LedgerProofs, SignedNote
from kvcustody.audit.tlog.key_rotation import KeyPeriod, key_periods, rotation_record
from kvcustody.audit.tlog.ledger_identity import own_origin
from kvcustody.audit.tlog.log_break import LogBreak, break_record
from kvcustody.audit.tlog.signed_note import KeyKind, parse_note, parse_vkey
from kvcustody.audit.tlog.signing_key import SigningKey, create_signing_key, read_signing_key
from kvcustody.audit.write.record_operator_act import recorder
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError
from kvcustody.files import sync_path
from kvcustody.governance.ledger_protocol import Ledger
from kvcustody.logger import get_logger

_log = get_logger(__name__)


def recorded_keys(engine: Engine) -> tuple[KeyPeriod, ...]:
    """Return every key that the ledger's leaves name, with the sizes that it may sign; none for an unsigned ledger.

    Whoever does not trust the ledger starts from a key that he was given: `rotation.key_periods`.
    """
    with engine.connect() as connection:
        query = (
            select(events.c.leaf)
            .where(events.c.kind == "signing-key", has_leaf(events))
            .order_by(events.c.log, events.c.idx)
        )
        bodies = [orjson.loads(bytes(leaf)) for leaf in connection.scalars(query)]
    if not bodies:
        return ()
    return key_periods(parse_vkey(bodies[0]["vkey"]), [base64.b64decode(body["record"]) for body in bodies[1:]])


def open_signing_key(
    path: Path,
    origin: str,
    engine: Engine,
    ledger: Ledger,
    clock: Clock,
    kind: KeyKind = KeyKind.ED25519,
) -> SigningKey | None:
    """Open the key that signs this ledger; None where another process holds it.

    Makes one of `kind` for a ledger that has none, named by `own_origin`. Raises `ConfigError` where the file holds a
    key that the ledger does not name.
    """
    periods = recorded_keys(engine)
    if periods:
        return _recorded(path, periods)
    finish_handover(path, periods)
    key = read_signing_key(path) if path.exists() else create_signing_key(path, own_origin(engine, origin), kind)
    ledger.submit_durable(SigningKeyRecorded(clock.now_us(), "made", str(key.verifier), "", "governor"))
    return key


def sign_ledger(
    path: Path, origin: str, engine: Engine, clock: Clock, kind: KeyKind = KeyKind.ED25519
) -> SignedNote | None:
    """Sign the newest checkpoint once, for a ledger that no running process signs; returns its note, old or new.

    A ledger that has no key gets one, on record. None where another process holds the key, or nothing is committed.
    Raises as `open_signing_key`, and `ProofError` where the ledger is not the one that the key signed before.
    """
    periods = recorded_keys(engine)
    if periods:
        key = _recorded(path, periods)
    else:
        check_unused(path)
        with recorder(engine, clock) as writer:
            key = open_signing_key(path, origin, engine, writer, clock, kind)
    if key is None:
        return None
    CheckpointSigner(engine, [key], memory=memory_of(path), clock=clock).sign_once()
    with engine.connect() as connection:
        return LedgerProofs(connection).signed_or_none()


def memory_of(path: Path) -> Path:
    """Return the file that remembers a key's last signature; it lies beside the key."""
    return path.with_name(path.name + ".last")


def check_unused(path: Path) -> None:
    """Raise `ConfigError` where this file's key has signed another ledger."""
    head = last_signed(memory_of(path))
    if head is not None and head.size:
        raise ConfigError(
            f"signing key `{path}` has signed another ledger, and this one names no key: name another file, or, where "
            f"that ledger is gone for good, move `{path}` and `{memory_of(path)}` away",
            path=path,
        )


def _recorded(path: Path, periods: Sequence[KeyPeriod]) -> SigningKey | None:
    """The key that the ledger names; None where another process holds it."""
    finish_handover(path, periods)
    if not path.exists():
        _log.warning("another process signs checkpoints", key=str(periods[-1].key), expected_at=str(path))
        return None
    key = read_signing_key(path)
    if key.verifier != periods[-1].key:
        raise ConfigError(
            f"signing key `{path}` is not the one that signs this ledger (`{periods[-1].key}`); give the right file",
            path=path,
        )
    return key


def confirm_break(
    signer: CheckpointSigner,
    key: SigningKey,
    engine: Engine,
    ledger: Ledger,
    clock: Clock,
    actor: str,
    reason: str,
) -> LogBreak:
    """Record that the root log does not extend what its key signed, and let signing resume.

    Raises `ConfigError` where it does extend it, `LedgerUnavailable` where it cannot be recorded (nothing is changed
    then), `SigningKeyError` while a signer runs.
    """
    with signer.alone():
        if not signer.contradiction():
            raise ConfigError("the ledger extends the last signed checkpoint: there is no break to confirm")
        with engine.connect() as connection:
            proofs = LedgerProofs(connection)
            stored = proofs.signed_or_none()
            stored_head = proofs.checkpoint().head
            replays = select(events.c.leaf).where(events.c.kind == "replay-completed", has_leaf(events))
            if stored is not None:
                replays = replays.where(events.c.at_us >= stored.at_us)
            replayed = sum(orjson.loads(bytes(leaf))["added"] for leaf in connection.scalars(replays))
        base = EMPTY.head() if stored is None else parse_checkpoint(parse_note(stored.note).text).head
        seconds = clock.utc_us() // MICROSECONDS
        what = LogBreak(key.name, signer.last_head(), stored_head, base, replayed, seconds)
        record = base64.b64encode(break_record(key, what)).decode()
        ledger.submit_durable(LogBroken(clock.now_us(), what.lost.size, what.base.size, record, actor, reason))
        signer.begin_again(None if stored is None else stored.note)
    return what


def rotate_signing_key(
    path: Path,
    signer: CheckpointSigner,
    ledger: Ledger,
    clock: Clock,
    actor: str,
    kind: KeyKind | None = None,
) -> SigningKey:
    """Hand over to a new key of `kind` (None: as the old one), on record; the old file stays under its key id.

    Raises `LedgerUnavailable` where the handover could not be recorded; the old key then goes on. Raises
    `SigningKeyError` while a signer runs.
    """
    with signer.alone():
        return _rotate(path, signer, ledger, clock, actor, kind)


def _rotate(
    path: Path, signer: CheckpointSigner, ledger: Ledger, clock: Clock, actor: str, kind: KeyKind | None
) -> SigningKey:
    old = read_signing_key(path)
    fresh = next_file(path)
    fresh.unlink(missing_ok=True)
    new = create_signing_key(fresh, old.name, kind or old.kind)
    signer.sign_once()
    head = signer.last_head()
    record = rotation_record(old, new, head, clock.utc_us() // 1_000_000)
    ledger.submit_durable(
        SigningKeyRecorded(clock.now_us(), "rotated", str(new.verifier), base64.b64encode(record).decode(), actor)
    )
    take_over(path, old)
    return new


def finish_handover(path: Path, periods: Sequence[KeyPeriod]) -> None:
    """Finish an interrupted handover: the new key takes over if the ledger names it, otherwise it is dropped.

    One that is under way in another process is waited for.
    """
    fresh = next_file(path)
    if not fresh.exists():
        return
    with behind_handover(memory_of(path)):
        _finish_handover(path, periods)


def _finish_handover(path: Path, periods: Sequence[KeyPeriod]) -> None:
    fresh = next_file(path)
    if not fresh.exists():
        return
    if periods and read_signing_key(fresh).verifier == periods[-1].key:
        take_over(path, read_signing_key(path) if path.exists() else None)
    else:
        fresh.unlink()


def take_over(path: Path, old: SigningKey | None) -> None:
    """Put the next key in the old one's place; the old one stays under its id."""
    if old is not None:
        kept = path.with_name(f"{path.name}.{old.verifier.key_id.hex()}")
        if not kept.exists():
            kept.hardlink_to(path)
    next_file(path).replace(path)
    sync_path(path.parent)


def next_file(path: Path) -> Path:
    """Return the file of the next key until it is on record."""
    return path.with_name(path.name + ".next")
