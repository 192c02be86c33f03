"""Commands that follow the ledger end with a state: 1 where leaves were lost or batches given up, else 130."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from kvcustody.audit.kinds import KeyEvent
from kvcustody.audit.store.database.engine import open_store
from kvcustody.console.command import following
from standins import builders
from standins.sinks import WebhookReceiver
from standins.waiting import until

SECONDS_MAX = 60


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C is heard, here and by what is started: whoever starts tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_lost_decides_how_following_ends(number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended, following(lambda: True):
        os.kill(os.getpid(), number)
    assert ended.value.exit_code == 1
    with pytest.raises(KeyboardInterrupt), following(lambda: False):
        os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGTERM) is before


def record(path: Path, spill: Path, names: str) -> None:
    engine = open_store(path)
    writer = builders.writer(engine, spill)
    writer.submit([KeyEvent(at, None, "made", at, name) for at, name in enumerate(names, 1)])
    assert writer.flush()
    writer.close()
    engine.dispose()


@pytest.fixture
def follow(tmp_path: Path, migrated: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts commands in a folder with a ledger, and ends those that a test leaves."""
    shutil.copy(migrated, tmp_path / "kvcustody.db")
    record(tmp_path / "kvcustody.db", tmp_path / "1", "ab")
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "kvcustody.console.main", "audit", *words, "--follow", "--unrecorded"],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def line_with(process: subprocess.Popen[str], stream: str, words: str) -> str:
    """The next line that has these words, as soon as it is there; the process ends where it does not come."""
    timer = threading.Timer(SECONDS_MAX, process.kill)
    timer.start()
    try:
        return next(line for line in getattr(process, stream) if words in line)
    finally:
        timer.cancel()


@pytest.mark.parametrize(("restored", "state"), [(True, 1), (False, 130)])
def test_ship_says_a_restore_at_once_and_ends_with_its_state(
    follow: Callable[..., subprocess.Popen[str]], tmp_path: Path, restored: bool, state: int
) -> None:
    ledger = tmp_path / "kvcustody.db"
    shutil.copy(ledger, tmp_path / "backup.db")
    record(ledger, tmp_path / "2", "cdefgh")
    first = follow("ship", "positions.json", "--shape", "leaf")
    line_with(first, "stdout", '"actor":"h"')
    until((tmp_path / "positions.json").exists)
    first.send_signal(signal.SIGINT)
    assert first.wait(SECONDS_MAX) == 130
    if restored:
        for beside in ("-wal", "-shm"):
            ledger.with_name(ledger.name + beside).unlink(missing_ok=True)
        shutil.copy(tmp_path / "backup.db", ledger)
    record(ledger, tmp_path / "3", "xyz")
    again = follow("ship", "positions.json", "--shape", "leaf")
    if restored:
        line_with(again, "stderr", "read again from its first leaf")
    line_with(again, "stdout", '"actor":"z"')
    again.send_signal(signal.SIGTERM)
    assert again.wait(SECONDS_MAX) == state


def test_push_says_what_a_receiver_refuses_and_ends_with_one(
    follow: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "hook.key").write_text("k" * 40)
    with WebhookReceiver() as receiver:
        receiver.status = 400
        push = follow("push", "hook", "--url", receiver.url, "--signing-key", "hook.key")
        assert "refused the batch (400)" in line_with(push, "stderr", "webhook:")
        push.send_signal(signal.SIGTERM)
        assert push.wait(SECONDS_MAX) == 1
