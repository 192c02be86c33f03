"""Checks of the ledger: its schema, location, role, signatures, witnesses, and credentials."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Engine, func, select, text

from kvcustody.audit.store.database.database_place import SqliteFile, database_place
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.engine import check_store
from kvcustody.audit.store.schema.retention import cosignatures
from kvcustody.audit.store.schema.service import service_keys, service_principals
from kvcustody.audit.store.schema.trees import checkpoints, signed_checkpoints
from kvcustody.audit.tlog.root_sealer import unsealed
from kvcustody.audit.tlog.signing_key import read_signing_key
from kvcustody.console.doctor.findings import (
    Diagnosis,
    Examined,
    check,
    ledger_check,
    problem,
    skipped,
    warning,
)
from kvcustody.console.render.number_format import relative
from kvcustody.governance.keys.checkpoint_signing_key import recorded_keys
from kvcustody.governance.service.access.roles import Role
from kvcustody.plurals import several
from kvcustody.times import DAY_US, MINUTE_US, SECOND_US

_FREE_BYTES, _FREE_SHARE = 1 << 30, 0.05
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "overlay", "apfs", "ufs"})
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_RENEW_US = 14 * DAY_US
_UNSIGNED_US, _UNWITNESSED_US = 5 * MINUTE_US, DAY_US
_CLOCKS_APART_US = 5 * SECOND_US
_MOUNTS = Path("/proc/self/mounts")


@check("ledger", "the ledger exists, with this program's schema")
def ledger(subject: Examined) -> Iterator[Diagnosis]:
    """Check that the ledger opens at this program's schema. A pooler that drops session options is refused when it is
    met.
    """
    if subject.engine is None:
        yield skipped("no ledger was named (`--ledger`, `--service` or `--worker`)")
    else:
        check_store(subject.engine)


@check("disk", "there is free space on local disks")
def disk(subject: Examined) -> Iterator[Diagnosis]:
    """Check the disks of the ledger, the spill, the service's folder and the NVMe tier."""
    folders: dict[str, Path] = {}
    place = database_place(subject.ledger) if subject.ledger is not None else None
    if isinstance(place, SqliteFile) and place.path.exists():
        folders["the ledger"] = place.path.parent
    if subject.service is not None:
        folders["the service's folder"] = subject.service.state_path
    if subject.worker is not None:
        folders["the spill"] = subject.worker.spill_path
        if subject.worker.nvme_tier_path is not None:
            folders["the NVMe tier"] = subject.worker.nvme_tier_path
    if not folders:
        yield skipped("the settings name no folder")
    for name, folder in folders.items():
        yield from _folder(name, _existing(folder.absolute()))


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _folder(name: str, path: Path) -> Iterator[Diagnosis]:
    usage = shutil.disk_usage(path)
    if usage.free < max(_FREE_BYTES, min(_FREE_SHARE * usage.total, 20 * _FREE_BYTES)):
        free = f"{usage.free / (1 << 30):.1f} of {usage.total / (1 << 30):.0f} GiB are free"
        yield problem(f"{name} (`{path}`): {free}", "make room: a full disk stops admission")
    kind = filesystem_of(path)
    if kind in _IN_MEMORY:
        yield problem(f"{name} (`{path}`) is in memory (`{kind}`) and ends with the machine", "move it to a disk")
    elif kind and kind not in _LOCAL:
        yield warning(
            f"{name} (`{path}`) is on `{kind}`, which is not a known local file system: locks and fsync may not work",
            "move it to a local disk, or use PostgreSQL for the ledger",
        )


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """Return the kernel's name for the file system of a path; empty where it names none."""
    best, kind = "", ""
    resolved = str(path.resolve())
    if mounts is None:
        mounts = _MOUNTS.read_text() if _MOUNTS.exists() else ""
    for line in mounts.splitlines():
        _, where, found, *_ = line.split(" ")
        where = where.encode().decode("unicode_escape")
        inside = resolved == where or resolved.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best):
            best, kind = where, found
    return kind


