"""Dynamo's mocker replays our generated workload: a fleet without accelerators, with and without tenants apart."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from dynamo._core import run_mocker_trace_replay

from kvcustody.lab.replay.workload.generator import GeneratedWorkload, WorkloadSpec, generate

SPEC = WorkloadSpec(tenants=4, conversations=60, span_seconds=120.0)


def trace(path: Path, workload: GeneratedWorkload, *, apart: bool) -> int:
    """Mooncake rows of whole blocks; `apart`: block ids are each tenant's own, as governed keys are."""
    numbers: dict[tuple[int, int], int] = {}
    tokens = 0
    with path.open("w") as rows:
        for request, label in zip(workload.requests, workload.labels, strict=True):
            ids = [
                numbers.setdefault((label.tenant if apart else 0, int(block)), len(numbers))
                for block in request.blocks[: request.input_tokens // SPEC.block_tokens]
            ]
            if not ids:
                continue
            tokens += len(ids) * SPEC.block_tokens
            row = {
                "timestamp": request.at_us // 1000,
                "input_length": len(ids) * SPEC.block_tokens,
                "output_length": max(1, request.output_tokens),
                "hash_ids": ids,
            }
            rows.write(json.dumps(row) + "\n")
    return tokens


def replayed(path: Path, mode: str, workers: int, block_tokens: int = SPEC.block_tokens) -> dict[str, Any]:
    made = run_mocker_trace_replay([str(path)], num_workers=workers, router_mode=mode, trace_block_size=block_tokens)
    found = made if isinstance(made, dict) else {name: getattr(made, name) for name in dir(made)}
    summary = found.get("summary", found)
    called: dict[str, Any] = summary() if callable(summary) else summary
    return called


def test_a_workload_of_ours_is_replayed_whole(tmp_path: Path) -> None:
    workload = generate(SPEC)
    shared, apart = tmp_path / "shared.jsonl", tmp_path / "apart.jsonl"
    tokens = trace(shared, workload, apart=False)
    assert trace(apart, workload, apart=True) == tokens
    reused = {}
    for name, path in (("shared", shared), ("apart", apart)):
        count = len(path.read_text().splitlines())
        for mode, workers in (("round_robin", 1), ("round_robin", 4), ("kv_router", 4)):
            result = replayed(path, mode, workers)
            assert result["completed_requests"] == count and result["total_input_tokens"] == tokens
            reused[name, mode, workers] = result["prefix_cache_reused_ratio"]
    print(reused)
    assert reused["apart", "kv_router", 4] > reused["apart", "round_robin", 4], "own prefixes are routed to"
    assert reused["shared", "round_robin", 1] > reused["apart", "round_robin", 1] > 0, "the house prompt"


TRACES = os.environ.get("KVCUSTODY_TRACES")  # a folder with Mooncake's published rows


@pytest.mark.skipif(TRACES is None, reason="KVCUSTODY_TRACES names no folder of traces")
def test_published_rows_are_replayed_whole(tmp_path: Path) -> None:
    """Mooncake's conversation trace, 512-token blocks as published."""
    rows = gzip.decompress((Path(str(TRACES)) / "mooncake_conv_dev40.jsonl.gz").read_bytes()).splitlines()[:2000]
    wanted = ("timestamp", "input_length", "output_length", "hash_ids")
    plain = [{name: json.loads(row)[name] for name in wanted} for row in rows]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in plain))
    assert replayed(path, "kv_router", 4, block_tokens=512)["completed_requests"] == len(plain)
