"""The catalogue of historic bugs: what went wrong, where it was seen, what it breaks, and which cases must detect it.

`precedent` names public threads, advisories or our own suites; a bare description is a bug class without one thread.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One bug. `cases`: names of cases, any one of which must fail; the first is the intended one."""

    precedent: str
    breaks: str
    cases: tuple[str, ...]


FAULTS: dict[str, Fault] = {
    # -- scope ---------------------------------------------------------------------------------------------------------
    "scope dropped at admission": Fault(
        "ktransformers#2184: the salt is accepted and ignored",
        "every tenant's requests share one domain",
        ("scope/look-up", "worlds/foreign-tenant"),
    ),
    "scope dropped at look-up": Fault(
        "LMCache#2878, sglang#37160: keys without the salt, trusted at attach",
        "a foreign tenant's prompt is a hit",
        ("scope/look-up", "scope/attach"),
    ),
    "unscoped keys": Fault(
        "as above, with the domain compared at attach",
        "the first tenant's blocks take every other tenant's keys",
        ("scope/look-up",),
    ),
    "erase epochs ignored": Fault(
        "adapters from before doors: what a door says of an erasure is not compared",
        "an erased prompt is a hit until the erasure itself arrives",
        ("scope/epochs",),
    ),
    "scope dropped at store": Fault(
        "vllm#51640: the connector hashes token ids alone",
        "objects of the tier have names that every tenant can compute",
        ("scope/store",),
    ),
    "scope dropped at prefetch": Fault(
        "vllm#51640, LMCache#4825: one name at store and prefetch, without the salt",
        "the tier serves one tenant's blocks to another",
        ("scope/prefetch",),
    ),
    "scope dropped at event": Fault(
        "sglang#24568, dynamo#11571: stored events without the salt",
        "routers cannot tell tenants apart",
        ("events/scope",),
    ),
    "unscoped removal": Fault(
        "vLLM and SGLang removal events carry no salt",
        "routers cannot tell whose blocks are gone",
        ("events/scope",),
    ),
    "removal not told": Fault(
        "dynamo#14627: stale routing entries after an eviction",
        "routers send requests to blocks that are gone",
        ("events/truth",),
    ),
    "tokens in events": Fault(
        "vLLM, SGLang and TensorRT-LLM events carry the prompt's token ids",
        "whoever subscribes reads prompts",
        ("events/scope",),
    ),
    "scope dropped at fork": Fault(
        "children of parallel sampling without their parent's salt",
        "what a child computes is nobody's, or everybody's",
        ("scope/fork",),
    ),
    "scope dropped after preemption": Fault(
        "a resumed request is queued anew, without its identity",
        "what it computes from then on is nobody's, or everybody's",
        ("scope/preempt-resume",),
    ),
    # -- identity ------------------------------------------------------------------------------------------------------
    "forged identity accepted": Fault(
        "a signature that is read and not compared",
        "any client is any tenant",
        ("identity/forged",),
    ),
    "expired identity accepted": Fault(
        "a token's life that is not compared", "a leaked token works for ever", ("identity/expired",)
    ),
    "replayed identity accepted": Fault(
        "a token of one use whose use is not remembered", "a leaked token works again", ("identity/replayed",)
    ),
    "no identity falls to a tenant": Fault(
        "tinfoil router, vLLM: no identity means no salt, and no salt is a namespace",
        "whoever sends nothing reads what the last one wrote",
        ("identity/missing",),
    ),
    # -- lifetime ------------------------------------------------------------------------------------------------------
    "free while in flight": Fault(
        "sglang#35049: a block is freed under a transfer or step that still writes",
        "the late write lands in another request's block",
        ("residue/transfers", "residue/in-flight", "fuzz/in-flight"),
    ),
    "async store of a re-used block": Fault(
        "vllm#52360: the store thread reads after the block was given away",
        "one request's bytes are persisted under another's key",
        ("residue/transfers", "fuzz/tier"),
    ),
    "late answer of a preempted request": Fault(
        "a step's answer is taken by the request's next life",
        "tokens twice, or of K/V that is gone",
        ("fuzz/in-flight", "scope/preempt-resume"),
    ),
    "double free in one list": Fault(
        "vllm#44097: one block twice in one list of blocks to free",
        "two requests write one block",
        ("lifecycle/one-holder", "lifecycle/any-order"),
    ),
    "release not idempotent": Fault(
        "LMCache#3770: abort and finish both release",
        "references go below those that are held",
        ("lifecycle/any-order", "lifecycle/stale-handle", "lifecycle/stale-preemption"),
    ),
    "generation not bumped": Fault(
        "handles by block index alone (ABA)",
        "evidence of one use passes for another's",
        ("ledger/complete",),
    ),
    "uncomputed block published": Fault(
        "a block is indexed when it is scheduled, and its request is aborted before it is computed",
        "another request reads K/V that was never written",
        ("lifecycle/aborted-prefill", "lifecycle/computed-only"),
    ),
    "order to forget ignored": Fault(
        "the index keeps what governance ended",
        "a look-up finds a block without custody",
        ("time/idle", "erase/cached"),
    ),
    # -- residue -------------------------------------------------------------------------------------------------------
    "never scrubbed": Fault(
        "vllm#35219 and everybody before: freed blocks keep their bytes",
        "the next holder reads the last one's K/V",
        ("residue/first-write",),
    ),
    "scrub after hand-out": Fault(
        "vllm#47574: zeroing is ordered behind the first write",
        "the new holder's K/V is wiped, the old one's was readable",
        ("residue/first-write", "scope/evict"),
    ),
    "scrub skips the tail": Fault(
        "only published blocks are scrubbed; the partial last one is not",
        "the end of a prompt stays readable",
        ("residue/in-time", "residue/first-write"),
    ),
    "scrub of the first shard only": Fault(
        "one worker's answer is taken for all",
        "other shards keep their bytes",
        ("residue/shards",),
    ),
    "verify skipped": Fault(
        "a receipt that says more than was read",
        "the policy's read-back never happens",
        ("ledger/verified",),
    ),
    "failed block handed out": Fault(
        "a block that does not verify goes back to the free list",
        "the next holder reads the last one's K/V",
        ("residue/stuck",),
    ),
    # -- time ----------------------------------------------------------------------------------------------------------
    "late sweep serves the expired": Fault(
        "expiry happens in a sweep alone (AIBrix, llm-d evictors)",
        "a block is served after its deadline",
        ("time/late-sweep", "time/late-sweep-many"),
    ),
    "TTL does not fire while idle": Fault(
        "expiry runs in the scheduler's step only",
        "an idle engine keeps everything",
        ("time/idle",),
    ),
    "ceiling moved by attach": Fault(
        "sliding TTL: every touch renews it", "a block that is used often lives for ever", ("time/ceiling",)
    ),
    "running block past its ceiling attached": Fault(
        "a referenced block is never due",
        "a stream of requests keeps a block alive",
        ("time/ceiling-running",),
    ),
    "hold renewed by foreign reader": Fault(
        "a grant's reader touches the owner's LRU entry",
        "the owner's deadline is in the reader's hands",
        ("time/foreign-renewal",),
    ),
    "tier outlives the deadline": Fault(
        "LMCache#2840: files stay when their cache entry is gone",
        "an expired block comes back from the tier",
        ("time/tier",),
    ),
    # -- administration ------------------------------------------------------------------------------------------------
    "erase misses cached": Fault(
        "an erasure ends sessions, not blocks", "the erased prompt is a hit", ("erase/cached",)
    ),
    "erase misses running": Fault(
        "an erasure looks at the cache only", "the erased subject's request goes on", ("erase/running",)
    ),
    "erase misses the tier": Fault(
        "Mooncake `file_storage.cpp`, LMCache#1660: clear does not clear the disk",
        "the erased prompt comes back from the tier",
        ("erase/tier",),
    ),
    "grant cached past its revocation": Fault(
        "a decision is made once and kept (check then use)",
        "a revoked reader goes on reading",
        ("policy/revocation",),
    ),
    # -- quota and evidence --------------------------------------------------------------------------------------------
    "quota stalls others": Fault(
        "vLLM: `allocate_slots` that answers None stops the queue",
        "one tenant over its quota holds everybody up",
        ("quota/waits-alone",),
    ),
    "quota preempts others": Fault(
        "vLLM: a failed allocation preempts the youngest, whoever's it is",
        "one tenant over its quota takes another's blocks",
        ("quota/waits-alone",),
    ),
    "end not recorded": Fault(
        "write-behind audit that loses a record",
        "custody without an end: nobody can show that it is gone",
        ("ledger/complete",),
    ),
    "receipt not recorded": Fault(
        "as above, for the scrub", "an end without evidence", ("ledger/complete", "ledger/coverage")
    ),
}
