"""Readers of traces that have prompts as text or token ids: the logs of vLLM and SGLang, and ShareGPT's conversations.

1. A log's other lines are no rows: they are passed over.
2. A prompt that the log left out or cut short is a wrong row: what is left of it would find what the request did not.
3. Where there are token ids, blocks are cut by them; otherwise by the text's bytes (see `block_numbers`).
4. Each answer of a conversation makes a request: its prompt is everything that was said before. The next question
   follows the answer after `THINK_SECONDS`. A file is read one conversation at a time, however large it is.
"""

from __future__ import annotations

import ast
import datetime
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson

from kvcustody.errors import TraceError
from kvcustody.lab.replay.traces.block_numbers import BlockNumbers, SessionGuesser, text_tokens
from kvcustody.lab.replay.traces.hashed_traces import DECODE_US
from kvcustody.lab.replay.traces.model import LineFields, TraceRequest, trace_error
from kvcustody.lab.replay.traces.rows import (
    STRICT,
    Head,
    SenderFields,
    TraceReading,
    checked_text,
    numbered_lines,
)

TEXT_IS_COUNTED: Final = "Where a prompt is text, four bytes of it count as one token."
_NO_ANSWER: Final = "An answer that is not in the log counts as 0 tokens."
_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_IDS = r"\[[\d, ]*\]"


class _LoggedRequests:
    """The requests of one log, in the order in which they were logged, with what became known of each later."""

    def __init__(self, path: Path, how: TraceReading, block_tokens: int, fix: str) -> None:
        self._path, self.fix, self.how = path, fix, how
        self._size = how.block_tokens or block_tokens
        self._senders = SenderFields(how.columns)
        self._numbers = BlockNumbers()
        self._guesser = SessionGuesser()
        self._at: dict[str, int] = {}
        self._requests: list[TraceRequest] = []

    def fields(self, number: int, fields: Mapping[str, object]) -> LineFields:
        """Return the fields of a line, for errors and senders."""
        return LineFields(self._path, number, dict(fields), self.fix)

    def add(self, row: LineFields, number: int, name: str, at_us: int, prompt: str | None, ids: list[int]) -> None:
        """Add a request, whose prompt is text or token ids."""
        sender = self._senders.read(row)
        if ids:
            tokens, blocks = len(ids), self._numbers.of_tokens(ids, self._size)
        else:
            text = (prompt or "").encode(errors="replace")
            tokens, blocks = text_tokens(text), self._numbers.of_text(text, self._size)
        if not tokens:
            raise row.error("prompt", prompt, "expected a prompt that is not empty")
        session, lineage, turn = self._guesser.place(number, blocks, (sender.tenant, sender.subject))
        self._at[name] = len(self._requests)
        key = session if sender.session is None else sender.session
        request = TraceRequest(at_us, tokens, 0, blocks, key, lineage, key, turn, 0, sender.tenant, sender.subject)
        self._requests.append(request)

    def answer(self, name: str, tokens: int) -> None:
        """Take note of an answer's tokens; answers to requests before the log's beginning are passed over."""
        at = self._at.get(name, self._at.get(f"{name}-0"))
        if at is not None:
            self._requests[at] = replace(self._requests[at], output_tokens=tokens)

    def in_order(self) -> Iterator[TraceRequest]:
        """Yield all requests in time order, from the first one's time."""
        ordered = sorted(self._requests, key=lambda request: request.at_us)
        for request in ordered:
            yield replace(request, at_us=request.at_us - ordered[0].at_us)


class _LogReader:
    """What readers of logs have in common."""

    block_tokens = 16
    blocks_fixed = False
    relative_sessions = False
    has_content = True
    assumptions: tuple[str, ...] = (TEXT_IS_COUNTED, _NO_ANSWER)
    fix: str

    def read(self, path: Path, how: TraceReading = STRICT) -> Iterator[TraceRequest]:
        """Yield requests in time order from the first one's time. The whole log is read first: answers come later."""
        log = _LoggedRequests(path, how, self.block_tokens, self.fix)
        lines = self.lines(log)
        for number, text in numbered_lines(path):
            try:
                lines.line(number, checked_text(path, number, text).decode().rstrip("\r\n"))
            except TraceError as error:
                how.refuse(error)
        yield from log.in_order()

    def lines(self, log: _LoggedRequests) -> _LogLines:
        """Return what takes in the lines of one log."""
        raise NotImplementedError


