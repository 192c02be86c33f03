"""A release that is refused at start, tried all the same: its bounds are widened in the processes of its tests alone.

`newest.py --run` names it in the environment (`vllm==0.34.0`); the tests' conftest and the probes inside engines' own
processes call `widen` before anything asks for a version. What the product accepts does not change.
"""

from __future__ import annotations

import os

TRIED = "ENGINE_TRIED_RELEASE"


def tried(distribution: str) -> str:
    """The release of this engine that is tried; empty: none."""
    name, _, version = os.environ.get(TRIED, "").partition("==")
    return version if name == distribution else ""


def widen(distribution: str) -> None:
    """Accept the tried release of this engine in this process, if one is named."""
    version = tried(distribution)
    if not version:
        return
    major, minor, *_ = (int(part) for part in version.split(".")[:2])
    if distribution == "vllm":
        from kvcustody.integrations.vllm import versions

        versions.VLLM_OLDEST = min(versions.VLLM_OLDEST, (major, minor))
        versions.VLLM_BELOW = max(versions.VLLM_BELOW, (major, minor + 1))
    elif distribution == "sglang":
        from kvcustody.integrations.sglang import check_engine as sglang

        sglang.VERSIONS = (*sglang.VERSIONS, version)
    elif distribution == "transformers":
        from kvcustody.integrations.transformers.batching import governed_batching as transformers

        transformers.FIRST = min(transformers.FIRST, (major, minor))
        transformers.BEYOND = max(transformers.BEYOND, (major, minor + 1))
