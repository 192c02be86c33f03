"""Grants: who may read whose blocks, up to which classification, until when: owners in rows, readers in columns.

1. Shown is what workers run, released or from a file; of a policy whose digest alone is known, that it is so.
2. Who acts for one tenant alone sees what opens its own data, and nothing of anybody else's.
3. Whoever may take a way back finds the button beside it; the step is signed in the browser.
"""

from __future__ import annotations

from starlette.responses import Response

from kvcustody.console.web.page_request import PageRequest
from kvcustody.console.web.pages.policy_status import release_of
from kvcustody.governance.release.declared_openings import OVER, DeclaredOpening
from kvcustody.governance.release.replay_records import ReleaseState
from kvcustody.governance.service.access.roles import Permission

_MATRIX_MAX = 24


def show(visit: PageRequest) -> Response:
    """Return the matrix of the policy that workers run, and a table of every grant and segment."""
    visit.caller.must(Permission.READ_POLICY, Permission.CONSENT)
    state, effect = release_of(visit), visit.service.policies_in_effect()
    owner = None if visit.may(Permission.READ_POLICY) else visit.caller.tenant or ""
    ways = effect.openings(visit.service.clock.utc_us(), owner=owner)
    live = [way for way in ways if way.state not in OVER]
    owners = sorted({way.owner for way in live})
    readers = sorted({way.reader for way in live})
    return visit.page(
        "policy/grants.html",
        "Grants",
        effect=effect,
        revision=effect.policies[0].revision if effect.policies and effect.policies[0].released else 0,
        explains=visit.may(Permission.READ_POLICY),
        ways=ways,
        to_take_back=_to_take_back(visit, state, live),
        owners=owners,
        readers=readers,
        cells={(o, r): [way for way in live if (way.owner, way.reader) == (o, r)] for o in owners for r in readers},
        fits=len(owners) <= _MATRIX_MAX and len(readers) <= _MATRIX_MAX,
    )


def _to_take_back(visit: PageRequest, state: ReleaseState | None, live: list[DeclaredOpening]) -> list[str]:
    """Return the ids that this person may revoke (rule 3): those of the release, which workers follow."""
    if state is None or not visit.may(Permission.NARROW_POLICY, Permission.CONSENT):
        return []
    return sorted({way.id for way in live if state.owners(way.id)})
