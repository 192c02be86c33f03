"""Tags that bind an id chosen by a client to its owner, so that equal ids of different owners never collide.

The door puts a tag in front of every id that a server keys state by. The engine puts one in front of a session that
reached it on another way.
"""

from __future__ import annotations

import re
from typing import Final

from kvcustody.governance.credentials.scope_token_secret import keyed_state
from kvcustody.governance.identity import tlv
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.keys.locked_buffer import KeyBuffer

_KNOWN_MAX: Final = 4_096
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class OwnerTags:
    """Tags by owner: the tenant and, inside it, the narrowest private scope that the request has.

    They are keyed, so a tag tells nobody who its owner is, and equal in every process with the same secret.
    """

    def __init__(self, secret: KeyBuffer) -> None:
        self._state = keyed_state(secret, "owner-tag", 8)
        self._known: dict[Principal, str] = {}

    def tag(self, principal: Principal) -> str:
        """The owner's tag: 16 lower-case hexadecimal digits."""
        known = self._known.get(principal)
        if known is None:
            session = principal.session if principal.subject is None else None
            fields: dict[int, tlv.Value] = {
                1: principal.issuer,
                2: principal.tenant,
                3: principal.subject,
                4: session,
            }
            state = self._state.copy()
            state.update(tlv.encode("kvcustody/owner", 1, fields))
            known = state.hexdigest()
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[principal] = known
        return known

    def bound(self, principal: Principal, value: object) -> str | None:
        """An id behind its owner's tag, whether the door has put it there or not; None for what no door would pass."""
        tag = self.tag(principal)
        chosen = value.removeprefix(f"{tag}-") if type(value) is str else None
        return f"{tag}-{chosen}" if chosen is not None and _ID.fullmatch(chosen) else None
