"""What vLLM does without governance, in the same harness: the figures beside which the governed ones stand."""

from __future__ import annotations

import time

from standins.engines.vllm.local_engine import BLOCK, LocalEngine

VICTIM = list(range(100, 196))  # three whole blocks
NEXT = [301]


def test_without_a_salt_anyone_sees_what_was_cached(plain: LocalEngine):
    assert plain.ask([*VICTIM, *NEXT]).cached_tokens == 0
    assert plain.ask([*VICTIM, *NEXT]).cached_tokens == 3 * BLOCK


def test_a_client_chooses_its_salt_so_it_can_choose_anothers(plain: LocalEngine):
    prompt = [token + 1 for token in VICTIM]
    plain.ask([*prompt, *NEXT], salt="victim")
    assert plain.ask([*prompt, *NEXT], salt="attacker").cached_tokens == 0
    assert plain.ask([*prompt, *NEXT], salt="victim").cached_tokens == 3 * BLOCK


def test_freed_blocks_keep_their_bytes_and_are_handed_out_with_them(plain: LocalEngine):
    plain.write_report()
    for number in range(30):  # more than the pool holds
        plain.ask([(number * 31 + at) % 400 + 50 for at in range(3 * BLOCK - 5)], tenant=f"t{number}")
    report = plain.write_report()
    print("plain:", report, "free residue:", plain.free_residue())
    assert report["dirty_blocks"] > 0
    assert report["nonzero_bytes"] > 1000
    assert plain.free_residue() > 1000


def test_nothing_expires(plain: LocalEngine):
    prompt = [token + 2 for token in VICTIM]
    plain.ask([*prompt, *NEXT], tenant="brief")
    time.sleep(4)
    assert plain.ask([*prompt, *NEXT], tenant="brief").cached_tokens == 3 * BLOCK
