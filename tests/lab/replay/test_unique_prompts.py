"""A trace in which no prompt is repeated has no hit, however often its requests are preempted and begin again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app

REQUESTS, BLOCKS, TOKENS = 24, 6, 3000


@pytest.mark.system("a replay that preempts its requests: each begins again and is no hit")
def test_nobody_repeats_a_prompt_and_nothing_is_a_hit(tmp_path: Path) -> None:
    """The control is in the same figures: requests were preempted, and began again."""
    trace = tmp_path / "unique.jsonl"
    rows = [
        {
            "timestamp": 10 * number,
            "input_length": TOKENS,
            "output_length": TOKENS,
            "hash_ids": [*range(100 * number, 100 * number + BLOCKS)],
        }
        for number in range(REQUESTS)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [
        "replay",
        str(trace),
        "--trace-format",
        "mooncake",
        "--tenants",
        "1",
        "--policy",
        "single-org",
        "--json",
    ]
    words += ["--pool-blocks", "100", "--ledger", str(tmp_path / "k.db"), "--html", str(tmp_path / "k.html")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    totals = json.loads(found.stdout)["totals"]
    assert totals["preempted"] > 0, "void: nothing was preempted"
    assert (totals["hit_tokens"], totals["hit_requests"], totals["prefill_avoided"]) == (0, 0, 0.0)
    counted = totals["input_tokens"] / TOKENS
    assert REQUESTS - totals["deferred"] <= counted <= REQUESTS, (
        "no prompt is counted twice; one that is given up may not be"
    )
