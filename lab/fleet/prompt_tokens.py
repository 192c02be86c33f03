"""Tokens of a prompt without a model: a word `b` and a number is a block of a trace, any other word one token."""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcustody.lab.replay.traces.token_ids import VOCABULARY, expand

_BLOCK = re.compile(r"b([0-9a-f]{1,8})")


def prompt_text(body: dict[str, Any]) -> str:
    """The text of a chat completion's messages."""
    return " ".join(str(message.get("content")) for message in body.get("messages", []))


def tokens_of(text: str, block_tokens: int) -> NDArray[np.int32]:
    """The tokens of a text; `block_tokens`: of a block of a trace."""
    parts, words = list[NDArray[np.int32]](), list[int]()
    for word in text.split():
        block = _BLOCK.fullmatch(word)
        if block is None:
            words.append(zlib.crc32(word.encode()) % VOCABULARY)
            continue
        if words:
            parts.append(np.array(words, dtype=np.int32))
            words = []
        parts.append(expand(np.array([int(block[1], 16)], dtype=np.int64), block_tokens))
    parts.append(np.array(words, dtype=np.int32))
    return np.concatenate(parts)
