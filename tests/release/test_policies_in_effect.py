"""What is in effect, from what workers run and the release beside it: stages, revocations, several at once, none."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvcustody.audit.evidence.processes.running_policies import RunningPolicy, running_policies
from kvcustody.audit.evidence.processes.work_periods import WorkPeriod
from kvcustody.errors import PolicyError
from kvcustody.governance.decisions.policy_on_record import documents_on_record, revoked_on_record
from kvcustody.governance.decisions.staged_table import Stage, StagedTable
from kvcustody.governance.release.policies_in_effect import policies_in_effect
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.policies.table.compile import compile_policy
from standins.release.release_world import FORBID, READS, THIRD, Release, policy

NOW = 1_767_225_600_000_000


@pytest.fixture
def release(tmp_path: Path) -> Release:
    made = Release(tmp_path)
    made.release_reads()
    return made


def run(worker: str, document: str, revision: int = 1, **said: Any) -> RunningPolicy:
    table = compile_policy(load_policy(document, name="policy"), revision=revision)
    found = RunningPolicy(
        worker, worker.encode().hex(), revision, table.policy.name, table.digest, NOW, document=document
    )
    return found._replace(**said)


def test_where_nobody_is_at_work_it_is_what_is_released_and_said_to_be_that(release: Release) -> None:
    state = release.desk.state()
    found = policies_in_effect((), state)
    assert not found.at_work and found.the_one().revision == 1 and found.the_one().workers == ()
    assert [way.id for way in found.openings(NOW)] == ["reads"]
    with pytest.raises(PolicyError, match="no policy is in effect"):
        policies_in_effect((), None).the_one()


def test_what_workers_run_goes_before_what_is_released(release: Release) -> None:
    state = release.desk.state()
    found = policies_in_effect([run("gpu-0", policy(THIRD, name="local"))], state)
    assert found.at_work and not found.the_one().released
    assert [way.id for way in found.openings(NOW)] == ["third-reads"]
    assert found.openings(NOW, owner="reader") == ()
    same = policies_in_effect([run("gpu-0", release_source(state))._replace(document="")], state)
    assert same.the_one().released, "control: the release's own revision needs no document on record"
    assert [way.id for way in same.openings(NOW)] == ["reads"]


def release_source(state: Any) -> str:
    return str(state.active.document)


def test_several_are_told_and_none_is_picked(release: Release) -> None:
    state = release.desk.state()
    running = [run("gpu-0", release_source(state)), run("gpu-1", policy(THIRD, name="local"))]
    found = policies_in_effect(running, state)
    with pytest.raises(PolicyError, match=r"workers run 2 policies: .*gpu-1.*gpu-0"):
        found.the_one()
    assert {way.id for way in found.openings(NOW)} == {"reads", "third-reads"}


def test_what_is_revoked_is_shown_as_that_once_no_worker_lets_it_through() -> None:
    document = policy(READS)
    gone = frozenset({"reads"})
    both = policies_in_effect([run("gpu-0", document, revoked=gone), run("gpu-1", document, revoked=gone)], None)
    assert [way.state for way in both.openings(NOW)] == ["revoked"]
    one = policies_in_effect([run("gpu-0", document, revoked=gone), run("gpu-1", document)], None)
    assert [way.state for way in one.openings(NOW)] == ["live"], "gpu-1 lets it through"


def test_a_stage_stands_beside_what_everybody_has(release: Release) -> None:
    state = release.desk.state()
    staged = run("gpu-0", policy(READS, THIRD), 2, stage="third")
    found = policies_in_effect([run("gpu-0", release_source(state)), staged], state)
    assert found.the_one().revision == 1 and [one.stage for one in found.policies] == ["", "third"]
    assert {way.id for way in found.openings(NOW)} == {"reads", "third-reads"}


def test_a_worker_of_which_nothing_is_on_record_is_named(release: Release) -> None:
    bare = RunningPolicy("gpu-9", "ab", 0, "", "", NOW)
    found = policies_in_effect([bare], release.desk.state())
    assert found.unsaid == ("gpu-9",) and not found.at_work and found.the_one().released


def leaf(kind: str, sequence: int, incarnation: str = "a", **said: Any) -> dict[str, Any]:
    return {"kind": kind, "sequence": sequence, "incarnation": incarnation, "at_us": sequence, **said}


def activated(sequence: int, revision: int, digest: str, **said: Any) -> dict[str, Any]:
    return leaf("policy-activated", sequence, revision=revision, name="p", digest=digest, **said)


def test_the_last_activation_of_the_newest_process_counts() -> None:
    bodies = [
        activated(1, 1, "sha256:one"),
        leaf("policy-text", 2, digest="sha256:two", number=2, of=2, text="b"),
        leaf("policy-text", 3, digest="sha256:two", number=1, of=2, text="a"),
        leaf("policy-staged", 4, revision=2, name="p", digest="sha256:two", stage="acme"),
        leaf("grants-revoked", 5, ids=["reads"]),
        activated(1, 7, "sha256:dead", incarnation="b") | {"incarnation": "b"},
    ]
    periods = {"a": WorkPeriod("gpu-0", 10, None), "b": WorkPeriod("gpu-0", 5, None)}
    base, staged = running_policies(bodies, periods)
    assert (base.revision, base.stage, base.document) == (1, "", "")
    assert (staged.revision, staged.stage, staged.document) == (2, "acme", "ab")
    assert base.revoked == staged.revoked == {"reads"}
    [whole] = running_policies([*bodies, activated(6, 2, "sha256:two")], periods)
    assert (whole.revision, whole.stage, whole.document) == (2, "", "ab")
    assert running_policies(bodies, {"a": WorkPeriod("gpu-0", 10, 20, "stopped")}) == ()
    partly = [body for body in bodies if body.get("number") != 1]
    assert running_policies(partly, periods)[1].document == "", "a piece is lacking"


@pytest.mark.parametrize("comment", ["", "# " + "ä" * 9000 + "\n", "#" + ' \\"' * 6000 + "\n"])
def test_a_document_of_any_length_and_script_comes_back_as_it_was(comment: str) -> None:
    document = comment + policy(READS)
    table = compile_policy(load_policy(document, name="policy"), revision=1)
    pieces = documents_on_record(table, 5)
    assert "".join(piece.text for piece in pieces) == document  # type: ignore[union-attr]
    assert [piece.number for piece in pieces] == list(range(1, len(pieces) + 1))  # type: ignore[union-attr]


def test_of_a_stage_both_documents_go_on_record_and_of_what_is_too_long_none() -> None:
    base = compile_policy(load_policy(policy(READS), name="policy"), revision=1)
    other = compile_policy(load_policy(policy(READS, rules=FORBID), name="policy"), revision=2)
    staged = StagedTable(base, other, Stage(share=Fraction(1, 2)))
    assert {piece.digest for piece in documents_on_record(staged, 5)} == {base.digest, other.digest}  # type: ignore[union-attr]
    long = compile_policy(load_policy("# " + "x" * 500_000 + "\n" + policy(), name="policy"), revision=1)
    assert documents_on_record(long, 5) == []


def test_what_a_policy_begins_without_fits_leaves() -> None:
    ids = frozenset(f"grant-{number}" for number in range(100))
    events = revoked_on_record(ids, 1, 5, "gpu-0")
    assert {id_ for event in events for id_ in event.ids} == ids  # type: ignore[union-attr]
    assert max(len(event.ids) for event in events) <= 32  # type: ignore[union-attr]
    assert revoked_on_record(frozenset(), 1, 5, "gpu-0") == []
