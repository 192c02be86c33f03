"""Alembic's entry point: runs on the connection that `upgrade()` passes, without a configuration file."""

from __future__ import annotations

from alembic import context

from kvcustody.audit.store.database.engine import VERSION_TABLE
from kvcustody.audit.store.schema.ledger import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
