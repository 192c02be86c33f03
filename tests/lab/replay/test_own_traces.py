"""Own traces, one of each kind of file: read at once, or refused with place and remedy (`kvcustody replay FILE`)."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcustody.console.main import app
from kvcustody.errors import ConfigError, TraceError
from kvcustody.lab.replay.options import read_policy
from kvcustody.lab.replay.run.workload_from_options import Choice, load_workload, read_columns
from kvcustody.lab.replay.traces.model import TraceRequest
from kvcustody.lab.replay.traces.readers import READERS, WrongRows, open_trace, recognise
from kvcustody.lab.replay.traces.rows import ROWS_OUT_OF_ORDER_MAX, read_head
from kvcustody.lab.replay.workload.tenant_assignment import LabelledPrincipals


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def mooncake(at: float, ids: list[Any], **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "input_length": 512 * len(ids), "output_length": 3, "hash_ids": ids, **more}


def bailian(chat: int, parent: int, at: float, ids: list[int], **more: Any) -> dict[str, Any]:
    row = {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "input_length": 16 * len(ids) - 3}
    return {**row, "output_length": 2, "type": "text", "turn": 1, "hash_ids": ids, **more}


def spoken(name: str, *words: str, **more: Any) -> dict[str, Any]:
    speakers = ("human", "gpt") * len(words)
    messages = [{"from": who, "value": said} for who, said in zip(speakers, words, strict=False)]
    return {"id": name, "conversations": messages, **more}


PROMPT = "You are a careful clerk who answers in short sentences, and never about a customer's secrets. " * 2

VLLM_OLD = lines(
    "INFO 07-25 02:41:20 [api_server.py:99] Starting",
    f"INFO 07-25 02:41:21 [logger.py:43] Received request cmpl-1-0: prompt: {PROMPT!r}, params: SamplingParams(n=1, "
    "max_tokens=9), prompt_token_ids: None, prompt_embeds shape: None, lora_request: None.",
    "INFO 07-25 02:41:24 [logger.py:43] Received request cmpl-2-0: prompt: 'a', params: SamplingParams(n=1), "
    f"prompt_token_ids: {list(range(40))}, lora_request: None.",
)
VLLM_NEW = lines(
    f"(APIServer pid=7) DEBUG 12-31 23:59:59 [request_logger.py:61] Request c-1 details: prompt: {PROMPT!r}, "
    f"prompt_token_ids: {list(range(33))}, prompt_embeds shape: None.",
    "(APIServer pid=7) INFO 12-31 23:59:59 [request_logger.py:70] Received request c-1: params: P(), lora_request: N.",
    "(APIServer pid=7) INFO 01-01 00:00:02 [request_logger.py:99] Generated response c-1: output: 'eight by', "
    "finish_reason: stop",
    f"(APIServer pid=7) DEBUG 01-01 00:00:03 [request_logger.py:61] Request c-2 details: prompt: {PROMPT!r}, "
    f"prompt_token_ids: {list(range(33))}, prompt_embeds shape: None.",
    "(APIServer pid=7) INFO 01-01 00:00:03 [request_logger.py:70] Received request c-2: params: P(), lora_request: N.",
)
SGLANG_TEXT = lines(
    "[2026-05-27 20:00:05] Receive: obj=GenerateReqInput(rid='r1', text=None, "
    f"input_ids={list(range(50))}, sampling_params={{}}), headers={{'x-tenant': 'acme'}}",
    "[2026-05-27 20:00:06 TP0] Decode batch. #running-req: 1",
    "[2026-05-27 20:00:07] Finish: obj=GenerateReqInput(rid='r1', text=None), out={'text': 'ok', 'meta_info': "
    "{'prompt_tokens': 50, 'completion_tokens': 7}}",
    "[2026-05-27 20:00:08] Receive: obj=GenerateReqInput(rid='HEALTH_CHECK_1', text='hi', input_ids=None)",
    f"[2026-05-27 20:00:09] Receive: obj=GenerateReqInput(rid='r2', text={PROMPT!r}, input_ids=None), "
    "headers={'x-tenant': 'globex'}",
)
SGLANG_JSON = lines(
    {"timestamp": "2026-05-27T20:00:05.5", "event": "request.received", "rid": "r1", "obj": {"text": PROMPT}},
    {
        "timestamp": "2026-05-27T20:00:06",
        "event": "request.finished",
        "rid": "r1",
        "obj": {},
        "out": {"meta_info": {"completion_tokens": 5}},
    },
    {"timestamp": "2026-05-27T20:00:07", "event": "request.received", "rid": "r2", "obj": {"input_ids": [1] * 20}},
)

FILES: dict[str, tuple[str, str]] = {
    "mooncake with fractions": ("mooncake", lines(mooncake(0.25, [1, 2]), mooncake(27.5, [1, 2, 3]))),
    "mooncake with delays": (
        "mooncake",
        lines(
            {**mooncake(0, [1]), "session_id": "a"},
            {"delay": 1000.5, "session_id": "a", "input_length": 1024, "output_length": 3, "hash_ids": [1, 2]},
        ),
    ),
    "mooncake with long ids": ("mooncake", lines(mooncake(0, ["9f", "a0"]), mooncake(1, ["9f", 1 << 61]))),
    "qwen-bailian": ("bailian", lines(bailian(7, -1, 0.5, [1, 2]), bailian(8, 7, 61.114, [1, 2, 3]))),
    "burstgpt": (
        "burstgpt",
        lines(
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "5,ChatGPT,70,8,78,Conversation log",
            "45.5,GPT-4,40,0,40,API log",
        ),
    ),
    "burstgpt with sessions": (
        "burstgpt",
        lines(
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "19.0,s-1,4,GPT-4,70,8,78,Conversation log",
            "20.0,s-1,4,GPT-4,90,8,98,Conversation log",
        ),
    ),
    "sharegpt": ("sharegpt", json.dumps([spoken("a_0", PROMPT, "Yes.", "And?", "No."), spoken("b_0")])),
    "sharegpt in pretty print": ("sharegpt", json.dumps([spoken("a_0", PROMPT, "Yes.", "And?", "No.")], indent=2)),
    "azure 2023": (
        "azure",
        lines(
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:17:03.9799600,48,10",
            "2023-11-16 18:17:04.0319600,31,8",
        ),
    ),
    "azure 2024": (
        "azure",
        lines(
            '"TIMESTAMP","ContextTokens","GeneratedTokens"',
            '"2024-05-10 00:00:00.009930+00:00","48","10"',
            '"2024-05-10 02:00:01+02:00","31","8"',
        ),
    ),
    "vllm's log": ("vllm-log", VLLM_OLD),
    "vllm's debug log": ("vllm-log", VLLM_NEW),
    "sglang's log": ("sglang-log", SGLANG_TEXT),
    "sglang's json log": ("sglang-log", SGLANG_JSON),
    "kv-cache-tester": (
        "kv-cache-tester",
        json.dumps(
            {
                "id": "t1",
                "block_size": 64,
                "requests": [
                    {"t": 0.0, "type": "s", "in": 130, "out": 2, "hash_ids": [1, 2]},
                    {"t": 9.5, "type": "n", "in": 200, "out": 2, "hash_ids": [1, 2, 3]},
                ],
            }
        ),
    ),
}


@pytest.fixture
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    name, text = FILES[request.param]
    path = tmp_path / "trace"
    path.write_text(text)
    return path, name


@pytest.mark.parametrize("written", FILES, indirect=True)
def test_each_kind_of_file_is_recognised_and_read(written: tuple[Path, str]) -> None:
    path, name = written
    assert recognise(path) == name
    first, second = open_trace(path)
    assert first.at_us <= second.at_us and first.input_tokens > 0


@pytest.mark.parametrize("written", FILES, indirect=True)
def test_no_reader_takes_another_kind_for_its_own(written: tuple[Path, str]) -> None:
    path, name = written
    others = [reader for other, reader in READERS.items() if other != name]
    assert not any(reader.recognises(read_head(path)) for reader in others)


ODD = (
    "null",
    "[]",
    "{}",
    '"x"',
    "-1",
    "1e99",
    "true",
    "[[1]]",
    "\\x",
    "\\N{x}",
    "[1,,2]",
    "\0",
    "9" * 400,
    "{'a': [1]}",
)
VALUE = re.compile(r'"[^"]*"|\'[^\']*\'|-?\d+(?:\.\d+)?|\[[^\[\]]*\]|\{[^{}]*\}|None')


@pytest.mark.parametrize("written", FILES, indirect=True)
def test_an_odd_value_is_read_or_refused(written: tuple[Path, str]) -> None:
    """Any value of any line may be anything: what is not read is a `TraceError`."""
    path, name = written
    text, chance = path.read_text(), random.Random(1)
    for _ in range(150):
        first, end = chance.choice([match.span() for match in VALUE.finditer(text)])
        path.write_text(text[:first] + chance.choice(ODD) + text[end:])
        with suppress(TraceError):
            list(open_trace(path, name))


def read(path: Path, text: str, **how: Any) -> list[TraceRequest]:
    path.write_text(text)
    return list(open_trace(path, **how))


def test_a_delay_follows_the_answer_before_it(tmp_path: Path) -> None:
    first, second = read(tmp_path / "t", FILES["mooncake with delays"][1])
    assert second.at_us - first.at_us == 3 * 20_000 + 1_000_500, "three tokens of 20 ms, then 1,000.5 ms"
    assert first.session == second.session == "a"


def test_chats_of_bailian_are_sessions_by_their_root(tmp_path: Path) -> None:
    rows = [bailian(1, -1, 0, [1]), bailian(2, 1, 1, [1, 2]), bailian(3, 2, 2, [1, 2, 3]), bailian(9, -1, 3, [1])]
    assert [request.session for request in read(tmp_path / "t", lines(*rows))] == [1, 1, 1, 9]


def test_offsets_of_azure_are_read(tmp_path: Path) -> None:
    first, second = read(tmp_path / "t", FILES["azure 2024"][1])
    assert second.at_us - first.at_us == 990_070


def test_equal_prompts_of_a_log_have_equal_blocks(tmp_path: Path) -> None:
    first, second = read(tmp_path / "t", VLLM_NEW)
    assert first.blocks.tolist() == second.blocks.tolist() and len(first.blocks) == 2
    assert (first.output_tokens, second.output_tokens) == (2, 0)
    assert second.at_us == 4_000_000, "over the end of a year"
    (old, _), (text, _) = read(tmp_path / "o", VLLM_OLD), read(tmp_path / "s", SGLANG_JSON)
    assert old.input_tokens == text.input_tokens == len(PROMPT) // 4 and text.output_tokens == 5


def test_a_wrong_header_is_one_error_and_a_missing_field_has_no_value(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("when,customer,prompt\n1,acme,400\n2,acme,400\n")
    wrong = WrongRows()
    assert list(open_trace(tmp_path / "t.csv", "azure").noting(wrong)) == []
    assert [error.operands["line"] for error in wrong.first] == [1], "rows below it are not wrong besides"
    (tmp_path / "t.jsonl").write_text(lines({"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}))
    with pytest.raises(TraceError, match=r"field `output_length`: missing field; each line needs"):
        list(open_trace(tmp_path / "t.jsonl"))
    with pytest.raises(TraceError, match=r"replay-your-own-trace\.md shows how to write records of your own"):
        open_trace(tmp_path / "t.csv")


def test_a_log_of_another_layout_has_whole_dates(tmp_path: Path) -> None:
    """A program around vLLM logs through its own configuration; a line's own time counts before a collector's."""
    rest = f"prompt: {PROMPT!r}, params: SamplingParams(n=1), prompt_token_ids: None, lora_request: None."
    log = lines(
        f"2025-12-31 23:59:59.250 1647689 wrapper.trace Received request chatcmpl-1: {rest}",
        f"2026-01-01T00:00:01,500 1647689 wrapper.trace Received request chatcmpl-2: {rest}",
    )
    first, second = read(tmp_path / "t", log)
    assert (first.at_us, second.at_us) == (0, 2_250_000) and first.blocks.tolist() == second.blocks.tolist()
    collected = "".join(f"[2026-08-12T08:42:31Z] {line}\n" for line in VLLM_OLD.splitlines())
    assert [r.at_us for r in read(tmp_path / "c", collected)] == [r.at_us for r in read(tmp_path / "o", VLLM_OLD)]


def test_a_conversation_is_a_request_for_each_answer(tmp_path: Path) -> None:
    first, second = read(tmp_path / "t", FILES["sharegpt"][1])
    assert (first.turn, second.turn, second.session) == (0, 1, "a_0")
    whole = first.input_tokens // 16
    assert second.blocks[:whole].tolist() == first.blocks[:whole].tolist(), "the second question repeats the first"
    assert second.at_us - first.at_us == 25_000_000 + first.output_tokens * 20_000
    assert [r.input_tokens for r in read(tmp_path / "p", FILES["sharegpt in pretty print"][1])] == [
        first.input_tokens,
        second.input_tokens,
    ]


def test_local_ids_of_kv_cache_tester_stay_small_in_a_folder(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"t{number}.json").write_text(FILES["kv-cache-tester"][1])
    requests = list(open_trace(tmp_path))
    assert max(int(request.blocks.max()) for request in requests) < 1 << 34, "what token ids can spell"
    assert len({int(block) for request in requests for block in request.blocks}) == 9


def test_a_row_that_is_far_too_late_is_refused(tmp_path: Path) -> None:
    rows = [f"{second},M,16,0,16,API log" for second in range(10, ROWS_OUT_OF_ORDER_MAX + 12)]
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    with pytest.raises(TraceError, match="sort the file by time"):
        read(tmp_path / "t", lines(header, *rows, "0,M,16,0,16,API log"))


REFUSED: dict[str, tuple[str, int, str, str]] = {
    "burstgpt": (FILES["burstgpt"][1].replace("45.5", "late"), 3, "Timestamp", "expected seconds"),
    "bailian": (lines(bailian(1, -1, 0, [1, 2], input_length=160)), 1, "hash_ids", "expected 10 block ids"),
    "sharegpt": (json.dumps([spoken("a", "x", "y")]).replace('"gpt"', '"bot"'), 1, "conversations[1].from", "speaker"),
    "sharegpt, broken": ('[\n{"conversations": [', 2, "", "not JSON"),
    "azure": (FILES["azure 2023"][1].replace(",31,", ",many,"), 3, "ContextTokens", "whole number"),
    "vllm without prompts": (
        "INFO 07-25 02:41:21 [l.py:1] Received request c: params: P(), lora_request: None.\n",
        1,
        "prompt",
        "VLLM_LOGGING_LEVEL=DEBUG",
    ),
    "sglang without prompts": (
        "[2026-05-27 20:00:05] Receive: obj=GenerateReqInput(rid='r', stream=True)\n",
        1,
        "text",
        "--log-requests-level 3",
    ),
    "sglang, cut": (
        "[2026-05-27 20:00:05] Receive: obj=GenerateReqInput(rid='r', text='a' ... 'b', input_ids=None)\n",
        1,
        "text",
        "--log-requests-level 3",
    ),
    "sglang, cut ids": (
        lines(
            {
                "timestamp": "2026-05-27T20:00:05",
                "event": "request.received",
                "rid": "r",
                "obj": {"input_ids": [1, "..."]},
            }
        ),
        1,
        "input_ids",
        "--log-requests-level 3",
    ),
    "a wrong tenant": (lines(mooncake(0, [1], tenant="a/../b")), 1, "tenant", "path segment"),
    "a tenant that is missing once": (
        lines(mooncake(0, [1], tenant="a"), mooncake(1, [1])),
        2,
        "tenant",
        "rows before",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_row_is_refused_by_line_field_and_remedy(tmp_path: Path, name: str) -> None:
    text, line, field, remedy = REFUSED[name]
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        load_workload(Choice(path), 16, "p")
    assert (caught.value.operands["line"], caught.value.operands["field"]) == (line, field)
    assert caught.value.message.startswith(f"{path}:{line}:") and remedy in caught.value.message


def test_ten_wrong_rows_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(lines(mooncake(0, [1]), *(mooncake(n, [1], input_length=0) for n in range(12))))
    with pytest.raises(TraceError) as caught:
        load_workload(Choice(path), 512, "p")
    assert caught.value.message.count("field `input_length`") == 10
    assert caught.value.message.endswith("and 2 more wrong rows") and caught.value.operands["wrong_rows"] == 12
    workload = load_workload(Choice(path, skip_wrong_rows=True), 512, "p")
    assert workload.requests == 1 and workload.remarks[0].startswith("12 wrong rows left out: ")


def test_an_unknown_file_lists_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    with pytest.raises(TraceError) as caught:
        recognise(path)
    assert all(f"{name}: {reader.described}" in caught.value.message for name, reader in READERS.items())
    path.write_text("\n")
    with pytest.raises(TraceError, match="the file is empty"):
        recognise(path)


OWN = lines(
    mooncake(0, [1, 2, 3], customer="alpha", user="ann"),
    mooncake(1000, [1, 2, 3, 4], customer="alpha", user="ann"),
    mooncake(2000, [1, 2, 3, 5], customer="beta", user="bob"),
    mooncake(3000, [1, 2, 3, 5], customer="alpha", user="abe"),
)
COLUMNS = read_columns(["tenant=customer", "subject=user"])


def test_own_tenants_and_subjects_are_used(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(OWN)
    workload = load_workload(Choice(path, columns=COLUMNS), 512, "p")
    assert workload.tenant_names == ("alpha", "beta") and workload.remarks == ()
    principals = LabelledPrincipals(read_policy("regulated-saas"), workload.tenants, workload.tenant_names)
    senders = [principals.principal(label) for _, label in workload.jobs]
    assert [(who.tenant, who.subject) for who in senders] == [
        ("alpha", "ann"),
        ("alpha", "ann"),
        ("beta", "bob"),
        ("alpha", "abe"),
    ]
    assert {who.classification for who in senders} == {None}, "the policy decides it"
    assert senders[0].session == senders[1].session and senders[0].session not in {
        senders[2].session,
        senders[3].session,
    }


def test_a_session_may_have_a_name_that_is_no_identifier(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([spoken("a b/..", PROMPT, "Yes."), spoken("c" * 400, PROMPT, "Yes.")]))
    workload = load_workload(Choice(path), 16, "p")
    principals = LabelledPrincipals(read_policy("regulated-saas"), workload.tenants)
    assert len({principals.principal(label).session for _, label in workload.jobs}) == 2


def test_a_file_without_tenants_is_told_so_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(OWN)
    (remark,) = load_workload(Choice(path), 512, "p").remarks
    assert remark.startswith("The file names no tenant") and "--column tenant=FIELD" in remark
    (remark,) = load_workload(Choice(path, columns={"tenant": "customer"}), 512, "p").remarks
    assert remark.startswith("The file names no subject") and "--column subject=FIELD" in remark
    with pytest.raises(TraceError, match=r"field `client`: missing field \(--column tenant=client; it has timestamp,"):
        load_workload(Choice(path, columns={"tenant": "client"}, limit=1), 512, "p")


@pytest.mark.parametrize("text", ["tenant", "tenant=", "colour=x", "=x"])
def test_a_malformed_column_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="write ROLE=FIELD"):
        read_columns([text])
    with pytest.raises(ConfigError, match="each role once"):
        read_columns(["tenant=a", "tenant=b"])


def replayed(folder: Path, *more: str) -> dict[str, Any]:
    ledger, page = folder / "own.db", folder / "own.html"
    words = ["replay", str(folder / "own.jsonl"), "--ledger", str(ledger), "--html", str(page), "--json", *more]
    result = CliRunner().invoke(app, [*words, "--pool-blocks", "64"])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_an_own_trace_gets_its_four_answers(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(OWN)
    document = replayed(tmp_path, "--column", "tenant=customer", "--column", "subject=user")
    assert [row["tenant"] for row in document["tenants"]] == ["alpha", "beta"]
    answers = document["answers"]
    assert answers["isolation"] == {
        "prompt_tokens": 512 * 15,
        "found_tokens": document["totals"]["hit_tokens"],
        "unlimited": {
            "within_subjects_tokens": 512 * 3,  # ann's second request finds her first
            "within_tenants_tokens": 512 * 6,  # and abe finds ann's
            "everybody_tokens": 512 * 9,  # and bob too
        },
        "cost_tokens": 512 * 3,
    }
    assert answers["sharing"] == [{"prefix_tokens": 512 * 3, "tenants": 1, "tokens": 512 * 3}]
    assert document["totals"]["hit_tokens"] == 512 * 3, "regulated-saas reuses within a subject"
    assert answers["pool"]["everything"] == 5 + 4 and answers["pool"]["blocks"] == 64
    assert answers["ledger"]["leaves_per_request"] > 1 and answers["ledger"]["requests_per_day"] == 4 * 86_400 / 3
    assert document["remarks"] == []
    page = (tmp_path / "own.html").read_text()
    assert all(sentence.split(".")[0] in page for sentence in answers["sentences"].values())


def test_a_second_replay_weighs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(OWN)
    first, second = (replayed(tmp_path)["answers"]["ledger"]["leaves_per_request"] for _ in range(2))
    assert second == pytest.approx(first, abs=0.5)


def test_lengths_alone_answer_nothing_about_sharing(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(FILES["azure 2024"][1])
    document = replayed(tmp_path)
    sentences = document["answers"]["sentences"]
    assert sentences["what isolation costs"] == sentences["what sharing would give"]
    assert document["answers"]["isolation"]["cost_tokens"] is None
    assert any("has lengths and no content" in remark for remark in document["remarks"])


def test_blocks_of_text_have_the_size_that_is_given(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(VLLM_NEW)
    (first, _), *_ = list(load_workload(Choice(path), 32, "p").jobs)
    assert len(first.blocks) == 1, "33 tokens in blocks of 32"
