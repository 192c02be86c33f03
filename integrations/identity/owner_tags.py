"""Sixteen digits that stand for an owner in ids which other software keys its state by."""

from __future__ import annotations

from typing import Final

from kvcustody.governance import tlv
from kvcustody.governance.identity import Principal
from kvcustody.governance.key_buffer import KeyBuffer
from kvcustody.governance.scope_token import keyed_state

_KNOWN_MAX: Final = 4_096


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
