"""Compare rows that are no projection of a single leaf with what the leaves say about them.

1. Names of people are proved by their pseudonyms, which are in leaves (`subject_table`). A row that is gone is
   accounted for by `subject-unlinked` leaves, by number: what was destroyed is not named again.
2. A step of a policy's release is proved by the leaf that has its record's digest; its columns repeat the record.
3. Who may ask the control plane, with which roles and keys, is what `principal-changed` leaves came to.
4. A witness's line says itself who signed when; whether it verifies needs the witness's key.
5. What no leaf can prove is said (`unproved`), and is in the list of `not_evidence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Table, func, select

from kvcustody.audit.evidence.subjects.subject_table import is_proved, is_tagged, row_of
from kvcustody.audit.kinds import SYSTEM, log_of
from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.schema.all_tables import has_leaf
from kvcustody.audit.store.schema.leaf_tables import residencies
from kvcustody.audit.store.schema.ledger import events, logs, subjects, tenants
from kvcustody.audit.store.schema.releases import policy_release
from kvcustody.audit.store.schema.retention import cosignatures, timestamps
from kvcustody.audit.store.schema.service import service_keys, service_principals
from kvcustody.audit.store.schema.stored_rows import StoredRow, stored_rows
from kvcustody.audit.store.schema.trees import signed_checkpoints
from kvcustody.audit.tlog.checkpoint import verify
from kvcustody.audit.tlog.signed_note import NoteError, VerifierKey, parse_note, parse_signatures
from kvcustody.plurals import several
from kvcustody.signed_document import digest

_AT_ONCE = 4096
_SECOND_US = 1_000_000
_TOKEN = "token"  # noqa: S105 - the kind of a principal whom an issuer of tokens keeps


class RegisterFindings(NamedTuple):
    """What is wrong, what is unproved, and other remarks: sentences."""

    problems: list[str]
    unproved: list[str]
    remarks: list[str]


def check_registers(connection: Connection, witnesses: Sequence[VerifierKey] = ()) -> RegisterFindings:
    """Check every register, table by table."""
    findings = RegisterFindings([], [], [])
    for table, check in REGISTERS.items():
        if not _may_read(connection, table):
            findings.unproved.append(f"`{table}` was not compared: this login may not read it")
            continue
        try:
            check(connection, findings)
        except (LookupError, TypeError, ValueError, AttributeError) as problem:
            findings.problems.append(
                f"`{table}` cannot be compared, because a leaf about it is malformed: {type(problem).__name__}"
            )
    if _may_read(connection, "cosignatures"):
        _check_cosignatures(connection, findings, witnesses)
    return findings


def _may_read(connection: Connection, table: str) -> bool:
    """Return whether this login may read a table and its counterpart; an auditor's login sees no names of people."""
    beside = {"service_principals": ["service_keys"]}.get(table, [])
    if not dialect_of(connection).roles:
        return True
    return all(connection.scalar(select(func.has_table_privilege(name, "SELECT"))) for name in (table, *beside))


def _said(connection: Connection, kind: str, *, of_tenants: bool = False) -> Iterator[Mapping[str, Any]]:
    """Yield the bodies of one kind of leaf, in order, without withdrawn ones.

    They are read from the system log; with `of_tenants`, from all tenants' logs.
    """
    system = select(logs.c.id).where(logs.c.name == SYSTEM).scalar_subquery()
    column = events.c
    log = column.log != system if of_tenants else column.log == system
    query = select(column.leaf).where(log, has_leaf(events)).order_by(column.log, column.idx)
    gone = {
        (body["incarnation"], int(body["of_sequence"]))
        for body in map(orjson.loads, connection.scalars(query.where(column.kind == "withdrawn")))
    }
    for leaf in connection.scalars(query.where(column.kind == kind)):
        body = orjson.loads(leaf)
        if (body["incarnation"], int(body["sequence"])) not in gone:
            yield body


def _check_tenants(connection: Connection, findings: RegisterFindings) -> None:
    """One row for each log of a tenant."""
    made = {name: log for log, name in connection.execute(select(logs.c.id, logs.c.name)) if name != SYSTEM}
    stored = {log_of(row.tenant): row for row in connection.execute(select(tenants.c.tenant, tenants.c.log))}
    for name in sorted(made.keys() | stored.keys()):
        if name not in stored:
            findings.problems.append(f"`{name}` has no row in `tenants`")
        elif stored[name].log != made.get(name):
            findings.problems.append(f"the row of `{stored[name].tenant}` in `tenants` is of another log")


