"""What a tenant's own people do with its data is asked of the policy in effect, and on record."""

from __future__ import annotations

import json

import pytest
from control_plane_world import APART, ControlPlane, ask

from kvcustody.audit.database.engine import open_store
from kvcustody.audit.schema.ledger import events
from kvcustody.errors import ServiceError

PERMITS = "rules:\n  - {id: people, effect: permit, action: [export, administer], when: {reader: owner}}\n"
FORBID = "  - {id: ACTION-not, effect: forbid, action: ACTION, when: {owner: holder, classification: low}}\n"
ACTS = {
    "export": ("/v1/exports", {"tenant": "holder"}),
    "administer": ("/v1/erasures", {"tenant": "holder", "classification": "low"}),
}


def policy(forbidden: str = "") -> str:
    rules = PERMITS + (FORBID.replace("ACTION", forbidden) if forbidden else "")
    return APART.replace("rules:\n", rules)


def decisions(plane: ControlPlane, action: str) -> list[tuple[str, str, str, str]]:
    """Effect, tenant, classification and outage class of what is on record about an action."""
    engine = open_store(f"sqlite:///{plane.folder / 'ledger.db'}", read_only=True)
    with engine.connect() as connection:
        leaves = [
            json.loads(row.leaf) for row in connection.execute(events.select()) if row.kind == "decision"
        ]
    engine.dispose()
    return [
        (leaf["effect"], leaf["reader"], leaf["classification"], leaf["outage"])
        for leaf in leaves
        if leaf["action"] == action
    ]


@pytest.mark.parametrize("action", ACTS)
def test_a_tenant_does_with_its_data_what_the_policy_permits(plane: ControlPlane, action: str) -> None:
    plane.release(policy(action))
    with plane.worker() as worker:
        ask(worker, "holder")
    path, body = ACTS[action]
    with plane.connect("holger") as owner:
        with pytest.raises(ServiceError, match=f"{action}-not") as refused:
            owner.post(path, body)
        assert refused.value.operands["status"] == 403
        assert decisions(plane, action)[-1] == ("deny", "holder", "low", "A")
        plane.release(policy())
        owner.post(path, body)  # control: the same act, permitted
    assert decisions(plane, action)[-1] == ("permit", "holder", "low", "A")


def test_what_the_policy_says_of_a_tenant_binds_nobody_elses_role(plane: ControlPlane) -> None:
    """A data protection officer erases by role: no rule of a policy takes that away."""
    plane.release(policy("administer"))
    with plane.worker() as worker:
        ask(worker, "holder", "user-1")
    before = decisions(plane, "administer")
    with plane.connect("dora") as officer:
        officer.post("/v1/erasures", {"tenant": "holder", "subject": "user-1"})
    assert decisions(plane, "administer") == before
