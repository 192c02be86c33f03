"""Reader of ShareGPT files: conversations as text, without times.

Each answer makes a request: its prompt is everything that was said before. The next question follows the answer after
`THINK_SECONDS`. A file is read one conversation at a time, however large it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvcustody.errors import TraceError
from kvcustody.lab.replay.traces.block_numbers import BlockNumbers, text_tokens
from kvcustody.lab.replay.traces.hashed_traces import DECODE_US
from kvcustody.lab.replay.traces.logged_prompts import TEXT_IS_COUNTED
from kvcustody.lab.replay.traces.model import LineFields, TraceRequest, trace_error
from kvcustody.lab.replay.traces.rows import STRICT, Head, Reading, SenderFields, checked_text, numbered_lines

THINK_SECONDS: Final = 25
_ANSWERS = frozenset({"gpt", "chatgpt", "assistant", "bing", "bard", "model"})
_OTHERS = frozenset({"human", "user", "system", "tool", "function_call", "observation"})


class ShareGpt:
    """ShareGPT conversations: an array of them, or one a line, each with its messages by speaker."""

    block_tokens = 16
    blocks_fixed = False
    relative_sessions = True
    has_content = True
    assumptions: tuple[str, ...] = (
        TEXT_IS_COUNTED,
        f"The file has no times: starts are drawn, and a question follows an answer after {THINK_SECONDS} s.",
    )
    described = "JSON: conversations, each a list of messages with from and value, or role and content"
    fix = 'expected {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}'

    def recognises(self, head: Head) -> bool:
        """Recognise conversations."""
        start = head.text.lstrip()
        return start[:1] in {"[", "{"} and '"conversations"' in start and '"hash_ids"' not in start

    def read(self, path: Path, how: Reading = STRICT) -> Iterator[TraceRequest]:
        """Yield the requests of each conversation, with `at_us` from its start."""
        size = how.block_tokens or self.block_tokens
        numbers, senders = BlockNumbers(), SenderFields(how.columns)
        for index, (line, document) in enumerate(_documents(path, self.fix)):
            try:
                row = LineFields(path, line, document, f"{self.fix} (conversation {index})")
                requests = self._requests(row, index, senders, numbers, size)
            except TraceError as error:
                how.refuse(error)
                continue
            yield from requests

    def _requests(
        self, row: LineFields, index: int, senders: SenderFields, numbers: BlockNumbers, size: int
    ) -> list[TraceRequest]:
        messages = row.raw("conversations")
        if not isinstance(messages, list):
            raise row.error("conversations", messages, "expected a list of messages")
        sender = senders.read(row)
        session = (row.key("id", index) if "id" in row else index) if sender.session is None else sender.session
        text, at_us, requests = b"", 0, list[TraceRequest]()
        for place, message in enumerate(messages):
            is_answer, said = self._message(row, place, message)
            if is_answer and text:
                answer = text_tokens(said)
                blocks = numbers.of_text(text + said, size)
                tokens = text_tokens(text)
                turn = len(requests)
                requests.append(
                    TraceRequest(
                        at_us, tokens, answer, blocks, session, session, session, turn, 0, sender.tenant, sender.subject
                    )
                )
                at_us += answer * DECODE_US + THINK_SECONDS * 1_000_000
            text += said
        return requests

    @staticmethod
    def _message(row: LineFields, place: int, message: object) -> tuple[bool, bytes]:
        where = f"conversations[{place}]"
        if not isinstance(message, dict):
            raise row.error(where, message, "expected a message")
        speaker, said = message.get("from", message.get("role")), message.get("value", message.get("content"))
        if speaker not in _ANSWERS | _OTHERS:
            known = ", ".join(sorted(_ANSWERS | _OTHERS))
            raise row.error(f"{where}.from", speaker, f"expected a speaker ({known})")
        if not isinstance(said, str):
            raise row.error(f"{where}.value", said, "expected text")
        return speaker in _ANSWERS, f"{speaker}: {said}\n".encode(errors="replace")


def _documents(path: Path, fix: str) -> Iterator[tuple[int, object]]:
    """Yield each value of an array, or of lines, with the line that it begins in."""
    decoder, text, at, begun = json.JSONDecoder(), "", 0, 1
    wanted = 0  # a value that did not end yet is tried again when as much more is there
    lines = numbered_lines(path)
    while True:
        line = next(lines, None)
        if line is not None:
            number, raw = line
            if not text.strip():
                begun, text, at = number, "", 0
            text += checked_text(path, number, raw).decode()
            if len(text) < wanted:
                continue
        while True:
            while at < len(text) and text[at] in " \t\r\n,[]":
                begun += text[at] == "\n"
                at += 1
            if at == len(text):
                text, at, wanted = "", 0, 0
                break
            try:
                document, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                text, at = text[at:], 0
                wanted = 2 * len(text)
                if line is None:
                    raise trace_error(
                        path, begun, "", text[:80].strip(), expected=f"not JSON ({error.msg})", fix=fix
                    ) from None
                break
            yield begun, document
            begun += text.count("\n", at, end)
            at = end
        if line is None:
            return
