"""Prompt tokens without a model: the word `b` with a number is a trace's block, any other word is one token."""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcustody.lab.replay.traces.token_ids import VOCABULARY, expand

_BLOCK = re.compile(r"b([0-9a-f]{1,8})")


def prompt_text(body: dict[str, Any]) -> str:
    """Return the text of a chat completion's messages."""
    return " ".join(str(message.get("content")) for message in body.get("messages", []))


def tokens_of(text: str, block_tokens: int) -> NDArray[np.int32]:
    """Return a text's tokens; `block_tokens` is the size of a trace's block."""
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
