"""The attacks, run unchanged against a plain and a governed engine, and the conclusions that they permit.

1. The plain engine is the control: an attack that recovers nothing from it proves nothing about the governed one, and
   is `void`. So is everything where a governed tenant no longer reuses its own: a cache that is off leaks nothing.
   And so is a residual read of a block that nobody was handed again.
2. The attacker is given every secret word before the one that it is after, also where it has not found them.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from kvcustody.testkit.demo.codebook import Codebook
from kvcustody.testkit.demo.engine import ATTACKER, VICTIM, Engine, Values
from kvcustody.testkit.demo.vocabulary import CANDIDATES, form, greetings, note, token_ids

ROUNDS_MAX = 64

Salts = tuple[str | None, str | None]
NO_SALTS: Salts = (None, None)


class AttackOutcome(NamedTuple):
    """What one engine revealed. `words`: recovered secret words; `text`: all readable text."""

    words: tuple[str, ...] = ()
    text: str = ""
    residue_bytes: int | None = None
    refused: str | None = None  # the engine did not start, and why

    @property
    def gave_away(self) -> bool:
        """Whether any of the victim's data reached the attacker."""
        return bool(self.words or self.text or self.residue_bytes)

    def as_json(self) -> dict[str, Any]:
        """Return every field as JSON values."""
        return {**self._asdict(), "words": list(self.words), "gave_away": self.gave_away}


class Attack(NamedTuple):
    """One attack's two outcomes. `reads`: what the attacker reads."""

    name: str
    reads: str
    plain: AttackOutcome
    governed: AttackOutcome

    @property
    def verdict(self) -> str:
        """`held`, `leaked`, or `void` (rule 1)."""
        plain, governed = self.plain, self.governed
        if governed.gave_away:
            return "leaked"
        unread = plain.residue_bytes is not None and governed.residue_bytes is None and governed.refused is None
        return "held" if plain.gave_away and not unread else "void"


class Probed(NamedTuple):
    """What a prefix probe finds by each of two measures."""

    by_metadata: AttackOutcome
    by_cost: AttackOutcome


def probe(engine: Engine, secret: tuple[str, ...], seed: int, salts: Salts = NO_SALTS) -> Probed:
    """Recover `secret` word by word: the right candidate is the one whose prompt is already cached.

    salts: what the victim and the attacker send as `cache_salt`.
    """
    random = Random(seed)  # noqa: S311 - a demonstration must repeat
    for position in range(len(secret)):  # the victim's conversation, turn by turn
        engine.serve(VICTIM, [form(secret[: position + 1], engine.block_tokens)], salts[0])
    by_metadata: list[str | None] = []
    by_cost: list[str | None] = []
    for position in range(len(secret)):
        tried = random.sample(CANDIDATES, len(CANDIDATES))
        prompts = [form((*secret[:position], word), engine.block_tokens) for word in tried]
        served = engine.serve(ATTACKER, prompts, salts[1])
        by_metadata.append(_odd_one([one.cached_tokens for one in served], tried))
        by_cost.append(_odd_one([-one.computed_tokens for one in served], tried))
    return Probed(_recovered(by_metadata, secret), _recovered(by_cost, secret))


def _odd_one(measures: Sequence[int], words: Sequence[str]) -> str | None:
    """Return the single word that stands out above all others, if there is one."""
    best = max(measures)
    return words[measures.index(best)] if measures.count(best) == 1 else None


def _recovered(found: Sequence[str | None], secret: tuple[str, ...]) -> AttackOutcome:
    words = tuple(word for word, true in zip(found, secret, strict=True) if word == true)
    return AttackOutcome(words, " ".join(words))


def residual_read(engine: Engine, secret: tuple[str, ...], book: Codebook, salts: Salts = NO_SALTS) -> AttackOutcome:
    """Read the block of the victim's last message when the next tenant receives it, before that tenant writes.

    The other tenant asks until it gets that very block. An engine that never hands it out again is not shown to clear
    it: the outcome then has no `residue_bytes`.
    """
    message = note(secret)
    assert len(message) < engine.block_tokens, "the message must stay in a block that is never complete"
    (victim,) = engine.serve(VICTIM, [token_ids(message)], salts[0])
    for _ in range(ROUNDS_MAX):
        for one in engine.serve(ATTACKER, greetings(), salts[1]):
            if one.block == victim.block:
                return _read(one.found, message, secret, book)._replace(residue_bytes=one.nonzero_bytes)
    return AttackOutcome()


def read_blocks(blocks: Sequence[Values], secret: tuple[str, ...], book: Codebook) -> AttackOutcome:
    """Return the largest part of the victim's last message that any of `blocks` reveals."""
    said = note(secret)
    return max((_read(block, said, secret, book) for block in blocks), key=lambda one: len(one.text))


def _read(block: Values, said: tuple[str, ...], secret: tuple[str, ...], book: Codebook) -> AttackOutcome:
    if not len(block):
        return AttackOutcome()
    read = book.read(block)
    true = [word for word, expected in zip(read, said, strict=False) if word == expected]
    if len(true) < 2:  # one word may be anybody's
        return AttackOutcome()
    return AttackOutcome(tuple(word for word in true if word in secret), " ".join(true))


def own_reuse(engine: Engine, secret: tuple[str, ...]) -> tuple[int, int]:
    """Return the cached and the possible tokens when the victim repeats its last turn."""
    prompt = form(secret, engine.block_tokens)
    return engine.serve(VICTIM, [prompt])[0].cached_tokens, len(secret) * engine.block_tokens
