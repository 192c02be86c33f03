"""Events of every kind as `tests/audit/leaf/recorded_leaves.jsonl` keeps them: `test_recorded` says what for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvcustody.audit.kinds import KINDS, Event
from kvcustody.audit.kinds.block_runs import Run
from kvcustody.audit.leaf import Context
from kvcustody.audit.leaf.change_items import CHANGED
from kvcustody.audit.leaf.leaf_schema import ITEMS

PLACE = Path(__file__).parents[3] / "audit" / "leaf" / "recorded_leaves.jsonl"
RECORDED: list[dict[str, Any]] = [json.loads(line) for line in PLACE.read_bytes().split(b"\n") if line]
WRITTEN = [each for each in RECORDED if "fields" in each]
OLDER = [each for each in RECORDED if "leaf" in each]
KIND_OF: dict[str, Any] = {named.name: kind for kind, named in KINDS.items()}
CONTEXT = Context(
    "ab" * 16,
    1_700_000_000_000_000,
    lambda tenant, subject, session="": f"name-{len(tenant)}-{len(subject)}-{len(session)}",
)


def event_of(recorded: dict[str, Any]) -> Event:
    fields = {
        name: tuple(map(run_of, value)) if name in ("runs", "attached", "written") else value
        for name, value in recorded["fields"].items()
    }
    if recorded["kind"] == CHANGED:
        for key, item in ITEMS.items():
            of = {"kind": item.name}
            fields[key] = [event_of(of | {"fields": each}) for each in fields.get(key, ())]
    made: Event = KIND_OF[recorded["kind"]](
        **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    )
    return made


def run_of(numbers: list[int]) -> Run:
    generation, pool, first, step, count, modulus = numbers
    return Run((first + np.arange(count, dtype=np.int64) * step) % modulus, generation, pool)
