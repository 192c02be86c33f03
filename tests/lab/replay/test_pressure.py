"""What a replay says of a pool that is too small or too coarse, and that it says nothing of one that is neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.lab.replay.workload.scenarios import SCENARIOS

Replayed = Callable[..., dict[str, Any]]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replayed:
    """`kvcustody replay --json`, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> dict[str, Any]:
        found = CliRunner().invoke(app, ["replay", *arguments, "--json"])
        assert found.exit_code == 0, found.output
        document: dict[str, Any] = json.loads(found.stdout)
        return document

    return run


def cycle(path: Path, prompts: int, blocks: int, rounds: int) -> str:
    rows = [
        {
            "timestamp": at * 1000,
            "input_length": blocks * 512,
            "output_length": 2,
            "hash_ids": [(at % prompts) * blocks + one for one in range(blocks)],
        }
        for at in range(prompts * rounds)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def finding(document: dict[str, Any], name: str) -> str:
    found = [one for one in document["pressure"]["findings"] if one.startswith(name)]
    return found[0] if found else ""


def test_a_cycle_of_a_trace_that_does_not_fit_is_named_with_the_pool_that_holds_it(
    replayed: Replayed, tmp_path: Path
) -> None:
    """Ten prompts of 8 blocks, 1.25 times what there is: no hit in 40, and in the pool that is advised all of them."""
    trace = cycle(tmp_path / "cycle.jsonl", 10, 8, 4)
    arguments = (trace, "--trace-format", "mooncake", "--tenants", "1", "--policy", "single-org")
    small = replayed(*arguments, "--pool-blocks", "64")
    (row,) = small["tenants"]
    assert (row["requests"], row["hit_tokens"], row["room_blocks"]) == (40, 0, 64)
    assert row["thrashing"] > 0.5 and row["recomputed_blocks"] >= 2 * 64
    assert 80 <= row["advised_blocks"] == small["pressure"]["advised_blocks"] <= 160
    assert "thrash: org computed" in finding(small, "thrash")
    large = replayed(*arguments, "--pool-blocks", str(row["advised_blocks"]))
    (held,) = large["tenants"]
    assert held["hit_requests"] == 30 and held["thrashing"] == 0 and not finding(large, "thrash")
    assert held["recomputed_blocks"] == held["advised_blocks"] == 0


@pytest.mark.system("an advised pool forgets what a tenant may have of it")
def test_the_pool_that_is_advised_counts_in_what_the_tenant_may_have_of_it(replayed: Replayed) -> None:
    """Under a cap of 60 % a pool that only holds the cycle would not do."""
    said = replayed("--trace-format", "thrash")
    (row,) = said["tenants"]
    assert row["room_blocks"] == int(0.6 * SCENARIOS["thrash"].pool_blocks) and row["hit_tokens"] == 0
    advised = finding(said, "thrash").rpartition("a pool of ")[2].split()[0].replace(",", "")
    assert int(advised) > said["pressure"]["advised_blocks"]
    again = replayed("--trace-format", "thrash", "--pool-blocks", advised)
    assert again["tenants"][0]["hit_requests"] == 60 and not finding(again, "thrash")


def test_requests_without_room_wait_stall_and_are_preempted(replayed: Replayed) -> None:
    arguments = ("--trace-format", "oom", "--policy", "single-org")
    result = replayed(*arguments)
    total = result["totals"]
    assert result["pressure"]["stalls"] > 0 and total["preempted"] > 0
    assert sum(total["deferrals"].values()) > 0 and total["refused"] == 0
    assert result["pressure"]["queue_seconds"] > 0.1, "a request that is offered again came when it first came"
    for part in ("requests waited (", "in the queue together", f"{total['preempted']} preempted"):
        assert part in finding(result, "out of memory")
    wide = replayed(*arguments, "--pool-blocks", "2048")
    assert wide["pressure"]["findings"] == [] and wide["pressure"]["stalls"] == 0
    assert (
        wide["pressure"]["queue_seconds"] == 0
        and wide["totals"]["deferrals"] == {}
        and wide["totals"]["preempted"] == 0
    )


@pytest.mark.system("a replay does not see that short requests waste long blocks")
def test_short_requests_waste_long_blocks(replayed: Replayed) -> None:
    said = replayed("--trace-format", "fragmentation")
    assert 1 - 32 / 256 <= said["pressure"]["fragmentation"] <= 1 - 20 / 256
    assert "stood empty" in finding(said, "fragmentation")
    short = replayed("--trace-format", "fragmentation", "--block-tokens", "16")
    assert short["pressure"]["fragmentation"] < 0.5 and not finding(short, "fragmentation")


def test_what_is_found_is_printed_and_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["replay", "--trace-format", "thrash"], env={"COLUMNS": "240"})
    assert found.exit_code == 0, found.output
    page = (tmp_path / "kvcustody-summary.html").read_text()
    for text in (found.stdout, page):
        assert "thrash: acme computed" in text and "blocks computed again" in text
        assert "pool that would have kept them" in text


def test_a_scenario_reads_no_file(tmp_path: Path) -> None:
    trace = cycle(tmp_path / "cycle.jsonl", 1, 1, 1)
    refused = CliRunner().invoke(app, ["replay", trace, "--trace-format", "thrash"])
    assert refused.exit_code == 2 and "reads no file" in refused.stderr


def test_the_page_shows_every_scenario() -> None:
    page = (ROOT / "docs" / "how-to" / "operate" / "watch.md").read_text(encoding="utf-8")
    assert all(f"kvcustody replay --trace-format {name}" in page for name in SCENARIOS)
