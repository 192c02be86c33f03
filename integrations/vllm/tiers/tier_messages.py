"""What travels between the scheduler's side and the workers about copies: jobs there, replies back.

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
    """What the policy lets a tenant's blocks of one classification do in a tier, and the tenant's part of it."""

    limit: CopyLimit
    share: TierShare


Rules: TypeAlias = dict[tuple[str, str], CopyRule]
"""By tenant and classification."""


class OpenTier(NamedTuple):
    """The first job of a tier: what may be in it, how many tokens a block has, and which process has it."""

    number: int
    tier: str
    block_tokens: int
    rules: Rules
    holder: TierHolder | None = None


class NarrowCopies(NamedTuple):
    """Policy or keys have changed: these are the rules now, and what they do not let be ends."""

    number: int
    tier: str
    rules: Rules


class StoreCopy(NamedTuple):
    """Seal the blocks of a run, as they are before anything of this step is written."""

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
    """Fill these blocks of a request that waits, part by part.

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
    """Ask the store that workers share for copies that go on from `depth` of a chain, whoever stored them.

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
    """Carry out a completed erasure again on keys that an older copy of their file put back."""

    number: int
    tier: str
    complete: CompletedErasure


class DestroyCopies(NamedTuple):
    """End these objects, known or not."""

    number: int
    tier: str
    names: tuple[bytes, ...]


class ForgetTenant(NamedTuple):
    """A tenant that the policy does not name has left: what it has here ends."""

    number: int
    tier: str
    tenant: str


class ExpireCopies(NamedTuple):
    """End what is due; a worker does so by itself too, this says when it has."""

    number: int
    tier: str


class ProbeCopy(NamedTuple):
    """Read one object as a load does, and drop it: what a link takes that nobody is to wait for."""

    number: int
    tier: str


class CompareCopies(NamedTuple):
    """Compare the store with the worker's own index, as a scan does, and end what differs."""

    number: int
    tier: str


class OfferCopies(NamedTuple):
    """Give these parts of a chain to who fetches them with this ticket."""

    number: int
    tier: str
    offer: Offer


class FetchCopies(NamedTuple):
    """Fetch with a ticket what another worker sealed of one domain's part of a chain, and keep it.

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
    """The last job: end what does not outlive the process, and let the store go."""

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
    """The answer to the first job: what a block's bytes mean, how many stores may be under way, most bytes kept.

    `returned_keys`: how many destroyed keys the worker found in their file again, by its receipts.
    """

    layout: bytes
    buffers: int
    capacity_bytes: int
    returned_keys: int = 0


class FetchedCopies(NamedTuple):
    """Blocks that a fetch brought into the tier, the bytes that came, and why it was not all, where it was not."""

    blocks: int
    size: int
    reason: str


class SoughtCopy(NamedTuple):
    """A copy that a look-up in the shared store found: of which layer group, where in the chain it ends, its blocks
    and sealed bytes.

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
    """Return a label that came from another process: hashes of its spec are made anew, for each process has its own."""
    return label if label.spec is None else replace(label, spec=replace(label.spec))
