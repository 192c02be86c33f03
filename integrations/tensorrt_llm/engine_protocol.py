"""What we read of TensorRT-LLM's objects, as its connector interface documents them (files of September 2026).

Never run on TensorRT-LLM itself: a field that is not there is an error of the first request, not a silent None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

# Attributes of a request whose content no token says; a request that has one is neither kept nor found.
OTHER_CONTENT = (
    *("lora_task_id", "lora_weights", "multimodal_hashes", "multimodal_embedding", "prompt_embedding_table"),
    *("mrope_rotary_cos_sin", "encoder_tokens"),
)


class EngineRequest(Protocol):
    """`LlmRequest`, as the connector is handed it."""

    @property
    def request_id(self) -> int:
        """The engine's own id."""

    @property
    def cache_salt(self) -> str | None:
        """What `generate(cache_salt=…)` was given."""

    @property
    def is_dummy_request(self) -> bool:
        """Whether the engine made it for itself, as it does to warm up."""

    def get_tokens(self, beam: int, /) -> Sequence[int]:
        """Return all token ids of a beam."""


class ScheduledRequest(Protocol):
    """`RequestData`: what of one request is new in the coming step."""

    @property
    def request_id(self) -> int:
        """The engine's own id."""

    @property
    def new_tokens(self) -> Sequence[int]:
        """Tokens since the last step."""

    @property
    def new_block_ids(self) -> Sequence[int]:
        """Blocks since the last step."""

    @property
    def computed_position(self) -> int:
        """Tokens with KV before the step; those that a connector promised are not among them in the first one."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""

    @property
    def block_hashes(self) -> Sequence[int]:
        """What KV events call its full blocks, from the first; none under the engine's second cache manager."""

    @property
    def cache_salt(self) -> str | None:
        """As the request's."""


class ScheduledStep(Protocol):
    """`SchedulerOutput`."""

    @property
    def new_requests(self) -> Sequence[ScheduledRequest]:
        """Requests that are scheduled for the first time."""

    @property
    def cached_requests(self) -> Sequence[ScheduledRequest]:
        """Requests that were."""


class LoadOrder(NamedTuple):
    """Blocks of the device that a claim fills."""

    request_id: int
    claim: int
    blocks: tuple[int, ...]


class SaveOrder(NamedTuple):
    """Blocks of the device that are whole after this step, and what they are called."""

    request_id: int
    number: int
    blocks: tuple[int, ...]


class StepOrders(NamedTuple):
    """What the scheduler half tells the worker half: numbers alone, no key and no content."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()


def has_other_content(request: object) -> bool:
    """Return whether something of a request's content is not in its tokens."""
    return any(getattr(request, name, None) is not None for name in OTHER_CONTENT)
