"""Alembic's entry: runs on the connection that `upgrade()` hands over, and on no configuration file."""

from __future__ import annotations

from alembic import context

from kvcustody.audit.database.engine import VERSION_TABLE
from kvcustody.audit.schema import cases as case_schema
from kvcustody.audit.schema import erasures as erasure_schema
from kvcustody.audit.schema import releases as release_schema
from kvcustody.audit.schema import retention as keeping_schema
from kvcustody.audit.schema import service as service_schema
from kvcustody.audit.schema import trees as tree_schema
from kvcustody.audit.schema.ledger import metadata

assert tree_schema.root_log.metadata is metadata  # its tables are among those that are compared
assert erasure_schema.erasure_effects.metadata is metadata
assert case_schema.cases.metadata is metadata
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