def _check_subjects(connection: Connection, findings: RegisterFindings) -> None:
    """Rule 1."""
    column, unproved, clear = subjects.c, 0, 0
    query = select(column.pseudonym, column.tenant, column.subject, column.session, column.secret)
    for part in connection.execute(query.order_by(column.pseudonym)).partitions(_AT_ONCE):
        for row in part:
            proved = is_proved((row[0], row[1], row[2], row[3], row[4]))
            unproved += proved is None
            clear += not is_tagged(row_of(row))
            if proved is False:
                findings.problems.append(f"the row of pseudonym `{row[0]}` in `subjects` names another")
    if unproved:
        findings.unproved.append(
            f"{unproved} names in `subjects` are proved by nothing here: made before pseudonyms committed to names, or "
            "sealed under a subject's key (asking for a name compares it)"
        )
    if clear:
        findings.remarks.append(
            f"{several(clear, 'row')} of `subjects` with names of people in clear, here and in every backup: "
            "`kvcustody audit redact` unlinks one (docs/concepts/ledger/redaction-and-retention.md#redaction)"
        )
    unlinked: dict[str, int] = {}
    for body in _said(connection, "subject-unlinked", of_tenants=True):
        unlinked[body["tenant"]] = unlinked.get(body["tenant"], 0) + int(body["pseudonyms"])
    for tenant, gone in sorted(_nobody(connection).items()):
        if gone > unlinked.get(tenant, 0):
            findings.problems.append(
                f"`{gone}` pseudonyms of `{tenant}` have no row in `subjects`, and `{unlinked.get(tenant, 0)}` were "
                "unlinked on record"
            )


def _nobody(connection: Connection) -> dict[str, int]:
    """By tenant: how many pseudonyms of leaves nobody is behind. A session's goes with its subject's."""
    column = residencies.c
    counts: dict[str, int] = {}
    alone = column.subject.is_(None)
    for name, own in ((column.subject, None), (column.session, alone)):
        query = select(column.tenant, func.count(name.distinct())).outerjoin(subjects, subjects.c.pseudonym == name)
        query = query.where(name.is_not(None), subjects.c.pseudonym.is_(None)).group_by(column.tenant)
        for tenant, count in connection.execute(query if own is None else query.where(own)):
            counts[tenant] = counts.get(tenant, 0) + count
    orphaned = (
        select(column.tenant, func.count(column.session.distinct()))
        .outerjoin(subjects, subjects.c.pseudonym == column.subject)
        .where(column.subject.is_not(None), column.session.is_not(None), subjects.c.pseudonym.is_(None))
        .group_by(column.tenant)
    )
    for tenant, count in connection.execute(orphaned):
        counts[tenant] = counts.get(tenant, 0) + count
    return counts


def _check_release(connection: Connection, findings: RegisterFindings) -> None:
    """Rule 2."""
    digests: dict[int, set[str]] = {}
    for body in _said(connection, "release-step"):
        digests.setdefault(int(body["step"]), set()).add(body["record"])
    rows = connection.execute(select(policy_release).order_by(policy_release.c.number)).all()
    for row in rows:
        step = f"step `{row.number}` in `policy_release`"
        data = bytes(row.record)
        if digest(data) not in digests.get(row.number, ()):
            findings.problems.append(f"{step} is not on record in this form")
            continue
        record = orjson.loads(data)
        said = (record["action"], int(record["body"].get("revision", 0)), record["signature"]["key"])
        if (row.number, row.at_us, (row.kind, row.revision, row.actor)) != (
            record["number"],
            record["at_us"],
            said,
        ):
            findings.problems.append(f"{step} has columns that contradict its record")
    missing = sorted(digests.keys() - {row.number for row in rows})
    if missing and not rows:
        findings.unproved.append(
            f"{len(missing)} steps of a policy's release are on record, and `policy_release` has none: the release is "
            "kept in a folder, or was removed here"
        )
    elif missing:
        findings.problems.extend(
            f"step `{step}` of the policy's release is on record and not in `policy_release`: it was removed, or never "
            "arrived (then take it again)"
            for step in missing
        )


class _Standing(NamedTuple):
    """What leaves say of a principal: its last roles and tenant, who enrolled it, whether it is disabled."""

    roles: str
    tenant: str | None
    enrolled_by: str | None
    disabled: bool


class _Issued(NamedTuple):
    """What leaves say of a key."""

    principal: str
    certificate: str | None
    revoked: bool


