"""What a database says of its own schema, in full: what SQLAlchemy does not see is read from the catalog itself.

1. `catalog(engine)` names every table, column, constraint, index, trigger, function, partition, sequence, row policy
   and grant, each with its definition. Two schemas are equal where their catalogs are.
   The order of a table's columns is no part of that: every statement names them.
2. `without_months` leaves the months of a PostgreSQL ledger out: which there are depends on when it was made.
"""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import Connection, Engine, inspect

Catalog = dict[str, str]  # what it is -> how it is defined
_MONTH = re.compile(r"_\d{4}_\d{2}\b|_\d{4}_\d{2}_|_first\b|_first_")

_POSTGRES = {
    "relation": """
        SELECT relname, concat_ws(' ', relkind, 'persistence', relpersistence, 'partition', relispartition,
               'rows walled', relrowsecurity, relforcerowsecurity, pg_get_partkeydef(oid),
               pg_get_expr(relpartbound, oid), reloptions)
        FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind <> 'i' AND relkind <> 'I'""",
    "column": """
        SELECT relname || '.' || attname, concat_ws(' ', format_type(atttypid, atttypmod),
               CASE WHEN attnotnull THEN 'NOT NULL' END, 'DEFAULT ' || pg_get_expr(adbin, adrelid),
               nullif(attidentity, ''), nullif(attgenerated, ''), collname)
        FROM pg_attribute
        JOIN pg_class ON pg_class.oid = attrelid
        LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
        LEFT JOIN pg_collation ON pg_collation.oid = attcollation AND attcollation <> 100
        WHERE relnamespace = 'public'::regnamespace AND attnum > 0 AND NOT attisdropped
        AND relkind IN ('r', 'p', 'v')""",
    "constraint": """
        SELECT conrelid::regclass || '.' || conname, concat_ws(' ', contype, convalidated, pg_get_constraintdef(oid))
        FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND contype <> 'n'""",
    "index": """
        SELECT indexrelid::regclass::text, concat_ws(' ', 'valid', indisvalid, pg_get_indexdef(indexrelid))
        FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
        WHERE relnamespace = 'public'::regnamespace""",
    "trigger": """
        SELECT tgrelid::regclass || '.' || tgname, concat_ws(' ', tgenabled, pg_get_triggerdef(oid))
        FROM pg_trigger WHERE NOT tgisinternal""",
    "function": """
        SELECT proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace""",
    "inheritance": """
        SELECT inhrelid::regclass::text, inhparent::regclass::text FROM pg_inherits""",
    "sequence": """
        SELECT sequencename, concat_ws(' ', data_type, start_value, min_value, max_value, increment_by, cycle, 'of',
               (SELECT refobjid::regclass || '.' || refobjsubid FROM pg_depend
                WHERE objid = sequencename::regclass AND deptype = 'a'))
        FROM pg_sequences WHERE schemaname = 'public'""",
    "policy": """
        SELECT tablename || '.' || policyname, concat_ws(' ', permissive, cmd, roles, 'USING', qual, with_check)
        FROM pg_policies""",
    "grant": """
        WITH listed AS (
            SELECT relname AS name, relowner AS owner, coalesce(relacl, acldefault('r', relowner)) AS rights
            FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'S', 'v')
            UNION ALL SELECT attrelid::regclass || '.' || attname, relowner, attacl
            FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
            WHERE relnamespace = 'public'::regnamespace AND attacl IS NOT NULL
            UNION ALL SELECT proname || '()', proowner, coalesce(proacl, acldefault('f', proowner))
            FROM pg_proc WHERE pronamespace = 'public'::regnamespace
            UNION ALL SELECT 'schema', nspowner, coalesce(nspacl, acldefault('n', nspowner))
            FROM pg_namespace WHERE nspname = 'public'
        )
        SELECT name || ' to ' || coalesce(rolname, 'everybody'), string_agg(privilege_type, ' ' ORDER BY privilege_type)
        FROM listed CROSS JOIN LATERAL aclexplode(rights) LEFT JOIN pg_roles ON pg_roles.oid = grantee
        WHERE grantee <> owner GROUP BY 1""",
}


def catalog(engine: Engine) -> Catalog:
    """Every part of the schema (rule 1)."""
    with engine.connect() as connection:
        return _sqlite(connection) if engine.dialect.name == "sqlite" else _postgres(connection)


def without_months(found: Catalog) -> Catalog:
    """The same without the months of a PostgreSQL ledger (rule 2): the rest partition of each table stays."""
    return {name: text for name, text in found.items() if not _MONTH.search(name)}


def differences(one: Catalog, other: Catalog) -> list[str]:
    """What one catalog has that the other has not, or has otherwise."""
    return [
        f"{name}: {one.get(name, 'is missing')} <> {other.get(name, 'is missing')}"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]


def _postgres(connection: Connection) -> Catalog:
    return {
        f"{kind} {name}": str(text)
        for kind, query in _POSTGRES.items()
        for name, text in connection.exec_driver_sql(query.replace("%", "%%")).all()
    }


def _sqlite(connection: Connection) -> Catalog:
    """Tables by what SQLite made of them; indexes and triggers by their text, which is all that there is of them."""
    run, see = connection.exec_driver_sql, inspect(connection)
    catalog: Catalog = {}
    for row in run("SELECT type, name, sql FROM sqlite_master WHERE type <> 'table' AND sql IS NOT NULL").all():
        catalog[f"{row.type} {row.name}"] = _plain(row.sql)
    for table in run("PRAGMA table_list").all():
        name = table.name
        if table.schema != "main" or name.startswith("sqlite_"):
            continue
        text = run("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).scalar_one()
        kinds: list[Any] = [table.type, table.wr, table.strict, "AUTOINCREMENT" in text.upper()]
        catalog[f"table {name}"] = repr(kinds)
        for column in run(f"PRAGMA table_xinfo({name})").all():
            catalog[f"column {name}.{column.name}"] = repr(tuple(column)[2:])
        for index in run(f"PRAGMA index_list({name})").all():
            columns = [tuple(each)[2:] for each in run(f"PRAGMA index_xinfo({index.name})").all()]
            label = index.name if index.origin == "c" else f"{name} {index.origin} {[c[0] for c in columns if c[-1]]}"
            catalog[f"index of {label}"] = repr((index.unique, index.origin, index.partial, columns))
        for key, parts in (
            ("primary key", [see.get_pk_constraint(name)]),
            ("check", see.get_check_constraints(name)),
            ("foreign key", see.get_foreign_keys(name)),
        ):
            catalog[f"{key} {name}"] = repr(sorted(repr(sorted(dict(part).items())) for part in parts))
    return catalog


def _plain(sql: str) -> str:
    """The text without what means nothing: quotes, white space, and brackets around one value."""
    return " ".join(re.sub(r"\((\w+ / \w+)\)", r"\1", sql.replace('"', "")).split())
