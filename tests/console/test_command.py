"""The command line: help that teaches, JSON, one-line errors, exit codes."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "intermediate_size": 14336,
}


def run(*arguments: str):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_help_shows_examples() -> None:
    assert "kvcustody up" in run("--help").stdout
    for command in ("replay", "size", "version"):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert "Example" in result.stdout and f"kvcustody {command}" in result.stdout


def test_help_marks_code_and_keeps_the_lines_of_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal in colour; elsewhere the words alone."""
    plain = run("up", "--help").stdout
    assert "\x1b" not in plain and "`" not in plain and "--tour prints what to look at first" in plain
    emphasis = run("demo", "fleet", "--help").stdout
    assert "*Routes*" not in emphasis and "Routes" in emphasis
    lines = [line.strip() for line in plain.splitlines()]
    first = lines.index("kvcustody up")
    assert lines[first + 1] == "kvcustody up --folder demo --port 8080"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "Start with \x1b[1;36mkvcustody up\x1b[0m" in run("--help").stdout


def test_version_is_json_on_request() -> None:
    assert json.loads(run("version", "--json").stdout)["kvcustody"] == run("version").stdout.split()[1]


def test_size_reports_exact_figures(config: Path) -> None:
    document = json.loads(run("size", config, "--gpu-memory", "80GiB", "--weights", "15GiB", "--json").stdout)
    assert document["bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert document["kv_bytes"] == int(80 * 2**30 * 0.9) - 15 * 2**30
    assert document["blocks"] == document["kv_bytes"] // (16 * document["bytes_per_token"])
    text = run("size", config, "--gpu-memory", "80GiB").stdout
    assert "131,072 bytes a token" in text and "estimate" in text
    mixed = run("size", config, "--gpu-memory", "80GiB", "--context", "4096:3", "--context", "8192", "--json")
    assert json.loads(mixed.stdout)["context_mix"] == [[4096, 0.75], [8192, 0.25]]


def test_size_ledger_is_what_the_ledger_holds(tmp_path: Path) -> None:
    """Of a ledger that is there: its own leaves, added up; a day of it is so many times as much."""
    ledger = tmp_path / "k.db"
    page = ("--html", tmp_path / "page.html")
    assert run("replay", "--ledger", ledger, "--limit", "40", *page, "--json").exit_code == 0
    found = run("size", "ledger", "--ledger", f"sqlite:///{ledger}", "--requests-per-second", "10", "--json")
    document = json.loads(found.stdout)
    with sqlite3.connect(ledger) as connection:
        leaves, size = connection.execute("SELECT count(*), sum(length(leaf)) FROM events").fetchone()
    assert (document["requests"], document["leaves"], document["leaf_bytes"]) == (40, leaves, size)
    assert sum(row["bytes"] for row in document["by_kind"].values()) == size < document["disk_bytes"]
    assert document["per_day"]["leaves"] == pytest.approx(leaves / 40 * 10 * 86_400)
    assert document["per_day"]["gigabytes"] == pytest.approx(size / 40 * 10 * 86_400 / 1e9)


@pytest.mark.system("`size --ledger` misreads a replay")
def test_size_ledger_measures_a_replay() -> None:
    document = json.loads(run("size", "ledger", "--limit", "40", "--json").stdout)
    assert document["requests"] == 40 and document["by_kind"]["residency-opened"]["leaves"] == 40
    assert "a day takes" in run("size", "ledger", "--limit", "40").stdout


BAD = [
    (("size", "ledger", "absent.gz", "--ledger", "sqlite:///absent.db"), "KVC100: give a trace to replay or"),
    (("size", "ledger", "--ledger", "sqlite:///absent.db"), "KVC600"),
    (("size", "absent.json", "--gpu-memory", "80GiB"), "KVC100: cannot read config `absent.json`"),
    (("size", "CONFIG", "--gpu-memory", "lots"), "KVC100: `lots` is not a size"),
    (("size", "CONFIG", "--gpu-memory", "1GiB"), "KVC100: no memory is left"),
    (("size", "CONFIG", "--gpu-memory", "80GiB", "--context", "long"), "KVC100: context `long`"),
    (("replay", "--policy", "nobody"), "KVC100: cannot read policy `nobody`"),
    (("replay", "--trace-format", "parquet"), "KVC100: unknown format `parquet`"),
    (("replay", "absent.gz", "--trace-format", "mooncake"), "KVC120: cannot read trace `absent.gz`"),
    (("replay", "--unit", "person"), "KVC100: --unit `person`"),
    (("replay", "--html", "absent/page.html"), "KVC100: cannot write summary"),
    (("replay", "--ledger", "absent/ledger.db", "--limit", "1"), "KVC600:"),
    (("replay", "--ledger", "CONFIG", "--limit", "1"), "KVC600:"),
    (("replay", "--device", "tpu", "--limit", "1"), "KVC100: unknown device `tpu`"),
    (("replay", "--skew", "CONFIG", "CONFIG", "--trace-format", "mooncake"), "KVC100:"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a)[:40] for a, _ in BAD])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    result = run(*(config if argument == "CONFIG" else argument for argument in arguments))
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {message}"), result.stderr
    assert "Traceback" not in result.output


