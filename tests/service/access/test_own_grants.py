"""An owner takes back what it granted: at once, on every worker, its own alone, and by nothing but what it may see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.clock import SystemClock
from kvcustody.console.main import app
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.consents import OwnerConsents
from kvcustody.governance.control_plane.release_store import WorkflowReleaseStore
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.governance.release.record import ReleaseAction, ReleaseError, make_record
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.governance.release.trust import read_trust
from standins.service.control_plane_world import READS, ControlPlane, ask, glance, until


def grants(**owners: str) -> str:
    """The policy with these grants, each by its owner, to the other tenant."""
    line = "  - {{id: {}, owner: {}, reader: {}, at_most: low, until: 2099-01-01, reason: test}}\n"
    made = [line.format(name.replace("_", "-"), owner, _other(owner)) for name, owner in owners.items()]
    before, _, after = READS.partition("grants:\n")
    return before + "grants:\n" + "".join(made) + after.partition("\n")[2]


def _other(tenant: str) -> str:
    return "reader" if tenant == "holder" else "holder"


def desk(plane: ControlPlane, connection: ControlPlaneConnection) -> ReleaseWorkflow:
    trust = read_trust(plane.folder / "trust.toml")
    return ReleaseWorkflow(WorkflowReleaseStore(connection), trust, clock=SystemClock(), ledger=CountingLedger())


def own(plane: ControlPlane, connection: ControlPlaneConnection) -> OwnerConsents:
    return OwnerConsents(connection, "prod", SystemClock())


def send(
    plane: ControlPlane, connection: ControlPlaneConnection, ids: Any, path: str = "/v1/policies:withdraw"
) -> tuple[int, str]:
    """Status and problem of a revocation that `holger` signs and that is refused."""
    stands = connection.get("/v1/policies/release")
    record = make_record(
        plane.signers["holger"], ReleaseAction.REVOKED, {"ids": ids, "reason": "test"}, number=stands["steps"] + 1,
        previous=stands["head"], audience="prod", at_us=max(SystemClock().utc_us(), stands["last_us"]),
    )  # fmt: skip
    with pytest.raises(ServiceError) as refused:
        connection.post(path, {"record": record.to_bytes().decode()})
    return int(refused.value.operands["status"]), str(refused.value)


@pytest.mark.system("one of two workers serves a grant on that its owner took back")
def test_what_an_owner_takes_back_is_denied_on_every_worker_at_once(plane: ControlPlane) -> None:
    """Both workers serve the reader (control); the owner takes the grant back; both miss, by the ordinary pull."""
    workers = [plane.worker(name) for name in ("gpu-0", "gpu-1")]
    try:
        for worker in workers:
            ask(worker, "holder")
            until(lambda worker=worker: glance(worker) > 0, worker)
        with plane.connect("holger") as owner:
            assert [item["id"] for item in owner.get("/v1/policies/grants")["items"]] == ["reads"]
            assert own(plane, owner).withdraw(["reads"], plane.signers["holger"], reason="over") == {"reads"}
            [shown] = owner.get("/v1/policies/grants")["items"]
            assert (shown["state"], shown["reader"]) == ("revoked", "reader")
        for worker in workers:
            until(lambda worker=worker: "reads" in worker.governor.revoked, worker)
            assert glance(worker) == 0
            assert ask(worker, "holder") > 0, "control: the owner's own reuse goes on"
    finally:
        for worker in workers:
            worker.close()


def proposed(folder: Path) -> ControlPlane:
    """Proposed: `mine`, `also` and `last` of holder, `theirs` of reader."""
    plane = ControlPlane(folder)
    with plane.connect("ada") as author:
        desk(plane, author).propose(
            grants(mine="holder", theirs="reader", also="holder", last="holder"),
            plane.signers["ada"],
            note="both",
        )
    return plane


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = proposed(tmp_path_factory.mktemp("both"))
    yield made
    made.end()


@pytest.fixture
def attacked(tmp_path: Path) -> Any:
    """One of its own: what an attack leaves in a release is believed by nobody afterwards."""
    made = proposed(tmp_path)
    yield made
    made.end()


def test_foreign_absent_and_shared_grants_are_one_answer(both: ControlPlane) -> None:
    with both.connect("holger") as owner:
        before = owner.get("/v1/policies/release")["steps"]
        answers = {send(both, owner, ids) for ids in (["theirs"], ["absent"], ["mine", "theirs"], ["mine", "absent"])}
        assert len(answers) == 1 and answers.pop()[0] == 404
        assert send(both, owner, [])[0] == 409 and send(both, owner, "mine")[0] == 409, "no ids at all"
        assert send(both, owner, ["mine"], "/v1/policies:revoke")[0] == 403
        assert owner.get("/v1/policies/release")["steps"] == before
        assert "mine" in own(both, owner).withdraw(["mine"], both.signers["holger"], reason="control")


def test_nobody_else_takes_an_owners_grants_back_here(both: ControlPlane) -> None:
    for name in ("ada", "grace", "dora"):
        with both.connect(name) as other, pytest.raises(ServiceError) as refused:
            other.post("/v1/policies:withdraw", {"record": "{}"})
        assert refused.value.operands["status"] == 403
    with both.connect("holger") as owner, pytest.raises(ReleaseError, match="signed by the principal"):
        own(both, owner).withdraw(["also"], both.signers["grace"], reason="another's key")


def test_a_proposal_that_takes_an_id_takes_no_owners_right(plane: ControlPlane) -> None:
    """`reads` is the holder's in effect; an author proposes it as the reader's. The holder still takes it back."""
    connect = plane.connect
    with connect("ada") as author, connect("holger") as owner, connect("grace") as approver:
        revision = desk(plane, author).propose(grants(again="holder"), plane.signers["ada"], note="ours").revision
        own(plane, owner).consent(revision, "again", plane.signers["holger"])
        cells = desk(plane, approver).review(revision).cells
        desk(plane, approver).approve(revision, plane.signers["grace"], cells=cells)
        desk(plane, approver).activate(revision, plane.signers["grace"])
        desk(plane, author).propose(grants(again="reader"), plane.signers["ada"], note="a squatter")
        assert "again" in own(plane, owner).withdraw(["again"], plane.signers["holger"], reason="mine")


def test_the_command_takes_an_owners_grant_back(both: ControlPlane) -> None:
    asked = [
        "policy",
        "revoke",
        "last",
        "--reason",
        "over",
        "--signing-key",
        str(both.signing_file("holger")),
        "--json",
    ]
    asked += ["--trust", str(both.folder / "trust.toml"), "--server", both.address]
    result = CliRunner().invoke(app, [*asked, "--api-key-file", str(both.key_file("holger"))])
    assert result.exit_code == 0, result.output
    with both.connect("holger") as owner:
        assert "last" in owner.get("/v1/policies/release")["revoked"]


def test_control_without_the_check_of_owners_a_foreign_grant_is_gone(attacked: ControlPlane, monkeypatch: Any) -> None:
    with attacked.connect("holger") as owner:
        assert send(attacked, owner, ["theirs"])[0] == 404
        monkeypatch.setattr(ReleaseState, "owners", lambda state, source: {"holder"})
        own(attacked, owner).withdraw(["theirs"], attacked.signers["holger"], reason="attack")
    with attacked.connect("ada") as author:
        assert "theirs" in author.get("/v1/policies/release")["revoked"], "void: nothing was attacked"
