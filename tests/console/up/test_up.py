"""`kvcustody up` as a newcomer runs it: every page has data, the link works once, and it ends without a trace."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.console.up.plane import RunningPlane
from kvcustody.console.web.page_request import PLACES
from standins.console.browser_pages import check_in_browser
from standins.console.start_up import PROGRAM, Started, start

pytest.importorskip("torch", reason="the worker's blocks are tensors")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Started, Path, httpx.Client]]:
    """One that runs, and somebody who came in by its link."""
    folder = tmp_path_factory.mktemp("up")
    running = start(folder, "--tour")
    with httpx.Client(
        base_url=running.said["url"].removesuffix("/console/"), timeout=30, follow_redirects=True
    ) as client:
        elsewhere = client.get(running.said["link"], headers={"X-Forwarded-For": "192.0.2.7"})
        assert elsewhere.status_code == 401 and "signs nobody in" in elsewhere.text
        assert client.head(running.said["link"]).status_code == 405
        page = client.get(running.said["link"])
        assert page.status_code == 200 and "<h1>Overview</h1>" in page.text
        yield running, folder, client
        if running.process.poll() is None:
            running.end(signal.SIGKILL)


def rendered(client: httpx.Client, path: str) -> str:
    found = client.get(path)
    assert found.status_code == 200, (path, found.text)
    return found.text


@pytest.mark.system
def test_the_link_works_once(started: tuple[Started, Path, httpx.Client]) -> None:
    made, _, _ = started
    second = httpx.get(made.said["link"])
    assert second.status_code == 401 and "signs nobody in" in second.text and "set-cookie" not in second.headers


@pytest.mark.system
def test_every_page_has_something_to_show(started: tuple[Started, Path, httpx.Client]) -> None:
    _, _, client = started
    waited = time.monotonic() + 150
    empty = {place.path for place in PLACES} - {"/console/routes"}
    assert "A door before a router writes one" in rendered(client, "/console/routes"), "there is no door"
    while empty and time.monotonic() < waited:
        empty = {path for path in empty if 'class="empty"' in rendered(client, path)}
        time.sleep(2.0)
    assert empty == set()


@pytest.mark.system
def test_what_goes_wrong_can_be_seen(started: tuple[Started, Path, httpx.Client]) -> None:
    """A hung device, a refused identity, an erasure, copies, denials, a request of a person: each is on record."""
    _, _, client = started
    wanted = {
        "attempts-refused",
        "orphan-found",
        "erasure-completed",
        "copies-stored",
        "decision",
        "case-step",
    }
    waited = time.monotonic() + 150
    while wanted and time.monotonic() < waited:
        text = rendered(client, "/console/audit")
        wanted = {kind for kind in wanted if not re.search(rf"{kind} \([\d,]+\)", text)}
        time.sleep(2.0)
    assert wanted == set()


@pytest.mark.system
def test_a_missed_deadline_stands_out(started: tuple[Started, Path, httpx.Client]) -> None:
    """The erasure that was asked for before the engine stalled."""
    _, _, client = started
    waited = time.monotonic() + 120
    while time.monotonic() < waited:
        if re.search(r'class="badge bad">(missed|late)<', rendered(client, "/console/erasures")):
            return
        time.sleep(1.0)
    pytest.fail("no erasure missed its deadline")


@pytest.mark.system
def test_every_page_in_a_browser(started: tuple[Started, Path, httpx.Client]) -> None:
    """Nothing serious for axe, nothing that breaks; with KVCUSTODY_SCREENSHOTS a picture of each."""
    _, _, client = started
    check_in_browser(client, PLACES)


@pytest.mark.system("a command or a page of the tour fails")
def test_each_step_of_the_tour_works(started: tuple[Started, Path, httpx.Client]) -> None:
    running, _, client = started
    assert len(running.said["tour"]) == 5
    for step in running.said["tour"]:
        assert rendered(client, step["page"])
        words = shlex.split(step["command"])
        more = ["--once"] if words[1] == "top" else []
        words = [word for word in words if word != "--follow"]
        done = subprocess.run(
            [PROGRAM, *words[1:], *more],
            env=os.environ | running.said["environment"],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 1) and done.stdout and "error" not in done.stderr, (step, done.stderr)


@pytest.mark.system
def test_ctrl_c_ends_it_and_leaves_nothing(started: tuple[Started, Path, httpx.Client]) -> None:
    made, folder, _ = started
    port = int(made.said["url"].rpartition(":")[2].partition("/")[0])
    assert Path(made.said["folder"]).parent == folder
    assert made.end() == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(made.process.pid, 0)
    assert list(folder.iterdir()) == []
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


@pytest.mark.system
def test_a_named_folder_is_kept_signed_and_gone_on_with(tmp_path: Path) -> None:
    place = tmp_path / "demo"
    for _ in range(2):
        made = start(tmp_path, "--folder", str(place))
        time.sleep(3.0)
        assert made.end(signal.SIGTERM) == 0
    key = json.loads(command("audit", "keys", "--json", "--ledger", made.said["ledger"]))["keys"][0]["key"]
    command("audit", "fsck", "--ledger", made.said["ledger"], "--key", key)
    open_ = json.loads(command("worker", "list", "--json", "--ledger", made.said["ledger"]))
    assert open_["processes"] == [], "every process has said its end"


@pytest.mark.system
def test_a_request_whose_body_does_not_come_is_answered_when_it_ends(tmp_path: Path) -> None:
    """No traceback is said. Control: one whose body has come is answered before."""
    running = start(tmp_path)
    host = running.said["url"].removeprefix("http://").partition("/")[0]
    name, _, port = host.partition(":")
    with socket.create_connection((name, int(port)), 60) as held:
        head = f"POST /console/login HTTP/1.1\r\nHost: {host}\r\nContent-Length: 7\r\n\r\n"
        whole = httpx.post(running.said["url"] + "login", data={"key": "none"})
        assert whole.status_code == 401
        held.sendall(head.encode() + b"key=")
        time.sleep(0.5)  # until it is being read
        assert running.end(signal.SIGTERM) == 0
        assert held.recv(65536).startswith(b"HTTP/1.1 503 ")
    assert running.process.stderr is not None
    said = running.process.stderr.read()
    assert "Traceback" not in said and "ended" in said


def command(*words: str) -> str:
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, check=True).stdout


def failed(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(
        [PROGRAM, "up", *more], check=False, cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.system("`up` that fails leaves something")
def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = failed(tmp_path, "--port", str(taken.getsockname()[1]), "--folder", str(tmp_path / "demo"))
    assert told.returncode == 2 and "address already in use" in told.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.system("`up` writes into somebody's folder")
def test_a_folder_of_somebody_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    told = failed(tmp_path, "--folder", str(tmp_path))
    assert told.returncode == 2 and "did not create" in told.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.system("`up` interrupted at its start leaves something")
def test_ctrl_c_while_it_starts_ends_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [PROGRAM, "up", "--folder", str(tmp_path / "demo")], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stderr is not None
    while "enrolling" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["up"], ["demo", "fleet"]], ids=" ".join)
def test_a_port_in_use_is_named_before_anything_starts(command: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        folder = tmp_path / "place"
        done = CliRunner().invoke(app, [*command, "--port", str(port), "--folder", str(folder)])
    assert done.exit_code == 2 and f"port {port} of 127.0.0.1 cannot be used (address already in use)" in done.output
    assert "--port" in done.output and not folder.exists() and "importing" not in done.output


@pytest.mark.parametrize(
    ("python", "says"), [("", "lacks vllm; install vLLM"), ("/nowhere/python", "does not run as a Python")]
)
def test_a_missing_vllm_is_named_before_anything_starts(python: str, says: str, tmp_path: Path) -> None:
    if not python and find_spec("vllm"):
        pytest.skip("vLLM is installed here")
    more = ["--engine-python", python] if python else []
    done = CliRunner().invoke(app, ["up", "--engine", "vllm", *more, "--folder", str(tmp_path / "place")])
    assert done.exit_code == 2 and says in done.output
    assert not (tmp_path / "place").exists() and "importing" not in done.output


@pytest.mark.parametrize("is_terminal", [True, False])
def test_enter_is_offered_on_a_terminal_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunningPlane, "link", "http://127.0.0.1/link")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: is_terminal)
    RunningPlane(None, Path(), "127.0.0.1:1", "").tell()  # type: ignore[arg-type]
    assert ("Enter prints another" in capsys.readouterr().out) is is_terminal
