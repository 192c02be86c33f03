"""Messages about copies between the scheduler's side and the workers: jobs and replies.

1. A job says whose blocks they are, under which keys they are found, and what they may live. No key that opens
   anything travels, no token, and no content: a worker has its own access to the keyring.
2. A worker does the jobs of one tier in their order, so that an end that was ordered later reaches what was stored
   before it.
3. Every job is answered once by every worker.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeAlias

from kvcustody.governance.decisions.access_plan import DomainLabel
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.erasure.tier_protocol import CompletedErasure, TierErased
from kvcustody.governance.handover.exchange import AnsweredFetch
from kvcustody.governance.handover.offers import Offer
from kvcustody.governance.handover.ticket import Ticket
from kvcustody.governance.orphans.finding import Finding
from kvcustody.governance.tiers.copies.index import CopyLimit, PublishedRun, TierShare
from kvcustody.governance.tiers.copy_event import CopyEvent
from kvcustody.governance.tiers.heirs import TierHolder
from kvcustody.governance.tiers.tier import CopyCounts, Restored
from kvcustody.integrations.vllm.tiers.layer_groups import CopiedGroup


class CopyRule(NamedTuple):
    """What the policy permits a tenant's blocks of one classification in a tier, and the tenant's share of the tier."""

    limit: CopyLimit
    share: TierShare


Rules: TypeAlias = dict[tuple[str, str], CopyRule]
"""By tenant and classification."""


class OpenTier(NamedTuple):
    """A tier's first job: its rules, its block size in tokens, and its process."""

    number: int
    tier: str
    block_tokens: int
    rules: Rules
    holder: TierHolder | None = None


class NarrowCopies(NamedTuple):
    """Apply new rules after policy or keys changed, and end what they no longer permit."""

    number: int
    tier: str
    rules: Rules


class StoreCopy(NamedTuple):
    """Seal a run's blocks as they are before any write in this step."""

    number: int
    tier: str
    run: PublishedRun
    rule: CopyRule
    blocks: list[int]


class LoadPart(NamedTuple):
    """Blocks of one layer group and domain to fill, from `depth` of the chain on.

    `keys`: of the chain, from block `first` on.
    """

    label: DomainLabel
    first: int
    keys: bytes
    depth: int
    blocks: list[int]


class LoadCopies(NamedTuple):
    """Fill these blocks of a waiting request, part by part.

    `together`: parts are of several layer groups, and for vLLM all of it came or none.
    """

    number: int
    tier: str
    request_id: str
    parts: tuple[LoadPart, ...]
    together: bool = False


class SoughtChain(NamedTuple):
    """The keys of one layer group's part of a chain."""

    group: CopiedGroup
    keys: bytes


class SeekCopies(NamedTuple):
    """Search the shared store for copies that continue a chain from `depth`, whoever stored them.

    `chains`: by layer group, from block `first` of the chain on. A hit may end at `last` or before.
    """

    number: int
    tier: str
    label: DomainLabel
    first: int
    chains: tuple[SoughtChain, ...]
    depth: int
    last: int
    rule: CopyRule


class EraseCopies(NamedTuple):
    """End what an erasure covers."""

    number: int
    tier: str
    erasure: str
    selector: Selector
    before_us: int


class EraseReturned(NamedTuple):
    """Repeat a completed erasure on keys that an older copy of their file restored."""

    number: int
    tier: str
    complete: CompletedErasure


class DestroyCopies(NamedTuple):
    """End these objects, known or not."""

    number: int
    tier: str
    names: tuple[bytes, ...]


class ForgetTenant(NamedTuple):
    """End everything here of a tenant that left and that the policy does not name."""

    number: int
    tier: str
    tenant: str


class ExpireCopies(NamedTuple):
    """End what is due; workers also do so on their own, and this reports when they have."""

    number: int
    tier: str


class ProbeCopy(NamedTuple):
    """Read one object as a load does, and drop it, to measure the link without a waiting request."""

    number: int
    tier: str


class CompareCopies(NamedTuple):
    """Compare the store with the worker's own index, as a scan does, and end differences."""

    number: int
    tier: str


class OfferCopies(NamedTuple):
    """Offer these parts of a chain to the worker that fetches them with this ticket."""

    number: int
    tier: str
    offer: Offer


class FetchCopies(NamedTuple):
    """Fetch another worker's sealed copies of one domain's part of a chain with a ticket, and keep them.

    `text`: the ticket as it came. `keys`: of the chain up to the part's end, 32 bytes a block.
    """

    number: int
    tier: str
    ticket: Ticket
    text: str
    label: DomainLabel
    keys: bytes
    rule: CopyRule


class CloseTier(NamedTuple):
    """End what does not outlive the process, and close the store: the last job."""

    number: int
    tier: str


CopyJob: TypeAlias = (
    OpenTier
    | NarrowCopies
    | StoreCopy
    | LoadCopies
    | SeekCopies
    | EraseCopies
    | EraseReturned
    | DestroyCopies
    | ForgetTenant
    | ExpireCopies
    | ProbeCopy
    | CompareCopies
    | OfferCopies
    | FetchCopies
    | CloseTier
)


class OpenedTier(NamedTuple):
    """The answer to the first job: the meaning of a block's bytes, how many stores may run at once, and the capacity.

    `returned_keys`: how many destroyed keys the worker found in their file again, by its receipts.
    """

    layout: bytes
    buffers: int
    capacity_bytes: int
    returned_keys: int = 0


class FetchedCopies(NamedTuple):
    """The blocks and bytes that a fetch brought into the tier, and the reason where it was not all."""

    blocks: int
    size: int
    reason: str


class SoughtCopy(NamedTuple):
    """A copy found in the shared store: its layer group, its end in the chain, its blocks and its sealed bytes.

    Times are boot times.
    """

    group: int
    end: int
    blocks: int
    size: int
    since_us: int
    due_us: int


class CopyReply(NamedTuple):
    """One worker's answer to a job, with everything that happened to its copies until then.

    `number` 0: nobody asked. `restored`: to a load, part by part, less than was asked where it failed. `counts`: the
    worker's own, behind these events. `took_us`: what the job took on the thread.
    `probed`: the bytes that were read for nobody. `found`: what a comparison found, each as it was repaired.
    `returned_keys`: how many keys an `EraseReturned` destroyed. `fetched`: what came of a fetch. `given`: how
    fetches of other workers were answered. `sought`: what a look-up in the shared store found.
    """

    number: int
    tier: str
    shard: int
    events: tuple[CopyEvent, ...] = ()
    restored: tuple[Restored, ...] = ()
    erased: TierErased | None = None
    opened: OpenedTier | None = None
    counts: CopyCounts | None = None
    took_us: int = 0
    probed: int = 0
    found: tuple[Finding, ...] = ()
    returned_keys: int = 0
    fetched: FetchedCopies | None = None
    given: tuple[AnsweredFetch, ...] = ()
    sought: tuple[SoughtCopy, ...] = ()


def received(label: DomainLabel) -> DomainLabel:
    """Return a label from another process with new hashes for its spec, because each process has its own."""
    return label if label.spec is None else replace(label, spec=replace(label.spec))
