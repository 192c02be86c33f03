"""What SGLang does by itself: the figures beside which the others stand."""

from __future__ import annotations

PROMPT = [16 + (7 * at) % 400 for at in range(300)]


def test_plain_sglang_shares_and_leaves_bytes(start):
    """The positive control: what governance ends is there without it."""
    engine = start()
    engine.run(PROMPT, "tenant-chosen")
    stolen = engine.run(PROMPT, "tenant-chosen")  # anybody may say so
    assert stolen.cached_tokens == len(PROMPT) - 1
    for number in range(60):
        engine.run([16 + (number * 31 + at * (number % 7 + 3)) % 480 for at in range(120)])
    written = engine.probe("written")
    assert written["soiled"] > 0, "no slot was handed out with another request's bytes in it"
