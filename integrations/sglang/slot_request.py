"""A request in SGLang under governance: its hit, the reported and published parts of its row, and tiers' content."""

from __future__ import annotations

from typing import NamedTuple

from kvcustody.allocator.external.residency import ExternalResidency
from kvcustody.governance.external.namespace_keys import NO_PATH, TreePath
from kvcustody.governance.identity.principal import Principal
from kvcustody.governance.tiers.run_transfers import CopyReader, TierWay
from kvcustody.governance.tiers.tier import Found
from kvcustody.governance.tiers.tier_link import TransferChoice
from kvcustody.integrations.sglang.page_tree import NO_PAGES, PageNode, Pages


class ChainPlace(NamedTuple):
    """Pages [first, until) of a path in one domain, in the namespace `name`, behind those of `behind`, if any."""

    name: str
    first: int
    until: int
    behind: str = ""


class UnitChain(NamedTuple):
    """The units of one place, as a request may read them."""

    reader: CopyReader
    keys: bytes
    place: ChainPlace


class PlannedLeg(NamedTuple):
    """One tier's part of a load, from a unit of a chain on."""

    chain: UnitChain
    way: TierWay
    depth: int
    found: list[Found]
    choice: TransferChoice


class PlannedRestore(NamedTuple):
    """The `pages` of a request's prompt that tiers would load behind the first `hit`."""

    hit: int
    pages: int
    legs: tuple[PlannedLeg, ...]


class SlotRequest:
    """A request under governance."""

    __slots__ = (
        "avoids",
        "cached",
        "cause",
        "found",
        "has_begun",
        "latency",
        "narrowed_by",
        "node",
        "path",
        "planned",
        "principal",
        "published",
        "publishes",
        "reported",
        "request_id",
        "residency",
        "unit_keys",
    )

    def __init__(
        self,
        request_id: str,
        residency: ExternalResidency,
        narrowed_by: str,
        latency: str = "",
        principal: Principal | None = None,
    ) -> None:
        self.request_id = request_id
        self.residency = residency
        self.principal = principal
        self.narrowed_by = narrowed_by  # what its client said besides: a part of its namespaces
        self.latency = latency  # its class, as tiers see it
        self.cause: str | None = None  # why it ends, where governance ends it
        self.avoids: frozenset[TierWay] = frozenset()  # tiers that failed it, or are slower than computing
        self.forget_row()

    def name(self, namespace: str) -> str:
        """Return a namespace for the request; its client's salt can only narrow it."""
        return f"{namespace}/{self.narrowed_by}" if self.narrowed_by else namespace

    def forget_row(self) -> None:
        """Forget the row: the request is new, or was preempted."""
        self.path: TreePath = NO_PATH
        self.found: Pages = NO_PAGES  # by its last look-up
        self.node: PageNode | None = None  # where its published pages end, once it has published
        self.has_begun = False
        self.cached = 0  # leading pages that it did not compute
        self.reported = 0  # leading pages of its row that the port knows of
        self.published = 0  # leading pages of its row that are the tree's
        self.publishes = True
        self.planned: PlannedRestore | None = None  # what tiers have behind its last look-up
        self.unit_keys: dict[tuple[ChainPlace, int], bytes | None] = {}  # by place and length, for tiers
