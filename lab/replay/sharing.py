"""What a workload's prompts have in common, counted without a cache: for everybody, within tenants, within subjects.

Each figure is what a cache without limits would find, one request at a time: whole blocks that were sent or answered
before, and never a prompt's last token, which is always computed. Requests are labelled jobs of a workload, in order.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcustody.lab.replay.workload.model import Job

_PREFIXES_SHOWN = 3


class SharedPrefix(NamedTuple):
    """A prefix that several tenants sent. `tokens`: how many prompt tokens it would save if they shared it."""

    prefix_tokens: int
    tenants: int
    tokens: int


@dataclass(slots=True)
class _Foreign:
    """What tenants could have found of others, by the first block: per depth, how many requests reached it."""

    tenants: set[int] = field(default_factory=set)
    depths: dict[int, int] = field(default_factory=dict)

    def best(self, block_tokens: int) -> SharedPrefix:
        """Return the prefix length that saves the most."""
        ordered = sorted(self.depths.items(), reverse=True)
        best, reached = (0, 0), 0
        for depth, requests in ordered:
            reached += requests
            best = max(best, (reached * depth, depth))
        saved, depth = best
        return SharedPrefix(depth * block_tokens, len(self.tenants), saved * block_tokens)


class SharingCounter:
    """Counts as jobs pass. `has_content`: the workload says which prompts are alike."""

    def __init__(self, block_tokens: int, *, has_content: bool = True) -> None:
        self._size = block_tokens
        self.has_content = has_content
        self.prompt_tokens = 0
        self.everybody_tokens = 0
        self.tenant_tokens = 0
        self.subject_tokens = 0
        self._everybody: set[int] = set()
        self._owned: dict[Hashable, set[int]] = {}
        self._foreign: dict[int, _Foreign] = {}

    def passing(self, jobs: Iterable[Job]) -> Iterator[Job]:
        """Yield each job, counted."""
        for job in jobs:
            self.count(job)
            yield job

    def count(self, job: Job) -> None:
        """Count one request against everything before it."""
        request, label = job
        size = self._size
        self.prompt_tokens += request.input_tokens
        kept: list[int] = request.blocks[: (request.input_tokens + request.output_tokens) // size].tolist()
        asked = max(0, (request.input_tokens - 1) // size)
        tenant = self._owned.setdefault(label.tenant, set())
        subject = self._owned.setdefault((label.tenant, label.subject), set())
        everybody = min(asked, _known(kept, self._everybody))
        own = min(asked, _known(kept, tenant))
        self.everybody_tokens += everybody * size
        self.tenant_tokens += own * size
        self.subject_tokens += min(asked, _known(kept, subject)) * size
        if everybody > own:
            foreign = self._foreign.setdefault(kept[0], _Foreign())
            foreign.tenants.add(label.tenant)
            foreign.depths[everybody] = foreign.depths.get(everybody, 0) + 1
        for known in (self._everybody, tenant, subject):
            known.update(kept)

    @property
    def blocks(self) -> int:
        """Blocks that hold everything that was ever sent or answered, each tenant's on its own."""
        return sum(len(known) for owner, known in self._owned.items() if isinstance(owner, int))

    def shared_prefixes(self) -> list[SharedPrefix]:
        """Return the prefixes that sharing between tenants would save the most by, best first."""
        best = sorted((foreign.best(self._size) for foreign in self._foreign.values()), key=lambda row: -row.tokens)
        return best[:_PREFIXES_SHOWN]


def _known(chain: list[int], known: set[int]) -> int:
    """Return how many leading blocks are known: ids are prefix-chained, so these are all before the first unknown."""
    return bisect.bisect_left(chain, True, key=lambda block: block not in known)
