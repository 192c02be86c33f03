"""Every field of vLLM's requests is decided on by the door before a router: a release that adds one fails here."""

from __future__ import annotations

import importlib

import pytest

from kvcustody.integrations.door.passed_fields import (
    ACTED_ON_FIELDS,
    DROPPED_FIELDS,
    PASSED_FIELDS,
    PASSED_SAMPLING,
)
from kvcustody.integrations.identity.routes import Body

CLASSES = [
    ("openai.chat_completion.protocol", "ChatCompletionRequest", Body.CHAT),
    ("openai.chat_completion.protocol", "BatchChatCompletionRequest", Body.CHAT_BATCH),
    ("openai.completion.protocol", "CompletionRequest", Body.COMPLETION),
    ("openai.responses.protocol", "ResponsesRequest", Body.RESPONSES),
    ("anthropic.protocol", "AnthropicMessagesRequest", Body.MESSAGES),
    ("scale_out.token_in_token_out.protocol", "GenerateRequest", Body.GENERATE),
    *(
        (f"pooling.{module}.protocol", name, Body.POOLING)
        for module, name in (
            ("embed", "EmbeddingCompletionRequest"),
            ("embed", "EmbeddingChatRequest"),
            ("embed", "EmbeddingBatchChatRequest"),
            ("embed", "EmbeddingChatInputRequest"),
            ("pooling", "PoolingCompletionRequest"),
            ("pooling", "PoolingChatRequest"),
            ("pooling", "IOProcessorRequest"),
            ("classify", "ClassificationCompletionRequest"),
            ("classify", "ClassificationChatRequest"),
        )
    ),
    *(
        ("pooling.scoring.protocol", name, Body.SCORING)
        for name in (
            "ScoreDataRequest",
            "ScoreQueriesDocumentsRequest",
            "ScoreQueriesItemsRequest",
            "ScoreTextRequest",
            "RerankRequest",
        )
    ),
]
ENGINES_OWN = {"output_kind", "skip_clone", "output_text_buffer_length", "trace_decode_token_ids"}


@pytest.mark.parametrize(("module", "name", "kind"), CLASSES)
def test_every_field_is_passed_dropped_or_refused(module: str, name: str, kind: Body) -> None:
    of = getattr(importlib.import_module(f"vllm.entrypoints.{module}"), name)
    assert not of.model_fields.keys() - PASSED_FIELDS[kind] - DROPPED_FIELDS - ACTED_ON_FIELDS


def test_so_is_every_sampling_parameter() -> None:
    from vllm.sampling_params import SamplingParams

    fields = {field for field in SamplingParams.__struct_fields__ if not field.startswith("_")}
    assert not fields - PASSED_SAMPLING - ACTED_ON_FIELDS - ENGINES_OWN
