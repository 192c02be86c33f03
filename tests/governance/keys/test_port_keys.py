"""Keys of an engine's own index: made one by one or all at once, they are the same."""

from __future__ import annotations

import hashlib
from itertools import islice

import pytest

from kvcustody.allocator.prefix.longest_prefix import Prompt
from kvcustody.governance.external.block_keys import KeyChain, LazyKeys
from kvcustody.governance.identity.extra_content import Media, frame
from kvcustody.governance.request import read_prompt

BLOCK_TOKENS = 4
TOKENS = [(7 * at) % 1000 for at in range(BLOCK_TOKENS * 19 + 3)]
EXTRAS = {3: frame(Media(b"a", (2, 2), "uint8")), 17: frame(Media(b"b", (3,), "uint8"))}


def prompt(extras: dict[int, bytes]) -> Prompt:
    return read_prompt(TOKENS, BLOCK_TOKENS, extras, keep_last=True)


def state() -> hashlib.blake2b:
    return hashlib.blake2b(key=bytes(32), digest_size=32)


def one_by_one(extras: dict[int, bytes]) -> list[bytes]:
    """The keys as docs/concepts/keys.md says: a digest behind each whole block and its extra content."""
    running, data, keys = state(), prompt(extras).data, []
    for block in range(len(TOKENS) // BLOCK_TOKENS):
        running.update(data[16 * block : 16 * block + 16] + extras.get(block, b""))
        keys.append(running.digest())
    return keys


@pytest.mark.parametrize("extras", [{}, EXTRAS])
@pytest.mark.parametrize("reached", [0, 1, 4, 5, 18, 19])
def test_lazy_keys_are_the_keys_however_far_they_were_asked_for(extras: dict[int, bytes], reached: int) -> None:
    lazy, keys = LazyKeys(state(), prompt(extras)), one_by_one(extras)
    assert list(islice(lazy, reached)) == keys[:reached]
    assert len(lazy) <= max(4, 2 * reached) and (reached or not lazy)  # the rest was not made
    assert list(lazy) == keys
    assert lazy.complete() == keys


@pytest.mark.parametrize("reached", [0, 6, 19])
def test_a_generated_block_continues_the_prompt_whatever_was_asked_for(reached: int) -> None:
    running = state()
    chain = KeyChain(prompt({}), single_group=True, epoch=0)
    chain.state, chain.keys = running, LazyKeys(running, chain.prompt)
    assert len(list(islice(chain.keys, reached))) == reached
    made = chain.extend([5])  # the block's last token
    whole = read_prompt([*TOKENS, 5], BLOCK_TOKENS, None, keep_last=True)
    assert [*one_by_one({}), *made] == LazyKeys(state(), whole).complete()
    made += chain.extend([6, 7, 8, 9])
    longer = read_prompt([*TOKENS, 5, 6, 7, 8, 9], BLOCK_TOKENS, None, keep_last=True)
    assert chain.keys == [*one_by_one({}), *made] == LazyKeys(state(), longer).complete()