def test_a_ledger_is_named_by_its_path_or_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a command with the service's settings, of one that reads, and of a replay: one ledger, one answer."""
    monkeypatch.chdir(tmp_path)
    page = ("--html", tmp_path / "page.html")
    assert run("replay", "--ledger", f"sqlite:///{tmp_path}/k.db", "--limit", "20", *page).exit_code == 0
    for command in (("audit", "status"), ("principal", "list"), ("report", "schedules", "list")):
        answers = [
            run(*command, "--ledger", name, "--json")
            for name in ("k.db", tmp_path / "k.db", f"sqlite:///{tmp_path}/k.db")
        ]
        assert {answer.exit_code for answer in answers} == {0}, [answer.output for answer in answers]
        said = [json.loads(answer.stdout) for answer in answers]
        if command == ("audit", "status"):
            for each in said:
                del each["unsealed"], each["unwitnessed_us"]  # they count the time since
        assert said[0] == said[1] == said[2]
    refused = run("replay", "--ledger", "postgresql://nowhere/k", "--limit", "20", *page)
    assert refused.exit_code == 2 and "a replay writes an SQLite file" in refused.stderr


def test_a_replay_writes_its_ledger_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("replay", "--limit", "20", "--pool-blocks", "2048", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["totals"]["requests"] == 20
    assert all(row["holds"] for row in document["identities"])
    assert Path("kvcustody.db").stat().st_size > 0
    assert "</html>" in Path("kvcustody-summary.html").read_text()
    text = run("replay", "--limit", "5", "--pool-blocks", "2048").stdout
    assert "Conservation" in text and "memory drift" in text and "first requests hit" in text


def test_a_bad_line_is_an_error_before_anything_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
    Path("t.jsonl").write_text(row + "{]\n")
    result = run("replay", "t.jsonl", "--trace-format", "mooncake", "--pool-blocks", "64", "--policy", "regulated-saas")
    assert result.exit_code == 2
    assert result.stdout == "" and not Path("kvcustody.db").exists()
    assert result.stderr.startswith("error: KVC120: t.jsonl:2:")
    left_out = run("replay", "t.jsonl", "--pool-blocks", "64", "--brief", "--skip-wrong-rows")
    assert left_out.exit_code == 0 and "1 wrong row left out: t.jsonl:2:" in left_out.stdout
    assert "what isolation costs: " in left_out.stdout and "Conservation" not in left_out.stdout


@pytest.mark.system("an interrupted command leaves something open")
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_exits_130_with_everything_closed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcustody.console.main", "replay", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ledger = tmp_path / "kvcustody.db-wal"
        deadline = time.monotonic() + 60
        while not (ledger.exists() and ledger.stat().st_size > 200_000) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    document = json.loads(out)
    assert document["stopped"] == "interrupted"
    assert all(row["holds"] for row in document["identities"])
    assert "Traceback" not in err
