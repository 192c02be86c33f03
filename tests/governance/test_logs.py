"""Log lines N1-N3: canaries of every kind are logged in every way, and none reaches a line."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from array import array
from typing import Any

import numpy as np
import pytest
import structlog

from kvcustody.errors import KeyringError
from kvcustody.governance.keys.locked_buffer import KeyBuffer
from kvcustody.governance.observability.logs import configure, safe_text
from kvcustody.testkit.conformance.deployment import toy_model

CANARY = bytes(range(200, 232))
TOKENS = [1_750_001_337 + 37 * i for i in range(24)]  # ten digits: no timestamp holds one by chance
PROMPT = "canary-prompt-of-a-patient"
PASSWORD = "canary-hunter2"

CASES: dict[str, dict[str, Any]] = {
    "bytes": {"value": CANARY},
    "bytearray": {"value": bytearray(CANARY)},
    "memoryview": {"value": memoryview(CANARY)},
    "hexadecimal": {"value": CANARY.hex()},
    "base64": {"value": base64.b64encode(CANARY).decode()},
    "urlsafe-base64": {"value": base64.urlsafe_b64encode(CANARY).decode()},
    "repr": {"value": repr(CANARY)},
    "bare-hash": {"value": hashlib.sha256(PROMPT.encode()).hexdigest()},
    "hash-state": {"value": hashlib.blake2b(CANARY)},
    "inside-text": {"value": f"key={CANARY.hex()} loaded"},
    "token-list": {"value": TOKENS},
    "token-tuple": {"value": tuple(TOKENS)},
    "token-set": {"value": set(TOKENS)},
    "token-array": {"value": np.asarray(TOKENS, dtype=np.int32)},
    "token-array-module": {"value": array("i", TOKENS)},
    "token-text": {"value": str(TOKENS)},
    "token-words": {"value": " ".join(map(str, TOKENS))},
    "token-scalar": {"token_id": TOKENS[0]},
    "nested": {"value": {"inner": [{"deep": CANARY}], "tokens": TOKENS}},
    "range": {"value": range(50_001, 50_030)},
    "generator": {"value": (token for token in TOKENS)},
    "object": {"value": type("Odd", (), {"__repr__": lambda self: PROMPT})()},
    "prompt": {"prompt": PROMPT},
    "camel-case": {"userPrompt": PROMPT},
    "content": {"message_content": PROMPT},
    "nested-prompt": {"request": {"prompt": PROMPT}},
    "password": {"db_password": PASSWORD},
    "header": {"authorization": f"Bearer {PASSWORD}"},
    "api-key": {"apiKey": PASSWORD},
    "salt": {"client_salt": PASSWORD},
    "tokens-name": {"tokens": str(TOKENS[0])},
    "subject": {"subject": PROMPT},
}
NEEDLES = [
    CANARY.hex(),
    CANARY.hex().upper(),
    base64.b64encode(CANARY).decode(),
    base64.urlsafe_b64encode(CANARY).decode(),
    repr(CANARY)[2:-1],
    repr(CANARY)[2:20],
    hashlib.sha256(PROMPT.encode()).hexdigest(),
    PROMPT,
    PASSWORD,
    str(TOKENS[0]),
    str(TOKENS[5]),
    CANARY.hex()[:24],
]


@pytest.fixture(params=["json", "console"])
def lines(request: pytest.FixtureRequest) -> Any:
    stream = io.StringIO()
    configure("debug", request.param, stream)
    yield stream
    structlog.reset_defaults()


def _leaks(text: str) -> list[str]:
    return [needle for needle in NEEDLES if needle in text]


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_no_canary_reaches_a_line(lines: io.StringIO, values: dict[str, Any]) -> None:
    log = structlog.get_logger()
    log.info("canary logged", **values)
    log.bind(**values).warning("canary bound")
    if isinstance(values.get("value"), str):
        log.error(values["value"])
    assert "canary logged" in lines.getvalue() and "canary bound" in lines.getvalue()
    assert _leaks(lines.getvalue()) == []


def test_without_the_processor_the_same_canaries_do_reach_lines() -> None:
    """The positive control."""
    stream = io.StringIO()
    structlog.configure(
        processors=[structlog.dev.ConsoleRenderer(colors=False)],
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    for values in CASES.values():
        structlog.get_logger().info("canary", **values)
    structlog.reset_defaults()
    assert len(_leaks(stream.getvalue())) >= 10


def test_an_exception_shows_type_and_place_and_only_our_own_message(lines: io.StringIO) -> None:
    log = structlog.get_logger()
    key = CANARY.hex()  # a local variable of the frame that fails
    try:
        raise ValueError(f"cannot parse {PROMPT} {key}")
    except ValueError:
        log.exception("request failed", exc_info=True)
        log.error("request failed", exc_info=True, stack_info=True)
    try:
        raise KeyringError("root key `/x`: has mode `0644`", path="/x")
    except KeyringError as error:
        log.error("start failed", exc_info=error)
    text = lines.getvalue()
    assert _leaks(text) == []
    assert "ValueError" in text and "test_logs.py" in text and "KVC300" in text and "has mode `0644`" in text


def test_a_key_buffer_is_not_shown(lines: io.StringIO) -> None:
    with KeyBuffer.random() as buffer:
        structlog.get_logger().info("loaded", value=buffer, root=buffer)
        assert bytes(buffer.view()).hex()[:16] not in lines.getvalue()
    assert lines.getvalue().count("[withheld: KeyBuffer]") == 2


def test_facts_are_kept(lines: io.StringIO) -> None:
    facts = {
        "tenant": "acme",
        "hit_tokens": 4096,
        "blocks": 12,
        "share": 0.5,
        "strict": True,
        "rules": ["own-scope", "no-restricted"],
        "key_epoch": 3,
        "route": "/v1/chat/completions",
        "policy_digest": hashlib.sha256(b"policy").hexdigest(),
        "model_digest": "sha256:" + hashlib.sha256(b"model").hexdigest(),
        "nothing": None,
    }
    structlog.get_logger().info("admitted", **facts)
    text = lines.getvalue()
    digests = (facts["policy_digest"], facts["model_digest"])
    for kept in ("acme", "4096", "0.5", "own-scope", "/v1/chat/completions", *digests):
        assert str(kept) in text
    assert "withheld" not in text


def test_a_segment_can_be_declared_with_what_an_engine_logs(lines: io.StringIO) -> None:
    """`kvcustody policy segment add --model` takes the digest of the line `model identity`."""
    model = toy_model(16)
    structlog.get_logger().info("model identity", **model.named())
    assert "model_digest" in lines.getvalue() and model.digest.hex() in lines.getvalue()


def test_a_line_cannot_be_forged(lines: io.StringIO) -> None:
    """Newlines, terminal escapes and direction marks in values stay inside their line."""
    structlog.get_logger().info("ok", tenant="a\nlevel=critical\x1b[31m\u202e\r", **{"bad\nname": 1})
    text = lines.getvalue()
    assert text.count("\n") == 1 and "\x1b" not in text and "\u202e" not in text and "\r" not in text


def test_long_text_is_cut() -> None:
    assert len(safe_text("word " * 10_000)) < 400


def test_levels_and_json() -> None:
    stream = io.StringIO()
    configure("warning", "json", stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("heard", blocks=3)
    structlog.reset_defaults()
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["blocks"] == 3 and json.loads(line)["level"] == "warning"
