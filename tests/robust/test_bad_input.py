"""Every situation that a user or a machine can bring about: one exact line, exit code 2, nothing lost.

The rows go through the real command line. "Nothing lost" is shown on a ledger that held evidence before: every
earlier leaf is still there, byte for byte, whatever the command did, and the database is whole.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcustody.audit.store.database.engine import SCHEMA_REVISION
from kvcustody.console.main import app
from kvcustody.policies import library

pytestmark = pytest.mark.system

SMALL = ("--limit", "3", "--pool-blocks", "256")
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
COMMAND = [sys.executable, "-m", "kvcustody.console.main"]


def cli(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(item) for item in arguments])
    return result.exit_code, result.stdout, result.stderr


def leaves(ledger: Path) -> dict[tuple[int, int], bytes]:
    connection = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return {(log, idx): leaf for log, idx, leaf in connection.execute("SELECT log, idx, leaf FROM events")}
    finally:
        connection.close()


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose ledger holds a replay's evidence."""
    folder = tmp_path_factory.mktemp("earlier")
    code, _, errors = cli("replay", *SMALL, "--ledger", folder / "ledger.db", "--html", folder / "page.html")
    assert code == 0, errors
    return folder


@pytest.fixture
def place(earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to work in."""
    for path in (earlier / "ledger.db", earlier / "page.html", *earlier.glob("ledger.db.signing.key*")):
        shutil.copy(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- what is wrong, and what is said --------------------------------------------------------------------------

REPLAY = ("replay", *SMALL, "--ledger", "ledger.db", "--html", "page.html")
GOOD_LINE = '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'
MOONCAKE_FIX = "each line needs timestamp (ms), input_length, output_length and hash_ids"


def file(name: str, content: str | bytes, mode: int = 0o600) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (place / name).write_bytes(data)
        (place / name).chmod(mode)

    return make


def edited(old: str, new: str) -> str:
    text = library.source("regulated-saas")
    assert old in text
    return text.replace(old, new, 1)


def newer(place: Path) -> None:
    with sqlite3.connect(place / "ledger.db") as connection:
        connection.execute("UPDATE kvcustody_schema SET version_num = '9999'")


def folder(name: str) -> Callable[[Path], None]:
    return lambda place: (place / name).mkdir()


def link(place: Path) -> None:
    file("real.key", b"k" * 32)(place)
    (place / "link.key").symlink_to("real.key")


def nothing(place: Path) -> None:
    pass


CASES: dict[str, tuple[Callable[[Path], None], tuple[str, ...], str]] = {
    "policy: YAML that is none": (
        file("p.yaml", "schema: [\n"),
        (*REPLAY, "--policy", "p.yaml"),
        "p.yaml:2:1: KVP103 the YAML is not well-formed: did not find expected node content; "
        "correct the YAML at this place",
    ),
    "policy: not text": (
        file("p.yaml", b"\xff\xfe"),
        (*REPLAY, "--policy", "p.yaml"),
        "p.yaml:1:1: KVP101 byte `0xff` is not UTF-8; save the file as UTF-8",
    ),
    "policy: unknown name": (
        nothing,
        (*REPLAY, "--policy", "nobody"),
        "KVC100: cannot read policy `nobody`: No such file or directory; "
        "the library has public-api, regulated-saas, single-org",
    ),
    "trace: malformed line": (
        file("t.jsonl", GOOD_LINE + '{"timestamp": 1\n'),
        (*REPLAY, "t.jsonl", "--trace-format", "mooncake"),
        "KVC120: t.jsonl:2: not JSON (*), got `*`; " + MOONCAKE_FIX,
    ),
    "trace: a value out of range": (
        file("t.jsonl", GOOD_LINE + GOOD_LINE.replace("600", "-4")),
        (*REPLAY, "t.jsonl", "--trace-format", "mooncake"),
        "KVC120: t.jsonl:2: field `input_length`: expected a whole number from 1 to 16777216, got `-4`; "
        + MOONCAKE_FIX,
    ),
    "trace: missing": (
        nothing,
        (*REPLAY, "t.jsonl", "--trace-format", "mooncake"),
        "KVC120: cannot read trace `t.jsonl`: No such file or directory; check the path and its permissions",
    ),
    "model config: not JSON": (
        file("c.json", '{"model_type":'),
        ("size", "c.json", "--gpu-memory", "80GiB"),
        "KVC100: c.json:1:15: not JSON (unexpected end of data)",
    ),
    "model config: not an object": (
        file("c.json", "[]"),
        ("size", "c.json", "--gpu-memory", "80GiB"),
        "KVC100: c.json: expected a JSON object, got `list`",
    ),
    "model config: a field is missing": (
        file("c.json", json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"})),
        ("size", "c.json", "--gpu-memory", "80GiB"),
        "KVC100: field `*` is missing*",
    ),
    "database: a folder": (
        folder("here"),
        (*REPLAY, "--ledger", "here"),
        "KVC600: ledger `here` cannot be used: it cannot be opened (missing directory or not a file)",
    ),
    "database: something else": (
        file("notes.db", "these are notes, and they are long enough to be a page of a database\n" * 20),
        (*REPLAY, "--ledger", "notes.db"),
        "KVC600: ledger `notes.db` cannot be used: it is not a SQLite database",
    ),
    "database: in no folder": (
        nothing,
        (*REPLAY, "--ledger", "absent/ledger.db"),
        "KVC600: no ledger here: `absent/ledger.db` does not exist; name one with `--ledger`, or start with "
        "`kvcustody up`",
    ),
    "database: newer schema": (
        newer,
        REPLAY,
        f"KVC600: the ledger's schema `9999` is newer than this program's `{SCHEMA_REVISION}`",
    ),
    "page: a folder": (
        folder("page"),
        (*REPLAY, "--html", "page"),
        "KVC100: cannot write summary `page`: it is a folder",
    ),
    "page: in no folder": (
        nothing,
        (*REPLAY, "--html", "absent/page.html"),
        "KVC100: cannot write summary `absent/page.html`: no such folder",
    ),
    "pool: of 0 blocks": (
        nothing,
        (*REPLAY, "--pool-blocks", "0"),
        "KVC100: invalid value for '--pool-blocks': *; see `*replay --help`",
    ),
    "command: unknown": (nothing, ("reply",), "KVC100: no such command 'reply'*; see `* --help`"),
    "command: unknown option": (
        nothing,
        (*REPLAY, "--polcy", "x"),
        "KVC100: no such option: --polcy*; see `*replay --help`",
    ),
    "root key: missing": (
        nothing,
        ("keys", "check", "root.key"),
        "KVC300: root key `root.key`: does not exist; create it with `kvcustody keys init`",
    ),
    "root key: too short": (
        file("root.key", b"k" * 31),
        ("keys", "check", "root.key"),
        "KVC300: root key `root.key`: has `31` bytes, not 32; give exactly 32 random bytes",
    ),
    "root key: too long": (
        file("root.key", b"k" * 33),
        ("keys", "check", "root.key"),
        "KVC300: root key `root.key`: has `33` bytes, not 32; give exactly 32 random bytes",
    ),
    "root key: open to others": (
        file("root.key", b"k" * 32, 0o640),
        ("keys", "check", "root.key"),
        "KVC300: root key `root.key`: has mode `0640`, open to others; chmod 600 it; replace the key if it was seen",
    ),
    "root key: a link": (
        link,
        ("keys", "check", "link.key"),
        "KVC300: root key `link.key`: is a symbolic link; give the path of the file itself",
    ),
    "root key: a folder": (
        folder("root.key"),
        ("keys", "check", "root.key"),
        "KVC300: root key `root.key`: is not a regular file; give the path of a key file",
    ),
    "root key: would be overwritten": (
        file("root.key", b"k" * 32),
        ("keys", "init", "root.key"),
        "KVC300: root key `root.key`: already exists; use it, or choose another path",
    ),
    "root key: in no folder": (
        nothing,
        ("keys", "init", "absent/root.key"),
        "KVC300: root key `absent/root.key`: no such folder; create it, without access for others",
    ),
}


def matches(line: str, expected: str) -> bool:
    return re.fullmatch(re.escape(expected).replace(r"\*", ".*"), line) is not None


@pytest.mark.parametrize("case", CASES)
def test_one_line_exit_code_2_and_nothing_lost(place: Path, case: str) -> None:
    make, arguments, expected = CASES[case]
    before = leaves(place / "ledger.db")
    make(place)
    files = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    code, _, errors = cli(*arguments)
    lines = errors.strip().splitlines()
    assert code == 2 and len(lines) == 1, errors
    assert matches(lines[0], f"error: {expected}"), lines[0]
    after = leaves(place / "ledger.db")
    assert before and {key: after.get(key) for key in before} == before
    for name, data in files.items():
        if not name.startswith(("ledger.db", "page.html")):
            assert (place / name).read_bytes() == data, f"{name} was changed"


def test_every_problem_of_a_policy_is_a_line(place: Path) -> None:
    file("p.yaml", edited("effect: permit", "effect: maybe"))(place)
    code, _, errors = cli(*REPLAY, "--policy", "p.yaml")
    lines = errors.removeprefix("error: ").strip().splitlines()
    assert code == 2 and len(lines) == 1
    assert re.fullmatch(r"p.yaml:\d+:\d+: KVP208 `effect` `maybe` is not a choice; .*", lines[0])
    file("q.yaml", "schema: kvcustody/policy@1\nname: x\n")(place)
    code, _, errors = cli(*REPLAY, "--policy", "q.yaml")
    lines = errors.removeprefix("error: ").strip().splitlines()
    assert code == 2 and len(lines) > 3
    assert all(re.fullmatch(r"q.yaml:\d+:\d+: KVP302 .*; add it", line) for line in lines)


def test_the_lines_before_a_bad_one_were_replayed_and_are_on_record(place: Path) -> None:
    before = leaves(place / "ledger.db")
    file("t.jsonl", 3 * GOOD_LINE + "{]\n")(place)
    code, out, errors = cli("replay", "t.jsonl", *REPLAY[1:], "--limit", "9", "--trace-format", "mooncake", "--json")
    document = json.loads(out)
    assert code == 2 and errors.startswith("error: KVC120: t.jsonl:4:") and errors.count("\n") == 1
    assert document["totals"]["requests"] == 3 and all(row["holds"] for row in document["identities"])
    assert len(leaves(place / "ledger.db")) > len(before)


# -- conditions of the machine, in a process of their own ---------------------------------------------------------


def process(place: Path, *arguments: str, condition: Callable[[], None] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=place,
        capture_output=True,
        check=False,
        text=True,
        timeout=90,
        preexec_fn=condition,
    )
    return done.returncode, done.stdout, done.stderr


def without_override() -> None:
    """Root without the capability to ignore modes: from here on a mode means what it says."""
    if os.geteuid() == 0 and ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0) != 0:
        os._exit(77)


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities")
def test_a_read_only_ledger_is_said_in_one_line(place: Path) -> None:
    before = leaves(place / "ledger.db")
    (place / "ledger.db").chmod(0o400)
    code, out, errors = process(place, *REPLAY, condition=without_override)
    if code == 77:
        pytest.skip("no right to give up rights here")
    assert (code, out) == (2, "")
    assert errors == "error: KVC600: ledger `ledger.db` cannot be used: it is read-only\n"
    assert leaves(place / "ledger.db") == before


def files_up_to(size: int) -> Callable[[], None]:
    """No file may grow beyond this: what a full disk or a quota does to the ledger and to its spill."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def without_warnings(errors: str) -> str:
    """What a command said itself: on a slow machine a checkpoint falls due meanwhile, and its log warns first."""
    own = [line for line in errors.splitlines(keepends=True) if "leaves have no checkpoint yet" not in line]
    return "".join(own)


def test_a_disk_that_is_full_at_once(place: Path) -> None:
    before = leaves(place / "ledger.db")
    size = (place / "ledger.db").stat().st_size
    code, _, errors = process(place, *REPLAY, condition=files_up_to(min(size, 100_000)))
    errors = without_warnings(errors)
    assert code == 2 and errors.count("\n") == 1
    assert re.fullmatch(r"error: KVC6\d\d: .*the disk (is full|refused a read or write).*\n", errors), errors
    after = leaves(place / "ledger.db")
    assert {key: after.get(key) for key in before} == before


def test_a_disk_that_fills_up_under_a_replay(place: Path) -> None:
    """The figures are printed, coverage is not claimed, and the next process adds what waits in the spill."""
    before = leaves(place / "ledger.db")
    size = (place / "ledger.db").stat().st_size
    arguments = ("replay", "--limit", "60", "--pool-blocks", "512", *REPLAY[5:], "--json")
    code, out, errors = process(place, *arguments, condition=files_up_to(size + 60_000))
    errors = without_warnings(errors)
    document = json.loads(out)
    assert code == 2 and document["totals"]["requests"] == 60
    assert re.fullmatch(
        r"error: KVC600: the ledger is incomplete: the disk (is full|refused a read or write); what is missing is "
        r"in the spill, and the next process adds it; coverage is not shown\n",
        errors,
    ), errors
    spill = place / "ledger.db.spill"
    assert [path for path in spill.glob("*.spill") if path.stat().st_size > 1000]
    code, out, errors = process(place, *REPLAY)
    assert code == 0 and not list(spill.glob("*.spill"))
    after = leaves(place / "ledger.db")
    assert {key: after[key] for key in before} == before
    last: dict[str, int] = {}
    sequences = set()
    for body in map(json.loads, after.values()):
        sequences.add((body["incarnation"], body["sequence"]))
        if body["kind"] == "withdrawn":  # it was refused to its caller, and this says so
            sequences.add((body["incarnation"], body["of_sequence"]))
        last[body["incarnation"]] = max(last.get(body["incarnation"], 0), body["sequence"])
    replays = [count for count in last.values() if count > 2]  # who signs beside one begins and ends, no more
    assert len(replays) == 3 and len(sequences) == sum(last.values()), "a sequence is missing"


def test_a_spill_that_is_full_too_leaves_no_files(place: Path) -> None:
    """Not a byte of room for either: the figures and one line, and no file for each retry."""
    size = (place / "ledger.db").stat().st_size
    spill = place / "ledger.db.spill"
    spill.mkdir(mode=0o700)

    code, _, errors = process(
        place, "replay", "--limit", "20", "--pool-blocks", "512", *REPLAY[5:], condition=files_up_to(4096)
    )
    assert code == 2 and errors.count("\n") == 1 and errors.startswith("error: KVC6"), errors
    assert not list(spill.glob("*.spill")) and (place / "ledger.db").stat().st_size == size


def test_ctrl_c_keeps_what_ran(place: Path) -> None:
    before = leaves(place / "ledger.db")
    command = [*COMMAND, "replay", "--pool-blocks", "2048", *REPLAY[5:], "--json"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        journal = place / "ledger.db-wal"
        deadline = time.monotonic() + 60
        while not (journal.exists() and journal.stat().st_size > 400_000) and time.monotonic() < deadline:
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        out, errors = running.communicate(timeout=60)
    document = json.loads(out)
    assert running.returncode == 130 and "Traceback" not in errors, errors
    assert document["stopped"] == "interrupted" and document["totals"]["requests"] > 0
    assert all(row["holds"] for row in document["identities"])
    after = leaves(place / "ledger.db")
    assert len(after) > len(before) and {key: after[key] for key in before} == before
    with sqlite3.connect(place / "ledger.db") as connection:
        assert connection.execute('SELECT DISTINCT "end" FROM incarnations').fetchall() == [("stopped",)]
    assert "</html>" in (place / "page.html").read_text()
