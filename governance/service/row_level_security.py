"""Row-level security in PostgreSQL as a second wall behind row filters, for every read of one tenant.

1. A transaction of one tenant acts as `kvcustody_reader`, and names the tenant in `kvcustody.tenant`: a query whose
   own filter was forgotten shows that tenant's rows and no other.
2. Role and tenant end with the transaction: the next one of the same connection begins without them.
3. The wall stands where `kvcustody db roles` of this version has been run and the service's login may take the role.
   Where it does not, health says so, and the filters of the queries are alone; SQLite has no such wall.
"""

from __future__ import annotations

from sqlalchemy import Connection, Engine, text

from kvcustody.audit.store.database.dialect import dialect_of
from kvcustody.audit.store.database.postgres_roles import FIGURES, READER
from kvcustody.audit.store.schema.all_tables import projections
from kvcustody.audit.store.schema.recorded_losses import LOSING_FUNCTION

_MEMBER = text("SELECT pg_has_role(current_user, oid, 'MEMBER') FROM pg_roles WHERE rolname = :role")
_WALLED = text("SELECT tablename FROM pg_policies WHERE policyname = 'of_tenant'")
_FUNCTION = text(f"SELECT to_regprocedure('{LOSING_FUNCTION}()')")
_TENANT = text("SELECT set_config('kvcustody.tenant', :tenant, true)")


def has_row_level_security(engine: Engine) -> bool:
    """Whether the login may act as the reader, and the roles have this version (rule 3)."""
    if not dialect_of(engine).roles:
        return False
    with engine.connect() as connection:
        if not connection.scalar(_MEMBER, {"role": READER}):
            return False
        walled = set(connection.scalars(_WALLED))
        has_function = connection.scalar(_FUNCTION) is not None
    return has_function and walled >= {"events", "logs", *FIGURES, *(table.name for table in projections())}


def restrict_to_tenant(connection: Connection, tenant: str) -> None:
    """Limit the rest of this transaction to one tenant's rows (rule 1)."""
    connection.execute(_TENANT, {"tenant": tenant})
    connection.exec_driver_sql(f"SET LOCAL ROLE {READER}")
