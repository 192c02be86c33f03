"""Work on whole policies in a separate process: one author's work slows nobody else.

1. One task at a time. Two of one party, and sixteen in all, run or wait; more are refused as not now.
2. The process is niced, and bounded in memory and time. A task ends when its caller has gone, or with the service.
3. What comes back is what the task gives here. Work on a small policy is done here, as it takes less than sending it.
4. The process knows no key, no database and no address. It is started when it is first needed.

What a revision shows its gates is kept: every look at the inbox asks for it.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvcustody.errors import ConfigError, CustodyError, PolicyError
from kvcustody.governance.release.activation_gates import Assessment, PolicyAt, TooCostlyError, assess
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.processes import policy_tasks as tasks
from kvcustody.governance.service.processes.pipes import (
    end_process,
    is_there,
    length,
    read_part,
    receive,
    send,
    start_module,
)
from kvcustody.governance.service.processes.policy_tasks import Draft, ReviewFacts
from kvcustody.governance.service.processes.work_for import WORK_FOR, WorkFor
from kvcustody.logger import get_logger
from kvcustody.policies.document.problems import PolicyRejected, Problem
from kvcustody.policies.table.decision_table import DecisionTable
from kvcustody.policies.workbench.prove.model import Proof

_WAITING_MAX = 16
_WAITING_MAX_OF_PARTY = 2
_LOOK_SECONDS = 0.1
_START_SECONDS = 60.0
_PART_SECONDS = 30.0
_NICE = 19
_SESSION = Path("/proc/self/autogroup")  # the share of a session's processes (Linux, sched(7))
_MORE = 1_000
_KEPT_MAX = 32
_READY = b"ready"
_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

Found = TypeVar("Found")


class _Reply(NamedTuple):
    """What became of a task in the other process."""

    found: Any = None
    rejected: tuple[tuple[Problem, ...], int] | None = None  # what `PolicyRejected` is made of
    costly: str = ""
    unfit: str = ""  # the question, in the words of a `ConfigError`
    refused: str = ""  # by another error of ours, in its words
    failed: str = ""  # by a fault


class PolicyWork:
    """The process, and those who wait for it. Close it at the end."""

    def __init__(self, *, seconds: float, bytes_max: int) -> None:
        self._seconds = seconds
        self._bytes_max = bytes_max
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Condition()
        self._waiting: list[WorkFor] = []  # the first is at work
        self._closing = False
        self._kept: OrderedDict[object, Any] = OrderedDict()

    def call(self, task: Callable[..., Found], *given: Any, more: int = 0) -> Found:
        """Return a task's result for drafts and tables; `more` counts what else it visits.

        Raises `PolicyRejected` as it does, `TooCostlyError`, and `unavailable` where too many wait or the caller has
        gone.
        """
        if more < _MORE and all(_is_small(each) for each in given):
            reply = _reply(task, given)
        else:
            with self._my_turn(WORK_FOR.get()) as asker:
                reply = self._ask(pickle.dumps((task, given)), asker)
        found: Found = _found(reply)
        return found

    def answer(self, task: Callable[..., Any], *given: Any, more: int = 0) -> bytes:
        """Return a task's result in the API's form."""
        return self.call(tasks.answer, task, *given, more=more)

    def assess(self, candidate: PolicyAt, base: PolicyAt | None) -> Assessment:
        """Return `activation_gates.assess`, cached."""
        if not _are_of_documents(candidate, base):
            return assess(candidate, base)
        return self._keeping(tasks.assessed, _draft(candidate), None if base is None else _draft(base))

    def review(self, candidate: PolicyAt, base: PolicyAt | None, manifest: str) -> ReviewFacts:
        """Return a reviewer's facts, cached; made in the process because they may be megabytes."""
        if not _are_of_documents(candidate, base):
            return tasks.review_facts(assess(candidate, base), manifest)
        before = None if base is None else _draft(base)
        return self._keeping(tasks.reviewed, _draft(candidate), before, manifest)

    def proved(self, draft: Draft) -> Proof:
        """Return the proof of a document, cached."""
        return self._keeping(tasks.proved, draft)

    def close(self) -> None:
        """End the process and its work."""
        with self._turn:
            self._closing = True
            self._turn.notify_all()
            idle = not self._waiting
        if idle:
            self._end()

    def _keeping(self, task: Callable[..., Found], *given: Any) -> Found:
        key = (task.__name__, *given)
        if key not in self._kept:
            try:
                outcome: Any = self.call(task, *given)
            except TooCostlyError as error:
                outcome = error
            self._kept[key] = outcome
            while len(self._kept) > _KEPT_MAX:
                with suppress(KeyError):  # another thread was first
                    self._kept.popitem(last=False)
        outcome = self._kept.get(key)
        if outcome is None:
            return self._keeping(task, *given)
        if isinstance(outcome, TooCostlyError):
            raise TooCostlyError(outcome.message)
        found: Found = outcome
        return found

    @contextmanager
    def _my_turn(self, asker: WorkFor) -> Iterator[WorkFor]:
        """Wait until nobody else's task runs (rule 1)."""
        place = WorkFor(asker.party, asker.has_gone)
        with self._turn:
            mine = sum(other.party == place.party for other in self._waiting)
            if len(self._waiting) >= _WAITING_MAX or mine >= _WAITING_MAX_OF_PARTY:
                whose = "your " if mine >= _WAITING_MAX_OF_PARTY else ""
                raise _not_now(f"too many of {whose}checks of policies are waiting")
            self._waiting.append(place)
        try:
            while True:
                with self._turn:
                    if self._closing or self._waiting[0] is place:
                        break
                    self._turn.wait(_LOOK_SECONDS)
                _check_there(place)
            if self._closing:
                raise _not_now("the service ends")
            yield place
        finally:
            with self._turn:
                self._waiting = [other for other in self._waiting if other is not place]
                self._turn.notify_all()

    def _ask(self, question: bytes, asker: WorkFor) -> _Reply:
        try:
            process = self._ready(asker)
            send(process, length(question) + question, time.monotonic() + _PART_SECONDS)
            self._wait(process, asker, self._seconds)
            reply = pickle.loads(receive(process, time.monotonic() + _PART_SECONDS))  # noqa: S301 - of our own process
            assert isinstance(reply, _Reply)
            return reply
        except TimeoutError:
            self._end()
            return _Reply(costly=f"the work is not done within {self._seconds:g} seconds")
        except (OSError, EOFError) as problem:
            self._end()
            get_logger(__name__).warning("the process for policies ended", why=repr(problem))
            if self._closing:
                raise _not_now("the service ends") from None
            return _Reply(costly="the process that works on policies ended: it needs too much memory or time")
        except BaseException:
            self._end()
            raise

    def _ready(self, asker: WorkFor) -> subprocess.Popen[bytes]:
        """The process, started where there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        words = (str(self._bytes_max), str(int(self._seconds) + 1))
        self._process = start_module(__name__, *words, more=_THREADS)
        self._wait(self._process, asker, _START_SECONDS)
        if receive(self._process, time.monotonic() + _PART_SECONDS) != _READY:
            raise EOFError
        return self._process

    def _wait(self, process: subprocess.Popen[bytes], asker: WorkFor, seconds: float) -> None:
        """Until the process says something; raises `TimeoutError`, and `ProblemError` where nobody waits for it."""
        until = time.monotonic() + seconds
        while not is_there(process, select.POLLIN, _LOOK_SECONDS):
            if self._closing:
                raise _not_now("the service ends")
            _check_there(asker)
            if time.monotonic() >= until:
                raise TimeoutError

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_process(process)


def _is_small(given: Any) -> bool:
    if isinstance(given, Draft):
        return given.is_small
    return not isinstance(given, DecisionTable) or tasks.is_small(given.policy)


def _are_of_documents(candidate: PolicyAt, base: PolicyAt | None) -> bool:
    """False: one was made here, from nothing that came from outside."""
    return bool(candidate.policy.source) and (base is None or bool(base.policy.source))


def _draft(at: PolicyAt) -> Draft:
    return Draft(at.policy.source, at.revision, at.revoked, at.policy.file or "policy")


def _check_there(asker: WorkFor) -> None:
    if asker.has_gone():
        raise _not_now("the caller has disconnected")


def _not_now(why: str) -> ProblemError:
    return ProblemError("unavailable", why, headers={"Retry-After": "5"})


def _found(reply: _Reply) -> Any:
    """What a task found; raises what it raised, as `call` says."""
    if reply.rejected is not None:
        raise PolicyRejected(*reply.rejected)
    if reply.costly:
        raise TooCostlyError(reply.costly)
    if reply.unfit:
        raise ConfigError(reply.unfit)
    if reply.refused:
        raise PolicyError(reply.refused)
    if reply.failed:
        get_logger(__name__).error("work on a policy failed", why=reply.failed)
        raise ProblemError("internal")
    return reply.found


def _reply(task: Callable[..., Any], given: tuple[Any, ...]) -> _Reply:
    try:
        return _Reply(task(*given))
    except PolicyRejected as rejected:
        return _Reply(rejected=(rejected.problems, rejected.omitted))
    except TooCostlyError as costly:
        return _Reply(costly=costly.message)
    except MemoryError:
        return _Reply(costly="the work needs more memory than it may have")
    except ConfigError as unfit:
        return _Reply(unfit=unfit.message)
    except CustodyError as refused:
        return _Reply(refused=refused.message)


def _be_nice() -> None:
    """Let others go first. Where Linux shares processors by session, a nice value counts within the session alone."""
    os.nice(_NICE)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            _SESSION.write_text(str(_NICE))


def main() -> None:
    """Run one task after the other until standard input ends."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no answer
    bytes_max, seconds = map(int, sys.argv[1:])
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (bytes_max, bytes_max))
    _be_nice()
    answer = _READY
    while True:
        sink.write(length(answer) + answer)
        sink.flush()
        try:
            question = read_part(sys.stdin.buffer)
        except EOFError:
            return
        signal.alarm(seconds)  # also where the service has died meanwhile
        task, given = pickle.loads(question)  # noqa: S301 - of our parent
        try:
            reply = _reply(task, given)
        except Exception as fault:
            reply = _Reply(failed=repr(fault)[:500])
        answer = pickle.dumps(reply)
        signal.alarm(0)


if __name__ == "__main__":
    from kvcustody.governance.service.processes import policy_work

    policy_work.main()  # of the module that its parent knows: what it pickles has that name
