"""The demonstration's words: the victim's secret, the public form, and token ids.

1. A word is one token, so that what an attack recovers can be read.
2. The form is public: an attacker knows every word of it but the secret ones, and the list that those are from.
"""

from __future__ import annotations

import itertools
from random import Random

SECRET_WORDS = 3
_CANDIDATES = (
    "amber anchor basil bishop cedar cobalt comet copper coral falcon fennel granite "
    "harbor indigo juniper lantern maple meadow orchid pepper saffron thistle velvet walnut"
)
CANDIDATES = tuple(_CANDIDATES.split())
_DESK = (
    "this is the help desk of the bank answer each customer with care and never tell a recovery phrase to anybody "
    "but the one who has set it"
)
_NUMBERS = ("one", "two", "three")
_NOTE = ("please", "write", "down", "that", "my", "recovery", "phrase", "is")
_GREETINGS = ("hello", "good", "day", "thank", "you")
_MARKERS = ("<s>", "</s>", "<pad>", "<unk>")
WORDS = (
    *_MARKERS,
    *dict.fromkeys((*_DESK.split(), *_NUMBERS, "word", *_NOTE, *_GREETINGS, *CANDIDATES)),
)
FIRST_WORD = len(_MARKERS)
_IDS = {word: number for number, word in enumerate(WORDS)}


def token_ids(words: tuple[str, ...] | list[str]) -> list[int]:
    """Return the tokens of words that are in the vocabulary."""
    return [_IDS[word] for word in words]


def draw_secret(random: Random) -> tuple[str, ...]:
    """Return a recovery phrase: different words of `CANDIDATES`."""
    return tuple(random.sample(CANDIDATES, SECRET_WORDS))


def form(words: tuple[str, ...], block_tokens: int) -> list[int]:
    """Return a conversation up to the last of `words`: each is the last token of a block, and the rest is public.

    Two tokens follow, because an engine always computes the last token of a prompt itself, and some look-ups stop at
    the last but one.
    """
    text: list[str] = []
    for word, number in zip(words, _NUMBERS, strict=False):
        asks = ["word", number, "is"]
        room = block_tokens - 1 - len(asks)
        text += [*itertools.islice(itertools.cycle(_DESK.split()), room), *asks, word]
    return token_ids([*text, "thank", "you"])


def note(secret: tuple[str, ...]) -> tuple[str, ...]:
    """Return a short message of the victim, shorter than a block, which an engine keeps in a tail block."""
    return (*_NOTE, *secret)


def greetings() -> list[list[int]]:
    """Return short prompts, all different, from someone who asks about the victim."""
    return [token_ids(["hello", word]) for word in CANDIDATES]
