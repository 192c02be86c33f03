"""What a worker's batch must be before any of it is written: its own leaves, canonical, of kinds that workers write.

1. A leaf's bytes are the canonical form of what they say: a forged, repeated or reordered key does not survive the
   comparison with their own canonical form.
2. A worker writes for its own incarnation alone. Of others' it may only say that one of its own predecessors died.
3. Kinds that the control plane writes (access, principals, policies, keys of others) are refused from a worker.
4. A tenant's leaf goes to that tenant's log, and to no other.
5. A batch is checked column by column (`leaf_columns`). Whatever that does not take is checked leaf by leaf here,
   which defines what is refused and says which leaf it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import orjson

from kvcustody.audit.events import KINDS, LEAF_BYTES_MAX, LEAF_KEYS, ORIGINS, SCHEMA, SYSTEM, Leaf, log_of
from kvcustody.audit.events.batch import EMPTY, LeafBatch, batch_of
from kvcustody.audit.events.registry import TRACE
from kvcustody.audit.subjects.subject_table import is_proved, row_of
from kvcustody.governance.identity.w3c_trace import is_trace
from kvcustody.governance.service.ingest.check_columns import Sender, read_columns
from kvcustody.governance.service.problem_details import ProblemError

LEAVES_MAX = 20_000
NAMES_MAX = 20_000
CONTROL_KINDS = frozenset(  # what only the control plane writes
    {"access", "principal-changed", "signing-key", "release-step", "retention-purged"}
    | {"legal-hold", "subject-unlinked", "sink-changed", "keys-ordered", "clock-confirmed"}
)
_OUTAGES = {kind.name: kind.outage for kind in KINDS.values()}
_CANONICAL = orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER
_HEX = frozenset("0123456789abcdef")
_SECRET_CHARACTERS = 32
_NAMES = {str, type(None)}
_OPTIONAL = frozenset({"written", "written_blocks", "origin", TRACE})

Name = tuple[str, str, str, str, str | None]  # pseudonym, tenant, subject, session, secret


class Received(NamedTuple):
    """A batch that may be written, and the span of its sequences; 0 to 0 where it has no leaf."""

    names: list[Name]
    batch: LeafBatch
    first_sequence: int
    last_sequence: int


def read_batch(body: bytes, sender: Sender) -> Received:
    """The batch in a request: a line of names, then a leaf a line. Raises `malformed` or `refused-leaf`."""
    head, lines = lines_of(body)
    if not lines:
        return Received(_names(head), EMPTY, 0, 0)
    batch = read_columns(lines, sender, CONTROL_KINDS) or _singly(lines, sender)
    return Received(_names(head), batch, min(batch.sequences), max(batch.sequences))


def lines_of(body: bytes) -> tuple[bytes, list[bytes]]:
    """The line of names, and those of leaves; raises `malformed`."""
    lines = body.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines or len(lines) > LEAVES_MAX + 1:
        raise ProblemError(
            "malformed", f"a batch is a line of names and at most {LEAVES_MAX} lines of leaves"
        )
    return lines.pop(0), lines


def _singly(lines: list[bytes], sender: Sender) -> LeafBatch:
    """The same, leaf by leaf."""
    seen: set[tuple[Any, ...]] = set()  # logs with their tenants that were found right in this batch
    found = [_leaf(line, sender, place, seen) for place, line in enumerate(lines)]
    try:
        return batch_of(found)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        raise unwritable() from None


def unwritable() -> ProblemError:
    """Some leaf of a batch that only its own writing can find."""
    return ProblemError("refused-leaf", "the ledger refuses a leaf of this batch; send them one by one")


def write_batch(names: Iterable[Name], leaves: Iterable[bytes]) -> bytes:
    """The body of a batch."""
    return b"\n".join((orjson.dumps(list(names)), *leaves))


def _leaf(line: bytes, sender: Sender, place: int, seen: set[tuple[Any, ...]]) -> Leaf:
    if len(line) > LEAF_BYTES_MAX:
        raise _refused(place, "is longer than a leaf may be")
    try:
        body = orjson.loads(line)
        canonical = orjson.dumps(body, option=_CANONICAL)
    except (ValueError, TypeError):
        raise _refused(place, "is not canonical JSON") from None
    if canonical != line or body.__class__ is not dict:
        raise _refused(place, "is not in its canonical form")
    kind: Any = body.get("kind")
    keys = LEAF_KEYS.get(kind) if kind.__class__ is str else None
    if keys is None or kind in CONTROL_KINDS:
        raise _refused(place, "is of a kind that workers do not write")
    if body.keys() != keys and not (body.keys() <= keys and keys - body.keys() <= _OPTIONAL):
        raise _refused(place, "has other fields than its kind")
    if (
        body["schema"] != SCHEMA
        or body["incarnation"] != sender.incarnation
        or body["outage"] != _OUTAGES[kind]
        or body.get("worker", sender.worker) != sender.worker
    ):
        raise _refused(place, "is not of this worker's incarnation")
    if body.get("origin", "") not in tuple(ORIGINS):  # whatever its type is
        raise _refused(place, "has an origin that is none")
    if TRACE in body and not is_trace(body[TRACE]):
        raise _refused(place, "names a trace that is none")
    if float in set(map(type, body.values())):
        raise _refused(place, "carries a float")
    _check_numbers(body, sender, place)
    log = body["log"]
    parties = (log, body.get("tenant"), body.get("owner"), body.get("reader"))
    if set(map(type, parties)) - _NAMES:
        raise _refused(place, "names a tenant that is no name")
    if parties not in seen and parties != (SYSTEM, None, None, None):
        _check_log(body, place)
        seen.add(parties)
    about = body.get("of_incarnation")
    if about and about != sender.incarnation and about not in sender.predecessors:
        raise _refused(place, "is about an incarnation that is not this worker's")
    return Leaf(log, body, line)


def _check_numbers(body: dict[str, Any], sender: Sender, place: int) -> None:
    numbers = (body["sequence"], body["part"], body["parts"], body["at_us"], body["boot_us"])
    if {number.__class__ for number in numbers} != {int} or min(numbers) < 0 or not body["sequence"]:
        raise _refused(place, "has a head that is not of whole numbers")
    if not 1 <= body["part"] <= body["parts"] <= 1 << 20 or body["sequence"] >= 1 << 53:
        raise _refused(place, "has an impossible place")
    if body["at_us"] - body["boot_us"] != sender.offset_us:
        raise _refused(place, "has a time that is not of this incarnation")


def _check_log(body: dict[str, Any], place: int) -> None:
    parties = {body[name] for name in ("tenant", "owner", "reader") if name in body}
    if body["log"] not in {log_of(party) for party in parties or {None}}:
        raise _refused(place, "is in a log that is not its tenant's")


def _names(line: bytes) -> list[Name]:
    try:
        rows = orjson.loads(line)
    except ValueError:
        rows = None
    if rows.__class__ is not list or len(rows) > NAMES_MAX:
        raise ProblemError("malformed", f"the first line of a batch is a list of at most {NAMES_MAX} names")
    if rows and not _are_rows(rows):
        raise ProblemError(
            "malformed", "a name is a pseudonym, a tenant, a subject, a session and a secret or null"
        )
    made: list[Name] = [row_of(row) for row in rows]
    if any(is_proved(row) is False for row in made):
        raise ProblemError("malformed", "a pseudonym is not the one of its name and secret")
    return made


def _are_rows(rows: list[Any]) -> bool:
    """Each with a secret or null, or all without: from a worker of a release before there were secrets."""
    if set(map(type, rows)) != {list} or set(map(len, rows)) not in ({4}, {5}):
        return False
    names, *who, secrets = [*zip(*rows, strict=True), [None] * len(rows)][:5]
    lengths = list(map(len, names)) if set(map(type, names)) == {str} else [0]
    return (
        16 <= min(lengths) <= max(lengths) <= 32
        and all(map(_are_texts, (names, *who)))
        and _are_secrets(secrets)
    )


def _are_secrets(secrets: Sequence[Any]) -> bool:
    """Each is null, or a random one."""
    given = [secret for secret in secrets if secret is not None]
    if {secret.__class__ for secret in given} - {str}:
        return False
    digits = {*chain.from_iterable(given)}
    return digits <= _HEX and {len(secret) for secret in given} <= {_SECRET_CHARACTERS}


def _are_texts(texts: Sequence[Any]) -> bool:
    return set(map(type, texts)) == {str} and max(map(len, texts)) <= 256 and "\0" not in "".join(texts)


def _refused(place: int, reason: str) -> ProblemError:
    return ProblemError("refused-leaf", f"leaf {place} {reason}", leaf=place)
