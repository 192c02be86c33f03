"""Work on whole policies in a process beside the service: what it finds, what it refuses, and how it ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvcustody.governance.release.activation_gates import PolicyAt, TooCostlyError, assess
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.processes import policy_tasks as tasks
from kvcustody.governance.service.processes.policy_tasks import GRANTS_MAX, Draft, Question, count_grants
from kvcustody.governance.service.processes.policy_work import PolicyWork
from kvcustody.governance.service.processes.work_for import WORK_FOR, WorkFor
from kvcustody.policies.document.model import Action, Scope, Via
from kvcustody.policies.document.problems import PolicyRejected
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.workbench.simulate import Recorded, RecordedDenials
from standins.policies.large_policies import large_policy
from standins.waiting import until

BESIDE = 2_000  # goes through so much: it is done beside, whatever the policy
WAIT_SECONDS = 60.0
NOW_US = 1_790_000_000_000_000
CASES = """schema: kvcustody/policy-tests@1
cases:
  - name: a stranger
    ask: {action: reuse, reader: tenant-00001, owner: tenant-00002, classification: public, via: grant, scope: tenant,
          at: 2026-06-01}
    expect: deny
"""


@pytest.fixture(scope="module")
def work() -> Iterator[PolicyWork]:
    made = PolicyWork(seconds=60, bytes_max=2 << 30)
    yield made
    made.close()


@pytest.fixture
def make_work() -> Iterator[Callable[..., PolicyWork]]:
    works: list[PolicyWork] = []

    def make(seconds: float = 60, bytes_max: int = 2 << 30) -> PolicyWork:
        works.append(PolicyWork(seconds=seconds, bytes_max=bytes_max))
        return works[-1]

    yield make
    for one in works:
        one.close()


OLD, NEW = Draft(large_policy(14, 40, seed=1)), Draft(large_policy(14, 40, seed=2))
QUESTION = Question(Action.REUSE, "tenant-00001", "tenant-00002", "public", Scope.TENANT, Via.GRANT, NOW_US, None)
GIVEN: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "validate": (tasks.validated, (NEW,)),
    "lint": (tasks.linted, (NEW, NOW_US, ("host",))),
    "test": (tasks.tested, (NEW, CASES, "cases")),
    "diff": (tasks.compared, (OLD, NEW)),
    "diff with what is in effect": (tasks.compared, (OLD.table(), NEW)),
    "prove": (tasks.proved, (NEW,)),
    "simulate": (
        tasks.simulated,
        (
            OLD,
            NEW,
            [Recorded("tenant-00003", "public", NOW_US, ("g1",), 3, 2)],
            [RecordedDenials("tenant-00003", "tenant-00004", "default-deny", 7)],
        ),
    ),
    "explain": (tasks.explained, (NEW, QUESTION)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_the_other_process_finds_what_this_one_finds(work: PolicyWork, name: str) -> None:
    task, given = GIVEN[name]
    assert not NEW.is_small
    here = task(*given)
    assert work.call(task, *given) == here
    assert name != "validate" or here.sound
    assert work._process is not None and work._process.pid != os.getpid()
    if hasattr(here, "data"):
        assert work.answer(task, *given) == orjson.dumps(here.data(), default=str)


def test_a_revision_is_assessed_beside_as_here(work: PolicyWork) -> None:
    candidate = PolicyAt(load_policy(NEW.source, name="policy"), 3, frozenset({"g1"}))
    base = PolicyAt(load_policy(OLD.source, name="policy"), 2, frozenset({"g1"}))
    for against in (base, None):
        found = work.assess(candidate, against)
        assert found == assess(candidate, against)
        assert work.assess(candidate, against) is found, "kept"


def test_what_is_rejected_is_told_as_here(work: PolicyWork) -> None:
    wrong = Draft(NEW.source.replace("public", "pubic", 1))
    with pytest.raises(PolicyRejected) as here:
        tasks.proved(wrong)
    with pytest.raises(PolicyRejected) as beside:
        work.call(tasks.proved, wrong)
    assert beside.value.problems == here.value.problems and str(beside.value) == str(here.value)


def test_a_policy_of_too_many_grants_is_refused_before_any_is_made(work: PolicyWork) -> None:
    """A sharing group of 72 stands for 5,112 grants; one of 71 for 4,970."""
    sizes = {members: Draft(large_policy(members, 0, group=True)) for members in (71, 72)}
    policies = {members: load_policy(draft.source, name="policy") for members, draft in sizes.items()}
    for members, policy in policies.items():
        assert count_grants(policy) == len(policy.group_grants()) == members * (members - 1)
    assert count_grants(policies[71]) <= GRANTS_MAX < count_grants(policies[72])
    tasks.check_size(policies[71])
    with pytest.raises(TooCostlyError, match="5112 grants"):
        work.call(tasks.proved, sizes[72])


def test_work_that_takes_too_long_is_ended(make_work: Callable[..., PolicyWork]) -> None:
    work = make_work(seconds=1)
    with pytest.raises(TooCostlyError, match="not done within 1 seconds"):
        work.call(time.sleep, WAIT_SECONDS, more=BESIDE)
    assert work.call(abs, -3, more=BESIDE) == 3, "and the next is done"


def test_work_that_needs_too_much_memory_is_ended(make_work: Callable[..., PolicyWork]) -> None:
    work = make_work(bytes_max=1 << 30)
    assert len(work.call(bytes, 1 << 20, more=BESIDE)) == 1 << 20
    with pytest.raises(TooCostlyError, match="memory"):
        work.call(bytes, 2 << 30, more=BESIDE)
    assert work.call(abs, -3, more=BESIDE) == 3


def test_it_is_niced_and_ends_with_the_service(make_work: Callable[..., PolicyWork]) -> None:
    work = make_work()
    assert work.call(os.getpriority, os.PRIO_PROCESS, 0, more=BESIDE) == 19
    process = work._process
    assert process is not None and process.poll() is None
    session = Path(f"/proc/{process.pid}/autogroup")
    if session.exists():  # where Linux shares processors by session
        assert session.read_text().split()[-1] == "19"
    work.close()
    assert process.poll() is not None


def test_one_task_at_a_time_and_two_of_a_party(make_work: Callable[..., PolicyWork]) -> None:
    """Three parties ask at once: one task runs, a third of one party is refused, and others are served after it."""
    work = make_work()
    work.call(abs, -1, more=BESIDE)
    ran: list[tuple[float, float]] = []

    def ask(party: str) -> None:
        WORK_FOR.set(WorkFor(party))
        begun = work.call(time.monotonic, more=BESIDE)
        work.call(time.sleep, 0.2, more=BESIDE)
        ran.append((begun, work.call(time.monotonic, more=BESIDE)))

    blocked = threading.Thread(target=lambda: work.call(time.sleep, 1.0, more=BESIDE))
    blocked.start()
    until(lambda: len(work._waiting) == 1)
    others = [threading.Thread(target=ask, args=(party,)) for party in ("a", "a", "b")]
    for other in others:
        other.start()
    until(lambda: len(work._waiting) == 4)
    WORK_FOR.set(WorkFor("a"))
    with pytest.raises(ProblemError, match="too many of your"):
        work.call(abs, -1, more=BESIDE)
    WORK_FOR.set(WorkFor("c"))
    assert work.call(abs, -4, more=BESIDE) == 4
    for thread in (blocked, *others):
        thread.join(WAIT_SECONDS)
    assert len(ran) == 3


def test_work_ends_when_its_caller_has_gone(make_work: Callable[..., PolicyWork]) -> None:
    work, gone = make_work(), threading.Event()
    work.call(abs, -1, more=BESIDE)
    process = work._process
    assert process is not None
    WORK_FOR.set(WorkFor("a", gone.is_set))
    threading.Timer(0.3, gone.set).start()
    with pytest.raises(ProblemError, match="the caller has disconnected"):
        work.call(time.sleep, WAIT_SECONDS, more=BESIDE)
    assert process.poll() is not None
    WORK_FOR.set(WorkFor("a"))
    assert work.call(abs, -3, more=BESIDE) == 3


def test_a_caller_that_hangs_up_ends_its_proof(service: Any, server: Any, people: Any) -> None:
    """The process that works is killed soon after the connection is closed, and not while it is open."""
    draft = large_policy(2, 3_000, windows=True)
    body = orjson.dumps({"source": draft})
    host, port = server.address.removeprefix("http://").split(":")
    head = (
        f"POST /v1/policies:prove HTTP/1.1\r\nHost: kv\r\nAuthorization: Bearer {people['author']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    link = socket.create_connection((host, int(port)))
    link.sendall(head.encode() + body)
    work = service.policy_work
    until(lambda: bool(work._waiting) and work._process is not None)
    process = work._process
    time.sleep(0.5)
    assert process.poll() is None and len(work._waiting) == 1, "it works while somebody waits for it"
    link.close()
    until(lambda: process.poll() is not None and not work._waiting)


def test_the_api_refuses_what_is_too_costly_and_says_what_to_do(client: Any, people: Any) -> None:
    source = large_policy(72, 0, group=True)
    for path in ("prove", "lint", "diff", "simulate", "test"):
        body = {"source": source, "old": source} if path in ("diff", "simulate") else {"source": source}
        answer = client(
            "POST",
            f"/v1/policies:{path}",
            people["author"],
            json={**body, **({"cases": CASES} if path == "test" else {})},
        )
        problem = answer.json()
        assert answer.status_code == 422 and problem["type"].endswith(":policy-too-costly"), problem
        assert "5112 grants" in problem["detail"] and "5000 at most" in problem["detail"]