@ledger_check("database-role", "the ledger's connection has no more rights than it needs")
def database_role(subject: Examined, engine: Engine) -> Iterator[Diagnosis]:
    """Check the database role and clock: a superuser bypasses every row rule and trigger."""
    if not dialect_of(engine).roles:
        yield skipped("the ledger is not on a PostgreSQL server")
        return
    with engine.connect() as connection:
        name, is_superuser = connection.execute(
            text("SELECT current_user, rolsuper FROM pg_roles WHERE rolname = current_user")
        ).one()
        database_us = connection.scalar(text("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"))
    if is_superuser:
        yield warning(
            f"role `{name}` is a superuser: it may change evidence, and sees the rows of every tenant",
            "run `kvcustody db roles`, and let each process take its role (docs/concepts/ledger/overview.md)",
        )
    assert database_us is not None
    apart_us = abs(database_us - subject.clock.utc_us())
    if apart_us > _CLOCKS_APART_US:
        yield problem(
            f"the clocks of the database and of this machine are {apart_us // SECOND_US} s apart",
            "synchronise both",
        )


@ledger_check("signatures", "checkpoints are signed, by the key that these settings name")
def signatures(subject: Examined, engine: Engine) -> Iterator[Diagnosis]:
    """Check that no sealed checkpoint waits long for a signature; the holder of the ledger's key signs."""
    now_us = subject.clock.utc_us()
    with engine.connect() as connection:
        waiting = unsealed(connection, now_us)
        signed = connection.scalar(select(func.max(signed_checkpoints.c.size))) or 0
        first = select(func.min(checkpoints.c.at_us)).where(checkpoints.c.size > signed)
        since_us = connection.scalar(first)
    remedy = "start `kvcustody serve`, or a worker with this ledger; see its log for the signer"
    if waiting.leaves and waiting.age_us > _UNSIGNED_US:
        minutes = waiting.age_us // MINUTE_US
        leaves, age = several(waiting.leaves, "leaf"), several(minutes, "minute")
        yield problem(f"not sealed for {age}: {leaves}", remedy)
    if since_us is not None and now_us - since_us > _UNSIGNED_US:
        yield problem(f"no checkpoint was signed for {several((now_us - since_us) // MINUTE_US, 'minute')}", remedy)
    periods = recorded_keys(engine)
    for path in subject.signing_keys if periods else ():
        if not path.exists():
            yield problem(f"`{path}` does not exist, and the ledger has a key", "restore the key from its backup")
        elif read_signing_key(path).verifier != periods[-1].key:
            yield problem(
                f"`{path}` is not the key of this ledger, which is `{periods[-1].key}`",
                "put the ledger's key there; `kvcustody audit keys` lists all",
            )


@ledger_check("witnesses", "others have signed the ledger's state today")
def witnesses(subject: Examined, engine: Engine) -> Iterator[Diagnosis]:
    """Check the witnesses: without one, a rewritten ledger is undetected."""
    with engine.connect() as connection:
        last_us = connection.scalar(select(func.max(cosignatures.c.at_us)))
    if last_us is None:
        yield warning(
            "no witness has signed this ledger: the holder of its key could present another one",
            "set `witnesses_path`, or keep a checkpoint elsewhere (docs/concepts/ledger/trees.md)",
        )
    elif subject.clock.utc_us() - last_us > _UNWITNESSED_US:
        days = (subject.clock.utc_us() - last_us) // DAY_US
        yield problem(
            f"no witness has signed this ledger for {several(days, 'day')}", "check whether the witness answers"
        )


@ledger_check("credentials", "no key of a worker or person ends within 14 days")
def credentials(subject: Examined, engine: Engine) -> Iterator[Diagnosis]:
    """Check the keys of enabled principals, where only the last key counts; a bootstrap key should have ended."""
    now_us = subject.clock.utc_us()
    last = func.max(service_keys.c.expires_us)
    query = (
        select(service_keys.c.principal, last, func.max(service_keys.c.used_us))
        .join(service_principals, service_principals.c.name == service_keys.c.principal)
        .where(
            service_keys.c.revoked_us.is_(None),
            service_principals.c.disabled_us.is_(None),
            service_principals.c.roles != Role.BOOTSTRAP.value,
        )
        .group_by(service_keys.c.principal)
        .having(last < now_us + _RENEW_US)
        .order_by(last)
    )
    with engine.connect() as connection:
        rows = connection.execute(query).all()
    for name, expires_us, used_us in rows:
        remedy = "issue a new one: `kvcustody apikey issue`"
        if expires_us > now_us:
            yield warning(f"the last key of `{name}` ends {relative(expires_us, now_us)}", remedy)
        elif used_us is not None and now_us - used_us < 30 * DAY_US:
            yield problem(f"the last key of `{name}` has ended, and it was used this month", remedy)
