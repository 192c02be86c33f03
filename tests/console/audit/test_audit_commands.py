"""`kvcustody audit` and `kvcustody witness` as people run them; docs/tutorials/check-an-export.md, end to end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select

from kvcustody.audit.kinds import (
    DecisionRecorded,
    KeyEvent,
    ResidencyOpened,
    SigningKeyRecorded,
    WorkerStarted,
    WorkerStopped,
)
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import events
from kvcustody.audit.tlog.checkpoint_signer import CheckpointSigner
from kvcustody.audit.tlog.signed_note import parse_vkey
from kvcustody.audit.tlog.signing_key import create_signing_key
from kvcustody.audit.tlog.witness.client import WitnessAddress, read_addresses
from kvcustody.audit.tlog.witness.submitter import WitnessSubmitter
from kvcustody.audit.write.event_writer import EventWriter
from kvcustody.clock import SystemClock
from kvcustody.console.audit import on_record
from kvcustody.console.opening import reading
from standins import builders
from standins.audit.verifiers import ALONE
from standins.console.command_line import Run, answer
from standins.sinks import WebhookReceiver

DOCS = Path(__file__).parents[3] / "docs" / "tutorials" / "check-an-export.md"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def place(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a ledger of an ended worker, signed, and its public key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVCUSTODY_DATABASE_URL", raising=False)
    shutil.copy(migrated, "kvcustody.db")
    engine = open_store("sqlite:///kvcustody.db", timeout_seconds=2.0)
    clock = SystemClock()
    writer = builders.writer(engine, tmp_path / "spill", clock=clock)
    now = clock.now_us()
    writer.submit([WorkerStarted(now, "w", 8, 1, 4096, "cpu", "test")])
    writer.submit(
        [
            ResidencyOpened(now, number, "acme", "alice", None, False, "internal", (), (), ("own",), 1, 9)
            for number in range(40)
        ]
    )
    denied = DecisionRecorded(now, "reuse", "deny", "beta", "acme", "internal", ("no-restricted",), 1)
    writer.submit([denied._replace(trace=TRACE)])
    writer.submit([KeyEvent(now, "acme", "made", 1, "\x1b[31m=evil"), WorkerStopped(now, "w", "stopped", 0, (0,))])
    key = create_signing_key(tmp_path / "signing.key", "ledger.example/acme")
    writer.submit_durable(SigningKeyRecorded(now, "made", str(key.verifier), "", "governor"))
    writer.close()
    CheckpointSigner(engine, [key], memory=tmp_path / "signing.key.last", clock=clock).sign_once()
    (tmp_path / "ledger.vkey").write_text(f"# handed over in person\n{key.verifier}\n")
    engine.dispose()
    return tmp_path


def test_what_no_checkpoint_covers_is_said_and_past_three_intervals_a_problem(
    place: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_age(seconds: int) -> None:
        """One more leaf whose commit was so long ago, and whose process was killed before it sealed."""
        engine = open_store("sqlite:///kvcustody.db", timeout_seconds=2.0)
        writer = EventWriter(
            engine, worker="k", clock=SystemClock(), spill_directory=place / "killed", clear_names=True
        )
        writer.submit_durable(KeyEvent(1, "acme", "made", 2, "test"))
        with engine.begin() as connection:
            query = f"UPDATE unsealed_heads SET grown_us = grown_us - {seconds * 1_000_000}"
            connection.exec_driver_sql(query)
        monkeypatch.setattr(writer._sealer, "end", lambda **_: None)
        writer.close()
        engine.dispose()

    before = answer(run("audit status --json"))
    assert before["unsealed"] == {"logs": 0, "leaves": 0, "age_us": 0, "overdue": False}
    of_age(5)
    found = answer(run("audit status --json"))
    assert found["unsealed"]["leaves"] > 0 and found["unsealed"]["overdue"] is False
    assert found["logs"] == before["logs"], "heads are those under the newest checkpoint"
    checked = answer(run("audit fsck --json"))
    assert checked["sound"] and checked["unsealed"] == found["unsealed"]["leaves"]
    assert "under no checkpoint yet:" in run("audit fsck").stdout
    of_age(3600)
    late = run("audit status").stdout
    assert "no process signs this ledger" in late and "the oldest for 36" in late
    assert "nobody seals" in run("audit fsck", exits=1).stdout
    run("audit sign --signing-key signing.key")
    assert answer(run("audit status --json"))["unsealed"]["leaves"] == 0
    assert answer(run("audit fsck --json"))["sound"]


def test_what_belongs_to_a_trace_is_found_by_it(run: Run) -> None:
    [found] = answer(run(f"audit query --trace {TRACE} --json"))["items"]
    assert (found["log"], found["leaf"]["trace"]) == ("tenant/beta", TRACE), "not in the owner's log"
    assert "beta was not allowed to reuse acme's blocks" in run(f"audit query --trace {TRACE}").stdout
    assert answer(run(f"audit query --trace {'ab' * 16} --json"))["items"] == []
    assert "32 lowercase" in run(f"audit query --trace {TRACE.upper()}", exits=2).stderr


def test_tail_query_and_status(run: Run) -> None:
    shown = run("audit tail -n 50").stdout
    assert "acme: request admitted (internal)" in shown and "residency=" not in shown
    assert all(len(line.rstrip()) <= 160 for line in shown.splitlines()), "one line an event"
    assert "\x1b" not in run("audit tail -n 50").stdout  # no value colours or moves a terminal
    found = answer(run("audit query --tenant acme --limit 30 --json"))
    assert len(found["items"]) == 30 and found["next"]
    rest = answer(run(f"audit query --tenant acme --cursor {found['next']} --json"))
    assert len(rest["items"]) == 12 and rest["next"] is None  # the decision is in the owner's log too
    denied = answer(run("audit query --outcome deny --rule no-restricted --json"))
    assert {item["log"] for item in denied["items"]} == {"tenant/acme", "tenant/beta"}
    status = answer(run("audit status --json"))
    assert status["warning"].startswith("no witness") and status["logs"]["tenant/acme"]["size"] == 42
    assert "no event is called" in run("audit tail --kind nonsense", exits=2).stderr
    assert "`nonsense` is not one of 'access'" in run("audit query --kind nonsense", exits=2).stderr
    assert "is no ISO 8601 date" in run("audit query --since yesterday", exits=2).stderr


def test_leaves_and_holds_are_listed_newest_first_and_with_an_option_oldest_first(run: Run) -> None:
    ask = "audit query --tenant acme --limit 15 --json"
    newest, oldest = pages(run, ask), pages(run, f"{ask} --oldest-first")
    assert newest == oldest[::-1] and len(newest) == 42
    assert [at for at, _ in oldest] == sorted(at for at, _ in oldest)
    for name in ("first", "second"):
        run(f"audit hold place {name} --actor ops --reason test")
    held = [one["hold"] for one in answer(run("audit hold list --json"))["holds"]]
    assert held == ["second", "first"]
    held = [one["hold"] for one in answer(run("audit hold list --oldest-first --json"))["holds"]]
    assert held == ["first", "second"]


def pages(run: Run, ask: str) -> list[tuple[int, int]]:
    """Every leaf of a question, page by page: its time, and its place in its log."""
    found, more = [], ""
    while True:
        page = answer(run(f"{ask}{more}"))
        found += [(leaf["at_us"], leaf["idx"]) for leaf in page["items"]]
        if page["next"] is None:
            return found
        more = f" --cursor {page['next']}"


def test_a_proof_is_printed_and_checks(run: Run, place: Path) -> None:
    from kvcustody.audit.tlog.root_log import check_leaf, parse_leaf_proof

    run("audit prove tenant/acme 3 --out leaf-3")
    proof = parse_leaf_proof((place / "leaf-3.proof").read_bytes())
    key = parse_vkey((place / "ledger.vkey").read_text().splitlines()[1])
    sealed = check_leaf(proof, (place / "leaf-3.leaf").read_bytes(), [key])
    assert sealed.name == "tenant/acme" and sealed.head.size == 42
    assert "holds no leaf" in run("audit prove tenant/acme 42", exits=2).stderr


def test_a_mailed_leaf_is_checked_by_both_programs_and_no_edit_of_it_passes(
    run: Run, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("audit prove tenant/acme 3 --out leaf-3")
    found = answer(run("audit verify leaf-3.proof --key ledger.vkey --json"))
    assert (found["sound"], found["log"], found["idx"], found["size"]) == (True, "tenant/acme", 3, 42)
    vkey = (place / "ledger.vkey").read_text().splitlines()[1]
    alone = partial(ALONE.main, [str(place / "leaf-3.proof"), "--key", vkey])
    assert alone() == 0 and "leaf 3 of `tenant/acme` (42 leaves)" in capsys.readouterr().out
    for name in ("leaf-3.leaf", "leaf-3.proof"):
        good = (place / name).read_bytes()
        for at in range(0, len(good), 23):
            (place / name).write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            assert alone() == 1
            if not at % 5:
                assert "not sound" in run("audit verify leaf-3.proof --key ledger.vkey", exits=1).stdout
        (place / name).write_bytes(good)
    stranger = str(create_signing_key(place / "other.key", "ledger.example/acme").verifier)
    assert "not sound" in run(f"audit verify leaf-3.proof --key {stranger}", exits=1).stdout
    assert ALONE.main([str(place / "leaf-3.proof"), "--key", stranger]) == 1
    assert "no trusted key signed" in capsys.readouterr().out


def test_export_verify_and_fsck_find_an_edit(run: Run, place: Path) -> None:
    run("audit export evidence --format csv")
    assert answer(run("audit verify evidence --key ledger.vkey --json"))["sound"]
    assert "sound" in run("audit fsck --key ledger.vkey --note evidence/checkpoint").stdout
    [path] = (place / "evidence/logs/000002").glob("*.csv")
    path.write_bytes(path.read_bytes().replace(b"alice", b"alicf").replace(b"internal", b"publicly", 1))
    assert "not sound" in run("audit verify evidence --key ledger.vkey", exits=1).stdout
    assert "exists already" in run("audit export evidence", exits=2).stderr
    assert "not under the checkpoint" in run("audit export other --log tenant/nobody", exits=2).stderr


@pytest.mark.parametrize("log", ["", "--log tenant/acme"])
def test_a_log_as_tiles(run: Run, place: Path, log: str) -> None:
    """The root log under its checkpoint, and a sub-log under the proof of its head; a changed tile is found."""
    made = answer(run(f"audit tiles tiles {log} --json"))
    found = answer(run("audit verify tiles --key ledger.vkey --json"))
    assert found["sound"] and found["size"] == made["size"] and found["root"] == made["root"]
    assert (place / "tiles" / ("head.tlog-proof" if log else "checkpoint")).is_file()
    path = next(path for path in (place / "tiles/tile/0").rglob("*") if path.is_file())
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert "not sound" in run("audit verify tiles --key ledger.vkey", exits=1).stdout
    assert "not under the checkpoint" in run("audit tiles other --log tenant/nobody", exits=2).stderr


def test_a_witness_from_init_to_verdict(run: Run, place: Path) -> None:
    log = (place / "ledger.vkey").read_text().splitlines()[1]
    vkey = run(f"witness init w --name witness.example --log {log}").stdout.splitlines()[0]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcustody.console.main", "witness", "serve", "w"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=place,
    )
    try:
        assert process.stdout and "witness.example at unix:" in process.stdout.readline()
        (place / "witnesses").write_text(f"# ours\nunix:{place}/w/witness.sock {vkey}\n")
        [address] = read_addresses(place / "witnesses")
        assert address == WitnessAddress(f"unix:{place}/w/witness.sock", parse_vkey(vkey))
        engine = open_store("sqlite:///kvcustody.db")
        submitter = WitnessSubmitter(engine, [address], interval_seconds=0.02)
        submitter.start()
        until = 200
        while not submitter.status()[0].size and until:
            until -= 1
            threading.Event().wait(0.02)
        submitter.close()
        assert submitter.status()[0].problem == "" and submitter.submit_once(address) > 0
        engine.dispose()
    finally:
        process.terminate()
        process.wait()
        if process.stdout:
            process.stdout.close()
    status = answer(run("audit status --json"))
    assert status["warning"] is None and status["witnesses"][0]["name"] == "witness.example"
    run("audit export evidence --witnessed")
    found = answer(run(f"audit verify evidence --key ledger.vkey --witness {vkey} --json"))
    assert found["sound"] and found["witnesses"].keys() == {"witness.example"}
    assert not any("split views" in line for line in found["not_shown"])
    heads = answer(run("witness status w --json"))["logs"]
    assert heads["ledger.example/acme"]["size"] == found["checkpoint"]


def test_holds_purges_and_redaction(run: Run) -> None:
    run("audit export evidence")
    later = "--until 2090-01-01"
    plan = answer(run(f"audit purge {later} --json"))
    assert plan["dropped"] is False and {log["log"] for log in plan["logs"]} == {"tenant/acme", "tenant/beta"}
    run("audit hold place case-9 --tenant acme --actor counsel --reason 'case 9'")
    assert answer(run("audit hold list --json"))["holds"][0]["hold"] == "case-9"
    assert "case-9" in run("audit redact acme alice --actor dpo --reason r", exits=2).stderr
    run("audit hold lift case-9 --actor counsel --reason closed")
    assert "remains:" in run("audit redact acme alice --actor dpo --reason 'request 7'").stdout
    both = "--actor ops --approver dpo"
    assert "approver" in run(f"audit purge {later} --export evidence --key ledger.vkey --actor ops", exits=2).stderr
    gone = answer(run(f"audit purge {later} --export evidence --key ledger.vkey {both} --json"))
    assert gone["dropped"] and {log["log"]: log["below"] for log in gone["logs"]}["tenant/beta"] == 1
    assert "sound" in run("audit fsck --key ledger.vkey").stdout


def test_a_purge_that_writes_its_own_export(run: Run, place: Path) -> None:
    asked = "audit purge --until 2090-01-01 --key ledger.vkey --actor ops --approver dpo"
    shown = answer(run(f"{asked} --to purged --dry-run --json"))
    assert shown["dropped"] is False and shown["parts"] == [] and not (place / "purged").exists()
    assert "give one of them" in run(f"{asked} --to purged --export evidence", exits=2).stderr
    assert "approver" in run("audit purge --until 2090-01-01 --to purged --actor ops", exits=2).stderr
    gone = answer(run(f"{asked} --to purged --json"))
    assert gone["dropped"] and gone["logs"] == shown["logs"]
    assert [part["path"] for part in gone["parts"]] == ["part-000001"]
    manifest = (place / "purged" / "part-000001" / "manifest.json").read_bytes()
    assert gone["parts"][0]["digest"] == hashlib.sha256(manifest).hexdigest()
    assert answer(run("audit verify purged/part-000001 --key ledger.vkey --json"))["sound"]
    found = answer(run("audit fsck --key ledger.vkey --json"))
    assert found["sound"] and found["purged"] == gone["parts"][0]["leaves"] and found["segmented"] == 0
    assert "dropped" in run(f"{asked} --to purged").stdout  # asked again: nothing is left


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with WebhookReceiver() as opened:
        yield opened


def test_ship_and_push_go_on_where_they_were(run: Run, place: Path, receiver: WebhookReceiver) -> None:
    lines = run("audit ship positions.json --shape ocsf").stdout.splitlines()
    assert len(lines) == 48 and len({json.loads(line)["metadata"]["uid"] for line in lines}) == 48
    assert json.loads(lines[-2])["unmapped"]["operation"] == "audit ship", "that it is taken out is a leaf too"
    assert run("audit ship positions.json").stdout == ""
    (place / "hook.key").write_text("k" * 40)
    target = f"audit push hook --url {receiver.url} --signing-key hook.key --json"
    assert answer(run(target))["delivered"] == 48 + 2
    assert {event["specversion"] for event in receiver.bodies()[0]} == {"1.0"}
    run("audit sink detach hook --actor ops --reason down")
    assert answer(run(target)) == {
        "name": "webhook",
        "attached": False,
        "delivered": 0,
        "dead": 0,
        "failures": 0,
        "problem": "",
        "withheld": 0,
        "restarted": 0,
        "purged": 0,
        "failing_since_us": None,
        "losses": [],
    }
    run("audit sink attach hook --actor ops")
    own = 2  # that it is taken out, and the end of the process that wrote so
    assert answer(run(target))["delivered"] == 4 + own
    assert answer(run("audit sink status hook --json"))["attached"]
    kinds = [event["type"] for event in receiver.bodies()[-2]]
    assert kinds == ["kvcustody.sink-changed.v1", "kvcustody.worker-stopped.v1"] * 2


def test_a_restored_ledger_is_told_by_exit_status_and_stderr(run: Run, place: Path, receiver: WebhookReceiver) -> None:
    ledger, backup = place / "kvcustody.db", place / "backup.db"
    with (
        contextlib.closing(sqlite3.connect(ledger)) as source,
        contextlib.closing(sqlite3.connect(backup)) as to,
    ):
        source.backup(to)
    (place / "hook.key").write_text("k" * 40)
    target = f"audit push hook --url {receiver.url} --signing-key hook.key"
    run(target), run("audit ship positions.json")
    run("audit ship positions.json"), run(target)
    for name in ("kvcustody.db", "kvcustody.db-wal", "kvcustody.db-shm"):
        (place / name).unlink(missing_ok=True)
    ledger.write_bytes(backup.read_bytes())
    ledger.chmod(0o600)
    assert "read again from its first leaf" in run(target, exits=1).output
    shipped = run("audit ship positions.json", exits=1)
    assert "read again from its first leaf" in shipped.stderr and '"log_name":"system","sequence":0' in shipped.stdout
    assert len(json.loads(run("audit sink status hook --json", exits=1).stdout)["losses"]) == 1
    run(target), run("audit ship positions.json")
    run("audit sink acknowledge hook --actor ops --reason restored")
    assert json.loads(run("audit sink status hook --json").stdout)["troubles"] == []


def test_what_is_taken_out_of_a_ledger_is_on_record_or_it_is_said_that_it_is_not(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken() -> list[str]:
        with open_store(place / "kvcustody.db", read_only=True).connect() as connection:
            leaves = [json.loads(leaf) for leaf in connection.scalars(select(events.c.leaf))]
        return [leaf["operation"] for leaf in leaves if leaf["kind"] == "access"]

    run("audit export evidence")
    run("audit ship positions.json")
    run("audit ship positions.json")
    assert taken() == ["audit export", "audit ship"]
    monkeypatch.setattr(on_record, "writing", reading)  # a login that may only read
    refused = run("audit export more", exits=2)
    assert "--unrecorded" in str(refused.exception) + refused.output
    assert not (place / "more").exists()
    run("audit export more --unrecorded")
    assert len(taken()) == 2


def test_every_command_teaches_by_example(run: Run) -> None:
    text = run("audit --help").stdout
    for name in (
        "status",
        "tail",
        "query",
        "prove",
        "fsck",
        "keys",
        "rotate-key",
        "export",
        "tiles",
        "verify",
        "redact",
        "purge",
        "ship",
        "push",
    ):
        assert name in text and "Example" in run(f"audit {name} --help").stdout


@pytest.mark.system("the walkthrough page no longer runs")
def test_the_walkthrough_runs_as_it_is_written(run: Run, place: Path) -> None:
    """Every command in docs/tutorials/check-an-export.md, in its order, in one folder, with its stated exit status."""
    text = DOCS.read_text()
    commands = re.findall(r"^    \$ (.+?)(?:   # exit (\d))?$", text, re.MULTILINE)
    assert len(commands) >= 8
    for line, exits in commands:
        if line.startswith("kvcustody "):
            run(line.removeprefix("kvcustody "), exits=int(exits or 0))
            continue
        program = line.replace("python3", sys.executable, 1) if line.startswith("python3") else line
        made = subprocess.run(program, shell=True, cwd=place, capture_output=True, text=True, check=False)
        assert made.returncode == int(exits or 0), (line, made.stdout, made.stderr)
