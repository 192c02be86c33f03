"""Segment matching G1-G4, with real keys: lengths, margins, models, epochs, and what never matches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcustody.clock import VirtualClock
from kvcustody.errors import ConfigError, KeyringError
from kvcustody.governance.decisions.segment_matcher import Candidate, SegmentMatcher, covered_blocks, declare
from kvcustody.governance.identity.domain_spec import tenant_owner
from kvcustody.governance.keys.keyring import Keyring
from kvcustody.governance.keys.root_key_wrapping import open_wrapping
from kvcustody.governance.keys.wrapped_key_store import FileKeyStore

ACME = tenant_owner("idp", "acme")
GLOBEX = tenant_owner("idp", "globex")
MODEL = bytes(range(32))
BLOCK = 16
_RANDOM = random.Random(6)
TEXT = [_RANDOM.randrange(128_000) for _ in range(200)]


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    keyring = Keyring(
        FileKeyStore(tmp_path / "keys.json"),
        open_wrapping("generated", tmp_path / "root.key"),
        VirtualClock(),
    )
    keyring.ensure([ACME, GLOBEX])
    return keyring


def _candidate(ring: Keyring, tokens: list[int], name: str = "agent", owner: Any = ACME) -> Candidate:
    declared = declare(ring, owner, tokens, model=MODEL, block_tokens=BLOCK)
    return Candidate(name, owner, declared.digest, declared.tokens)


def _matcher(ring: Keyring, *candidates: Candidate, model: bytes = MODEL) -> SegmentMatcher:
    return SegmentMatcher(ring, candidates, model=model, block_tokens=BLOCK)


def _prompt(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()


@pytest.mark.parametrize(
    ("declared", "blocks"), [(7, 0), (8, 0), (23, 0), (24, 1), (39, 1), (40, 2), (200, 12), (0, 0)]
)
def test_whole_blocks_end_eight_tokens_before_the_text(declared: int, blocks: int) -> None:
    assert covered_blocks(declared, BLOCK) == blocks


def test_a_prompt_that_begins_with_the_text_matches(ring: Keyring) -> None:
    matcher = _matcher(ring, _candidate(ring, TEXT))
    for tail in ([], [5], list(range(300))):
        match = matcher.match(_prompt(TEXT + tail))
        assert match is not None and (match.id, match.owner, match.blocks) == ("agent", ACME, 12)
    merged = [*TEXT[:192], 9, 9, 9]  # the tokenizer merged the text's last tokens with what follows
    assert matcher.match(memoryview(_prompt(merged))) is not None


def test_any_changed_token_in_the_covered_blocks_is_a_miss(ring: Keyring) -> None:
    matcher = _matcher(ring, _candidate(ring, TEXT))
    for at in range(192):
        changed = TEXT.copy()
        changed[at] += 1
        assert matcher.match(_prompt(changed)) is None
    assert matcher.match(_prompt([1, *TEXT])) is None  # not at the prompt's start
    assert matcher.match(_prompt(TEXT[:191])) is None
    assert matcher.match(b"") is None


def test_the_longest_candidate_wins_and_ties_go_to_the_lowest_id(ring: Keyring) -> None:
    short, long = _candidate(ring, TEXT[:60], "a-short"), _candidate(ring, TEXT, "b-long")
    twin = _candidate(ring, TEXT, "a-twin", GLOBEX)
    for order in ((short, long), (long, short)):
        match = _matcher(ring, *order).match(_prompt(TEXT))
        assert match is not None and match.id == "b-long"
    match = _matcher(ring, short, long).match(_prompt(TEXT[:100]))
    assert match is not None and (match.id, match.blocks) == ("a-short", 3)
    match = _matcher(ring, long, twin, short).match(_prompt(TEXT))
    assert match is not None and (match.id, match.owner) == ("a-twin", GLOBEX)


def test_a_digest_holds_for_one_owner_model_and_block_size(ring: Keyring) -> None:
    candidate = _candidate(ring, TEXT)
    assert _matcher(ring, candidate._replace(owner=GLOBEX)).match(_prompt(TEXT)) is None
    assert _matcher(ring, candidate, model=bytes(32)).match(_prompt(TEXT)) is None
    other_size = SegmentMatcher(ring, [candidate], model=MODEL, block_tokens=32)
    assert other_size.match(_prompt(TEXT)) is None
    too_large = SegmentMatcher(ring, [candidate], model=MODEL, block_tokens=256)
    assert not too_large and too_large.match(_prompt(TEXT * 9)) is None


def test_a_segment_lives_through_a_rotation_and_dies_with_its_epoch(ring: Keyring) -> None:
    candidate = _candidate(ring, TEXT)
    ring.rotate(ACME)
    assert _matcher(ring, candidate).match(_prompt(TEXT)) is not None
    again = _candidate(ring, TEXT)
    assert again.digest != candidate.digest
    ring.destroy(ACME, 1)
    assert _matcher(ring, candidate).match(_prompt(TEXT)) is None
    assert _matcher(ring, again).match(_prompt(TEXT)) is not None


def test_no_candidates_is_an_empty_matcher(ring: Keyring) -> None:
    matcher = _matcher(ring)
    assert not matcher and matcher.match(_prompt(TEXT)) is None


def test_bad_input(ring: Keyring) -> None:
    with pytest.raises(ConfigError, match="segment of `23` tokens is too short; a whole block needs at least 24"):
        _candidate(ring, TEXT[:23])
    with pytest.raises(KeyringError, match="has no key epoch"):
        _candidate(ring, TEXT, owner=tenant_owner("idp", "nobody"))
    candidate = _candidate(ring, TEXT)
    with pytest.raises(ConfigError, match="`17` segments are open to one tenant, at most 16"):
        _matcher(ring, *[candidate] * 17)
    with pytest.raises(ConfigError, match="not 64 hex digits"):
        _matcher(ring, candidate._replace(digest="hmac:00"))


def test_a_digest_tells_nothing_without_the_key(ring: Keyring, tmp_path: Path) -> None:
    """F4's dictionary in small: the text itself, digested under another root, does not give the digest."""
    other = tmp_path / "other"
    other.mkdir()
    stranger = Keyring(
        FileKeyStore(other / "keys.json"), open_wrapping("generated", other / "root.key"), VirtualClock()
    )
    stranger.ensure([ACME])
    assert _candidate(ring, TEXT).digest == _candidate(ring, TEXT).digest  # the control: with the key it does
    assert _candidate(ring, TEXT).digest != _candidate(stranger, TEXT).digest
