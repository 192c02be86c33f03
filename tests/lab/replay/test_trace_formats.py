"""Readers of recorded traces: what they yield, and the one-line error of every malformed line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvcustody.errors import TraceError
from kvcustody.lab.replay.traces.readers import READERS, open_trace

ROW = {"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
SESSION = {"session": "s1", "fork_group": "f1", "block_size": 64}
TURN = {"t": 0.5, "in": 200, "out": 9, "st": 0, "keep": 0, "new": [[10, 3]]}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path, name: str) -> list:
    return list(open_trace(path, name))


def test_mooncake_reads_its_fields(tmp_path: Path) -> None:
    ours = dict(ROW, session=4, lineage=2, turn=3, link="edit")
    (first,) = read(write(tmp_path / "t.jsonl", ROW), "mooncake")
    (second,) = read(write(tmp_path / "own.jsonl", ours), "mooncake")
    assert (first.at_us, first.input_tokens, first.output_tokens, first.blocks.tolist()) == (
        1000,
        600,
        5,
        [7, 8],
    )
    assert (second.session, second.lineage, second.turn) == (4, 2, 3)


def test_mooncake_without_sessions_infers_them_from_chains(tmp_path: Path) -> None:
    def row(time: int, *ids: int) -> dict:
        return {"timestamp": time, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}

    rows = read(write(tmp_path / "t", row(0, 0, 1, 2), row(1, 0, 5), row(2, 0, 1, 2, 3), row(3, 0, 1, 9)), "mooncake")
    assert [(r.session, r.turn) for r in rows] == [(0, 0), (1, 0), (0, 1), (0, 2)]
    assert [r.lineage for r in rows] == [0, 1, 0, 0]


def test_agentic_rebuilds_chains_per_stream(tmp_path: Path) -> None:
    side = {"t": 1, "in": 70, "out": 1, "st": 1, "keep": 0, "new": [[90, 1]]}
    more = {"t": 2, "in": 300, "out": 1, "st": 0, "keep": 2, "new": [[20, 1], [30, 1]]}
    rows = read(write(tmp_path / "a", SESSION, TURN, side, more, {"session": "s2"}, TURN), "agentic")
    assert [r.blocks.tolist() for r in rows] == [[10, 11, 12], [90], [10, 11, 20, 30], [10, 11, 12]]
    assert [(r.session, r.lineage, r.turn, r.stream) for r in rows] == [
        ("s1", "f1", 0, 0),
        ("s1", "f1", 1, 1),
        ("s1", "f1", 2, 0),
        ("s2", "s2", 0, 0),
    ]
    assert rows[0].at_us == 500_000


def test_published_agent_sessions_nest_their_sub_agents(tmp_path: Path) -> None:
    def request(t: float, ids: list[int]) -> dict:
        return {"t": t, "type": "s", "in": 64 * len(ids) + 1, "out": 2, "hash_ids": ids}

    session = {
        "id": "trace_1",
        "block_size": 64,
        "hash_id_scope": "global",
        "requests": [
            request(0, [1, 2]),
            {"type": "subagent", "t": 10, "requests": [request(0, [5]), request(1.5, [5, 6])]},
            request(11, [1, 2, 3]),
        ],
    }
    write(tmp_path / "trace_1.json", session)
    write(tmp_path / "trace_2.json", dict(session, id="trace_2", hash_id_scope="local"))
    rows = read(tmp_path, "kv-cache-tester")
    assert [(r.session, r.stream, r.turn, r.blocks.tolist()) for r in rows[:4]] == [
        ("trace_1", 0, 0, [1, 2]),
        ("trace_1", 1, 1, [5]),
        ("trace_1", 0, 2, [1, 2, 3]),
        ("trace_1", 1, 3, [5, 6]),
    ]
    seconds = [request.at_us / 1e6 for request in rows[:4]]
    assert seconds == [0.0, 10.0, 11.0, 11.5], "a sub-agent's times count from its own start"
    assert not set(rows[0].blocks) & set(rows[4].blocks), "local ids of two files are not the same content"


def test_azure_rows_get_blocks_of_their_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:50.9951690,40,2",
        "2023-11-16 18:15:46.6805900,33,1",
    )
    first, second = read(path, "azure")
    assert (first.at_us, first.input_tokens, first.output_tokens) == (0, 33, 1)
    assert second.at_us == 4_314_579
    assert len(first.blocks) == len(second.blocks) == 2
    assert not set(first.blocks) & set(second.blocks)


def test_gzip_is_recognised_by_content(tmp_path: Path) -> None:
    path = tmp_path / "no-suffix"
    path.write_bytes(gzip.compress(json.dumps(ROW).encode()))
    assert len(read(path, "mooncake")) == 1


BAD_ROWS = [
    ("mooncake", [ROW, "{"], 2, ""),
    ("mooncake", [[1, 2]], 1, ""),
    ("mooncake", [{k: v for k, v in ROW.items() if k != "hash_ids"}], 1, "hash_ids"),
    ("mooncake", [dict(ROW, hash_ids=[7])], 1, "hash_ids"),
    ("mooncake", [dict(ROW, hash_ids=[7, -1])], 1, "hash_ids"),
    ("mooncake", [dict(ROW, hash_ids=[7, True])], 1, "hash_ids"),
    ("mooncake", [dict(ROW, hash_ids="78")], 1, "hash_ids"),
    ("mooncake", [dict(ROW, timestamp=-1)], 1, "timestamp"),
    ("mooncake", [dict(ROW, timestamp="soon")], 1, "timestamp"),
    ("mooncake", [dict(ROW, tenant="acme"), ROW], 2, "tenant"),
    ("mooncake", [ROW, dict(ROW, tenant="acme")], 2, "tenant"),
    ("mooncake", [dict(ROW, tenant="a\nb")], 1, "tenant"),
    ("mooncake", [ROW, dict(ROW, timestamp=0)], 2, "timestamp"),
    ("mooncake", [dict(ROW, input_length=0, hash_ids=[])], 1, "input_length"),
    ("mooncake", [dict(ROW, input_length=1 << 40)], 1, "input_length"),
    ("mooncake", [dict(ROW, output_length=None)], 1, "output_length"),
    ("mooncake", [dict(ROW, session=None)], 1, "session"),
    ("agentic", [TURN], 1, "session"),
    ("agentic", [dict(SESSION, block_size=16)], 1, "block_size"),
    ("agentic", [SESSION, dict(TURN, keep=1)], 2, "keep"),
    ("agentic", [SESSION, dict(TURN, new=[[10, 4]])], 2, "new"),
    ("agentic", [SESSION, dict(TURN, new=[[10, 1 << 61]])], 2, "new"),
    ("agentic", [SESSION, dict(TURN, new=[[10, -3]])], 2, "new"),
    ("agentic", [SESSION, dict(TURN, new={"a": 1})], 2, "new"),
    ("agentic", [SESSION, dict(TURN, t="soon")], 2, "t"),
    ("agentic", [SESSION, {"t": 1}], 2, "st"),
    ("azure", ["a,b,c"], 1, "TIMESTAMP"),
    ("azure", ["TIMESTAMP,ContextTokens,GeneratedTokens", "now,1,1"], 2, "TIMESTAMP"),
    ("azure", ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.68,1"], 2, ""),
    ("azure", ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.68,-1,1"], 2, "ContextTokens"),
    ("kv-cache-tester", [{"id": "x"}], 1, "requests"),
    ("kv-cache-tester", [{"requests": [{"t": 0, "in": 128, "out": 1, "hash_ids": [1]}]}], 1, "hash_ids"),
    ("kv-cache-tester", [{"requests": [{"t": 0, "in": 64, "out": 1}]}], 1, "hash_ids"),
]


@pytest.mark.parametrize(
    ("name", "rows", "line", "field"),
    BAD_ROWS,
    ids=[f"{n}-{f}-{i}" for i, (n, _, _, f) in enumerate(BAD_ROWS)],
)
def test_a_bad_line_is_one_error_with_place_value_and_remedy(
    tmp_path: Path, name: str, rows: list, line: int, field: str
) -> None:
    path = write(tmp_path / "bad", *rows)
    with pytest.raises(TraceError) as caught:
        read(path, name)
    error = caught.value
    assert (error.operands["line"], error.operands["field"]) == (line, field)
    assert error.message.startswith(f"{path}:{line}:")
    assert "\n" not in str(error)
    assert error.operands["fix"] in error.message


def test_requests_before_the_bad_line_are_not_lost(tmp_path: Path) -> None:
    path = write(tmp_path / "bad", ROW, ROW, "{")
    got = []
    with pytest.raises(TraceError):
        for request in open_trace(path, "mooncake"):
            got.append(request)
    assert len(got) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "latin", "empty"])
def test_damage_below_the_text_is_reported_at_its_line(tmp_path: Path, damage: str) -> None:
    rng = np.random.default_rng(1)
    rows = [dict(ROW, hash_ids=rng.integers(0, 1 << 40, 2).tolist()) for _ in range(400)]
    packed = bytearray(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    elif damage == "flip":
        packed[-8] ^= 0xFF  # the checksum
    elif damage == "latin":
        packed = bytearray(json.dumps(ROW).encode() + b"\n\xe9\n")
    else:
        packed = bytearray()
    path = tmp_path / "damaged"
    path.write_bytes(packed)
    with pytest.raises(TraceError) as caught:
        read(path, "mooncake")
    assert caught.value.operands["line"] >= 1


def test_a_missing_file_and_an_unknown_format_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read trace"):
        open_trace(tmp_path / "absent", "mooncake")
    with pytest.raises(TraceError, match="use one of agentic, azure, bailian, burstgpt"):
        open_trace(tmp_path / "absent", "parquet")
    assert {"agentic", "azure", "kv-cache-tester", "mooncake"} <= READERS.keys()
