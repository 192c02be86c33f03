"""What the suites of tiers share: a policy that lets copies leave, settings, and work that displaces others' pages."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcustody.audit.reports.erasure.certificate import issue, new_opening
from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.tlog.proofs import ProofError
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.errors import LedgerError
from kvcustody.governance.erasure.selector import Selector
from standins.engines.vllm.deployment import CLOCK, POLICY, Deployment

SMALL = {"max_total_tokens": 1024, "chunked_prefill_size": 64, "max_running_requests": 6}
WHOLE = 288  # of a prompt's 301 tokens: eighteen units of sixteen
TIER_POLICY = POLICY
for _before, _after in (
    (
        "offload: {internal: never, brief: never, restricted: never}",
        "offload: {internal: {tiers: [host, nvme], encrypt: required}, "
        "brief: {tiers: [host, nvme], encrypt: required}, restricted: never}",
    ),
    (  # copies of tenants that the policy names are found again after a restart
        "  default: {quota",
        "  acme: {quota: {guaranteed: 0%, cap: 100%, borrow: true}}\n  default: {quota",
    ),
):
    assert TIER_POLICY.count(_before) == 1, _before
    TIER_POLICY = TIER_POLICY.replace(_before, _after)
_crowds = itertools.count()


def settings(folder: Path, tiers: str, **more: Any) -> dict[str, str]:
    """The tiers' settings of an engine, in the environment."""
    named: dict[str, Any] = {"tier_object_blocks": 4, "tier_timeout_ms": 5000, "tier_transfers": "always"}
    if "host" in tiers:
        named["host_tier_bytes"] = 32 << 20
    if "nvme" in tiers:
        named |= {"nvme_tier_path": folder / "tier", "nvme_tier_bytes": 64 << 20}
    return {f"KVCUSTODY_{name.upper()}": str(value) for name, value in (named | more).items()}


def tiered(
    start: Callable[..., Any], new_deployment: Callable[..., Deployment], tiers: str, **options: Any
) -> tuple[Any, Deployment, dict[str, str]]:
    """An engine with these tiers, its deployment, and the settings to start it with again."""
    site = new_deployment(policy=TIER_POLICY)
    named = settings(site.folder, tiers)
    return start(deployment=site, settings=named, **{**SMALL, **options}), site, named


def prompt(number: int, tokens: int = 301) -> list[int]:
    """Token ids that no other number shares."""
    return [16 + (number * 131 + at * (number % 7 + 3) + at // 29) % 480 for at in range(tokens)]


def displace(engine: Any, tenant: str = "churner") -> None:
    """Others' prompts, until nothing of before is on the device."""
    for _ in range(4):
        engine.run(prompt(1000 + next(_crowds), 500), engine.deployment.token(tenant), 2)


def certificate(engine: Any, erasure: str, tenant: str, subject: str) -> dict[str, Any]:
    """Its body, from the ledger alone, as soon as it is complete and signed."""
    opening, until = new_opening(Selector(tenant, subject).text()), time.monotonic() + 60
    store, key = open_store(engine.deployment.ledger_url), SigningKey.generate("example.com/ledger")
    try:
        while True:
            engine.probe("conservation")  # what happened is in the ledger
            try:
                with store.connect() as connection:
                    made = issue(connection, erasure, key, opening, now_us=CLOCK.utc_us())
                body = dict(made.facts)
                if body["outcome"] == "complete":
                    return body
            except (LedgerError, ProofError):
                body = {}
            assert time.monotonic() < until, f"no certificate: {body.get('outcome')}, {body.get('waiting')}"
            time.sleep(0.2)
    finally:
        store.dispose()


def clean(engine: Any) -> None:
    """Every book agrees, and no free slot holds anything."""
    for name in ("check", "scan", "conservation"):
        problems = engine.probe(name)
        assert problems == [], (name, problems)
    free, held = engine.probe("free"), engine.probe("held")
    assert free["soiled"] == 0 and engine.probe("written")["soiled"] == 0
    assert free["free"] + held["evictable"] + held["protected"] == free["slots"]
    assert held["protected"] == 0, "an idle engine holds nothing"
