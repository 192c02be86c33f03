"""Alembic's entry: runs on the connection that `upgrade()` hands over, and on no configuration file."""

from __future__ import annotations

from alembic import context

from kvcustody.audit import erasure_schema, keeping_schema, release_schema, service_schema, tree_schema
from kvcustody.audit.schema import metadata
from kvcustody.audit.store import VERSION_TABLE

assert tree_schema.root_log.metadata is metadata  # its tables are among those that are compared
assert erasure_schema.erasure_effects.metadata is metadata
assert keeping_schema.legal_holds.metadata is metadata
assert release_schema.policy_release.metadata is metadata
assert service_schema.service_keys.metadata is metadata
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