class _LogLines:
    """Takes in the lines of one log."""

    def __init__(self, log: _LoggedRequests) -> None:
        self._log = log

    def line(self, number: int, text: str) -> None:
        """Take in one line."""
        raise NotImplementedError


class VllmLog(_LogReader):
    """vLLM's log of requests: of releases that log the prompt itself, and of newer ones with debug lines."""

    described = "vLLM's log with --enable-log-requests; newer releases log prompts with VLLM_LOGGING_LEVEL=DEBUG only"
    fix = "run vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG, without --max-log-len"

    def recognises(self, head: Head) -> bool:
        """Recognise a line of a request."""
        return any(_RECEIVED.search(line) for line in head.lines)

    def lines(self, log: _LoggedRequests) -> _LogLines:
        """Return what takes in the lines of one log."""
        return _VllmLines(log)


_RECEIVED = re.compile(r"\bReceived request (?P<id>\S+): (?=prompt: |params: )")
_DETAILS = re.compile(r"\bRequest (?P<id>\S+) details: (?=prompt: )")
_PROMPT = re.compile(rf"prompt: (?P<text>None|{_STRING}),")
_PROMPT_IDS = re.compile(rf"prompt_token_ids: (?P<ids>None|{_IDS})[,.]")
_GENERATED = re.compile(rf"\bGenerated response (?P<id>\S+)(?: \(streaming complete\))?: output: (?P<text>{_STRING})")
_GENERATED_IDS = re.compile(
    rf"\bGenerated response (?P<id>\S+)(?: \(streaming complete\))? details: output_token_ids: (?P<ids>{_IDS})"
)
_VLLM_TIME = re.compile(r"\b(?:INFO|DEBUG) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?\b")
_WHOLE_TIME = re.compile(r"\b(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")  # of a logging configuration
_HALF_A_YEAR_US = 183 * 86_400 * 1_000_000
_YEAR_US = 366 * 86_400 * 1_000_000


class _VllmLines(_LogLines):
    def __init__(self, log: _LoggedRequests) -> None:
        super().__init__(log)
        self._details: dict[str, str] = {}
        self._year_us = 0
        self._last_us = 0

    def line(self, number: int, text: str) -> None:
        if (details := _DETAILS.search(text)) is not None:
            self._details[details["id"]] = text[details.end() :]
        elif (received := _RECEIVED.search(text)) is not None:
            self._request(number, text, received)
        elif (ids := _GENERATED_IDS.search(text)) is not None:
            row = self._log.fields(number, {})
            self._log.answer(ids["id"], len(_ids(row, "output_token_ids", ids["ids"])))
        elif (answer := _GENERATED.search(text)) is not None:
            output = str(_literal(self._log.fields(number, {}), "output", answer["text"]))
            self._log.answer(answer["id"], text_tokens(output.encode(errors="replace")))

    def _request(self, number: int, line: str, received: re.Match[str]) -> None:
        name = received["id"]
        row = self._log.fields(number, {"request_id": name})
        at_us = self._time_us(row, line[: received.start()])
        details = self._details.pop(name, line[received.end() :])
        ids = _PROMPT_IDS.search(details)
        tokens = [] if ids is None else _ids(row, "prompt_token_ids", ids["ids"])
        text = _PROMPT.match(details)
        prompt = None if text is None else _literal(row, "prompt", text["text"])
        if prompt is None and not tokens:
            raise row.error("prompt", None, "the log has no prompt of this request")
        self._log.add(row, number, name, at_us, prompt, tokens)

    def _time_us(self, row: LineFields, before: str) -> int:
        """Return the time of a line. vLLM's own has no year: a step back by more than half of one begins the next."""
        stamp = _VLLM_TIME.search(before)
        if stamp is None:
            return self._whole_time_us(row, before)
        month, day, hour, minute, second = (int(part) for part in stamp.groups()[:5])
        try:
            moment = datetime.datetime(2000, month, day, hour, minute, second, tzinfo=datetime.UTC)
        except ValueError:
            raise row.error("time", stamp[0], "expected MM-DD HH:MM:SS") from None
        at_us = round(moment.timestamp()) * 1_000_000 + int((stamp[6] or "0").ljust(6, "0")) + self._year_us
        if at_us < self._last_us - _HALF_A_YEAR_US:
            self._year_us += _YEAR_US
            at_us += _YEAR_US
        self._last_us = at_us
        return at_us

    @staticmethod
    def _whole_time_us(row: LineFields, before: str) -> int:
        stamp = _WHOLE_TIME.search(before)
        if stamp is None:
            expected = "expected a line that begins with LEVEL MM-DD HH:MM:SS or YYYY-MM-DD HH:MM:SS"
            raise row.error("time", before.strip(), expected)
        try:
            moment = datetime.datetime.fromisoformat(stamp[1]).replace(tzinfo=datetime.UTC)
        except ValueError:
            raise row.error("time", stamp[0], "expected YYYY-MM-DD HH:MM:SS") from None
        return round(moment.timestamp()) * 1_000_000 + int((stamp[2] or "0").ljust(6, "0"))


