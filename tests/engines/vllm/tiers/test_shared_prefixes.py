"""A segment in a running vLLM with a host tier: its copies come back to whom the policy names, and to nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from local_engine import BLOCK, LocalEngine
from tier_engines import TIER_POLICY, deployment_with, displace, options, prompt, tier, until

SHARED = prompt(1, 8)[:-1]
NAMED = "".join(
    f"  {name}: {{quota: {{guaranteed: 0%, cap: 100%, borrow: true}}}}\n" for name in ("beta", "gamma")
)
POLICY = TIER_POLICY.replace("  default: {quota", NAMED + "  default: {quota")


def test_a_segment_comes_back_to_whom_it_is_for_and_to_nobody_else(
    start: Callable[..., LocalEngine], plain: LocalEngine, tmp_path: Path
):
    """Controls: the same prompts of a tenant that no rule names, and of one that did when the segment is withdrawn."""
    engine = start(deployment=deployment_with(tmp_path / "site", POLICY), **options())
    engine.ask(prompt(99, 2), tenant="alpha")
    made = engine.probe("declare", ("api-keys", "alpha", SHARED))
    covered = made["blocks"] * BLOCK
    assert made["blocks"] == 7, "the last block may be tokenized otherwise"
    segment = (
        f"segments: [{{id: s, owner: alpha, tenants: [alpha, beta], digest: 'hmac:{made['digest']}', "
        f"tokens: {made['tokens']}, classification: internal, expires: 2099-01-01}}]\n"
    )
    engine.governance("activate", POLICY + segment, 2, "tests")
    before = tier(engine)["restored_blocks"]

    def ask(tenant: str, seed: int) -> tuple[int, int]:
        """Cached tokens, and blocks that came from the tier for them."""
        nonlocal before
        tokens = [*SHARED[:covered], *prompt(seed, 4)]
        answer = engine.ask(tokens, tenant=tenant, max_tokens=8)
        assert answer.tokens == plain.ask(tokens, max_tokens=8).tokens
        restored, before = tier(engine)["restored_blocks"] - before, tier(engine)["restored_blocks"]
        return answer.cached_tokens, restored

    ask("alpha", 5)
    ask("beta", 6)  # a first use is put on record, and computed
    assert ask("beta", 7) == (covered, 0), "from the device"
    displace(engine)
    assert ask("gamma", 8) == (0, 0), "no rule is for it"
    displace(engine)
    assert ask("beta", 9) == (covered, 7), "from the tier"
    displace(engine)
    assert ask("alpha", 5) == (11 * BLOCK, 11), "and what is its owner's own follows"
    displace(engine)
    assert ask("gamma", 8) == (11 * BLOCK, 11), "its own copy, that it computed itself"
    assert ask("beta", 9)[0] == 11 * BLOCK

    displace(engine)
    engine.governance("activate", POLICY, 3, "tests")
    assert ask("beta", 10) == (4 * BLOCK, 4), (
        "withdrawn: one object of its own first use, before the policy was on record"
    )
    engine.governance("activate", POLICY + segment, 4, "tests")
    ask("beta", 11)
    displace(engine)
    engine.governance("erase", "alpha", None, None)
    assert ask("beta", 12)[1] in (0, 4), "its owner's data was erased, in every tier; its own was not"
    assert until(lambda: not any(engine.probe("pool")["refs"][1:]))
    assert engine.governance("check") == []
    assert engine.governance("scan") == []
