"""What a tenant's administrator sees of a release: where it stands and what waits for its consent, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvcustody.clock import SystemClock
from kvcustody.errors import ServiceError
from kvcustody.governance.control_plane.connection import ControlPlaneConnection
from kvcustody.governance.control_plane.consents import OwnerConsents
from kvcustody.governance.control_plane.release_store import WorkflowReleaseStore
from kvcustody.governance.ledger_protocol import CountingLedger
from kvcustody.governance.release.record import ReleaseError
from kvcustody.governance.release.release_desk import ReleaseWorkflow
from kvcustody.governance.release.trust import read_trust
from standins.service.control_plane_world import READS, ControlPlane

HIDDEN = "secret-of-reader"
BOTH = READS.replace(
    "rules:",
    f"  - {{id: {HIDDEN}, owner: reader, reader: holder, at_most: low, until: 2099-01-01, reason: theirs}}\nrules:",
    1,
)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One revision is proposed that opens something of either tenant; nothing of it is approved."""
    made = ControlPlane(tmp_path_factory.mktemp("cp"))
    with made.connect("ada") as connection:
        desk(made, connection).propose(BOTH, made.signers["ada"], note="both ways")
    yield made
    made.end()


def desk(plane: ControlPlane, connection: ControlPlaneConnection) -> ReleaseWorkflow:
    trust = read_trust(plane.folder / "trust.toml")
    return ReleaseWorkflow(WorkflowReleaseStore(connection), trust, clock=SystemClock(), ledger=CountingLedger())


def refused(connection: ControlPlaneConnection, path: str) -> int:
    with pytest.raises(ServiceError) as error:
        connection.get(path)
    return int(error.value.operands["status"])


def test_a_tenants_administrator_sees_its_own_openings_and_no_policy(plane: ControlPlane) -> None:
    with plane.connect("holger") as owner, plane.connect("grace") as approver:
        for path in ("/v1/policies/records", "/v1/policies", "/v1/policies/1", "/v1/policies/1/review"):
            assert refused(owner, path) == 403
        shown = owner.request("GET", "/v1/policies/consents").text + owner.request("GET", "/v1/policies/release").text
        assert '"reads"' in shown and HIDDEN not in shown
        everything = approver.request("GET", "/v1/policies/records").text
        assert HIDDEN in everything, "control: the steps show what is not the owner's"
        assert refused(approver, "/v1/policies/consents") == 403


def test_a_consent_is_signed_from_what_its_owner_sees(plane: ControlPlane) -> None:
    with plane.connect("holger") as owner, plane.connect("grace") as approver:
        consents = OwnerConsents(owner, "prod", SystemClock())
        with pytest.raises(ReleaseError, match="nothing that revision `1` opens"):
            consents.consent(1, HIDDEN, plane.signers["holger"])
        with pytest.raises(ReleaseError, match="releases for `prod`, not `another`"):
            OwnerConsents(owner, "another", SystemClock()).consent(1, "reads", plane.signers["holger"])
        [what] = consents.consent(1, "reads", plane.signers["holger"])
        assert (what["owner"], what["reader"]) == ("holder", "reader") and consents.waiting() == []
        missing = desk(plane, approver).review(1).missing
        assert [opening.id for opening in missing] == [HIDDEN], "the other owner's is still missing"


def test_an_answer_that_shows_something_else_than_it_names_is_not_signed(plane: ControlPlane, monkeypatch: Any) -> None:
    with plane.connect("holger") as owner:
        item = {"revision": 1, "manifest": "sha256:00", "opening": "sha256:11", "what": {"id": "reads"}}
        monkeypatch.setattr(owner, "get", lambda path, **query: {"items": [item], "next": None})
        with pytest.raises(ReleaseError, match="names another opening than it shows"):
            OwnerConsents(owner, "prod", SystemClock()).waiting()


def test_of_what_is_revoked_a_tenant_sees_its_own(plane: ControlPlane) -> None:
    with plane.connect("holger") as owner, plane.connect("grace") as approver:
        desk(plane, approver).revoke([HIDDEN], plane.signers["grace"], reason="test")
        assert approver.get("/v1/policies/release")["revoked"] == [HIDDEN]
        assert owner.get("/v1/policies/release")["revoked"] == []
        desk(plane, approver).revoke(["reads"], plane.signers["grace"], reason="test")
        assert owner.get("/v1/policies/release")["revoked"] == ["reads"]
