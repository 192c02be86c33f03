"""SGLang's HTTP server behind the door: who gets in, whose cache is read, and what reaches logs and ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from kvcustody.audit.store.database.engine import open_store
from kvcustody.audit.store.schema.ledger import incarnations
from standins.engines.sglang.sglang_server import SglangServer
from standins.engines.vllm.deployment import Deployment
from standins.engines.vllm.tiny_model import words

PROMPT = [16 + (7 * at) % 400 for at in range(200)]


@pytest.fixture(scope="module")
def served(model: Path, new_deployment: Callable[..., Deployment], tmp_path_factory) -> Iterator[tuple]:
    site = new_deployment()
    for tenant in ("acme", "beta"):
        site.api_key(tenant)
    server = SglangServer(model, tmp_path_factory.mktemp("logs"), deployment=site)
    yield server, site
    server.stop()


def ask(served: tuple, tenant: str, tokens: list[int], path: str = "/generate", **more) -> tuple:
    server, site = served
    key = {"authorization": f"Bearer {site.api_key(tenant)}", "x_kvcustody_subject": "jane"}
    if path == "/generate":
        body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 6}, **more}
    else:
        body = {"model": "tiny", "prompt": words(tokens), "max_tokens": 6, "temperature": 0, **more}
    answer = server.post(path, body, **key)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    if path != "/generate":
        return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"]
    if isinstance(said, list):
        return said, [one["meta_info"]["cached_tokens"] for one in said]
    return said["output_ids"], said["meta_info"]["cached_tokens"]


def test_without_a_credential_nobody_gets_in(served):
    server, _ = served
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", body).status_code == 401
    assert server.post("/v1/completions", {"prompt": "w20"}).status_code == 401
    assert server.post("/flush_cache", {}, authorization="Bearer nonsense").status_code == 401


@pytest.mark.parametrize("path", ["/flush_cache", "/open_session", "/abort_request", "/update_weights_from_disk"])
def test_a_tenant_administers_nothing(served, path):
    server, site = served
    assert server.post(path, {}, authorization=f"Bearer {site.api_key('acme')}").status_code == 403


@pytest.mark.parametrize("field", ["session_params", "lora_path", "kv_hints", "bootstrap_room"])
def test_a_body_reaches_no_further_than_its_tenant(served, field):
    server, site = served
    body = {"input_ids": PROMPT, field: {"id": "somebody's"}}
    answer = server.post("/generate", body, authorization=f"Bearer {site.api_key('acme')}")
    assert answer.status_code == 400 and field in answer.text


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_own_hits_are_full_and_foreign_ones_are_none(served, path):
    tokens = PROMPT if path == "/generate" else [31, *PROMPT]
    first, cached = ask(served, "acme", tokens, path)
    assert cached == 0
    again, cached = ask(served, "acme", tokens, path)
    assert cached == len(tokens) - 1 and again == first
    other, cached = ask(served, "beta", tokens, path)
    assert cached == 0 and other == first
    _, cached = ask(served, "acme", tokens, path, cache_salt="mine")
    assert cached == 0, "a client's own salt narrows"


def test_several_samples_of_a_prompt_share_what_is_theirs(served):
    tokens = [33, *PROMPT]
    sampling = {"temperature": 0, "max_new_tokens": 4, "n": 3}
    _, cached = ask(served, "acme", tokens, sampling_params=sampling)
    assert cached == [len(tokens) - 1] * 3


def test_no_token_key_or_prompt_is_written_down(served):
    server, site = served
    ask(served, "acme", [*PROMPT, 77])
    written = server.log.read_text()
    assert "sglang in custody" in written, "the positive control: this is the log"
    for secret in (site.api_key("acme"), str(PROMPT)[1:40], words(PROMPT[:8])):
        assert secret not in written
    kept = b"".join(path.read_bytes() for path in site.folder.glob("ledger.db*"))
    assert site.api_key("acme").encode() not in kept and words(PROMPT[:8]).encode() not in kept


def test_a_server_that_is_asked_to_stop_ends_all_custody(served):
    server, site = served
    server.stop()
    ledger = open_store(site.ledger_url)
    with ledger.connect() as connection:
        ends = connection.execute(select(incarnations.c.end).where(incarnations.c.device == "cpu")).scalars().all()
    ledger.dispose()
    assert ends == ["stopped"]
    assert sqlite3.connect(site.folder / "ledger.db").execute("pragma integrity_check").fetchone() == ("ok",)
