"""One vLLM request under governance: its owner, its residency, and the reported part of its block tables.

1. The port hears of blocks in the order in which the engine moved them: what was dropped before what was handed out,
   what was handed out before what was published.
2. `tables` is what the port was last told, group by group; the difference to the engine's own tables is what has yet
   to be reported. Nothing is reported twice and nothing is skipped, whatever the engine did in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcustody.integrations.vllm.scheduler.block_tables import KnownTable

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvcustody.allocator.external.residency import ExternalResidency
    from kvcustody.governance.identity.model_identity import ModelIdentity
    from kvcustody.governance.identity.principal import Principal
    from kvcustody.governance.request import Hints
    from kvcustody.integrations.vllm.scheduler.extra_content import Extras
    from kvcustody.integrations.vllm.tiers.copy_plans import Fetching, PlannedLoad, SharedLookup, UnsavedRun

ATTRIBUTE = "kvcustody"  # on vLLM's Request


class PublishedRange(NamedTuple):
    """Table entries [first, last) of a group that entered the engine's index, without masked ones."""

    group: int
    first: int
    last: int
    mask: list[bool] | None


class GovernedRequest:
    """The adapter's facts about a request. `principal` is None where no valid identity came with it."""

    __slots__ = (
        "cause",
        "extends_keys",
        "extras",
        "fetching",
        "fills_one_by_one",
        "hands_to",
        "has_looked",
        "hints",
        "hit_blocks",
        "keyed_tokens",
        "looking",
        "model",
        "model_changes",
        "planned",
        "principal",
        "publishes",
        "readable_tokens",
        "reported_tokens",
        "request",
        "request_id",
        "residency",
        "restored_blocks",
        "skips_reading",
        "skips_tiers",
        "tables",
        "trace",
        "unreported_ranges",
        "unsaved",
        "waits_for",
    )

    def __init__(
        self,
        request: Request,
        principal: Principal | None,
        hints: Hints,
        model: ModelIdentity,
        extras: Extras,
        groups: int,
        trace: str = "",
        model_changes: int = 0,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.principal = principal
        self.hints = hints
        self.model = model
        self.model_changes = model_changes  # known when it was told which model it runs on
        self.extras = extras
        self.trace = trace
        self.residency: ExternalResidency | None = None
        self.skips_reading = False
        self.waits_for: str | None = None
        self.cause: str | None = None  # why it ended, where governance ended it
        self.publishes = False
        self.fills_one_by_one = False  # it runs, alone in its domain and layer group: the common case of a decode step
        self.extends_keys = False  # blocks that it fills get keys
        self.readable_tokens = 0
        self.keyed_tokens = 0  # whole blocks of which have keys
        self.reported_tokens = request.num_tokens  # that the port has been told
        self.hit_blocks: tuple[int, ...] = (0,) * groups
        self.tables: list[KnownTable] = [KnownTable() for _ in range(groups)]
        self.unreported_ranges: list[PublishedRange] = []
        self.unsaved: UnsavedRun | None = None  # what it published and no tier has
        self.planned: PlannedLoad | None = None  # what a tier has for it
        self.restored_blocks = 0  # that a tier brought, or is bringing
        self.skips_tiers = False  # a load of it failed
        self.hands_to = ""  # the worker that it is prefilled for
        self.fetching: Fetching | None = None  # what another worker prefilled for it
        self.looking: SharedLookup | None = None  # what others stored of it
        self.has_looked = False

    def end(self) -> None:
        """Take note that its blocks were released: nothing more is reported."""
        self.residency = None
        self.publishes = self.fills_one_by_one = self.extends_keys = False
        self.unreported_ranges = []

    def forget_tables(self) -> None:
        """Take note that it was preempted and starts again from nothing."""
        self.keyed_tokens = self.restored_blocks = 0
        self.hit_blocks = (0,) * len(self.tables)
        self.tables = [KnownTable() for _ in self.tables]


def governed_request(request: Request) -> GovernedRequest | None:
    """Return the adapter's side of a request; None for one that it never admitted."""
    governed: GovernedRequest | None = request.__dict__.get(ATTRIBUTE)
    return governed
