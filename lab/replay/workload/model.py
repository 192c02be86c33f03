"""A workload: labelled requests in time order, and what a report should say about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.token_ids import Tokens
from kvcustody.lab.replay.workload.labels import Label

Job = tuple[TraceRequest, Label]


@dataclass(frozen=True, slots=True)
class Workload:
    """What to replay: labelled requests in time order, from `origin_us` of their clock over `span_us`.

    `origin` is what the ledger says of it: `generated`, or `replayed` from a record. `house_prompt` is the text that a
    policy's segment declares. `tenant_names` are those that the trace itself names, the busiest first. `remarks` say
    in a sentence each what the trace does not, and what to do about it. `has_content`: equal prompts can be recognised.
    """

    title: str
    jobs: Iterable[Job]
    tenants: int
    span_us: int
    origin: str
    longest_answer: int
    origin_us: int = 0
    requests: int | None = None
    house_prompt: Tokens | None = None
    notes: tuple[tuple[str, str], ...] = ()
    tenant_names: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    has_content: bool = True
