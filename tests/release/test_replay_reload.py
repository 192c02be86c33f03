"""Hot reload under replay load: a whole replay over real tensors and a real ledger, while its policy changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from kvcustody.governance.governor.governor import Governor
from kvcustody.lab.replay.options import EnvironmentOptions, RunnerOptions
from kvcustody.lab.replay.report import ReplayReport
from kvcustody.lab.replay.run import job
from kvcustody.lab.replay.run.runner import Runner
from kvcustody.lab.replay.run.workload_from_options import Choice, load_workload
from kvcustody.policies import library
from kvcustody.policies.document.model import Policy, Scope
from kvcustody.policies.table.compile import compile_policy

EVERY = 5


def without_sharing(policy: Policy) -> Policy:
    return replace(policy, segments=())


def shorter(policy: Policy) -> Policy:
    return replace(policy, retention=tuple(replace(r, idle_us=r.idle_us // 10) for r in policy.retention))


def narrower_scope(policy: Policy) -> Policy:
    return replace(policy, tenants=tuple(replace(t, scope=Scope.SESSION) for t in policy.tenants))


def nobody(policy: Policy) -> Policy:
    return replace(policy, tenants=(replace(policy.tenants[0], id="elsewhere"),), default=None)


CHANGES = (without_sharing, shorter, narrower_scope, lambda policy: policy)


def replayed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, conversations: int
) -> tuple[ReplayReport, int]:
    """A replay that activates the next of `changes` every few requests; also, how many were activated."""
    governors: list[Governor] = []
    waiting: list[Any] = []

    class Watched(Runner):
        def __init__(self, governor: Governor, *rest: Any, **options: Any) -> None:
            governors.append(governor)
            super().__init__(governor, *rest, **options)

    monkeypatch.setattr(job, "Runner", Watched)
    following: Any = cycle(changes)
    requests = 0

    def progress() -> None:
        nonlocal requests
        requests += 1
        if requests % EVERY == 0:
            governor = governors[0]
            start = starts.setdefault(0, governor.table.policy)
            table = compile_policy(next(following)(start), revision=2 + len(waiting))
            waiting.append(governor.call(lambda owned: owned.activate(table, actor="grace")))

    starts: dict[int, Policy] = {}
    workload = load_workload(Choice(conversations=conversations, tenants=4), 16, "small")
    roomy = folder / "roomy.yaml"  # so that no request is put off for want of room
    roomy.write_text(library.source("regulated-saas").replace("cap: 10%", "cap: 100%, borrow: true"))
    options = EnvironmentOptions(policy=str(roomy), pool_blocks=2048, database=folder / "ledger.db")
    report = job.run_job(workload, options, RunnerOptions(checked_share=1.0), progress=progress)
    done: Callable[[Any], bool] = lambda future: future.done() and future.exception() is None  # noqa: E731
    return report, sum(map(done, waiting))


def failed(report: ReplayReport) -> int:
    """Requests that were refused or put off for good."""
    return int(report.totals.refused + report.totals.deferred)


def check(report: ReplayReport) -> None:
    """What must hold of every replay, reloads or not."""
    assert report.stopped is None
    assert [row for row in report.identities if not row.holds] == [] and report.drift_blocks == 0
    assert report.residue_bytes == 0 and report.residue_checked_blocks > 0 and report.wrong_tokens == 0
    found = report.coverage
    assert found.failed == found.missing == found.unproven == found.overdue == 0 < found.due
    # The replay's clock runs at the machine's speed: a scrub is late where the machine was taken away meanwhile.
    assert found.in_time + found.late == found.due and found.late <= found.due // 10_000
    assert found.disputed == 0, "leaves alone give the due times of what a reload narrowed, too"


def test_reloads_under_replay_load_fail_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, reloads = replayed(tmp_path, monkeypatch, CHANGES, 20)
    assert reloads >= 8 and report.totals.hit_tokens > 0, "void: no reload, or no load"
    assert failed(report) == 0
    check(report)


@pytest.mark.soak
def test_reloads_under_replay_load_at_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, reloads = replayed(tmp_path, monkeypatch, CHANGES, 600)
    assert reloads >= 200 and failed(report) == 0
    check(report)


def test_a_reload_that_lists_nobody_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the replay counts a request that a reload makes fail."""
    assert failed(replayed(tmp_path, monkeypatch, (nobody,), 6)[0]) > 0
