"""What `make run` leaves behind: a history that ends at now, is signed, and serves every command at once.

The replay is the command's own, in a fresh folder, with fewer requests; nothing else runs between it and each question.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select
from typer.testing import CliRunner

import kvcustody
from kvcustody.audit.evidence.processes.marked_processes import marked_processes
from kvcustody.audit.kinds import GENERATED, REPLAYED, WorkerStarted
from kvcustody.audit.reports.framework import NAMES
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events, incarnations
from kvcustody.audit.tlog.database_proofs import LedgerProofs
from kvcustody.audit.tlog.signing_key import read_signing_key
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import MICROSECONDS, SystemClock
from kvcustody.console.api.operation_commands import read_commands
from kvcustody.console.command_table import every_command
from kvcustody.console.main import app
from kvcustody.errors import ConfigError
from kvcustody.governance.keys.checkpoint_signing_key import check_unused, recorded_keys
from kvcustody.lab.replay.options import EnvironmentOptions, RunnerOptions
from kvcustody.lab.replay.run.job import run_job
from kvcustody.lab.replay.run.virtual_clock import ReplayClock
from kvcustody.lab.replay.run.workload_from_options import Choice, load_workload
from kvcustody.migrations.upgrade import upgrade
from standins.audit.documents import signed_certificate, verify_certificate

KEY = "kvcustody-signing.key"


def run(*arguments: str, exit_code: int = 0) -> str:
    """A command's stdout; fails with what it said where it ends otherwise."""
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == exit_code, (arguments, found.output, found.exception)
    return found.stdout


