"""The scope of a request goes with it through every operation: look-up, attach, tier, eviction, fork, preemption."""

from __future__ import annotations

from kvcustody.governance.edge.erase_epochs import (
    Epochs,
    EpochScope,
    EpochTags,
    EraseEpochs,
    KnownEpochs,
    RaisedEpoch,
)
from kvcustody.governance.identity.principal import Principal
from kvcustody.testkit.conformance.case import (
    ISSUER,
    Bench,
    Case,
    CaseHarness,
    case,
    expect,
    expect_equal,
    person,
)
from kvcustody.testkit.conformance.engine_protocol import FINISHED
from kvcustody.testkit.conformance.policy import ONCE, SECOND_US, policy

ALPHA, BOB, BETA = person("alpha"), person("alpha", "bob"), person("beta")


@case("scope/look-up")
def look_up(bench: Bench) -> None:
    """The same prompt is a full hit for its own subject and a miss for any other tenant, subject or classification."""
    rig = bench.open()
    tokens = rig.warm(ALPHA, 5)
    for who, what in ((BETA, "foreign tenant"), (BOB, "other subject of the tenant")):
        rig.same_as_cold(who, tokens, rig.hit(who, tokens, 0, what, max_tokens=3))
        rig.hit(who, tokens, 5, f"{what}, on what it computed itself")
    rig.hit(ALPHA, tokens, 0, "other classification", route=ONCE)
    rig.same_as_cold(ALPHA, tokens, rig.hit(ALPHA, tokens, 5, "own, after the others asked", max_tokens=3))


@case("scope/salt", "salts")
def salt(bench: Bench) -> None:
    """A client's own salt narrows: it hits under the same salt and nothing else, and never another tenant's."""
    rig = bench.open()
    tokens = rig.prompt(4)
    rig.hit(ALPHA, tokens, 0, "first, salted", salt="pepper")
    rig.hit(ALPHA, tokens, 4, "own, same salt (control)", salt="pepper")
    rig.hit(ALPHA, tokens, 0, "own, without the salt")
    rig.hit(ALPHA, tokens, 0, "own, another salt", salt="salt")
    rig.hit(BETA, tokens, 0, "foreign tenant with the same salt", salt="pepper")


@case("scope/epochs", "epochs")
def epochs(bench: Bench) -> None:
    """What was written before an erase epoch was raised is found no more. A door and an engine that know of different
    epochs find and leave nothing. Other subjects' blocks are found as before.
    """
    rig = bench.open(blocks=96)
    tags = EpochTags(bytes(32))
    scope = EpochScope(ISSUER, ALPHA.tenant, ALPHA.subject)

    def heard(raised: int) -> KnownEpochs:
        numbers = [RaisedEpoch(number, tags.of(scope)) for number in range(1, raised + 1)]
        known = KnownEpochs(EraseEpochs(numbers, version=raised), tags)
        rig.engine.take_epochs(known)
        return known

    def of(who: Principal, known: KnownEpochs) -> Epochs:
        return known.of(who.issuer, who.tenant, who.subject)

    none = heard(0)
    tokens, of_bob = rig.warm(ALPHA, 4, epochs=of(ALPHA, none)), rig.warm(BOB, 4, epochs=of(BOB, none))
    first = heard(1)
    rig.hit(ALPHA, tokens, 0, "what was written before the raise", epochs=of(ALPHA, first))
    rig.hit(ALPHA, tokens, 4, "own, since the raise (control)", epochs=of(ALPHA, first))
    rig.hit(BOB, of_bob, 4, "other subject, after the raise", epochs=of(BOB, first))
    for said, what in (
        (of(ALPHA, none), "a door that is behind"),
        (Epochs(private=2), "a door that is ahead"),
    ):
        other = rig.prompt(4)
        for _ in range(2):
            rig.hit(ALPHA, other, 0, what, epochs=said)
        rig.hit(ALPHA, tokens, 0, f"{what}, on what it may read elsewhere", epochs=said)
    rig.hit(ALPHA, tokens, 4, "own, after doors that know otherwise", epochs=of(ALPHA, first))


@case("scope/attach")
def attach(bench: Bench) -> None:
    """What a running request has published is attached by its own subject only; no foreign table names its blocks."""
    rig = bench.open()
    tokens = rig.prompt(4)
    first = rig.submit(ALPHA, tokens, 30)
    rig.until_running(first)
    rig.steps(6)
    own, foreign = rig.submit(ALPHA, tokens, 2), rig.submit(BETA, tokens, 2)
    own_table, foreign_table = rig.until_running(own).blocks, rig.until_running(foreign).blocks
    mine = set(rig.engine.outcome(first).blocks)
    expect(bool(mine & set(own_table)), "the own request shares no block with the running one (control)")
    expect(not mine & set(foreign_table), "a foreign request has blocks of a running one")
    rig.finish(own, foreign, first)
    expect_equal(rig.engine.outcome(foreign).cached_tokens, 0, "foreign cached tokens")
    rig.same_as_cold(BETA, tokens, rig.engine.outcome(foreign))
    rig.same_as_cold(ALPHA, tokens, rig.engine.outcome(own))


