"""A thread that guards something goes on after any exception; where it ends, nothing is admitted and health says so."""

from __future__ import annotations

import ast
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvcustody import guarding_thread
from kvcustody.guarding_thread import FAILURES_MAX, GuardingThread, not_guarding, open_question
from standins.architecture.parsed import parsed_text

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("audit", "governance", "integrations")
ENDS_AT_ONCE = {"kvcustody-ledger"}  # it has closed its sink by then; the writer looks at it itself, too

TIMERS = {"attempts.py"}  # a new one each window; see the test of what it cannot record


class OddError(Exception):
    """Of a kind that no loop knows."""


class Begun(NamedTuple):
    """Where a thread is begun: the module, the name of its work, and the call."""

    place: str
    work: str
    call: ast.Call


def _begun() -> Iterator[Begun]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            for node in ast.walk(parsed_text(source)) if "GuardingThread(" in source else ():
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "GuardingThread":
                    work = ast.unparse(node.args[0]).removeprefix("self.")
                    yield Begun(path.relative_to(ROOT).as_posix(), work, node)


THREADS = list(_begun())


def _work_of(begun: Begun) -> Callable[..., object]:
    """The function that a thread runs, unbound."""
    name = begun.place.removesuffix(".py").replace("/", ".")
    try:
        module = importlib.import_module(f"kvcustody.{name}")
    except ImportError as missing:
        pytest.skip(f"{missing.name} is not installed")
    if hasattr(module, begun.work):
        return vars(module)[begun.work]  # type: ignore[no-any-return]
    owners = [
        made
        for made in vars(module).values()
        if isinstance(made, type) and made.__module__ == module.__name__ and begun.work in vars(made)
    ]
    assert owners, f"{begun.place}: nobody has {begun.work}"
    return vars(owners[0])[begun.work]  # type: ignore[no-any-return]


class OddState:
    """State that raises what no loop knows, so many times, and then what ends any thread."""

    def __init__(self, failures: int) -> None:
        self.__dict__["left"] = failures

    def _raise(self, *_given: Any) -> Any:
        self.__dict__["left"] -= 1
        if self.__dict__["left"] < 0:
            raise SystemExit
        raise OddError

    __getattr__ = __call__ = __setattr__ = _raise


