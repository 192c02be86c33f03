"""A worker behind a control plane may only report its own copies: valid leaves are accepted, others refused."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from kvcustody.audit.kinds import Event, TransferDecided
from kvcustody.audit.leaf import Context, leaves
from kvcustody.governance.service.ingest.check_leaves import Sender, read_batch, write_batch
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.copy_leaves import copy_leaves

LIFE = "ab" * 16
CONTEXT = Context(LIFE, 1_700_000_000_000_000, lambda tenant, subject, session="": "p" * 24)
SENDER = Sender("gpu-0", LIFE, 1_700_000_000_000_000)
COPY = ("acme", "low", 4, 100)


def told() -> list[Event]:
    """Each kind of leaf, the names that a process before left among them."""
    name = bytes(range(32))
    return [
        *copy_leaves(
            "nvme",
            [
                CopyEvent("stored", name, 1, *COPY, 5, 9),
                CopyEvent("ended", name, 1, *COPY, 9, 9, "ceiling"),
                CopyEvent("destroyed", name, 1, *COPY, 9, 9, "unlinked"),
                CopyEvent("destroyed", name, 0, "", "", 0, 100, 4, 0, "unlinked"),
            ],
        ),
        TransferDecided(5, "store", "nvme", "acme", 0, 4, 100, 1, 2, "transfer", "done", 1, "faster"),
    ]


def lines() -> list[bytes]:
    return [leaf.data for number, event in enumerate(told(), 1) for leaf in leaves(event, CONTEXT, number)]


def test_every_kind_is_taken_in_its_log() -> None:
    found = read_batch(write_batch([], lines()), SENDER)
    assert list(found.batch.logs) == ["tenant/acme"] * 3 + ["system", "tenant/acme"]
    assert len(set(found.batch.kinds)) == 4


CHANGES: dict[str, dict[str, Any]] = {
    "another tenant": {"tenant": "labs"},
    "another process": {"of_incarnation": "cd" * 16},
    "shorter lists": {"numbers": []},
    "a negative size": {"bytes_each": [-1]},
    "a name that is none": {"names": ["../../etc"]},
    "a further key": {"prompt": "secret"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_no_leaf_of_its_own_is_refused(name: str) -> None:
    every = lines()
    place = next(number for number, line in enumerate(every) if b'"kind":"copies-ended"' in line)
    every[place] = orjson.dumps(orjson.loads(every[place]) | CHANGES[name], option=orjson.OPT_SORT_KEYS)
    with pytest.raises(ProblemError, match=f"leaf {place}"):
        read_batch(write_batch([], every), SENDER)
