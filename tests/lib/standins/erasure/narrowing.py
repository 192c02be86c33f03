"""What coverage says of a world whose policy was narrowed."""

from __future__ import annotations

from kvcustody.audit.evidence.coverage.summary import CoverageRow, coverage
from standins.audit.coverage_agreement import disagreements
from standins.robust.custody_world import CustodyWorld


def judged(world: CustodyWorld) -> CoverageRow:
    """Coverage by the tables, which the recount from leaves must give to the row."""
    assert world.writer.flush()
    with world.engine.connect() as connection:
        found = coverage(connection)
        assert disagreements(connection) == []
    return found.total
