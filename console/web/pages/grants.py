"""Grants: who may read whose blocks, up to what, and until when: owners down, readers across.

1. Who acts for one tenant alone sees what opens its own data, and nothing of anybody else's.
2. Whoever may take a way back finds the button beside it; the step is signed in the browser.
"""

from __future__ import annotations

from starlette.responses import Response

from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.policy_status import release_of
from kvcustody.governance.release.declared_openings import (
    OVER,
    DeclaredOpening,
    declared_openings,
    own_declared_openings,
)
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.governance.service.access.roles import Permission

_MATRIX_MAX = 24


def show(visit: PageRequest) -> Response:
    """The matrix of the active revision, and every way in a table."""
    visit.caller.must(Permission.READ_POLICY, Permission.CONSENT)
    state = release_of(visit)
    ways = () if state is None else _ways(visit, state)
    live = [way for way in ways if way.state not in OVER]
    owners = sorted({way.owner for way in live})
    readers = sorted({way.reader for way in live})
    return visit.page(
        "policy/grants.html",
        "Grants",
        revision=0 if state is None else state.active_revision,
        explains=visit.may(Permission.READ_POLICY),
        ways=ways,
        to_take_back=_to_take_back(visit, live),
        owners=owners,
        readers=readers,
        cells={
            (o, r): [way for way in live if (way.owner, way.reader) == (o, r)]
            for o in owners
            for r in readers
        },
        fits=len(owners) <= _MATRIX_MAX and len(readers) <= _MATRIX_MAX,
    )


def _ways(visit: PageRequest, state: ReleaseState) -> tuple[DeclaredOpening, ...]:
    now_us = visit.service.clock.utc_us()
    if visit.may(Permission.READ_POLICY):
        return () if state.active is None else declared_openings(state.active.policy, state.revoked, now_us)
    return own_declared_openings(state, visit.caller.tenant or "", now_us)


def _to_take_back(visit: PageRequest, live: list[DeclaredOpening]) -> list[str]:
    """The ids that this person may revoke (rule 2)."""
    may = visit.may(Permission.NARROW_POLICY, Permission.CONSENT)
    return sorted({way.id for way in live}) if may else []
