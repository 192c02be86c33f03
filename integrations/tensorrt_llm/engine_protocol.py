"""The fields that we read from TensorRT-LLM's objects, as its connector interface documents them (September 2026).

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
    """An `LlmRequest`, as the connector gets it."""

    @property
    def request_id(self) -> int:
        """The engine's own id."""

    @property
    def cache_salt(self) -> str | None:
        """The argument of `generate(cache_salt=…)`."""

    @property
    def is_dummy_request(self) -> bool:
        """Whether the engine made the request for itself, as for a warm-up."""

    def get_tokens(self, beam: int, /) -> Sequence[int]:
        """Return all token ids of a beam."""


class ScheduledRequest(Protocol):
    """A `RequestData`: one request's news in the coming step."""

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
        """The tokens with KV before the step; in the first step, without those that a connector promised."""

    @property
    def num_scheduled_tokens(self) -> int:
        """The number of tokens that the step computes."""

    @property
    def block_hashes(self) -> Sequence[int]:
        """The KV events' hashes of its full blocks, from the first on; none under the engine's second cache manager."""

    @property
    def cache_salt(self) -> str | None:
        """The request's salt."""


class ScheduledStep(Protocol):
    """A `SchedulerOutput`."""

    @property
    def new_requests(self) -> Sequence[ScheduledRequest]:
        """The requests that are scheduled for the first time."""

    @property
    def cached_requests(self) -> Sequence[ScheduledRequest]:
        """The requests that were scheduled before."""


class LoadOrder(NamedTuple):
    """The device's blocks that a claim fills."""

    request_id: int
    claim: int
    blocks: tuple[int, ...]


class SaveOrder(NamedTuple):
    """The device's blocks that are full after this step, and their names."""

    request_id: int
    number: int
    blocks: tuple[int, ...]


class StepOrders(NamedTuple):
    """The scheduler half's orders to the worker half: only numbers, no key and no content."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()


def has_other_content(request: object) -> bool:
    """Return whether a request has content besides its tokens."""
    return any(getattr(request, name, None) is not None for name in OTHER_CONTENT)
