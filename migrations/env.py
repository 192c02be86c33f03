"""Alembic's entry point: runs on the connection that `upgrade()` passes, without a configuration file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo

from kvcustody.audit.store.database.engine import VERSION_TABLE
from kvcustody.audit.store.schema.ledger import metadata
from kvcustody.logger import get_logger

_LOG = get_logger("kvcustody.migrations")


def _log_revision(
    ctx: MigrationContext, step: MigrationInfo, heads: Collection[Any], run_args: Mapping[str, Any]
) -> None:
    """Log a revision that ran; it holds once the transaction commits."""
    _LOG.info("schema revision", revision=step.up_revision_id)


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
    render_as_batch=True,
    on_version_apply=_log_revision,
)
with context.begin_transaction():
    context.run_migrations()