@pytest.fixture(autouse=True)
def nothing_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this module ends is of no other test."""
    monkeypatch.setattr(guarding_thread, "_failing", type(guarding_thread._failing)())
    monkeypatch.setattr(guarding_thread, "_log", OddState(1 << 30))  # no more does a log that fails end one


def _name_of(begun: Begun) -> str:
    name = next(given.value for given in begun.call.keywords if given.arg == "name")
    return str(name.value) if isinstance(name, ast.Constant) else ast.unparse(name)


@pytest.mark.parametrize("begun", THREADS, ids=lambda begun: f"{begun.place}:{begun.work}")
def test_every_thread_goes_on_after_an_odd_exception_and_its_end_is_seen(begun: Begun) -> None:
    work, state = _work_of(begun), OddState(FAILURES_MAX - 1)
    named = {given.arg: given.value for given in begun.call.keywords}
    extra = len(named["args"].elts) if isinstance(named.get("args"), ast.Tuple) else 0
    is_method = ast.unparse(begun.call.args[0]).startswith("self.")
    paused: list[tuple[str, ...]] = []
    ends_at_once = "goes_on" in named
    assert ends_at_once is (_name_of(begun) in ENDS_AT_ONCE)
    thread = GuardingThread(
        work,
        name="odd",
        args=[state] * (extra + is_method),
        goes_on=not ends_at_once,
        pause=lambda _seconds: paused.append(not_guarding()),
    )
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert ends_at_once or set(paused) == {()}, "it went on, and guarded"
    assert not thread.guards and not_guarding() == ("odd",), "its end is seen"


def test_no_other_thread_is_begun() -> None:
    """Positive control with the enumeration: there are as many as there were, and each of them is a guarding one."""
    assert len(THREADS) >= 26
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "threading.Thread(" not in text, path
            assert "threading.Timer(" not in text or path.name in TIMERS, path
            assert "import Thread" not in text.replace("import ThreadPoolExecutor", ""), path


def test_without_the_guard_a_thread_ends_unseen() -> None:
    """Positive control: a plain thread with the same work."""
    seen: list[type[BaseException]] = []
    before, threading.excepthook = threading.excepthook, lambda given: seen.append(given.exc_type)
    try:
        plain = threading.Thread(target=OddState(1)._raise)
        plain.start()
        plain.join()
    finally:
        threading.excepthook = before
    assert seen == [OddError] and not_guarding() == ()


def test_work_that_keeps_failing_guards_no_more_until_it_is_well() -> None:
    seen: list[tuple[str, ...]] = []

    def work() -> None:
        if len(seen) < FAILURES_MAX:
            raise OddError

    def pause(_seconds: float) -> None:
        seen.append(not_guarding())

    thread = GuardingThread(work, name="failing", pause=pause)
    thread.start()
    thread.join(30)
    assert seen == [()] * (FAILURES_MAX - 1) + [("failing",)]
    assert not_guarding() == (), "work that returned has ended in order"


def test_while_a_thread_guards_no_more_nothing_is_admitted_and_health_says_so(tmp_path: Path) -> None:
    from kvcustody.audit.write.event_writer import LedgerWriter
    from kvcustody.governance.api.operations import health

    class Alive:
        """A writer whose own thread and room are well."""

        class _outage:
            full = False

        class _settings:
            capacity = 1

        _intake: tuple[()] = ()
        _thread = threading.current_thread()

    assert LedgerWriter.admitting.fget(Alive()) is True  # type: ignore[attr-defined]
    thread = GuardingThread(OddState(0), name="ended")
    thread.start()
    thread.join(30)
    assert LedgerWriter.admitting.fget(Alive()) is False  # type: ignore[attr-defined]
    assert health.not_guarding() == ("ended",)


def test_refusals_that_cannot_be_recorded_wait_for_the_next_window() -> None:
    """The one timer: whatever recording raises, the next window is armed, and nothing is lost."""
    from kvcustody.clock import VirtualClock
    from kvcustody.governance.observability.attempts import Attempts, AttemptsReporter

    recorded: list[int] = []

    def record(taken: Any) -> None:
        recorded.append(sum(one.attempts for one in taken))
        if len(recorded) == 1:
            raise OddError

    recorder = AttemptsReporter(Attempts("service", VirtualClock()), record)
    recorder.note("invalid")
    recorder.flush()
    assert recorder._timer is not None
    recorder.close()
    assert recorded == [1, 1]


def test_an_odd_row_hinders_no_erasure_and_no_other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """An erasure that cannot be read is left; orders that cannot be read stay as they were, and the thread is told."""
    from sqlalchemy import create_engine

    from kvcustody.audit.evidence.erasure.requests_and_answers import Requested
    from kvcustody.governance.erasure import erasure_inbox

    class Facade:
        def __init__(self) -> None:
            self.erased: list[Any] = []

        def end_keys_in_service(self) -> None: ...

        def call(self, command: Any) -> Any:
            if isinstance(command, erasure_inbox._Command):
                self.erased.append(command._order["erasure"])
            return None

    def requested(erasure: str, detail: str) -> Requested:
        values: dict[str, Any] = dict.fromkeys(Requested._fields, 0)
        return Requested(**values | {"erasure": erasure, "tenant": "acme", "actor": "dpo", "detail": detail})

    owed = [requested("odd", "{not json"), requested("whole", "")]
    monkeypatch.setattr(erasure_inbox, "pending", lambda *_: owed)
    monkeypatch.setattr(erasure_inbox, "names", lambda *_: erasure_inbox.SelectorNames(None, None))
    monkeypatch.setattr(erasure_inbox, "_key_orders", lambda *_: ())
    monkeypatch.setattr(erasure_inbox, "_enforcement", lambda *_: None)
    monkeypatch.setattr(erasure_inbox, "restricted_now", lambda *_: erasure_inbox.NOBODY_RESTRICTED)
    inbox, facade = erasure_inbox.ErasureInbox(create_engine("sqlite://"), "worker", 0), Facade()
    inbox.look(facade)  # type: ignore[arg-type]
    assert facade.erased == ["whole"]
    owed.append(requested("later", ""))
    monkeypatch.setattr(erasure_inbox, "_enforcement", OddState(1)._raise)
    with pytest.raises(OddError):
        inbox.look(facade)  # type: ignore[arg-type]
    assert facade.erased == ["whole", "later"], "carried out all the same"


@pytest.mark.parametrize("is_held_open", [True, False])
def test_an_end_waits_for_a_request_but_not_for_a_question_that_is_held_open(is_held_open: bool) -> None:
    asked, answered = threading.Event(), threading.Event()

    def ask() -> None:
        with open_question() if is_held_open else nullcontext():
            asked.set()
            answered.wait(60)

    thread = GuardingThread(ask, name="kvcustody-asks")
    thread.start()
    assert asked.wait(60)
    if not is_held_open:
        threading.Timer(0.1, answered.set).start()
    thread.end(60)
    assert thread.is_alive() is is_held_open
    answered.set()
    thread.join(60)
