"""Checks of a worker's or a door's batch before anything is written: own leaves, canonical, of its kinds.

1. A leaf has the fields and the types of its kind (`leaf_schema`), and its bytes are the canonical form of their
   content. A forged, additional, repeated or reordered key does not pass the comparison.
2. A worker writes for its own incarnation alone.
3. A worker, and a door, hands in the kinds that are declared so (`audit.kinds.event`), and no other; a door no names.
   What a field may name follows from its declared meaning. Here is checked what needs no ledger; `WorkerClaims` checks
   the rest.
4. A tenant's leaf goes to that tenant's log, and to no other.
5. No leaf contains the character U+0000: PostgreSQL takes no such text, and a ledger may move there.
6. A batch is checked as a whole; of one that is refused, the first leaf that is refused alone is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import sub
from typing import Any, NamedTuple

import orjson

from kvcustody.audit.evidence.subjects.subject_table import is_proved, row_of
from kvcustody.audit.kinds import log_of
from kvcustody.audit.kinds.block_runs import EXACT
from kvcustody.audit.kinds.event import FieldMeaning, OneOf
from kvcustody.audit.leaf import LEAF_BYTES_MAX
from kvcustody.audit.leaf.batch import EMPTY, LeafBatch, LeafGroup, read_leaves
from kvcustody.audit.leaf.leaf_schema import DOORS_KINDS, SCHEMA_OF_NAME, WORKERS_KINDS
from kvcustody.errors import LedgerError
from kvcustody.governance.identity.w3c_trace import is_trace
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.problem_details import ProblemError

LEAVES_MAX = 20_000
NAMES_MAX = 20_000
KEPT_RUNS_MAX = 1000  # that a worker asks about at once
_HEX = frozenset("0123456789abcdef")
_SECRET_CHARACTERS = 32
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # in canonical JSON: an escape that is not itself escaped
_PARTS_MAX = 1 << 20
_PARTY = frozenset(
    {FieldMeaning.SERVED, FieldMeaning.HELD, FieldMeaning.OWNER, FieldMeaning.OF_ORDER}
)  # the tenants whose log a leaf is in
_SHOWN_CHARACTERS = 64
_NO_NAMES = b"[]"

Name = tuple[str, str, str, str, str | None]  # pseudonym, tenant, subject, session, secret


class Sender(NamedTuple):
    """Who sends a batch: the worker or door (`role`), and its incarnation."""

    worker: str
    incarnation: str
    offset_us: int
    role: str = Role.WORKER.value

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that it may hand in."""
        return DOORS_KINDS if self.role == Role.DOOR.value else WORKERS_KINDS


class Received(NamedTuple):
    """A valid batch, and the span of its sequences; 0 to 0 without a leaf."""

    names: list[Name]
    batch: LeafBatch
    first_sequence: int
    last_sequence: int


def read_batch(body: bytes, sender: Sender) -> Received:
    """Parse the batch in a request: a line of names, then a leaf a line. Raises `malformed` or `refused-leaf`."""
    head, lines = lines_of(body)
    if sender.role == Role.DOOR.value and head != _NO_NAMES:
        raise ProblemError("malformed", "a door may not send names")
    if not lines:
        return Received(_names(head), EMPTY, 0, 0)
    try:
        batch = _checked(lines, sender)
    except LedgerError as problem:
        raise _refused(lines, sender, problem) from None
    return Received(_names(head), batch, min(batch.sequences), max(batch.sequences))


def lines_of(body: bytes) -> tuple[bytes, list[bytes]]:
    """Return the line of names, and the lines of leaves; raises `malformed`."""
    lines = body.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines or len(lines) > LEAVES_MAX + 1:
        raise ProblemError("malformed", f"a batch is a line of names and at most {LEAVES_MAX} lines of leaves")
    return lines.pop(0), lines


def unwritable() -> ProblemError:
    """Return the refusal of a leaf that only the database found to be wrong."""
    return ProblemError("refused-leaf", "the ledger refuses a leaf of this batch; send its leaves one by one")


def write_batch(names: Iterable[Name], leaves: Iterable[bytes]) -> bytes:
    """Return the body of a batch."""
    return b"\n".join((orjson.dumps(list(names)), *leaves))


def _refused(lines: list[bytes], sender: Sender, problem: LedgerError) -> ProblemError:
    """The refusal of a batch, whose first wrong leaf is looked for by halves."""
    place = 0
    while len(lines) > 1:
        half = len(lines) // 2
        try:
            _checked(lines[:half], sender)
        except LedgerError as found:
            lines, problem = lines[:half], found
        else:
            place, lines = place + half, lines[half:]
    try:
        _checked(lines, sender)
    except LedgerError as found:
        problem = found
    return ProblemError("refused-leaf", f"leaf {place} {problem.message}", leaf=place, **problem.operands)


def _checked(lines: list[bytes], sender: Sender) -> LeafBatch:
    """The batch of these leaves; raises `LedgerError` with what is wrong with one of them."""
    if max(map(len, lines)) > LEAF_BYTES_MAX:
        raise LedgerError("is longer than a leaf may be")
    if any(b"\\u0000" in line and _NUL.search(line) for line in lines):
        raise LedgerError("contains the character U+0000")
    batch = read_leaves(lines, canonical=True)
    foreign = set(batch.kinds) - sender.kinds
    if foreign:
        kind = min(foreign)[:_SHOWN_CHARACTERS]
        raise LedgerError(f"is of the kind `{kind}`, which {sender.role}s may not send", kind=kind)
    if set(batch.incarnations) != {sender.incarnation}:
        raise LedgerError("is not of this worker's incarnation")
    if min(batch.sequences) < 1 or max(batch.sequences) >= EXACT:
        raise LedgerError("has an impossible sequence")
    if not all(1 <= part <= of <= _PARTS_MAX for part, of in set(zip(batch.parts, batch.of_parts, strict=True))):
        raise LedgerError("has an impossible place")
    for group in batch.groups:
        _check_kind(group, batch.sequences, sender)
    return batch


