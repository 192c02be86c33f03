"""One small replay end to end, and the positive controls of what it claims to see (V1-V3, D3, J1)."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from kvcustody.allocator.pool.memory_protocol import NO_BLOCKS, ScrubResult
from kvcustody.allocator.pool.tensor_memory import TensorMemory
from kvcustody.clock import SystemClock
from kvcustody.errors import ConfigError, TraceError
from kvcustody.lab.replay.options import EnvironmentOptions, RunnerOptions
from kvcustody.lab.replay.report import ReplayReport
from kvcustody.lab.replay.run.job import run_job
from kvcustody.lab.replay.run.marked_tensors import PatternCache, ReplayCacheShape
from kvcustody.lab.replay.run.workload_from_options import Choice, block_tokens_of, load_workload
from kvcustody.lab.replay.workload.model import Workload

POLICY = """\
schema: kvcustody/policy@1
name: small
profile: shared
scope: subject
classifications: [public, internal, confidential, restricted]
classify:
  - {tenant: "*", as: public}
tenants:
  acme: {quota: {guaranteed: 30%, cap: 100%, borrow: true}}
  default: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}
segments:
  - id: house
    owner: acme
    tenants: "*"
    digest: hmac:DIGEST
    tokens: 512
    classification: public
    expires: 2099-01-01
rules:
  - {id: own, effect: permit, action: reuse, when: {reader: owner}}
  - {id: no-restricted, effect: forbid, action: reuse, when: {classification: restricted}}
retention:
  public: {idle: 10m, absolute: 1h, active_max: 1h}
  internal: {idle: 5m, absolute: 1h, active_max: 1h}
  confidential: {idle: 1m, absolute: 1h, active_max: 1h}
  restricted: {idle: 0s, absolute: 0s, active_max: 1h}
scrub:
  default: {within: 60s, verify: all}
offload: {public: never, internal: never, confidential: never, restricted: never}
audit: {on_outage: {decisions: deny, lifecycle: spill, own_hits: aggregate}}
eviction: {policy: lru}
"""


@pytest.fixture
def options(tmp_path: Path) -> EnvironmentOptions:
    policy = tmp_path / "small.yaml"
    policy.write_text(POLICY.replace("DIGEST", 64 * "0"))
    return EnvironmentOptions(policy=str(policy), pool_blocks=1024, database=tmp_path / "ledger.db")


def small(conversations: int = 40) -> Workload:
    return load_workload(Choice(conversations=conversations, tenants=4), 16, "small")


def replay(options: EnvironmentOptions, workload: Workload | None = None, **kwargs) -> ReplayReport:
    return run_job(workload or small(), options, RunnerOptions(checked_share=1.0), **kwargs)


def assert_conserved(report: ReplayReport) -> None:
    assert len(report.identities) >= 7
    assert [row for row in report.identities if not row.holds] == []
    assert report.drift_blocks == 0


def test_a_replay_accounts_for_every_block(options: EnvironmentOptions) -> None:
    report = replay(options)
    totals = report.totals
    assert report.stopped is None
    assert_conserved(report)
    assert totals.requests == len(small().jobs) and totals.refused == totals.deferred == 0
    assert 0.3 < totals.prefill_avoided < 1
    assert totals.shared_hit_tokens > 0, "the house prompt is shared by its segment"
    assert totals.denials["no-restricted"] > 0
    assert totals.ended_blocks["pressure"] > 0 and totals.ended_blocks["expired"] > 0
    assert totals.scrubbed_blocks == totals.ended_blocks.total() == report.coverage.due
    assert report.coverage.in_time == report.coverage.due
    assert report.residue_bytes == 0 and report.residue_checked_blocks > 1000
    assert report.wrong_tokens == 0 and report.read_tokens == totals.hit_tokens
    assert dict(report.coverage.bytes_by_level)["full"] == totals.scrubbed_blocks * 16 * 2048


@pytest.mark.system("a second replay reports the first")
def test_a_second_replay_appends_and_reports_itself_alone(options: EnvironmentOptions) -> None:
    first, second = replay(options, small(10)), replay(options, small(10))
    assert_conserved(second)
    assert first.totals.hit_tokens == second.totals.hit_tokens, "nothing is found that an earlier process cached"
    assert second.coverage.due == second.totals.scrubbed_blocks


def test_an_unscrubbed_block_is_seen(options: EnvironmentOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control of V2: with the overwrite switched off, residue appears and the device's count is short."""
    boot = []

    def forget(self: TensorMemory, shard: int, blocks: np.ndarray, verify_share: float) -> ScrubResult:
        if not boot:
            boot.append(True)
            return real(self, shard, blocks, verify_share)
        now = self._clock.now_us()
        return ScrubResult("torch", "cpu", len(blocks), now, now, "full", len(blocks), NO_BLOCKS)

    real = TensorMemory.scrub
    monkeypatch.setattr(TensorMemory, "scrub", forget)
    report = replay(options, small(12))
    assert report.residue_bytes > 0
    assert [row.name for row in report.identities if not row.holds] == ["receipts of shard 0 = its device's counter"]