def _check_principals(connection: Connection, findings: RegisterFindings) -> None:
    """Rule 3."""
    people: dict[str, _Standing] = {}
    keys: dict[str, _Issued] = {}
    for body in _said(connection, "principal-changed"):
        name, action, detail = body["principal"], body["action"], body["detail"]
        before = people.get(name)
        people[name] = _Standing(
            ",".join(body["roles"]),
            body["of_tenant"] or None,
            body["actor"] if action == "enrolled" else before and before.enrolled_by,
            action == "disabled" or (before is not None and before.disabled and action != "enabled"),
        )
        if action in ("key-issued", "key-replaced"):
            prefix, _, certificate = detail.partition(" x5t#S256=")
            keys[prefix] = _Issued(name, certificate or None, False)
        elif action in ("disabled", "enabled"):  # ends every key from before
            ended = [prefix for prefix, key in keys.items() if key.principal == name]
            keys |= {prefix: keys[prefix]._replace(revoked=True) for prefix in ended}
        elif action == "key-revoked":
            ended = [prefix for prefix in detail.split(",") if prefix in keys]
            keys |= {prefix: keys[prefix]._replace(revoked=True) for prefix in ended}
    _compare_principals(connection, findings, people)
    rows = {row.prefix: row for row in _read(connection, findings, service_keys)}
    for prefix in sorted(keys.keys() | rows.keys()):
        row, key = rows.get(prefix), keys.get(prefix)
        if row is None or key is None:
            what = "is on record and not there" if row is None else "is on record nowhere"
            findings.problems.append(f"key `{prefix}` of `service_keys` {what}")
        elif (row.principal, row.certificate) != key[:2]:
            findings.problems.append(f"key `{prefix}` of `service_keys` is not the one that was issued")
        elif row.revoked_us is None and key.revoked:
            findings.problems.append(f"key `{prefix}` of `service_keys` is revoked on record but still valid")
        elif row.revoked_us is not None and row.revoked_us < row.expires_us and not key.revoked:
            findings.problems.append(f"key `{prefix}` of `service_keys` is revoked without a record")


def _compare_principals(connection: Connection, findings: RegisterFindings, people: Mapping[str, _Standing]) -> None:
    rows = {row.name: row for row in _read(connection, findings, service_principals)}
    for name in sorted(people.keys() | rows.keys()):
        row, standing = rows.get(name), people.get(name)
        if row is not None and standing is None and row.kind == _TOKEN and row.disabled_us is None:
            continue  # it was refused to disable it
        if row is None or standing is None:
            what = "is on record and not there" if row is None else "is on record nowhere"
            findings.problems.append(f"principal `{name}` of `service_principals` {what}")
        elif (row.roles, row.tenant) != standing[:2]:
            findings.problems.append(f"principal `{name}` of `service_principals` has other roles than on record")
        elif (row.disabled_us is not None) is not standing.disabled:
            findings.problems.append(
                f"principal `{name}` of `service_principals` differs from the record in being disabled"
            )
        elif row.kind != _TOKEN and row.enrolled_by != standing.enrolled_by:
            findings.problems.append(
                f"principal `{name}` of `service_principals` was enrolled by somebody else on record"
            )


def _read(connection: Connection, found: RegisterFindings, table: Table) -> list[StoredRow]:
    """Return the rows of a table of the control plane; unreadable ones are named."""
    rows = stored_rows(connection, select(table))
    found.unproved.extend(
        f"it cannot be read, so nobody can sign in with it: {row.unread}" for row in rows if row.unread
    )
    return rows


def _check_stamps(connection: Connection, found: RegisterFindings) -> None:
    count = connection.scalar(select(func.count()).select_from(timestamps))
    if count:
        found.unproved.append(
            f"{several(count, 'row')} in `timestamps`: whoever reads an export checks a token by its "
            "authority's certificate"
        )


REGISTERS = {
    "tenants": _check_tenants,
    "subjects": _check_subjects,
    "policy_release": _check_release,
    "service_principals": _check_principals,
    "timestamps": _check_stamps,
}


def _check_cosignatures(connection: Connection, findings: RegisterFindings, witnesses: Sequence[VerifierKey]) -> None:
    """Rule 4."""
    keys = {(key.name, key.key_id): key for key in witnesses}
    unverified = 0
    query = select(cosignatures, signed_checkpoints.c.note).outerjoin(
        signed_checkpoints, signed_checkpoints.c.size == cosignatures.c.size
    )
    for row in connection.execute(query.order_by(cosignatures.c.size, cosignatures.c.witness)):
        what = f"the line of `{row.witness}` at `{row.size}` in `cosignatures`"
        try:
            (line,) = parse_signatures(bytes(row.line))
            stated = int.from_bytes(line.data[:8], "big") * _SECOND_US
            if (line.name, stated) != (row.witness, row.at_us):
                findings.problems.append(f"{what} says another witness or time than its columns")
            elif row.note is None:
                findings.problems.append(f"{what} is of a checkpoint that is not in `signed_checkpoints`")
            elif (line.name, line.key_id) in keys:
                verify(keys[line.name, line.key_id], parse_note(bytes(row.note)).text, line)
            else:
                unverified += 1
        except (NoteError, ValueError) as problem:
            findings.problems.append(f"{what} does not verify: {problem}")
    if unverified:
        findings.unproved.append(f"{unverified} lines in `cosignatures` are of witnesses whose key was not given")