def _check_kind(group: LeafGroup, sequences: Sequence[int], sender: Sender) -> None:
    """Leaves of one kind are their sender's, in their time and in their log."""
    columns = group.columns
    at_us, boot_us = columns["at_us"], columns["boot_us"]
    if min(at_us) < 0 or min(boot_us) < 0 or max(at_us) >= EXACT or max(boot_us) >= EXACT:
        raise LedgerError("has an impossible time")
    if set(map(sub, at_us, boot_us)) != {sender.offset_us}:
        raise LedgerError("has a time that is not of this incarnation")
    meanings = SCHEMA_OF_NAME[group.kind].meanings
    named = [columns[key] for key, meaning in meanings.items() if meaning in _PARTY and key in columns]
    for log, *parties in set(zip(columns["log"], *named, strict=True)):
        if log not in {log_of(party) for party in set(parties) or {None}}:
            raise LedgerError("is in another tenant's log", field="log")
    for key, meaning in meanings.items():
        if meaning is FieldMeaning.EARLIER:
            own = [sequences[place] for place in group.places]
            if not all(1 <= named < at for named, at in zip(columns[key], own, strict=True)):
                raise refused_field(group.kind, key, max(columns[key]), meaning.value)
        elif key in columns and (isinstance(meaning, OneOf) or meaning in _OWN):
            wrong = {value for value in set(columns[key]) if not _may_say(meaning, value, sender)}
            if wrong:
                raise refused_field(group.kind, key, min(wrong), _allowed(meaning))


def refused_field(kind: str, field: str, value: object, allowed: str) -> LedgerError:
    """Return why a leaf names what its worker may not: the field, the value, and the permitted ones.

    No tenant is quoted (rule 3 of `problem_details`).
    """
    if SCHEMA_OF_NAME[kind].meanings[field] in _PARTY:
        return LedgerError(f"may name in `{field}` of `{kind}`: {allowed}", kind=kind, field=field)
    shown = str(value)[:_SHOWN_CHARACTERS]
    message = f"says `{shown}` in `{field}` of `{kind}`, which may be: {allowed}"
    return LedgerError(message, kind=kind, field=field, value=shown)


_OWN: dict[FieldMeaning | OneOf, Callable[[Any, Sender], bool]] = {  # what needs no ledger
    FieldMeaning.WORKER: lambda value, sender: value == sender.worker,
    FieldMeaning.LIFE: lambda value, sender: value in ("", sender.incarnation),
    FieldMeaning.TRACE: lambda value, sender: value is None or is_trace(value),
}


def _may_say(meaning: FieldMeaning | OneOf, value: Any, sender: Sender) -> bool:
    return value in meaning.values if isinstance(meaning, OneOf) else _OWN[meaning](value, sender)


def _allowed(meaning: FieldMeaning | OneOf) -> str:
    if isinstance(meaning, FieldMeaning):
        return meaning.value
    return ", ".join(f"`{value}`" if value else "nothing" for value in sorted(meaning.values))


def _names(line: bytes) -> list[Name]:
    try:
        rows = orjson.loads(line)
    except ValueError:
        rows = None
    if rows.__class__ is not list or len(rows) > NAMES_MAX:
        raise ProblemError("malformed", f"the first line of a batch is a list of at most {NAMES_MAX} names")
    if rows and not _are_rows(rows):
        raise ProblemError(
            "malformed", "a name must be a pseudonym, a tenant, a subject, a session, and a secret or null"
        )
    made: list[Name] = [row_of(row) for row in rows]
    if any(is_proved(row) is False for row in made):
        raise ProblemError("malformed", "a pseudonym does not match its name and secret")
    return made


def _are_rows(rows: list[Any]) -> bool:
    if set(map(type, rows)) != {list} or set(map(len, rows)) != {5}:
        return False
    names, *who, secrets = zip(*rows, strict=True)
    lengths = list(map(len, names)) if set(map(type, names)) == {str} else [0]
    return 16 <= min(lengths) <= max(lengths) <= 32 and all(map(_are_texts, (names, *who))) and _are_secrets(secrets)


def _are_secrets(secrets: Sequence[Any]) -> bool:
    """Each is null, or a random one."""
    given = [secret for secret in secrets if secret is not None]
    if {secret.__class__ for secret in given} - {str}:
        return False
    digits = {*chain.from_iterable(given)}
    return digits <= _HEX and {len(secret) for secret in given} <= {_SECRET_CHARACTERS}


def _are_texts(texts: Sequence[Any]) -> bool:
    return set(map(type, texts)) == {str} and max(map(len, texts)) <= 256 and "\0" not in "".join(texts)


def worker_fields_table() -> str:
    """Return the table of kinds that are handed in, by whom, and what their fields may name."""
    rows = ["| kind | handed in by | fields |", "|---|---|---|"]
    for kind in sorted(WORKERS_KINDS | DOORS_KINDS):
        by = [name for name, kinds in (("workers", WORKERS_KINDS), ("doors", DOORS_KINDS)) if kind in kinds]
        named = (
            f"`{field}`: {_allowed(meaning)}"
            for field, meaning in sorted(SCHEMA_OF_NAME[kind].meanings.items())
            if meaning not in (FieldMeaning.WORDS, FieldMeaning.TRACE)
        )
        rows.append(f"| `{kind}` | {' and '.join(by)} | {'; '.join(named) or '–'} |")
    return "\n".join(rows) + "\n"