@contextmanager
def folder(path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh folder in which somebody ran a replay, and nothing else."""
    with folder(tmp_path_factory.mktemp("first-minute")) as made:
        run("replay", "--limit", "100", "--pool-blocks", "2048")
        return made


def test_the_report_says_of_the_scan_what_the_replay_says(here: Path) -> None:
    """Without the scan's leaf the replay says `no orphans, holds` and the report `no scan for orphans`."""
    scans = [body for body in bodies(here / "kvcustody.db") if body["kind"] == "orphan-scanned"]
    assert [int(body["findings"]) for body in scans] == [0]
    run("report", "make", "--framework", "soc2", "--out", str(here / "scanned"), "--format", "json")
    report = json.loads((here / "scanned" / "report.json").read_bytes())
    assert report["unscanned"] == []
    assert not [one for one in report["opinion"]["exceptions"] if one["id"] == "unscanned"]


@pytest.fixture
def here(replayed: Path) -> Iterator[Path]:
    with folder(replayed) as made:
        yield made


def bodies(path: Path) -> list[dict[str, Any]]:
    engine = open_store(path, read_only=True)
    with engine.connect() as connection:
        found = [orjson.loads(bytes(leaf)) for leaf in connection.scalars(select(events.c.leaf))]
    engine.dispose()
    return found


def test_no_leaf_is_dated_ahead_and_its_start_says_what_it_is(here: Path) -> None:
    now_us = SystemClock().utc_us()
    found = bodies(here / "kvcustody.db")
    started = [body for body in found if body["kind"] == "worker-started"]
    assert [body["origin"] for body in started] == [GENERATED]
    assert max(body["at_us"] for body in found) <= now_us
    assert now_us - min(body["at_us"] for body in found) > 60 * MICROSECONDS, "it lies in the past"


def test_the_key_is_the_one_of_the_settings_and_closed_to_others(here: Path) -> None:
    assert (here / KEY).stat().st_mode & 0o777 == 0o600
    assert len(json.loads(run("audit", "keys", "--json"))["keys"]) == 1


def vkey() -> str:
    found: str = json.loads(run("audit", "keys", "--json"))["keys"][0]["key"]
    return found


@pytest.mark.system("a command of the first minute fails on a replayed ledger")
def test_every_question_of_the_first_minute_is_answered_at_once(here: Path, tmp_path: Path) -> None:
    """An auditor's whole way, without a step in between: proof, export, report, check."""
    key = vkey()
    last = sum(body["log"] == "system" for body in bodies(here / "kvcustody.db")) - 1
    run("audit", "prove", "system", str(last), "--out", str(tmp_path / "leaf"))
    run("audit", "verify", str(tmp_path / "leaf.proof"), "--key", key)
    run("audit", "export", str(tmp_path / "export"))
    run("audit", "verify", str(tmp_path / "export"), "--key", key)
    run("report", "make", "--framework", "gdpr", "--out", str(tmp_path / "report"))
    run("audit", "fsck", "--key", key)


def test_an_erasure_is_complete_and_certified_at_once(here: Path, tmp_path: Path) -> None:
    erasure = json.loads(run("erasure", "request", "--tenant", "acme", "--yes", "--json"))["erasure"]
    assert json.loads(run("erasure", "status", erasure, "--json"))["outcome"] == "complete"
    certificate = tmp_path / "certificate.json"
    made = run("erasure", "certificate", erasure, "--signing-key", KEY, "--out", str(certificate), "--json")
    assert json.loads(made)["outcome"] == "complete"
    run("erasure", "verify", str(certificate), "--key", vkey())


def test_what_nobody_signed_yet_is_told_with_the_command_that_signs_it(here: Path) -> None:
    run("erasure", "request", "--tenant", "acme", "--yes")
    place = str(sum(body["log"] == "tenant/acme" for body in bodies(here / "kvcustody.db")) - 1)
    refused = CliRunner().invoke(app, ["audit", "prove", "tenant/acme", place])
    assert refused.exit_code == 2 and "KVC621" in refused.stderr and "`kvcustody audit sign`" in refused.stderr
    run("audit", "sign")
    run("audit", "prove", "tenant/acme", place)


def test_a_clock_skips_no_more_than_lies_behind_it() -> None:
    """Control: what is skipped beyond that would be dated ahead; it is waited for instead."""
    wall = SystemClock()
    clock = ReplayClock(wall.utc_us(), 60 * MICROSECONDS)
    clock.skip_to(clock.now_us() + 50 * MICROSECONDS)
    assert wall.utc_us() - clock.utc_us() >= 9 * MICROSECONDS
    began = time.monotonic()
    clock.skip_to(clock.now_us() + 10 * MICROSECONDS + 200_000)
    assert clock.utc_us() <= wall.utc_us()
    assert time.monotonic() - began > 0.1


def small(path: Path, **more: Any) -> EnvironmentOptions:
    return EnvironmentOptions(pool_blocks=1024, database=path / "ledger.db", **more)


def replay(options: EnvironmentOptions) -> None:
    report = run_job(load_workload(Choice(conversations=4, tenants=4), 16, "x"), options, RunnerOptions())
    assert report.error is None


def test_a_trace_is_as_long_as_it_is_and_is_called_replayed(tmp_path: Path) -> None:
    row = {"input_length": 512, "output_length": 30, "hash_ids": [1]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": at, **row}) + "\n" for at in (0, 5_000, 600_000)))
    workload = load_workload(Choice(trace, "mooncake", tenants=2), 512, "x")
    assert (workload.span_us, workload.origin, workload.longest_answer) == (600 * MICROSECONDS, REPLAYED, 30)
    report = run_job(workload, small(tmp_path, block_tokens=512), RunnerOptions())
    assert report.error is None and report.seconds < 300
    assert max(body["at_us"] for body in bodies(tmp_path / "ledger.db")) <= SystemClock().utc_us()


def test_one_that_is_interrupted_is_signed_as_far_as_it_came(tmp_path: Path) -> None:
    requests = 0

    def interrupt() -> None:
        nonlocal requests
        requests += 1
        if requests == 5:
            raise KeyboardInterrupt

    options = small(tmp_path)
    workload = load_workload(Choice(conversations=4, tenants=4), 16, "x")
    report = run_job(workload, options, RunnerOptions(), progress=interrupt)
    assert isinstance(report.error, KeyboardInterrupt)
    engine = open_store(options.database, read_only=True)
    with engine.connect() as connection:
        proofs = LedgerProofs(connection)
        assert proofs.signed().size == proofs.checkpoint().size > 0
    engine.dispose()


@pytest.mark.system("a killed replay is closed before its last leaf")
def test_what_a_killed_replay_left_ends_after_all_that_it_wrote(tmp_path: Path) -> None:
    replay(small(tmp_path))
    engine = open_store(tmp_path / "ledger.db")
    killed = EventWriter(engine, worker="replay", clock=SystemClock(), spill_directory=tmp_path / "ledger.db.spill")
    now_us = SystemClock().now_us()
    killed.submit([WorkerStarted(now_us, "replay", 8, 1, 64, "cpu", "test", origin=GENERATED)])
    killed.close()
    replay(small(tmp_path))
    found = bodies(tmp_path / "ledger.db")
    died = [body for body in found if body["kind"] == "worker-died"]
    assert [body["of_incarnation"] for body in died] == [killed.incarnation]
    last_us = max(body["at_us"] for body in found if body["incarnation"] == killed.incarnation)
    assert last_us <= died[0]["at_us"] <= SystemClock().utc_us()
    with engine.connect() as connection:
        announced = incarnations.c.blocks.is_not(None) & incarnations.c.end.is_(None)
        assert connection.execute(select(incarnations).where(announced)).all() == []
    engine.dispose()


def test_a_key_that_signed_another_ledger_is_refused_before_anything_runs(tmp_path: Path) -> None:
    options = small(tmp_path)
    replay(options)
    options.database.unlink()
    with pytest.raises(ConfigError, match="has signed another ledger"):
        replay(options)
    check_unused(tmp_path / "fresh.key")  # control: one that signed nothing
    other = EnvironmentOptions(pool_blocks=1024, database=tmp_path / "other.db")
    replay(other)
    engine = open_store(other.database, read_only=True)
    assert len(recorded_keys(engine)) == 1
    engine.dispose()


SAID = "Demo data: this ledger holds traffic"
ACTS = {  # commands on a ledger that show nothing of what processes recorded
    "replay", "db upgrade", "db roles", "db partitions", "audit timestamp", "audit sign", "audit rotate-key",
    "audit redact", "audit purge", "audit hold place", "audit hold lift", "audit sink detach", "audit sink attach",
    "audit sink retry", "audit sink acknowledge", "audit push", "audit confirm-break",
    "scan close-dead", "clock confirm", "worker close", "policy assign-issuer",
    "policy sign-orders", "observe", "report enrol-key", "report rotate-key", "init", "serve",
}  # fmt: skip
NOT_OF_A_LEDGER = {"policy grants", "report frameworks"}  # of a tenant that asks, and of this program
POLICY = "policies/library/regulated-saas.yaml"


def commands() -> set[str]:
    """Every command of a ledger, but for acts that are operations: they say it as the service does."""
    asked = {command.name: command.reads for command in read_commands()}
    found = set[str]()
    for name, command in every_command():
        flags = {flag for parameter in command.params for flag in parameter.opts}
        if "--ledger" in flags and asked.get(name, True):
            found.add(name)
    return found


def bare() -> set[str]:
    """Operations that are asked of a ledger itself and need no argument."""
    return {
        command.name
        for command in read_commands()
        if command.reads and not any(part.is_argument for part in command.parts)
    } - NOT_OF_A_LEDGER


def _case() -> str:
    """A case whose person was asked who they are, by somebody whom the book of principals has."""
    run("principal", "add", "dana", "--role", "dpo", "--ledger", "sqlite:///kvcustody.db")
    asks = ("--tenant", "acme", "--subject", "somebody", "--right", "access", "--channel", "mail")
    how = ("--as", "dana", "--subject-names", "clear", "--json")
    case = str(json.loads(run("case", "open", *asks, *how))["case_id"])
    run("case", "step", case, "identity", "--outcome", "asked", *how)
    return case


def shown(replayed: Path, out: Path) -> dict[str, tuple[str, ...]]:
    """Arguments for every command that shows what processes recorded."""
    policy = str(Path(kvcustody.__file__).parent / POLICY)
    erasure = json.loads(run("erasure", "request", "--tenant", "acme", "--yes", "--json"))["erasure"]
    (out / "log.vkey").write_text(vkey())
    case = _case()
    [opened] = json.loads(run("audit", "query", "--kind", "residency-opened", "--limit", "1", "--json"))["items"]
    size = str(json.loads(run("audit", "status", "--json"))["signed_size"])
    scan = json.loads(run("scan", "start", "--json"))["result"]
    return {
        "policy lint": (policy, "--ledger", "kvcustody.db"),
        "policy simulate": (policy, policy, "--ledger", "kvcustody.db"),
        "policy enforcement": (),
        "audit status": (),
        "audit tail": (),
        "audit query": (),
        "audit times": (),
        "worker list": (),
        "audit prove": ("system", "0"),
        "audit fsck": (),
        "audit export": (str(out / "export"),),
        "audit tiles": (str(out / "tiles"),),
        "audit keys": (),
        "audit ship": (str(out / "positions.json"),),
        "audit recompute": (),
        "audit hold list": (),
        "coverage show": (),
        "report list": (),
        "report make": ("--framework", "gdpr", "--out", str(out / "report")),
        "report verify": (str(out / "report"), "--key", str(out / "log.vkey"), "--ledger", "kvcustody.db"),
        "report ropa": ("--policy", policy, "--out", str(out / "ropa")),
        "subject show": ("--tenant", "acme", "--subject", "nobody"),
        "erasure status": (erasure,),
        "erasure list": (),
        "erasure certificate": (erasure, "--signing-key", KEY, "--out", str(out / "c.json")),
        "case list": (),
        "case show": (case,),
        "case letter": (case, "--kind", "identity", "--to", "A. Person", "--out", str(out / "letter")),
        "scan ledger": (),
        "size ledger": ("--ledger", "sqlite:///kvcustody.db"),
        "scan findings": (),
        "showback": ("--since", "2020-01-01"),
        "tier list": (),
        "tier transfers": (),
        "tier explain": (str(opened["leaf"]["residency"]),),
        "custody residencies": ("nobody", "--tenant", "acme"),
        "custody block": (opened["leaf"]["incarnation"], "0", "1"),
        "apikey list": ("dana",),
        "audit odd-times": ("system",),
        "audit checkpoint": (size,),
        "audit prove-consistency": ("1", size, "--log", "root"),
        "audit tile": ("0", "0", "--log", "root", "--width", "1"),
        "scan show": (scan["incarnation"], str(scan["scan"])),
        "prefixes top": ("--since", "2020-01-01"),
        "top": ("--once",),
        "advise": (),
    }


@pytest.mark.system("a command shows generated history as if it were real")
def test_every_command_that_shows_the_ledger_says_what_is_generated(here: Path, tmp_path: Path) -> None:
    """One that is new is in neither list, and fails here until it says so or shows nothing."""
    arguments = dict.fromkeys(bare(), ()) | shown(here, tmp_path)
    assert commands() - NOT_OF_A_LEDGER <= set(arguments) | ACTS <= {name for name, _ in every_command()}
    told = dict[str, int]()
    for name, more in arguments.items():
        found = CliRunner().invoke(app, [*name.split(), *more])
        assert found.exit_code == 0, (name, found.output)
        told[name] = found.stderr.count(SAID)
    assert {name for name, count in told.items() if count != 1} == set()
    assert [one["origin"] for one in json.loads(run("coverage", "show", "--json"))["marked"]] == [GENERATED]
    said = json.loads((tmp_path / "ropa" / "ropa.json").read_bytes())["history"]
    assert said.startswith(SAID)
    assert SAID in (tmp_path / "ropa" / "ropa.html").read_text()


def one_start(path: Path, **origin: str) -> EventWriter:
    """A ledger in which one worker started; returns its writer, closed."""
    engine = open_store(path)
    upgrade(engine)
    writer = EventWriter(engine, worker="gpu-0", clock=SystemClock(), spill_directory=path.parent / "spill")
    writer.submit([WorkerStarted(SystemClock().now_us(), "gpu-0", 8, 1, 64, "cpu", "test", **origin)])
    writer.close()
    engine.dispose()
    return writer


def test_a_ledger_of_engines_is_not_marked(tmp_path: Path) -> None:
    """Control: nothing is said of a worker at work, nor of one whose leaf is from before there were marks."""
    writer = one_start(tmp_path / "ledger.db")
    found = CliRunner().invoke(app, ["audit", "tail", "--json", "--ledger", f"sqlite:///{tmp_path}/ledger.db"])
    assert found.exit_code == 0 and found.stderr == "" and "marked" not in json.loads(found.stdout)
    body = next(body for body in bodies(tmp_path / "ledger.db") if body["kind"] == "worker-started")
    assert marked_processes([body | {"origin": GENERATED}])[0].incarnation == writer.incarnation
    del body["origin"]
    assert marked_processes([body]) == ()


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a signed ledger that holds the start of one generated process and no more."""
    with folder(tmp_path_factory.mktemp("generated")) as path:
        one_start(path / "kvcustody.db", origin=GENERATED)
        run("audit", "sign")
        return path


@pytest.mark.parametrize("framework", NAMES)
def test_every_report_says_it_in_its_head_and_under_its_limitations(
    generated: Path, tmp_path: Path, framework: str
) -> None:
    how = ("--framework", framework, "--format", "html,json,oscal", "--out", str(tmp_path))
    with folder(generated):
        run("report", "make", *how)
    report = json.loads((tmp_path / "report.json").read_bytes())
    assert report["boundary"]["history"].startswith(SAID)
    assert [worker["origin"] for worker in report["boundary"]["workers"]] == [GENERATED]
    assert report["limitations"][0].startswith(SAID)
    head = (tmp_path / "report.html").read_text().partition("<section")[0]
    assert SAID in head
    assert SAID in (tmp_path / "oscal.json").read_text()


def test_an_export_says_it_and_both_verifiers_hold_it_against_the_leaves(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(here, tmp_path / "copy"))  # an export is a leaf that nobody signed yet
    folder, key = tmp_path / "export", vkey()
    run("audit", "export", str(folder))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest["history"].startswith(SAID) and [one["origin"] for one in manifest["marked"]] == [GENERATED]
    alone = [sys.executable, "-I", str(folder / "verify_kvcustody.py"), str(folder), "--key", key]
    sound = subprocess.run(alone, check=False, capture_output=True, text=True)
    assert sound.returncode == 0 and "NOT AN ENGINE AT WORK" in sound.stdout
    assert SAID in CliRunner().invoke(app, ["audit", "verify", str(folder), "--key", key]).stderr
    assert SAID in CliRunner().invoke(app, ["audit", "recompute", "--export", str(folder)]).stderr
    (folder / "manifest.json").write_bytes(orjson.dumps(manifest | {"marked": [], "history": None}))
    assert "calls other processes" in run("audit", "verify", str(folder), "--key", key, exit_code=1)
    forged = subprocess.run(alone, check=False, capture_output=True, text=True)
    assert forged.returncode == 1 and "calls other processes" in forged.stdout


def test_a_certificate_says_it_on_its_page_and_where_it_is_verified(here: Path, tmp_path: Path) -> None:
    erasure = json.loads(run("erasure", "request", "--tenant", "acme", "--yes", "--json"))["erasure"]
    certificate, page = tmp_path / "c.json", tmp_path / "c.html"
    run(
        "erasure",
        "certificate",
        erasure,
        "--signing-key",
        KEY,
        "--out",
        str(certificate),
        "--html",
        str(page),
    )
    assert SAID in page.read_text()
    document = json.loads(certificate.read_bytes())
    assert [one["origin"] for one in document["marked"]] == [GENERATED]
    assert SAID in CliRunner().invoke(app, ["erasure", "verify", str(certificate), "--key", vkey()]).stderr
    facts = {name: value for name, value in document.items() if name not in ("schema", "signature")}
    key, false = read_signing_key(here / KEY), facts | {"marked": []}
    forged = verify_certificate(signed_certificate(false, key).to_bytes(), [vkey()])
    assert forged.problems == ("the processes that it calls replayed or generated are not those of its leaves",)


def test_the_summary_and_the_answer_of_a_replay_say_what_it_was(here: Path) -> None:
    assert "no engine at work" in (here / "kvcustody-summary.html").read_text()
