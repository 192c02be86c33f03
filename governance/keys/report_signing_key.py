"""The key that signs evidence reports. It is created once, recorded before it signs, and replaced only by a recorded
handover.

- It is in a file of its own and signs nothing but reports. It signs for the ledger that names it.
- A handover is a class A event that both keys signed. It is durable before the new key's file replaces the old one. A
  crash between the two is repaired at the next use.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection, Engine

from kvcustody.audit.kinds import ReportKeyRecorded
from kvcustody.audit.reports.model import Report
from kvcustody.audit.reports.signing.document_signature import (
    enrolment_leaves,
    report_key_periods,
    sign_document,
)
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.key_rotation import KeyPeriod, rotation_record
from kvcustody.audit.tlog.ledger_identity import own_origin
from kvcustody.audit.tlog.signed_note import KeyKind
from kvcustody.audit.tlog.signing_key import SigningKey, create_signing_key, read_signing_key
from kvcustody.clock import MICROSECONDS, Clock
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.checkpoint_signing_key import finish_handover, next_file, take_over
from kvcustody.governance.ledger_protocol import Ledger

NAME_END = "/report"  # a report key is named as its ledger, and this


def recorded_report_keys(engine: Engine) -> tuple[KeyPeriod, ...]:
    """Return every report-signing key that the ledger names, with the checkpoints it may sign for; oldest first."""
    with engine.connect() as connection:
        return report_key_periods([leaf for _, leaf in enrolment_leaves(connection)])


def open_report_key(
    path: Path,
    origin: str,
    engine: Engine,
    ledger: Ledger,
    clock: Clock,
    kind: KeyKind = KeyKind.ED25519,
    *,
    actor: str = "governor",
) -> SigningKey:
    """Open the key that signs this ledger's reports; create and record it where the ledger names none.

    Raises `ConfigError` where the file is missing or holds a key that the ledger does not name.
    """
    periods = recorded_report_keys(engine)
    if periods:
        return read_report_key(path, periods)
    name = f"{own_origin(engine, origin)}{NAME_END}"
    key = read_signing_key(path) if path.exists() else create_signing_key(path, name, kind)
    if key.name not in (name, f"{origin}{NAME_END}"):
        raise ConfigError(f"`{path}` holds key `{key.name}`, not `{name}`", path=path)
    ledger.submit_durable(ReportKeyRecorded(clock.now_us(), "made", str(key.verifier), "", actor))
    return key


def read_report_key(path: Path, periods: Sequence[KeyPeriod]) -> SigningKey:
    """Read the key that the ledger names; raises `ConfigError` for a missing file or another key."""
    if not periods:
        raise ConfigError("no key signs reports of this ledger; create one with `kvcustody report enrol-key`")
    finish_handover(path, periods)
    if not path.exists():
        raise ConfigError(f"`{path}` does not exist; give the file of key `{periods[-1].key}`", path=path)
    key = read_signing_key(path)
    if key.verifier != periods[-1].key:
        raise ConfigError(
            f"`{path}` does not hold the key that signs reports of this ledger (`{periods[-1].key}`)",
            path=path,
        )
    return key


def rotate_report_key(
    path: Path, engine: Engine, ledger: Ledger, clock: Clock, actor: str, kind: KeyKind | None = None
) -> SigningKey:
    """Hand over to a new key, on record; the old file stays under its key id.

    The old key may sign reports of checkpoints up to the newest signed one. Raises `LedgerUnavailable` where the
    handover could not be recorded; the old key then goes on.
    """
    old = read_report_key(path, recorded_report_keys(engine))
    fresh = next_file(path)
    fresh.unlink(missing_ok=True)
    new = create_signing_key(fresh, old.name, kind or old.kind)
    with engine.connect() as connection:
        proofs = LedgerProofs(connection)
        head = proofs.checkpoint(proofs.signed().size).head
    record = rotation_record(old, new, head, clock.utc_us() // MICROSECONDS)
    ledger.submit_durable(
        ReportKeyRecorded(clock.now_us(), "rotated", str(new.verifier), base64.b64encode(record).decode(), actor)
    )
    take_over(path, old)
    return new


def signed_report(connection: Connection, report: Report, key: SigningKey) -> Report:
    """Return the report with its signature; raises as `sign_document`."""
    return report.replace(signature=sign_document(connection, report.document(), key).signature)
