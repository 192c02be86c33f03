"""The interface that an adapter's author implements once, so that the conformance kit can drive the engine behind it.

Everything the kit knows about an engine comes through this interface. Nothing here is a copy of governance's books:
block tables, bytes and index contents come from the engine itself. So a false statement in either is detected.

1. A factory makes one fresh engine from a `Setup`; the kit owns the clock and moves it, the engine never does.
2. The engine is deterministic: greedy, the same prompt gives the same output on the same weights.
3. An engine names each feature that it lacks in `Capabilities.lacks`, with the reason. The cases that need the feature
   are skipped with that reason; no other case is skipped.
4. When a block was handed out, the probe of `watch` is called with the bytes of *every* shard just before the block's
   first write. That is after the scrub that was ordered for the block, and before anything else touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvcustody.audit.kinds import Event
from kvcustody.clock import VirtualClock
from kvcustody.governance.edge.erase_epochs import Epochs, KnownEpochs
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.identity.principal import Principal
from kvcustody.integrations.events.block_event import BlockEvent

# What an engine may lack. A name that is not here is a mistake of the adapter's author, and is refused.
FEATURES: dict[str, str] = {
    "tokens": "requests carry a signed token, which can be forged, replayed or expired",
    "forks": "a second request on the blocks of a running one",
    "preemption": "a running request gives its blocks up and resumes later",
    "async": "device steps stay in flight while the engine goes on (`Setup.steps_in_flight`)",
    "tier": "an external tier that blocks are stored to and prefetched from, asynchronously",
    "events": "block events, published for routers",
    "bytes": "the bytes of a block can be read, and first writes probed",
    "stuck": "a block can be made to refuse to become zero (`stick`)",
    "shards": "more than one shard of memory (`Setup.shards`)",
    "exact": "the output depends on nothing but prompt, weights and the K/V that was read",
    "salts": "a client may send a salt of its own",
    "epochs": "requests come through a door before a router, which says by which erase epochs",
    "grants": "blocks of a domain other than the request's own can be read, where a grant opens it",
}


class Capabilities(NamedTuple):
    """The engine's properties. `lacks`: feature (of `FEATURES`) → the reason why this engine lacks it.

    block_tokens: tokens a block. blocks: blocks that can be handed out, of all groups, after what the engine
    reserves for itself.
    groups: layer groups with block tables of their own (more than one: a hybrid model); `RequestOutcome.blocks`
            lists all.
    vocabulary: prompts have token ids from 3 to below this; at least 200.
    """

    engine: str
    block_tokens: int
    blocks: int
    shards: int = 1
    groups: int = 1
    vocabulary: int = 256
    lacks: Mapping[str, str] = {}


class Setup(NamedTuple):
    """The kit's requirements for a factory.

    policy: YAML for `policies.loader.load_policy`; tenants `alpha`, `beta`, `gamma`, `delta`; issuer `idp`.
    clock: decides every deadline; hand it to the port, the Governor, the memory and the verifier of tokens.
    blocks: how many blocks of each layer group can be handed out (an engine that reserves some allocates more); the
    cases press on pools of 16 to 400.
    steps_in_flight: how many device steps retire late; 0 is a synchronous engine. Only asked of engines with `async`.
    tier: attach the external tier. Only asked of engines with `tier`.
    shards: shards of memory. More than 1 only of engines with `shards`.
    """

    policy: str
    clock: VirtualClock
    blocks: int = 48
    steps_in_flight: int = 0
    tier: bool = False
    shards: int = 1
    seed: int = 0


class RequestSpec(NamedTuple):
    """One request. `identity`: a principal whose identity the harness proves in whatever way its engine wants; a text
    that is presented as it stands, as a client's raw token; or nothing at all. `salt`: the client's own.
    `route`: as the door says, or None. `epochs`: those that a door before a router put into its token; None: it came
    through no such door.
    """

    identity: Principal | str | None
    tokens: tuple[int, ...]
    max_tokens: int = 1
    salt: str | None = None
    route: str | None = None
    epochs: Epochs | None = None


WAITING, RUNNING, FINISHED, ABORTED, REFUSED = "waiting", "running", "finished", "aborted", "refused"
OVER = frozenset({FINISHED, ABORTED, REFUSED})


class RequestOutcome(NamedTuple):
    """The current facts about a request; its client can see the first four fields.

    cached_tokens: prompt tokens that needed no prefill, at its last start. blocks: its block table in the engine, every
    group, now; empty once it is over. reason: in the harness's words, for people.
    """

    state: str
    cached_tokens: int
    output: tuple[int, ...]
    error: str
    blocks: tuple[int, ...]
    reason: str = ""

    @property
    def seen(self) -> tuple[str, int, tuple[int, ...], str]:
        """What the client sees."""
        return self.state, self.cached_tokens, self.output, self.error


class FirstWrite(NamedTuple):
    """A block that is about to be written for the first time since it was allocated to `request`.

    nonzero_bytes: over all shards. hand_out: a number that the engine gives each hand-out, so that one block handed out
    twice is two.
    """

    request: object
    block: int
    nonzero_bytes: int
    hand_out: int


class TierObject(NamedTuple):
    """One object in the external tier: its key as the tier names it, and its bytes."""

    key: bytes
    data: bytes


class EngineUnderTest(Protocol):
    """A governed engine as the kit sees it, on one thread; every call returns at once."""

    @property
    def capabilities(self) -> Capabilities:
        """The engine's properties and lacks; the same for every call."""

    # -- requests ----------------------------------------------------------------------------------------------------

    def mint(self, principal: Principal, valid_us: int) -> str:
        """Return a valid raw token of `principal` for one request (`tokens`)."""

    def submit(self, ask: RequestSpec) -> object:
        """Queue a request; it starts in a later `step`. Never raises for what a client can cause: `RequestOutcome`."""

    def step(self) -> bool:
        """Take one engine step, deferred requests included; return False where no request waits or runs."""

    def outcome(self, request: object) -> RequestOutcome:
        """Return the current facts about a request, whatever its state."""

    def abort(self, request: object) -> None:
        """Cancel a request for its client; do nothing for a request that has ended."""

    def disconnect(self, request: object) -> None:
        """Drop a request's client connection; do nothing for a request that has ended."""

    def preempt(self, request: object) -> None:
        """Take a running request's blocks; it waits and resumes on its own. Otherwise do nothing (`preemption`)."""

    def fork(self, request: object) -> object:
        """Return a second request that continues a running one (`forks`)."""

    # -- time and administration -------------------------------------------------------------------------------------

    def idle(self, microseconds: int) -> None:
        """Let time pass without any request arriving. The harness advances `Setup.clock` in whatever strides it likes
        and runs only what an idle engine runs by itself: its timer, its wake-up; never a `step` it would not make.
        """

    def activate(self, policy: str) -> None:
        """Activate a new policy revision."""

    def erase(self, selector: Selector) -> None:
        """Erase a selection as an administrator does."""

    def take_epochs(self, known: KnownEpochs) -> None:
        """Take erase epochs from the control plane; they apply to all later decisions (`epochs`)."""

    def scan(self) -> list[str]:
        """Return the findings of the orphan scan against the live engine; empty when clean."""

    def check(self) -> list[str]:
        """Return the violated invariants of governance and of the engine's own books, recomputed; empty when all
        hold.
        """

    def close(self) -> None:
        """End everything in order; the evidence is complete afterwards."""

    # -- evidence ----------------------------------------------------------------------------------------------------

    def watch(self, probe: Callable[[FirstWrite], None]) -> None:
        """Call `probe` before each first write from now on (rule 4; `bytes`)."""

    def read(self, blocks: Sequence[int]) -> list[bytes]:
        """Return all bytes of each block on every shard, as they are now on the device (`bytes`)."""

    def free_blocks(self) -> tuple[int, ...]:
        """Return the engine's list of blocks that it could allocate without eviction; with duplicates, if any."""

    def indexed(self) -> frozenset[bytes]:
        """Return the keys in the engine's prefix index now, as its block events name them (32 bytes)."""

    def events(self) -> list[BlockEvent]:
        """Return the block events since the last call in order, as the default settings publish them (`events`)."""

    def ledger(self) -> list[Event]:
        """Return every ledger event so far, in order."""

    # -- faults and the tier -----------------------------------------------------------------------------------------

    def stick(self, block: int) -> None:
        """Make this block fail to become zero on its last shard from now on (`stuck`)."""

    def hold_transfers(self, held: bool) -> None:
        """Hold started transfers from and to the tier, or release them (`tier`)."""

    def tier(self) -> list[TierObject]:
        """Return everything in the external tier (`tier`)."""

    def drop_index(self) -> None:
        """Drop the engine's prefix index as under pressure; the tier keeps its content (`tier`)."""


EngineFactory = Callable[[Setup], EngineUnderTest]
