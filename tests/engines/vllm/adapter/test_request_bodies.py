"""vLLM's own request classes, fed what the middleware writes: the token is where its engine looks, once a request."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

import vllm
from pydantic import TypeAdapter
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
from vllm.v1.request import Request

from kvcustody.governance.credentials.scope_token import VerifiedToken
from kvcustody.integrations.identity.request_body import OUR_TRANSFER_FIELD
from kvcustody.integrations.identity.routes import PLAIN, SCOPED
from standins.integrations.door_world import Deployment, ask, make_signers

USER = [{"role": "user", "content": "hello"}]
GENERATING: list[tuple[str, Any, dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"model": "m", "prompt": [1, 2, 3]}),
    ("/v1/chat/completions", ChatCompletionRequest, {"model": "m", "messages": USER}),
    ("/v1/responses", ResponsesRequest, {"model": "m", "input": "hello"}),
]
SALT_ONLY: list[tuple[str, Any, dict[str, Any]]] = [
    ("/v1/embeddings", EmbeddingCompletionRequest, {"model": "m", "input": "hello"}),
    ("/v1/rerank", RerankRequest, {"model": "m", "query": "q", "documents": ["a", "b"]}),
    ("/score", ScoreRequest, {"model": "m", "queries": "q", "documents": ["a", "b"]}),
    ("/v1/messages", AnthropicMessagesRequest, {"model": "m", "messages": USER, "max_tokens": 5}),
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return Deployment(tmp_path_factory.mktemp("door"), make_signers())


def parsed(deployment: Deployment, path: str, kind: Any, body: dict[str, Any], key: str) -> Any:
    sent = {**body, "cache_salt": "mine", "kv_transfer_params": {OUR_TRANSFER_FIELD: "forged"}}
    return TypeAdapter(kind).validate_json(ask(deployment.gate, path, sent, key=key).passed.body)


@pytest.mark.parametrize(("path", "kind", "body"), GENERATING)
@pytest.mark.parametrize("subject", ["alice", "s" * 128])
def test_the_token_reaches_the_engines_request(
    deployment: Deployment, path: str, kind: Any, body: dict[str, Any], subject: str
) -> None:
    request = parsed(deployment, path, kind, body, deployment.token(sub=subject))
    params = request.to_sampling_params(16, {})
    inside = Request("r", [1, 2, 3], params, None, cache_salt=request.cache_salt)
    transfer = (inside.kv_transfer_params or {}).get(OUR_TRANSFER_FIELD)
    assert (transfer is None) == (subject == "alice")
    outcome = deployment.tokens.verify(inside.cache_salt, transfer)
    assert isinstance(outcome, VerifiedToken), outcome
    assert outcome.principal.subject == subject and outcome.uses_left == 0
    assert outcome.hints.salt is not None


@pytest.mark.parametrize(("path", "kind", "body"), SALT_ONLY)
def test_requests_that_generate_nothing_accept_the_token(
    deployment: Deployment, path: str, kind: Any, body: dict[str, Any]
) -> None:
    request = parsed(deployment, path, kind, body, deployment.acme)
    outcome = deployment.tokens.verify(request.cache_salt)
    assert isinstance(outcome, VerifiedToken) and outcome.principal.tenant == "acme"


def test_ids_are_those_of_the_owner(deployment: Deployment) -> None:
    body = {"model": "m", "input": "hello", "request_id": "chosen"}
    first = parsed(deployment, "/v1/responses", ResponsesRequest, body, deployment.acme)
    second = parsed(deployment, "/v1/responses", ResponsesRequest, body, deployment.globex)
    assert first.request_id != second.request_id
    assert all(request.request_id.startswith("resp_") for request in (first, second))


def test_the_paths_of_this_version_are_those_of_our_table() -> None:
    """A path that a version renames would be refused to tenants without a word; other paths are refused anyway."""
    root = Path(vllm.__file__).parent / "entrypoints"
    served = {path for file in root.rglob("api_router.py") for path in re.findall(r'"(/[^"]+)"', file.read_text())}
    assert set(SCOPED) | PLAIN <= served
