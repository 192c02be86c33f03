"""Primed hash states, one per domain in use, which the hot path copies to compute block keys.

- A state is `blake2b(key=domain key, digest_size=32)` with nothing hashed yet. Callers `copy()` it and never
  update it.
- A domain key exists in a buffer only while its state is primed; then the buffer is wiped. The state itself
  is as good as the key (docs/concepts/keys.md), so dropping an epoch drops its states before anything else is
  destroyed.
- The number of states is bounded in all and per owner: a tenant that invents domains evicts its own states.
- A forked child starts with no state.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container

from kvcustody.governance.identity.domain_spec import DomainSpec, KeyOwner
from kvcustody.governance.keys.locked_buffer import KEY_BYTES, KeyBuffer

BLOCK_KEY_BYTES = 32

Derive = Callable[[KeyOwner, int, bytes, KeyBuffer], None]


class DomainKeys:
    """A bounded cache of primed states over a deriving function: (owner, epoch, info, buffer to fill)."""

    def __init__(self, derive: Derive, *, states_max: int = 16_384, states_per_owner_max: int = 1_024) -> None:
        self._derive = derive
        self._states_max = states_max
        self._states_per_owner_max = states_per_owner_max
        self._states: OrderedDict[DomainSpec, hashlib.blake2b] = OrderedDict()
        self._by_owner: dict[KeyOwner, OrderedDict[DomainSpec, None]] = {}
        self._scratch = KeyBuffer(KEY_BYTES)
        _drop_in_children(self)

    def state(self, spec: DomainSpec) -> hashlib.blake2b:
        """Return the domain's primed state, to be copied; raises `KeyringError` if its key epoch does not exist."""
        state = self._states.get(spec)
        if state is None:
            return self._prime(spec)
        self._states.move_to_end(spec)
        return state

    def fill(self, spec: DomainSpec, buffer: KeyBuffer) -> None:
        """Derive the domain's key into `buffer`, for uses other than block keys. The caller wipes it."""
        self._derive(spec.owner, spec.key_epoch, spec.info, buffer)

    def drop(self, spec: DomainSpec) -> bool:
        """Forget one domain's state; returns whether there was one."""
        if self._states.pop(spec, None) is None:
            return False
        owned = self._by_owner[spec.owner]
        del owned[spec]
        if not owned:
            del self._by_owner[spec.owner]
        return True

    def drop_epoch(self, owner: KeyOwner, epoch: int) -> int:
        """Forget every state of an owner's epoch; returns their number."""
        doomed = [spec for spec in self._by_owner.get(owner, ()) if spec.key_epoch == epoch]
        return sum(self.drop(spec) for spec in doomed)

    def keep_only(self, epochs: Container[tuple[KeyOwner, int]]) -> None:
        """Forget every state whose (owner, epoch) is not among `epochs`."""
        for spec in [spec for spec in self._states if (spec.owner, spec.key_epoch) not in epochs]:
            self.drop(spec)

    def drop_all(self) -> None:
        """Forget every state."""
        self._states.clear()
        self._by_owner.clear()

    def __len__(self) -> int:
        return len(self._states)

    def _prime(self, spec: DomainSpec) -> hashlib.blake2b:
        with self._scratch as key:
            self.fill(spec, key)
            state = hashlib.blake2b(key=key.view(), digest_size=BLOCK_KEY_BYTES)
        owned = self._by_owner.get(spec.owner)
        if owned is not None and len(owned) >= self._states_per_owner_max:
            self.drop(next(iter(owned)))
        elif len(self._states) >= self._states_max:
            self.drop(next(iter(self._states)))
        self._states[spec] = state
        self._by_owner.setdefault(spec.owner, OrderedDict())[spec] = None
        return state


def _drop_in_children(keys: DomainKeys) -> None:
    """Drop the keys in a forked child, without keeping `keys` alive in the parent."""
    reference = weakref.ref(keys)

    def drop() -> None:
        alive = reference()
        if alive is not None:
            alive.drop_all()

    os.register_at_fork(after_in_child=drop)
