"""A tenant's own decisions as one flat tuple, and where in it each of them is.

1. Cells are ordered by action, level and scope; every row of a policy has all of them.
2. `places` answers for well-formed (action, level, scope) alone: anything else raises `KeyError`.

A tenant has one tuple whatever its rules say, so the memory that a decision touches does not grow with their number.
Rows of nested dicts, shared between tenants that were decided alike, made decisions slower once rules named tenants.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

from kvcustody.policies.ir import Action, Scope

if TYPE_CHECKING:
    from kvcustody.policies.table import Decision

Row = tuple["Decision", ...]
Places = Mapping[int, Mapping[int, Mapping[int, int]]]
"""The index in a row, by action, level and scope."""


@cache
def places(levels: int) -> Places:
    """Where each cell is in the rows of a policy with this many classifications."""
    following = count()
    return {
        int(action): {level: {int(scope): next(following) for scope in Scope} for level in range(levels)}
        for action in Action
    }