class SglangLog(_LogReader):
    """SGLang's log of requests, as text or as JSON, with whole prompts."""

    described = "SGLang's log with --log-requests --log-requests-level 3, as text or JSON"
    fix = "run SGLang with --log-requests --log-requests-level 3, which logs whole prompts"

    def recognises(self, head: Head) -> bool:
        """Recognise a line of a request."""
        return any(_RECEIVE.search(line) or '"request.received"' in line for line in head.lines)

    def lines(self, log: _LoggedRequests) -> _LogLines:
        """Return what takes in the lines of one log."""
        return _SglangLines(log)


_RECEIVE = re.compile(r"\bReceive: obj=GenerateReqInput\(")
_FINISH = re.compile(r"\bFinish: obj=GenerateReqInput\(")
_RID = re.compile(r"\brid='(?P<rid>[^']*)'")
_TEXT = re.compile(rf"\btext=(?P<text>None|{_STRING})(?P<cut> \.\.\. )?")
_INPUT_IDS = re.compile(rf"\binput_ids=(?P<ids>None|{_IDS})(?P<cut> \.\.\. )?")
_COMPLETION = re.compile(r"'completion_tokens': (\d+)")
_HEADERS = re.compile(r", headers=(\{[^{}]*\})$")
_SGLANG_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)")
_HEALTH = "HEALTH_CHECK"
_CUT = "the log cut this prompt short"


