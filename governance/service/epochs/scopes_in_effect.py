"""The scopes of doors' names under the policies in effect, read at most every two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvcustody.governance.edge.name_scopes import NameScopes
from kvcustody.governance.release.policies_in_effect import PoliciesInEffect

_SECONDS: Final = 2.0


class ScopesInEffect:
    """Thread-safe. Where a policy is known only by its digest, no scope is known; the other policies still place."""

    def __init__(self, policies: Callable[[], PoliciesInEffect]) -> None:
        self._policies = policies
        self._lock = threading.Lock()
        self._found = NameScopes()
        self._read = float("-inf")

    def now(self) -> NameScopes:
        """Return the scopes, two seconds old at most."""
        with self._lock:
            if time.monotonic() - self._read >= _SECONDS:
                effect = self._policies()
                known = [one.policy for one in effect.policies if one.policy is not None]
                found = NameScopes.of_policies(known)
                found = found.without_names() if effect.unknown else found
                self._found = self._found if found.digest == self._found.digest else found
                self._read = time.monotonic()
            return self._found