def test_a_foreign_or_stale_block_is_seen() -> None:
    """Positive control of V3: K of another prompt, K at another position, V of another tenant."""
    cache = PatternCache(8, ReplayCacheShape(layers=2), device="cpu", clock=SystemClock())
    table, tokens = np.array([3, 5]), np.arange(100, 132, dtype=np.int32)
    cache.write(table, tokens, 0, tenant=1)
    cache.check_found(table, tokens, (1,))
    assert (cache.read_tokens, cache.wrong_tokens) == (32, 0)
    cache.check_found(table, tokens, (0, 2))
    assert cache.wrong_tokens == 32
    cache.check_found(table, tokens + 1, (1,))
    assert cache.wrong_tokens == 64
    cache.check_found(table[::-1].copy(), tokens, (1,))
    assert cache.wrong_tokens > 64


def test_ctrl_c_keeps_what_ran(options: EnvironmentOptions) -> None:
    steps = iter(range(1000))

    def interrupt() -> None:
        if next(steps) == 25:
            raise KeyboardInterrupt

    report = replay(options, progress=interrupt)
    assert report.stopped == "interrupted"
    assert report.totals.requests == 26
    assert_conserved(report)


def test_a_bad_trace_line_is_refused_before_anything_is_recorded(options: EnvironmentOptions, tmp_path: Path) -> None:
    rows = "".join(
        f'{{"timestamp": {n * 100}, "input_length": 1024, "output_length": 4, "hash_ids": [0, {n}]}}\n'
        for n in range(1, 9)
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text(rows + '{"timestamp": 900}\n')
    choice = Choice(trace=trace, tenants=2)
    with pytest.raises(TraceError, match=f"{trace}:9:.*--skip-wrong-rows"):
        load_workload(choice, 512, "small")
    assert not options.database.exists()
    options = replace(options, block_tokens=block_tokens_of(choice, None))
    report = replay(options, load_workload(replace(choice, skip_wrong_rows=True), 512, "small"))
    assert report.totals.requests == 8
    assert report.remarks[0].startswith("1 wrong row left out: ")
    assert_conserved(report)


def test_labels_of_a_trace_stream_to_the_runner(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,40,2\n2023-11-16 18:00:01,4,1\n")
    workload = load_workload(Choice(trace=trace, format="azure", tenants=3, limit=1), 16, "p")
    assert [(r.input_tokens, label.classification != "") for r, label in islice(workload.jobs, 5)] == [(40, True)]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(trace=Path("x")), "cannot read trace"),
        (Choice(format="mooncake"), "name the trace"),
        (Choice(format="csv"), "unknown format"),
        (Choice(trace=Path("x"), format="generated"), "reads no file"),
        (Choice(tenants=0), "from 1 to 65,536"),
    ],
)
def test_impossible_choices_are_one_line_errors(choice: Choice, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        block_tokens_of(choice, None)
        load_workload(choice, 16, "p")


def test_a_trace_keeps_its_own_block_size() -> None:
    with pytest.raises(ConfigError, match="blocks of 512"):
        block_tokens_of(Choice(trace=Path("x"), format="mooncake"), 16)
    assert block_tokens_of(Choice(), 32) == 32
