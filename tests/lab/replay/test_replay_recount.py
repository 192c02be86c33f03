"""Both recorded traces through the Governor: coverage from the tables and from the leaves agree to the row."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcustody.audit.evidence.coverage.leaf_record import LeafRecord
from kvcustody.audit.evidence.coverage.recount_process import leaves_in_database
from kvcustody.audit.evidence.coverage.summary import coverage
from kvcustody.audit.store.database.engine import open_store
from kvcustody.lab.replay.options import EnvironmentOptions, RunnerOptions, read_policy
from kvcustody.lab.replay.run import golden_check as golden
from kvcustody.lab.replay.run.job import run_job
from kvcustody.lab.replay.run.workload_from_options import Choice, block_tokens_of, load_workload
from standins.audit.coverage_agreement import disagreements

TRACES = {
    "mooncake": ("mooncake_conv_dev40.jsonl.gz", 16_000),
    "agentic": ("agentic_v6_dev.jsonl.gz", 64_000),
}


@pytest.mark.soak
@pytest.mark.traces
@pytest.mark.parametrize("form", TRACES)
def test_tables_and_leaves_agree_on_a_trace(tmp_path: Path, form: str) -> None:
    folder = golden.find_traces()
    if folder is None:
        pytest.skip("the recorded traces are not here; KVCUSTODY_TRACES names their folder")
    name, blocks = TRACES[form]
    choice = Choice(folder / name, form, 8, 1, "session", None, None)
    size = block_tokens_of(choice, None)
    workload = load_workload(choice, size, read_policy("regulated-saas").name)
    path = tmp_path / "ledger.db"
    report = run_job(
        workload,
        EnvironmentOptions(policy="regulated-saas", pool_blocks=blocks, block_tokens=size, device="cpu", database=path),
        RunnerOptions(seed=1),
    )
    assert report.error is None
    engine = open_store(path, read_only=True)
    with engine.connect() as connection:
        record = LeafRecord(leaves_in_database(connection))
        found = coverage(connection)
        assert disagreements(connection) == []
        assert record.unaccounted().is_empty
    engine.dispose()
    print(f"{form}: {record.leaves} leaves, {found.total}")
    assert found.total.due == report.coverage.due > 0 and found.total.disputed == 0
