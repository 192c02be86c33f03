"""A segment in a real engine with a host tier: its copies come back to whom the policy names, and to nobody else."""

from __future__ import annotations

import pytest

from standins.engines.sglang.sglang_tiers import SMALL, TIER_POLICY, clean, displace, prompt, settings

SHARED = prompt(50, 109)
NAMED = "".join(f"  {name}: {{quota: {{guaranteed: 0%, cap: 100%, borrow: true}}}}\n" for name in ("beta", "gamma"))
POLICY = TIER_POLICY.replace("  default: {quota", NAMED + "  default: {quota")


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_segment_comes_back_to_whom_it_is_for_and_to_nobody_else(start, new_deployment, page_size):
    """Controls: the same prompts of a tenant that no rule names, and of one that did when the segment is withdrawn."""
    site = new_deployment(policy=POLICY)
    engine = start(deployment=site, settings=settings(site.folder, "host"), **{**SMALL, "page_size": page_size})
    engine.run(prompt(60, 40), site.token("acme"))
    made = engine.probe("declare", owner="acme", tokens=SHARED)
    covered = made["covered"]
    assert covered == 101 // page_size * page_size, "the last tokens may be tokenized otherwise"
    segment = (
        f"segments: [{{id: s, owner: acme, tenants: [acme, beta], digest: 'hmac:{made['digest']}', "
        f"tokens: {made['tokens']}, classification: internal, expires: 2099-01-01}}]\n"
    )
    engine.probe("activate", policy=POLICY + segment, revision=2)
    computed, before = dict[int, list[int]](), 0

    def ask(tenant: str, seed: int) -> tuple[int, int]:
        """Cached tokens, and units that came from the tier for them."""
        nonlocal before
        answer = engine.run([*SHARED[:covered], *prompt(seed, 81)], site.token(tenant))
        assert answer.tokens == computed.setdefault(seed, answer.tokens), "as when it was computed"
        after = engine.probe("tiers")["host"]["restored"]
        restored, before = after - before, after
        return answer.cached_tokens, restored

    shared_units = -(-covered // 16)
    ask("acme", 61)
    ask("beta", 62)  # a first use is put on record, and computed
    assert ask("beta", 63) == (covered, 0), "from the device"
    displace(engine)
    assert ask("gamma", 64) == (0, 0), "no rule is for it"
    displace(engine)
    assert ask("beta", 65) == (covered, shared_units), "from the tier"
    displace(engine)
    assert ask("beta", 63) == (covered + 80, shared_units + 5), "and what is its own behind it"
    displace(engine)
    assert ask("beta", 61) == (covered, shared_units), "what is another's behind it is not"
    displace(engine)
    assert ask("gamma", 64) == ((covered + 80) // 16 * 16, (covered + 80) // 16), "its own, that it computed"
    clean(engine)

    displace(engine)
    engine.probe("activate", policy=POLICY, revision=3)
    assert ask("beta", 66)[0] < covered, "withdrawn: at most what its own first use left"
    engine.probe("activate", policy=POLICY + segment, revision=4)
    ask("beta", 67)
    displace(engine)
    assert ask("beta", 68) == (covered, shared_units), "control: it is there again"
    displace(engine)
    engine.probe("erase", tenant="acme")
    assert ask("beta", 69) == (0, 0), "its owner's data was erased, in every tier"
    clean(engine)
