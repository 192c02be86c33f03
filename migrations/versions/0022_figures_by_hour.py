"""Figures by hour: what the leaves add up to, counted once over those that are there; the verdicts of coverage follow.

Leaves are read in order, some at a time; what is no leaf counts nowhere. None is changed, and no tree or signature is.
Where the roles are set up they get their rights to the new tables.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa
from alembic import context, op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

Progress = Callable[[str, int, int], None]
Figure = tuple[int, str, str, str, str, str]  # hour, kind, measure, outcome, detail, classification

_HOUR_US = 3_600_000_000
_ALL_HOURS = -1
_VERDICTS = (
    *("due", "ended_in_time", "covered", "in_time", "late", "failed", "missing", "unproven", "overdue"),
    *("disputed", "launched_bytes", "retired_bytes", "sampled_bytes", "full_bytes", "reread_blocks"),
    *("fence_us_max", "lag_us_max"),
)
_OUTCOMES = {
    **dict.fromkeys(("decision", "hit-counters"), "effect"),
    **dict.fromkeys(("residency-released", "blocks-released", "custody-ended", "observed-removed"), "cause"),
    **{"erasure-requested": "selector", "erasure-completed": "outcome", "receipt": "result"},
    "orphan-found": "orphan",
}
_ITEMS = {  # the lists of a `custody-changed` leaf: the kind of their items, and the keys of these
    "released": ("residency-released", ("boot_us", "residency", "cause", "runs")),
    "passed": ("blocks-released", ("boot_us", "residency", "cause", "runs", "own")),
    "ended": ("custody-ended", ("boot_us", "classification", "runs", "cause")),
    "scrubbed": (
        "receipt",
        (
            *("boot_us", "launch", "shard", "method", "device", "bytes", "started_boot_us", "ended_boot_us"),
            *("level", "share_ppm", "verified", "result", "runs"),
        ),
    ),
}
_LEAVES = 4096  # read at once
_WALLED = "SELECT 1 FROM pg_policies WHERE tablename = 'events' AND policyname = 'of_tenant'"
_BY_TENANT = ("counter_deltas", "counters", "coverage_hours")
_RIGHTS = {
    "kvcustody_writer": "SELECT, INSERT, UPDATE, DELETE",
    "kvcustody_retention": "SELECT",
    "kvcustody_auditor": "SELECT",
    "kvcustody_signer": "SELECT",
    "kvcustody_reader": "SELECT",
}


def upgrade() -> None:
    _tables()
    progress: Progress = context.config.attributes.get("progress") or (lambda what, done, total: None)
    _count(op.get_bind(), progress)
    if op.get_bind().dialect.name == "postgresql":
        _grant(op.get_bind())


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def _log() -> sa.Column[int]:
    return sa.Column("log", sa.Integer(), nullable=False)


def _scraped() -> sa.Column[bool]:
    return sa.Column("scraped", sa.Boolean(), nullable=False)


def _tables() -> None:
    op.create_table(
        "counter_deltas",
        _scraped(),
        _log(),
        _number("size"),
        _number("hour_us"),
        *_texts("figures"),
        sa.PrimaryKeyConstraint("scraped", "log", "size", "hour_us", name=op.f("pk_counter_deltas")),
    )
    op.create_table(
        "counters",
        _scraped(),
        _number("hour_us"),
        _log(),
        *_texts("figures"),
        sa.PrimaryKeyConstraint("scraped", "hour_us", "log", name=op.f("pk_counters")),
    )
    op.create_table(
        "coverage_hours",
        _number("hour_us"),
        _log(),
        *_texts("classification"),
        *map(_number, _VERDICTS),
        sa.PrimaryKeyConstraint("hour_us", "log", "classification", name=op.f("pk_coverage_hours")),
    )
    op.create_table(
        "coverage_pass",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        _number("size"),
        _number("at_us"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_coverage_pass")),
    )


def _count(connection: sa.Connection, progress: Progress) -> None:
    tables = sa.MetaData()
    tables.reflect(connection, only=["logs", "events", "counters"])
    logs, events, counters = (tables.tables[name] for name in ("logs", "events", "counters"))
    total = connection.scalar(sa.select(sa.func.count()).select_from(events)) or 0
    done = 0
    for log in connection.scalars(sa.select(logs.c.id).order_by(logs.c.id)).all():
        found: Counter[Figure] = Counter()
        for leaves in _leaves(connection, events, log):
            for leaf in leaves:
                found.update(_figures_of(leaf))
            done += len(leaves)
            progress("figures of the ledger's leaves", done, total)
        for figure, value in [*found.items()]:
            found[_ALL_HOURS, *figure[1:]] += value
        packed: dict[tuple[bool, int], list[tuple[str | int, ...]]] = {}
        for (hour, kind, measure, *rest), value in sorted(found.items()):
            if value:
                scraped = measure == "denied" or kind == "orphan-found"
                packed.setdefault((scraped, hour), []).append((kind, measure, *rest, value))
        rows = [
            {"scraped": scraped, "hour_us": hour, "log": log, "figures": _packed(figures)}
            for (scraped, hour), figures in packed.items()
        ]
        if rows:
            connection.execute(counters.insert(), rows)


def _packed(figures: list[tuple[str | int, ...]]) -> str:
    return json.dumps(figures, ensure_ascii=False, separators=(",", ":"))


def _figures_of(leaf: bytes) -> Counter[Figure]:
    """What one leaf counts."""
    made: Counter[Figure] = Counter()
    try:
        body = json.loads(leaf)
        made[_hour(body), str(body["kind"]), "leaves", "", "", ""] += 1
        for each in _items(body):
            _add(made, each)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return Counter()
    return made


def _hour(body: dict[str, Any]) -> int:
    return int(body["at_us"]) // _HOUR_US * _HOUR_US


def _items(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The body, or of a leaf that holds lists its items, each as a leaf of its own kind."""
    if body["kind"] != "custody-changed":
        yield body
        return
    for key, (kind, names) in _ITEMS.items():
        for values in body.get(key, ()):
            made = dict(zip(names, values, strict=False)) | {"kind": kind, "part": 1, "log": body["log"]}
            yield made | {"at_us": int(body["at_us"]) - int(made["boot_us"])}


