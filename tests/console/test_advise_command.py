"""`kvcustody advise` of a trace: every answer against what the trace is, without a worker or a ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app

PROMPTS, BLOCKS, TOKENS = 4, 8, 512
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Four prompts of eight blocks, each sent three times: 32 blocks are found of a round of them."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "timestamp": at * 1000,
            "input_length": BLOCKS * TOKENS,
            "output_length": 2,
            "hash_ids": [(at % PROMPTS) * BLOCKS + one for one in range(BLOCKS)],
            "session": f"s{at % PROMPTS}",
            "lineage": f"line {at % PROMPTS}",
            "turn": at // PROMPTS,
        }
        for at in range(3 * PROMPTS)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return "trace.jsonl"


def advised(trace: str, *more: str) -> list[dict[str, Any]]:
    arguments = [
        "advise",
        trace,
        "--trace-format",
        "mooncake",
        "--policy",
        "single-org",
        "--tenants",
        "1",
        "--json",
    ]
    found = CliRunner().invoke(app, [*arguments, *more])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["replay"]["origin"] == "replayed" and document["workers"] == ["replay"]
    answers: list[dict[str, Any]] = document["answers"]
    return answers


def values(one: dict[str, Any]) -> dict[str, Any]:
    return {row["metric"]: row["value"] for row in one["evidence"]}


def test_a_trace_answers_every_question_with_its_evidence(trace: str) -> None:
    size, budgets, prefixes, key, offload, locations, cleanup = advised(
        trace, "--pool-blocks", "64", "--model", "config.json", "--prefill-rate", "8000"
    )
    assert "131,072 bytes" in size["answer"] and not size["unknown"]
    assert values(budgets)["kvcustody_kv_cache_capacity_blocks"] == 64 and "thrash" not in budgets["answer"]
    hits, whole = (
        2 * PROMPTS * (BLOCKS - 1) * TOKENS,
        3 * PROMPTS * BLOCKS * TOKENS,
    )  # the last block is computed
    assert values(prefixes)["kvcustody_prefix_cache_hits_tokens_total"] == hits
    assert f"{hits / whole:.0%} of prompt tokens hit" in prefixes["answer"]
    by_lineage = {name: value for name, value in values(prefixes).items() if name.startswith("tokens found of")}
    assert by_lineage == {
        f"tokens found of `org`, lineage line {at}": 2 * (BLOCKS - 1) * TOKENS for at in range(PROMPTS)
    }
    assert "tenant" in key["answer"] and key["evidence"]
    rate = values(offload)["break-even GB/s of a shard at position 1,024"]
    assert rate == pytest.approx(131_072 * 8000 / 1e9)
    assert values(offload)["tokens computed again after their eviction"] == 0
    assert values(locations)["kvcustody_kv_cache_allocated_blocks_total"] > 0 and locations["unknown"]
    figures = values(cleanup)
    due, covered = (figures[f"kvcustody_deletion_{name}_units"] for name in ("due", "covered"))
    assert 0 < covered <= due, "on a busy machine a zeroization is late, and says so"
    assert figures["kvcustody_orphan_findings"] == 0 and not cleanup["unknown"]
    assert not list(Path.cwd().glob("*.db*")), "its ledger is thrown away"


def test_what_a_replay_cannot_know_is_unknown(trace: str) -> None:
    size, _, prefixes, _, offload, _, _ = advised(trace)
    assert size["answer"] == "unknown" and "--model" in size["unknown"][0]
    assert any("says no time" in why for why in prefixes["unknown"])
    assert "faster: unknown" in offload["answer"]
    assert not any("prefill" in row["metric"] for one in (prefixes, offload) for row in one["evidence"])


def test_a_trace_that_thrashes_is_told_what_its_tenant_would_need(trace: str) -> None:
    budgets, offload = (advised(trace, "--pool-blocks", "28")[at] for at in (1, 4))
    assert "thrashing: `org`" in budgets["answer"]
    assert values(budgets)["blocks that `org` may have"] == 28
    assert values(budgets)["blocks that would have kept what `org` computed again"] >= PROMPTS * BLOCKS
    assert values(offload)["tokens computed again after their eviction"] > 0


def test_what_is_of_a_trace_alone_is_refused_of_workers_and_the_reverse(trace: str) -> None:
    for arguments, told in (
        ([trace, "--trace-format", "mooncake", "--server", "https://kv.example"], "omit --server"),
        (["--model", "config.json"], "apply to a trace"),
        (["absent.jsonl"], "cannot read trace"),
    ):
        refused = CliRunner().invoke(app, ["advise", *arguments])
        assert refused.exit_code == 2 and told in refused.stderr


def test_it_is_said_in_tables_too(trace: str) -> None:
    """The control plane that the environment names is not asked."""
    elsewhere = {"KVCUSTODY_SERVER": "https://127.0.0.1:1", "KVCUSTODY_DATABASE_URL": "sqlite:///none.db"}
    found = CliRunner().invoke(app, ["advise", trace, "--trace-format", "mooncake"], env=elsewhere)
    assert found.exit_code == 0, found.output
    assert "replayed traffic" in found.stdout and "7. What cleanup is required?" in found.stdout