def _tiered(bench: Bench) -> tuple[CaseHarness, tuple[int, ...]]:
    rig = bench.open(policy(tier=True), tier=True)
    tokens = rig.warm(ALPHA, 4)
    rig.settle()
    rig.engine.idle(SECOND_US)
    rig.engine.drop_index()
    expect(bool(rig.engine.tier()), "nothing is in the tier (control)")
    return rig, tokens


@case("scope/store", "tier", "events")
def store(bench: Bench) -> None:
    """What is stored to the tier is named by scoped keys, each of which an event of its tenant has announced."""
    rig, tokens = _tiered(bench)
    announced: set[bytes] = set()
    for event in rig.engine.events():
        if event.kind == "stored":
            announced |= {event.keys[at : at + 32] for at in range(0, len(event.keys), 32)}
    unknown = [one.key for one in rig.engine.tier() if one.key not in announced]
    expect(not unknown, f"{len(unknown)} objects in the tier have names that no scope announced")
    rig.hit(ALPHA, tokens, 4, "own, from the tier (control)")


@case("scope/prefetch", "tier")
def prefetch(bench: Bench) -> None:
    """What the tier holds comes back for its own subject and for nobody else."""
    rig, tokens = _tiered(bench)
    for who, what in ((BETA, "foreign tenant"), (BOB, "other subject of the tenant")):
        rig.same_as_cold(who, tokens, rig.hit(who, tokens, 0, f"{what}, from the tier", max_tokens=2))
    rig.engine.drop_index()
    own = rig.hit(ALPHA, tokens, 4, "own, from the tier (control)", max_tokens=2)
    rig.same_as_cold(ALPHA, tokens, own)


@case("scope/evict")
def evict(bench: Bench) -> None:
    """Under pressure blocks change owners, and every output is still what an empty cache would give."""
    rig = bench.open(blocks=24)
    prompts = [(who, rig.prompt(5, 2)) for who in (ALPHA, BETA, BOB) for _ in range(4)]
    hits = 0
    for _ in range(2):
        for who, tokens in prompts:
            outcome = rig.ask(who, tokens, 2)
            expect_equal(outcome.state, FINISHED, f"a request that fits by itself ({outcome.reason})")
            rig.same_as_cold(who, tokens, outcome)
            hits += outcome.cached_tokens > 0
    expect(hits < 2 * len(prompts), "nothing was ever evicted (control)")


@case("scope/fork", "forks")
def fork(bench: Bench) -> None:
    """A forked request is its parent's subject's: it says what its parent says, and what it leaves is its subject's."""
    rig = bench.open()
    tokens = rig.prompt(4, 2)
    parent = rig.submit(ALPHA, tokens, 12)
    rig.until_output(parent, 3)
    child = rig.engine.fork(parent)
    rig.finish(parent, child)
    outcome = rig.engine.outcome(child)
    expect_equal(outcome.state, FINISHED, "child")
    expect_equal(outcome.output, rig.engine.outcome(parent).output, "the child's output, greedy as its parent")
    rig.expect_opened("alpha", 2)
    grown = (*tokens, *outcome.output)
    own = rig.ask(ALPHA, grown)
    expect(own.cached_tokens > 4 * rig.block_tokens, f"own, after the fork: {own.cached_tokens} cached (control)")
    rig.hit(BETA, grown, 0, "foreign, after the fork")


@case("scope/preempt-resume", "preemption")
def preempt_resume(bench: Bench) -> None:
    """A request keeps its scope over preemption: it resumes on its own blocks, and what it then leaves is its own."""
    rig = bench.open()
    tokens = rig.prompt(4, 2)
    request = rig.submit(ALPHA, tokens, 10)
    for wanted in (2, 5):
        rig.until_output(request, wanted)
        rig.engine.preempt(request)
    rig.finish(request)
    outcome = rig.engine.outcome(request)
    expect_equal(outcome.state, FINISHED, "preempted request")
    expect(
        outcome.cached_tokens >= 4 * rig.block_tokens,
        f"{outcome.cached_tokens} cached: it did not resume on its own blocks",
    )
    rig.same_as_cold(ALPHA, tokens, outcome)
    rig.expect_opened("alpha", 3)
    grown = (*tokens, *outcome.output)
    own = rig.ask(ALPHA, grown)
    expect(own.cached_tokens > 4 * rig.block_tokens, f"own, after it: {own.cached_tokens} cached (control)")
    rig.hit(BETA, grown, 0, "foreign, after it")


CASES: tuple[Case, ...] = (
    look_up,
    salt,
    epochs,
    attach,
    store,
    prefetch,
    evict,
    fork,
    preempt_resume,
)
