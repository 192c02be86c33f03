"""Two tensor-parallel workers: each holds half of every block, and both halves are in custody."""

from __future__ import annotations

from sqlalchemy import func, select

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.leaf_tables import receipts
from standins.engines.vllm.local_engine import BLOCK, environment
from standins.engines.vllm.workload import churn


def test_both_halves_of_a_block_are_scrubbed_with_a_receipt_each(start, new_deployment):
    deployment = new_deployment()
    with environment({"VLLM_CPU_OMP_THREADS_BIND": "0|1"}):
        engine = start(deployment=deployment, tensor_parallel_size=2)
    prompt = [*range(100, 100 + 3 * BLOCK), 17]
    asked = [engine.ask(prompt, tenant=tenant).cached_tokens for tenant in ("alpha", "beta", "alpha")]
    assert asked == [0, 0, 3 * BLOCK]
    halves = engine.rpc("block_residue")
    assert len(halves) == 2
    assert all(sum(half) > 1000 for half in halves), "positive control: both hold keys and values"
    engine.write_report()
    assert churn(engine, seed=3, requests=20)["finished"] > 8
    report = engine.write_report()
    assert report["blocks"] > 80  # counted once by each worker
    assert report["nonzero_bytes"] == 0
    assert engine.governance("check") == []
    engine.close()

    ledger = open_store(deployment.ledger_url)
    with ledger.connect() as connection:
        query = select(receipts.c.shard, func.sum(receipts.c.blocks)).group_by(receipts.c.shard)
        blocks = dict(connection.execute(query).all())
    ledger.dispose()
    assert set(blocks) == {0, 1}
    assert blocks[0] == blocks[1] > 80
