"""A ledger in memory, to export from: sub-logs of real leaves under a root log with a signed checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson
import pytest

from kvcustody.audit.evidence.processes.marked_processes import Marked, marked_processes
from kvcustody.audit.exports.enclosures import HandoverProof, Stamp
from kvcustody.audit.exports.source import RootLeaf, SubLog
from kvcustody.audit.kinds import PolicyActivated, ResidencyReleased
from kvcustody.audit.leaf import Context, leaf
from kvcustody.audit.leaf.merkle import leaf_hash, leaf_hashes
from kvcustody.audit.tlog.proofs import MemoryTiles, TileSource, inclusion_proof
from kvcustody.audit.tlog.root_log import HeadProof, RootLeafOpening, root_checkpoint, seal
from kvcustody.audit.tlog.signing_key import SigningKey, sign_checkpoint

ORIGIN = "ledger.example/test"
CONTEXT = Context("0" * 32, 1_700_000_000_000_000, lambda tenant, subject, session="": f"p-{subject}-{session}")


def some_leaves(log: str, count: int) -> list[bytes]:
    """Canonical leaves of one log."""
    if log == "system":
        events = [
            PolicyActivated(1000 * number, number + 1, "p", "shared", "d", "=cmd|'/c calc'!A0")
            for number in range(count)
        ]
        return [leaf(event, CONTEXT, 10_000 + number) for number, event in enumerate(events)]
    tenant = log.removeprefix("tenant/")
    ends = [ResidencyReleased(1000 * number, number, tenant, "finish", (), 0) for number in range(count)]
    return [leaf(event, CONTEXT, number + 1) for number, event in enumerate(ends)]


class MemorySource:
    """Sub-logs that grew in batches, each batch sealed in the root log, the last state signed."""

    def __init__(self, logs: dict[str, list[bytes]], key: SigningKey, *, batches: int = 3, purged: int = 0) -> None:
        self.content = logs
        self.key = key
        self.purged = purged
        self._tiles = {name: MemoryTiles() for name in logs}
        self._root = MemoryTiles()
        self.openings: list[RootLeafOpening | None] = []
        self._latest: dict[str, int] = {}
        for batch in range(batches):
            self._append(batch, batches)
        self.commitments = [opening.commitment() for opening in self.openings if opening]
        self._note = sign_checkpoint(root_checkpoint(ORIGIN, self._root.frontier.head()), [key])

    def _append(self, batch: int, batches: int) -> None:
        touched = {}
        for name, leaves in self.content.items():
            some = leaves[len(leaves) * batch // batches : len(leaves) * (batch + 1) // batches]
            if some or batch == batches - 1:
                self._tiles[name].extend(leaf_hashes(some))
                touched[name] = self._tiles[name].frontier.head()
        for opening in seal(touched):
            self._latest[opening.name] = len(self.openings)
            self.openings.append(opening)
            self._root.extend([leaf_hash(opening.commitment())])

    @property
    def note(self) -> bytes:
        return self._note

    def logs(self) -> Sequence[SubLog]:
        sub_logs = []
        for name, index in sorted(self._latest.items()):
            opening = self.openings[index]
            assert opening is not None
            path = tuple(inclusion_proof(self._root, index, self._root.frontier.size))
            sub_logs.append(SubLog(name, opening.head, HeadProof(opening, index, path, self._note), self.purged))
        return sub_logs

    def tiles(self, name: str) -> TileSource:
        return self._tiles[name]

    def leaves(self, name: str, first: int, end: int) -> Iterator[bytes]:
        assert first >= self.purged
        return iter(self.content[name][first:end])

    def root_leaves(self) -> Iterator[RootLeaf]:
        return iter([RootLeaf(leaf, opening) for leaf, opening in zip(self.commitments, self.openings, strict=True)])

    def handovers(self) -> Sequence[HandoverProof]:
        return ()

    def marked(self) -> Marked:
        return marked_processes(map(orjson.loads, self.content.get("system", [])))

    def stamps(self) -> Sequence[Stamp]:
        return ()

    def span(self, name: str, since_us: int | None, until_us: int | None) -> tuple[int, int]:
        times = [1_700_000_000_000_000 + 1000 * number for number in range(len(self.content[name]))]
        inside = [
            at
            for at, moment in enumerate(times)
            if (since_us is None or moment >= since_us) and (until_us is None or moment < until_us)
        ]
        return (min(inside), max(inside) + 1) if inside else (0, 0)


@pytest.fixture(scope="session")
def key() -> SigningKey:
    return SigningKey.generate(ORIGIN)


@pytest.fixture
def make_source(key: SigningKey) -> Callable[..., MemorySource]:
    """A ledger of three logs; `**rest` as `MemorySource` takes it."""

    def make(*, scale: int = 1, **rest: Any) -> MemorySource:
        sizes = {"system": 7, "tenant/acme": 300, "tenant/beta": 41}
        logs = {name: some_leaves(name, count * scale) for name, count in sizes.items()}
        return MemorySource(logs, rest.pop("key", key), **rest)

    return make
