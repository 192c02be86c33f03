"""`pytest --forks N`: the tests in N processes that share one collection.

1. The suite is imported and collected once; the processes are forked from there. pytest-xdist lets each process import
   and collect everything anew, which takes a tenth of this suite's processor time.
2. The tests of a file run in one process, in their order. A process takes the next file when it begins the last test of
   the previous one. So fixtures of the session stay alive between files.
3. Each process reports as pytest does: outcomes, durations, captured output and warnings reach the plugins of the first
   process (terminal, junit).
4. A process that dies fails the test it ran. Another one takes its place and the rest of the file.
"""

from __future__ import annotations

import atexit
import os
import pickle
import random
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

NEXT, REPORT, WARNING, BEGIN, END, FAILED = range(6)
FORK = "KVCUSTODY_TEST_FORK"  # set in a forked process: its number


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option `--forks`."""
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run the tests in N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forked processes, where the option asks for them."""
    option = session.config.option
    if not option.forks or option.collectonly or session.testsfailed:
        return None
    run_forked(session, option.forks)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def run_forked(session: pytest.Session, processes: int) -> None:
    """Run the collected tests of a session in forked processes.

    Args:
        session: after its collection.
        processes: how many run at a time.
    """
    folders: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
    folders.getbasetemp()  # one for all
    files = deque(_by_file(session.items))
    forks: list[_Fork] = []
    for number in range(min(processes, len(files))):
        forks.append(_Fork(session, number, forks))
    while forks:
        for connection in wait([fork.connection for fork in forks]):
            fork = next(fork for fork in forks if fork.connection is connection)
            if fork.receive(files):
                continue
            forks.remove(fork)
            connection.close()
            if fork.left:
                files.appendleft(fork.left)
                forks.append(_Fork(session, fork.number, forks))


def _by_file(items: list[pytest.Item]) -> Iterator[list[int]]:
    """The positions of the tests, those of a file together."""
    files: dict[object, list[int]] = {}
    for position, item in enumerate(items):
        files.setdefault(item.path, []).append(position)
    yield from files.values()


class _Fork:
    """A process that runs tests, seen from the first process."""

    def __init__(self, session: pytest.Session, number: int, others: list[_Fork]) -> None:
        self.session = session
        self.number = number
        self.left: list[int] = []  # handed out and not ended
        self.connection, other = Pipe()
        self.process = os.fork()
        if self.process == 0:
            for fork in (self, *others):  # else nobody would see the first process end
                fork.connection.close()
            _run(session, number, other)
        other.close()

    def receive(self, files: deque[list[int]]) -> bool:
        """Act on the next message; False where the process has ended."""
        hook = self.session.config.hook
        try:
            kind, content = self.connection.recv()
        except (EOFError, ConnectionResetError):
            _, status = os.waitpid(self.process, 0)
            if status == 0:  # it left out the rest after a failure, where the run ends with the first
                self.left.clear()
            elif self.left:
                self._died(status)
            return False
        if kind == NEXT:
            stopped = self.session.shouldstop or self.session.shouldfail
            positions = [] if stopped or not files else files.popleft()
            self.left += positions
            self.connection.send(positions)
        elif kind == BEGIN:
            hook.pytest_runtest_logstart(nodeid=content[0], location=content[1])
        elif kind == END:
            self.left.pop(0)
            hook.pytest_runtest_logfinish(nodeid=content[0], location=content[1])
        elif kind == REPORT:
            report = hook.pytest_report_from_serializable(config=self.session.config, data=content)
            hook.pytest_runtest_logreport(report=report)
        elif kind == WARNING:
            hook.pytest_warning_recorded.call_historic(kwargs=content)
        else:
            raise RuntimeError(content)
        return True

    def _died(self, status: int) -> None:
        item = self.session.items[self.left.pop(0)]
        code = os.waitstatus_to_exitcode(status)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", f"its process ended: {how}", "call", duration=0.0
        )
        item.ihook.pytest_runtest_logreport(report=report)


class _Sender:
    """The plugin of a forked process that tells the first process what happens."""

    def __init__(self, connection: Connection, config: pytest.Config) -> None:
        self.connection = connection
        self.config = config

    def pytest_runtest_logstart(self, nodeid: str, location: object) -> None:
        self.connection.send((BEGIN, (nodeid, location)))

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        self.connection.send((END, (nodeid, location)))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send((REPORT, content))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        try:
            pickle.dumps(warning_message)
        except Exception:  # a warning of a class that another process cannot name
            text = f"{warning_message.category.__name__}: {warning_message.message}"
            warning_message = warnings.WarningMessage(
                UserWarning(text), UserWarning, warning_message.filename, warning_message.lineno
            )
        content = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self.connection.send((WARNING, content))


def _run(session: pytest.Session, number: int, connection: Connection) -> None:
    """Run what the first process hands out, and end."""
    status = 1
    try:
        os.environ[FORK] = str(number)
        random.seed()
        _alone(session.config, number)
        session.config.pluginmanager.register(_Sender(connection, session.config), "forks-sender")
        _run_files(session, connection)
        atexit._run_exitfuncs()
        status = 0
    except BaseException:
        connection.send((FAILED, traceback.format_exc()))
    finally:
        os._exit(status)


def _alone(config: pytest.Config, number: int) -> None:
    """Part from the first process: no terminal, captured output and temporary files of its own."""
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.unregister(name="junitxml") if plugins.has_plugin("junitxml") else None
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folder = folders.getbasetemp() / f"fork-{number}"
    folder.mkdir(mode=0o700, exist_ok=True)
    folders._basetemp = folder


def _run_files(session: pytest.Session, connection: Connection) -> None:
    hook = session.config.hook

    def following() -> list[pytest.Item]:
        connection.send((NEXT, None))
        return [session.items[position] for position in connection.recv()]

    items = following()
    while items:
        item = items.pop(0)
        items = items or following()
        hook.pytest_runtest_protocol(item=item, nextitem=items[0] if items else None)
        if session.shouldfail or session.shouldstop:
            session._setupstate.teardown_exact(None)
            return
