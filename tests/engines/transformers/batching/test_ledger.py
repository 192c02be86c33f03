"""The evidence of a real engine in a real ledger: complete, conserved, and every end in time."""

from __future__ import annotations

from pathlib import Path

from kvcustody.audit.evidence.coverage.conservation import conservation
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.store.database.engine import open_store
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.governor.governor import Governor
from kvcustody.integrations.transformers.batching.governed_batching import GovernedBatching
from standins.engines.transformers.continuous_world import (
    IDENTITY,
    batching,
    generation,
    model,
    person,
    prompt,
    settings,
)


def test_evidence_is_complete_after_hits_forks_pressure_erasure_and_cancellation(tmp_path: Path) -> None:
    generate = generation(max_new_tokens=12, num_return_sequences=2, do_sample=True)
    engine = GovernedBatching(
        model(),
        settings(tmp_path),
        IDENTITY,
        generation_config=generate,
        batching_config=batching(num_blocks=40, allow_block_sharing=True),
    )
    with engine:
        for turn in range(3):
            people = [person("a"), person("b"), person("a", "eve")]
            found = engine.generate_batch(people, [prompt(30 + turn, turn), prompt(60, 1), prompt(25, 1)])
            assert [result.error for result in found.values()] == [None] * 6
        engine.start()
        doomed = engine.submit(person("a"), prompt(30))
        engine.cancel(doomed)
        assert engine.erase(Selector(tenant="a", subject="eve")).ended_blocks > 0
        engine.stop()
        worker = engine.worker
        assert worker is not None
        incarnation = worker.writer.incarnation
        governor: Governor = engine.custody.governor
        assert engine.call(lambda one: (one.check(), one.scan())) == ([], [])
    counts = governor.counts()
    store = open_store(tmp_path / "ledger.db", read_only=True)
    with store.connect() as connection:
        whole = coverage(connection).total
        identities = conservation(connection, incarnation, counts)
    store.dispose()
    assert whole.due == whole.in_time > 30
    assert whole.late == whole.failed == whole.missing == whole.unproven == whole.overdue == whole.disputed == 0
    assert [identity for identity in identities if identity.difference] == []