def _add(made: Counter[Figure], body: dict[str, Any]) -> None:
    """What an event counts, or a part of one."""
    kind, hour, classification = str(body["kind"]), _hour(body), str(body.get("classification", ""))
    outcome, first = str(body[_OUTCOMES[kind]]) if kind in _OUTCOMES else "", int(body["part"]) == 1

    def add(measure: str, value: int, came_out: str = outcome, detail: str = "") -> None:
        made[hour, kind, measure, came_out, detail, classification] += value

    add("events", int(first))
    blocks = sum(map(_blocks, body.get("runs", ())))
    if kind in ("residency-opened", "blocks-attached"):
        add("attached_blocks", blocks)
        add("written_blocks", sum(map(_blocks, body.get("written", ()))))
    elif kind == "residency-released" or (kind == "blocks-released" and body["own"]):
        add("written_blocks", blocks)
    elif kind == "custody-ended":
        add("blocks", blocks)
    elif kind == "receipt":
        level = str(body["level"]) if body["result"] == "ok" else "failed"
        add("blocks", blocks, level)
        add("bytes", int(body["bytes"]) if first else 0, level)
    elif kind in ("decision", "hit-counters"):
        acting = body["reader"] if kind == "decision" else body["tenant"]
        if body["log"] != f"tenant/{acting}":
            return
        for measure in ("requests", "blocks", "tokens") if kind == "hit-counters" else ():
            add(measure, int(body[measure]))
        if outcome == "deny":
            rule = body["rule"] if kind == "hit-counters" else (*body["reasons"], "default-deny")[0]
            add("denied", int(body.get("requests", 1)), rule, f"{int(body['revision'])} {body['owner']}")


def _blocks(run: list[Any]) -> int:
    """How many blocks an encoded run of any form has."""
    if not isinstance(run[0], list) and isinstance(run[1], list):
        return sum(run[2]) if run[2] else len(run[1])
    return sum((run[0] if isinstance(run[0], list) else run)[2::2])


def _leaves(connection: sa.Connection, events: sa.Table, log: int) -> Iterator[list[bytes]]:
    after = -1
    query = sa.select(events.c.idx, events.c.leaf).where(events.c.log == log)
    while rows := connection.execute(
        query.where(events.c.idx > after).order_by(events.c.idx).limit(_LEAVES)
    ).all():
        after = rows[-1].idx
        yield [bytes(row.leaf) for row in rows]


def _grant(connection: sa.Connection) -> None:
    known = set(connection.scalars(sa.text("SELECT rolname FROM pg_roles")))
    for role, rights in _RIGHTS.items():
        if role in known:
            connection.exec_driver_sql(f"GRANT {rights} ON {', '.join(_BY_TENANT)}, coverage_pass TO {role}")
    if "kvcustody_retention" in known:
        connection.exec_driver_sql("GRANT INSERT ON counter_deltas TO kvcustody_retention")
        connection.exec_driver_sql("GRANT DELETE ON coverage_hours, coverage_pass TO kvcustody_retention")
    if "kvcustody_reader" in known and connection.scalar(sa.text(_WALLED)):
        for table in _BY_TENANT:
            connection.exec_driver_sql(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            connection.exec_driver_sql(
                f"CREATE POLICY of_tenant ON {table} FOR SELECT TO kvcustody_reader"
                " USING (log = (SELECT kvcustody_log()))"
            )