class _SglangLines(_LogLines):
    def line(self, number: int, text: str) -> None:
        if text.startswith("{"):
            self._json(number, text)
        elif (received := _RECEIVE.search(text)) is not None:
            self._received(number, text, received)
        elif (finished := _FINISH.search(text)) is not None:
            name, tokens = _RID.search(text, finished.end()), _COMPLETION.findall(text)
            if name is not None and tokens:
                self._log.answer(name["rid"], int(tokens[-1]))

    def _received(self, number: int, line: str, received: re.Match[str]) -> None:
        fields_text = line[received.end() :]
        headers = _HEADERS.search(fields_text)
        name = _RID.search(fields_text)
        fields = {} if headers is None else _literal(self._log.fields(number, {}), "headers", headers[1])
        row = self._log.fields(number, {**_object(fields), **({} if name is None else {"rid": name["rid"]})})
        rid = str(row.raw("rid"))
        if rid.startswith(_HEALTH):
            return
        stamp = _SGLANG_TIME.search(line[: received.start()])
        at_us = self._time_us(row, None if stamp is None else stamp[1])
        ids, text = _INPUT_IDS.search(fields_text), _TEXT.search(fields_text)
        for field, match in (("input_ids", ids), ("text", text)):
            if match is not None and match["cut"]:
                raise row.error(field, match[0], _CUT)
        tokens = [] if ids is None else _ids(row, "input_ids", ids["ids"])
        prompt = None if text is None else _literal(row, "text", text["text"])
        self._add(row, number, rid, at_us, prompt, tokens)

    def _json(self, number: int, line: str) -> None:
        try:
            document = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise self._log.fields(number, {}).error("", line, f"not JSON ({error.msg})") from None
        event = document.get("event")
        if event not in ("request.received", "request.finished"):
            return
        row = self._log.fields(number, {**_object(document.get("headers")), **document})
        rid = row.raw("rid")
        if not isinstance(rid, str):
            raise row.error("rid", rid, "expected the id of one request")
        if event == "request.finished":
            tokens = _object(_object(document.get("out")).get("meta_info")).get("completion_tokens")
            if type(tokens) is int:
                self._log.answer(rid, tokens)
            return
        if rid.startswith(_HEALTH):
            return
        asked = row.raw("obj")
        if not isinstance(asked, dict):
            raise row.error("obj", asked, "expected the request's fields")
        ids, prompt = asked.get("input_ids"), asked.get("text")
        if isinstance(ids, list) and "..." in ids:
            raise row.error("input_ids", ids, _CUT)
        if isinstance(prompt, str) and len(prompt) == _CUT_LENGTH and prompt[1024:1027] == "...":
            raise row.error("text", prompt, _CUT)
        if ids is not None and not (isinstance(ids, list) and all(type(item) is int for item in ids)):
            raise row.error("input_ids", ids, "expected the token ids of one prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise row.error("text", prompt, "expected the text of one prompt")
        self._add(row, number, rid, self._time_us(row, document.get("timestamp")), prompt, ids or [])

    def _add(self, row: LineFields, number: int, rid: str, at_us: int, prompt: str | None, ids: list[int]) -> None:
        if prompt is None and not ids:
            raise row.error("text", None, "the log has no prompt of this request")
        self._log.add(row, number, rid, at_us, prompt, ids)

    @staticmethod
    def _time_us(row: LineFields, stamp: object) -> int:
        try:
            moment = datetime.datetime.fromisoformat(str(stamp))
        except ValueError:
            raise row.error("timestamp", stamp, "expected YYYY-MM-DD HH:MM:SS") from None
        return round(moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp() * 1_000_000)


_CUT_LENGTH = 2048 + len("...")


def _literal(row: LineFields, name: str, text: str) -> Any:
    """Read a value that Python wrote; raises `TraceError` for what it did not write."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise row.error(name, text, "expected a value as Python writes it") from None


def _ids(row: LineFields, name: str, text: str) -> list[int]:
    """Read token ids, or none."""
    ids = [] if text == "None" else _literal(row, name, text)
    if not all(type(item) is int and 0 <= item < 1 << 31 for item in ids):
        raise row.error(name, text, "expected token ids below 2^31")
    return list(ids)


def _object(value: object) -> Mapping[str, Any]:
    """A JSON object, or an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


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

    def read(self, path: Path, how: TraceReading = STRICT) -> Iterator[TraceRequest]:
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
            is_answer, content = self._message(row, place, message)
            if is_answer and text:
                answer = text_tokens(content)
                blocks = numbers.of_text(text + content, size)
                tokens = text_tokens(text)
                turn = len(requests)
                requests.append(
                    TraceRequest(
                        at_us, tokens, answer, blocks, session, session, session, turn, 0, sender.tenant, sender.subject
                    )
                )
                at_us += answer * DECODE_US + THINK_SECONDS * 1_000_000
            text += content
        return requests

    @staticmethod
    def _message(row: LineFields, place: int, message: object) -> tuple[bool, bytes]:
        where = f"conversations[{place}]"
        if not isinstance(message, dict):
            raise row.error(where, message, "expected a message")
        speaker, content = message.get("from", message.get("role")), message.get("value", message.get("content"))
        if speaker not in _ANSWERS | _OTHERS:
            known = ", ".join(sorted(_ANSWERS | _OTHERS))
            raise row.error(f"{where}.from", speaker, f"expected a speaker ({known})")
        if not isinstance(content, str):
            raise row.error(f"{where}.value", content, "expected text")
        return speaker in _ANSWERS, f"{speaker}: {content}\n".encode(errors="replace")


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
