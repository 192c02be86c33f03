"""What the ledger says of an engine that stopped in order, and of one that was killed."""

from __future__ import annotations

from sqlalchemy import select

from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.kinds import PROCESS_DEATH
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import custody_ends, releases, residencies
from kvcustody.audit.store.schema.ledger import incarnations
from kvcustody.audit.verify.ledger.fsck_ledger import fsck
from standins.engines.sglang.sglang_workload import TENANTS, requests, run

SMALL = {"max_total_tokens": 1024, "chunked_prefill_size": 64, "max_running_requests": 6, "page_size": 4}


def test_every_end_is_proved_and_every_count_agrees(start, new_deployment):
    site = new_deployment()
    engine = start(deployment=site, **SMALL)
    run(engine, requests(40), site.token)
    engine.run([20 + at for at in range(60)])  # nobody's
    assert engine.probe("conservation") == []
    engine.stop()
    ledger = open_store(site.ledger_url)
    with ledger.connect() as connection:
        total = coverage(connection).total
        (life,) = connection.execute(select(incarnations)).all()
        left = gaps(connection)
        report = fsck(connection)
    ledger.dispose()
    assert total.due > 500 and total.covered == total.due
    assert total.coverage == 1.0
    assert life.end == "stopped" and left == ()
    assert report.ok and report.leaves > 50, report.problems


def test_a_killed_engine_is_closed_as_unproven_by_the_next(start, new_deployment):
    site = new_deployment()
    engine = start(deployment=site, **SMALL)
    prompt = [16 + (at * 3) % 480 for at in range(100)]
    for tenant in TENANTS:
        engine.run(prompt, site.token(tenant))
    engine.probe("conservation")  # everything is in the ledger
    engine.kill()
    engine.close()
    again = start(deployment=site, **SMALL)
    assert again.probe("free")["soiled_anywhere"] == 0
    assert again.run(prompt, site.token("acme")).cached_tokens == 0
    assert again.run(prompt, site.token("acme")).cached_tokens == 96
    again.stop()
    ledger = open_store(site.ledger_url)
    with ledger.connect() as connection:
        engines = select(incarnations).where(incarnations.c.device == "cpu").order_by(incarnations.c.id)
        dead, second = connection.execute(engines).all()
        ends = connection.execute(select(custody_ends).where(custody_ends.c.incarnation == dead.id)).all()
        opened = connection.execute(select(residencies).where(residencies.c.incarnation == dead.id)).all()
        closed = connection.execute(select(releases).where(releases.c.incarnation == dead.id)).all()
        left = gaps(connection)
    ledger.dispose()
    assert {row.tenant for row in opened} >= set(TENANTS)
    assert {row.tenant for row in ends if row.cause == PROCESS_DEATH} >= set(TENANTS)
    assert {row.residency for row in opened} <= {row.residency for row in closed}
    assert second.end == "stopped" and dead.end not in (None, "stopped")
    assert left == ()
