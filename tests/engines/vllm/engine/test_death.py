"""kill -9 of the EngineCore: what the next start says of the dead one, and what its memory holds."""

from __future__ import annotations

import os
import signal
import time

from sqlalchemy import select

from kvcustody.audit.evidence.processes.sequence_gaps import gaps
from kvcustody.audit.kinds import PROCESS_DEATH
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import custody_ends, releases, residencies
from kvcustody.audit.store.schema.ledger import incarnations
from standins.engines.vllm.engine_probe import SOILED
from standins.engines.vllm.local_engine import BLOCK, environment


def test_a_killed_engine_is_closed_as_unproven_by_the_next(start, new_deployment):
    deployment = new_deployment()
    engine = start(deployment=deployment)
    prompt = [*range(50, 50 + 4 * BLOCK), 17]
    engine.ask(prompt, tenant="alpha")
    engine.submit(prompt[1:], tenant="beta", max_tokens=300)  # still running when it dies
    for _ in range(20):
        engine.step()
    time.sleep(1.0)  # the ledger's writer has had its turn
    os.kill(engine.core_pid, signal.SIGKILL)
    wait_for_death(engine.worker_pid)
    engine.close()

    with environment({SOILED: "1"}):
        again = start(deployment=deployment)
    assert again.rpc("soiled_bytes")[0] > 100_000, "positive control: memory that the dead engine might have left"
    assert sum(again.residue()) == 0
    assert again.ask(prompt, tenant="alpha").cached_tokens == 0
    assert again.ask(prompt, tenant="alpha").cached_tokens == 4 * BLOCK
    again.close()

    ledger = open_store(deployment.ledger_url)
    with ledger.connect() as connection:
        with_blocks = select(incarnations).where(incarnations.c.device.is_not(None))  # not who has closed the dead one
        dead, second = connection.execute(with_blocks.order_by(incarnations.c.id)).all()
        ends = connection.execute(select(custody_ends).where(custody_ends.c.incarnation == dead.id)).all()
        opened = connection.execute(select(residencies).where(residencies.c.incarnation == dead.id)).all()
        closed = connection.execute(select(releases).where(releases.c.incarnation == dead.id)).all()
        left = gaps(connection)
    ledger.dispose()
    assert {row.tenant for row in opened} == {"alpha", "beta"}
    assert {row.tenant for row in ends if row.cause == PROCESS_DEATH} == {"alpha", "beta"}
    assert {row.residency for row in opened} <= {row.residency for row in closed}
    assert second.end == "stopped"
    assert dead.end not in (None, "stopped")
    assert left == ()


def wait_for_death(pid: int, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
