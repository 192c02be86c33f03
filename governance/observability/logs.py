"""Structured logs in which no secret, token or content can appear.

1. Every value passes `safe_value` before it is rendered: bytes, arrays, tensors, lists of numbers, key buffers and hash
   states become a note of their type. Fields whose names stand for content or secrets are withheld, whatever their
   value.
2. Text is bounded and its control characters are escaped. Hexadecimal or base64 runs and number lists inside it are
   replaced. So no message can carry a key, a bare hash or token ids into a line.
3. An exception is logged as its type and place. Only our own errors show their message; no local variable is shown.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any, Literal, TextIO

from kvcustody.errors import CustodyError
from kvcustody.logger import configure_logging

TEXT_MAX = 300
_DEPTH_MAX = 4
_ITEMS_MAX = 32

# Words that make a name one that is never written: `prompt_text`, `apiKey` and `x-authorization` are
# withheld.
_SECRET_WORDS = frozenset(
    {
        *(
            "key",
            "keys",
            "secret",
            "secrets",
            "password",
            "passwd",
            "passphrase",
            "credential",
            "credentials",
        ),
        *("authorization", "bearer", "cookie", "salt", "seed", "digest", "hash", "hashes", "hmac", "token"),
        *(
            "prompt",
            "prompts",
            "text",
            "content",
            "contents",
            "completion",
            "completions",
            "message",
            "messages",
        ),
        *("input", "inputs", "output", "outputs", "query", "embedding", "embeddings", "subject", "session"),
    }
)
# Names that hold one of those words and are harmless facts, each with what it is.
_HARMLESS = frozenset(
    {
        "key_epoch",  # an integer
        "key_owner",  # a tenant
        "content_type",
        "policy_digest",  # of a document, never of a prompt
        "model_digest",
        "leaf_hash",  # of canonical ledger bytes
        "root_hash",
        "input_tokens",
        "output_tokens",
        "prompt_tokens",
        "hit_tokens",
    }
)
_MAY_BE_HEX = frozenset({"policy_digest", "model_digest", "leaf_hash", "root_hash"})

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_ENCODED = re.compile(r"(?:0x)?[0-9a-fA-F]{24,}|[A-Za-z0-9+/_-]{32,}={0,2}")
_ESCAPED_BYTES = re.compile(r"(?:\\x[0-9a-fA-F]{2}[^\\\s]{0,3}){4,}")
_NUMBERS = re.compile(r"-?\d+(?:[,;\s]+-?\d+){7,}")


def configure(
    level: Literal["debug", "info", "warning", "error"] = "info",
    form: Literal["json", "console"] = "console",
    stream: TextIO | None = None,
) -> None:
    """Send structlog's events to `stream` (standard error), one a line, each passed through `redact`."""
    configure_logging(partial(_configure, level, form, stream), level)


def _configure(level: str, form: str, stream: TextIO | None) -> None:
    import structlog

    renderer: Any = structlog.processors.JSONRenderer(ensure_ascii=True)
    if form == "console":
        renderer = structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback, sort_keys=False
        )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            describe_exception,
            redact,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )


def redact(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Apply rules 1 and 2 as a processor. Never raises: a value that cannot be shown is withheld."""
    safe: dict[str, Any] = {}
    for name, value in event.items():
        label = safe_text(str(name))
        try:
            safe[label] = safe_value(str(name), value)
        except Exception:
            safe[label] = f"[withheld: {type(value).__name__}]"
    return safe


def describe_exception(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Apply rule 3 as a processor: `exc_info` becomes the error's type, place, and our own message."""
    raised = event.pop("exc_info", None)
    event.pop("stack_info", None)
    if raised is True:
        raised = sys.exc_info()[1]
    if isinstance(raised, tuple):
        raised = raised[1]
    if isinstance(raised, BaseException):
        event["error"] = type(raised).__name__
        frames = traceback.extract_tb(raised.__traceback__)[-5:]
        event["error_at"] = " < ".join(
            f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames)
        )
        if isinstance(raised, CustodyError):
            event["error_code"] = raised.code
            event["error_says"] = raised.message
    return event


def safe_value(name: str, value: Any, depth: int = 0) -> Any:
    """Return `value` in the form that may be logged under `name`."""
    if name != "event" and _withheld(name, value):
        return "[withheld]"
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Enum):
        return safe_text(str(value.name))
    if isinstance(value, str):
        short_hex = name in _MAY_BE_HEX and re.fullmatch(r"(?:sha256:)?[0-9a-f]{64}", value) is not None
        return value if short_hex else safe_text(value)
    if isinstance(value, PurePath):
        return safe_text(str(value))
    if isinstance(value, Mapping) and depth < _DEPTH_MAX:
        items = list(value.items())[:_ITEMS_MAX]
        return {safe_text(str(key)): safe_value(str(key), item, depth + 1) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset) and depth < _DEPTH_MAX:
        return _safe_items(name, value, depth)
    return f"[withheld: {type(value).__name__}]"


def safe_text(text: str) -> str:
    """`text` bounded, on one line, without encoded runs and number lists (rule 2)."""
    cut = text if len(text) <= 4 * TEXT_MAX else text[: 4 * TEXT_MAX]
    cut = _ESCAPED_BYTES.sub("[withheld]", cut)
    cut = _ENCODED.sub(_withhold_encoded, cut)
    cut = _NUMBERS.sub("[withheld]", cut)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
    return shown if len(shown) <= TEXT_MAX else shown[:TEXT_MAX] + "…"


def _safe_items(name: str, value: Any, depth: int) -> Any:
    """A short list of words is kept; anything that holds numbers could be token ids or block contents."""
    if any(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
        return f"[withheld: {len(value)} numbers]"
    return [safe_value(name, item, depth + 1) for item in list(value)[:_ITEMS_MAX]]


def _withheld(name: str, value: Any) -> bool:
    if name in _HARMLESS:
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    if words and words[-1] == "tokens":  # a count, when it is one
        return type(value) is not int or len(words) == 1
    return any(word in _SECRET_WORDS or word == "tokens" for word in words)


def _withhold_encoded(match: re.Match[str]) -> str:
    """Long unbroken words are kept only if they read as words: a path or a name, not an encoding."""
    run = match.group()
    looks_encoded = re.fullmatch(r"(?:0x)?[0-9a-fA-F]+", run) or (
        any(c.isdigit() for c in run) and any(c.isupper() for c in run)
    )
    return "[withheld]" if looks_encoded else run
