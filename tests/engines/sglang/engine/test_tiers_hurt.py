"""Stores that do what they should not, in a real engine: misses, and never another's bytes."""

from __future__ import annotations

from standins.engines.sglang.sglang_tiers import WHOLE, clean, displace, prompt, tiered


def test_stores_give_misses_and_without_keys_a_tenant_would_be_given_copies(start, new_deployment):
    engine, site, _ = tiered(start, new_deployment, "host")
    for number, how in enumerate(("fails", "loses", "lies")):
        mine, other = prompt(10 + 2 * number), prompt(11 + 2 * number)
        first = [engine.run(one, site.token("acme")).tokens for one in (mine, other)]
        displace(engine)
        engine.probe("hurt_store", how=how)
        again = [engine.run(one, site.token("acme")) for one in (mine, other)]
        assert [one.tokens for one in again] == first, how
        assert [one.cached_tokens for one in again] == [0, 0], how
        assert engine.run(mine, site.token("acme")).cached_tokens == len(mine) - 1, "from the device by now"
        engine.probe("hurt_store", how="")
        displace(engine)
        assert engine.run(mine, site.token("acme")).cached_tokens == WHOLE, f"{how} no longer"
        clean(engine)
    # The positive control of every `0` in these suites: one domain's names and keys for everybody, and copies come.
    mine = prompt(30)
    engine.run(mine, site.token("acme"))
    displace(engine)
    assert engine.run(mine, site.token("beta")).cached_tokens == 0
    displace(engine, "acme")
    engine.probe("open_to_anybody")
    stolen = engine.run(mine, site.token("gamma")).cached_tokens
    print("without keys of its own a tenant finds", stolen, "of", len(mine), "tokens")
    assert stolen == WHOLE
