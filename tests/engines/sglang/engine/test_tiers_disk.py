"""Files alone as a tier of a real engine: a slow disk, a full one, an owner that is erased, a deadline that passes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from standins.engines.sglang.sglang_tiers import (
    SMALL,
    TIER_POLICY,
    WHOLE,
    certificate,
    clean,
    displace,
    prompt,
    settings,
)
from standins.engines.vllm.deployment import BRIEF_IDLE_SECONDS, Desk


@pytest.fixture(scope="module")
def filed(model, site, new_deployment) -> Iterator[Any]:
    """One engine whose only tier is a folder, for tests with tenants of their own."""
    from standins.engines.sglang.sglang_engine import SglangEngine

    deployment = new_deployment(policy=TIER_POLICY)
    named = settings(deployment.folder, "nvme", tier_timeout_ms=1000)
    engine = SglangEngine(model, site, deployment=deployment, settings=named, **SMALL)
    yield engine
    engine.probe("hurt_disk", how="")
    engine.close()


def tier(engine: Any) -> dict[str, Any]:
    """What the engine says of it."""
    found: dict[str, Any] = engine.probe("tiers")["nvme"]
    return found


def files(engine: Any) -> set[str]:
    """What the folder has, drafts included."""
    folder: Path = engine.deployment.folder / "tier"
    return {path.name for path in folder.glob("??/*")}


def await_asked(engine: Any) -> None:
    """Until the store would be asked again, after what it did."""
    until = time.monotonic() + 90
    while not tier(engine)["is_asked"]:
        assert time.monotonic() < until, "the store stays closed"
        time.sleep(0.2)


def test_a_slow_disk_is_waited_for_in_time_and_no_longer(filed):
    site, mine, other = filed.deployment, prompt(50), prompt(51)
    first = filed.run(mine, site.token("acme")).tokens
    alone = filed.run(other, site.token("beta")).tokens
    displace(filed)
    filed.probe("hurt_disk", how="slow", seconds=0.05)
    late = filed.run(mine, site.token("acme"))
    assert (late.cached_tokens, late.tokens) == (WHOLE, first), "late, and in time"
    displace(filed)
    filed.probe("hurt_disk", how="slow")  # from here on no read ends
    both = filed.run_all([(mine, site.token("acme")), (other, site.token("beta"))])
    assert [one.tokens for one in both] == [first, alone], "they compute, and nobody waits for the disk"
    assert [one.cached_tokens for one in both] == [0, 0]
    assert filed.run(prompt(52), site.token("gamma")).tokens and not tier(filed)["is_asked"]
    filed.probe("hurt_disk", how="")
    await_asked(filed)
    displace(filed)
    assert filed.run(mine, site.token("acme")).cached_tokens == WHOLE, "nothing was lost"
    clean(filed)


def test_an_owner_is_erased_while_a_read_of_its_copy_does_not_end(filed):
    """The read that nobody waits for any more is the only one that an erasure can meet; it brings nothing."""
    site, mine = filed.deployment, prompt(53)
    filed.run(mine, site.token("eta", "erased"))
    displace(filed)
    filed.probe("hurt_disk", how="slow")
    assert filed.run(mine, site.token("eta", "erased")).cached_tokens == 0
    erasure = filed.probe("erase", tenant="eta", subject="erased")["erasure"]
    assert "eta" not in tier(filed)["tenants"]
    filed.probe("hurt_disk", how="")
    await_asked(filed)
    assert filed.run(mine, site.token("eta", "erased")).cached_tokens == 0
    figures = certificate(filed, erasure, "eta", "erased")["figures"]["copies"]
    assert figures.keys() == {"nvme"} and figures["nvme"]["key_destroyed"] == figures["nvme"]["ended"] >= 4
    clean(filed)


def test_an_owner_is_erased_in_files_alone(filed):
    site, mine = filed.deployment, prompt(54)
    before = files(filed)
    filed.run(mine, site.token("zeta", "erased"))
    displace(filed)
    assert "zeta" in tier(filed)["tenants"]
    theirs = _named(filed, "zeta")
    assert theirs and theirs <= files(filed) - before
    erasure = filed.probe("erase", tenant="zeta", subject="erased")["erasure"]
    assert "zeta" not in tier(filed)["tenants"] and not theirs & files(filed)
    figures = certificate(filed, erasure, "zeta", "erased")["figures"]["copies"]
    assert figures.keys() == {"nvme"} and figures["nvme"]["waiting"] == 0
    assert figures["nvme"]["key_destroyed"] == figures["nvme"]["ended"] == len(theirs)
    assert filed.run(mine, site.token("zeta", "erased")).cached_tokens == 0
    clean(filed)


def test_a_deadline_passes_in_files_of_an_idle_engine(filed):
    site, mine = filed.deployment, prompt(55)
    filed.run(mine, site.token("brief"))
    displace(filed)
    theirs = _named(filed, "brief")
    assert theirs and theirs <= files(filed)
    time.sleep(BRIEF_IDLE_SECONDS + 1.0)
    assert "brief" not in tier(filed)["tenants"] and not theirs & files(filed), "without any request"
    assert filed.run(mine, site.token("brief")).cached_tokens == 0
    clean(filed)


def test_a_full_disk_takes_nothing_and_gives_what_it_has(filed):
    site, kept, more = filed.deployment, prompt(56), prompt(57)
    first = [filed.run(one, site.token("acme")).tokens for one in (kept,)]
    displace(filed)
    had, refused = files(filed), tier(filed)["refused"]
    filed.probe("hurt_disk", how="full")
    first.append(filed.run(more, site.token("acme")).tokens)
    displace(filed)
    assert tier(filed)["refused"] > refused
    assert files(filed) == had, "nothing was added, nothing was lost, and no draft is left"
    await_asked(filed)
    again = filed.run(kept, site.token("acme"))
    assert (again.cached_tokens, again.tokens) == (WHOLE, first[0]), "a full disk is read"
    again = filed.run(more, site.token("acme"))
    assert (again.cached_tokens, again.tokens) == (0, first[1]), "computed"
    assert filed.run(kept, site.token("beta")).cached_tokens == 0
    clean(filed)
    decided = Desk(site, site.folder).bodies("transfer-decided")
    failed = [one for one in decided if one["action"] == "store" and one["outcome"] == "failed"]
    assert failed and {one["tier"] for one in failed} == {"nvme"}, "on record"
    filed.probe("hurt_disk", how="")
    await_asked(filed)
    filed.run(more, site.token("acme"))
    displace(filed)
    await_asked(filed)
    assert filed.run(more, site.token("acme")).cached_tokens == WHOLE, "room again"
    clean(filed)


def _named(engine: Any, tenant: str) -> set[str]:
    return set(engine.probe("copies_of", tenant=tenant))
