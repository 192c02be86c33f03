"""The fields and headers that are forwarded to a router, and the headers that are returned: only those listed here.

1. A field that is not listed is refused by its name: a client learns that the engine never saw it. Fields of OpenAI's
   API that engines ignore are dropped, and so is a field that is null.
2. A header that is not listed goes no further.
3. An operator may list more of each, but no name by which routers or engines place, share, keep or reach blocks.
4. A header of an answer that is not listed ends at the door: it may say which worker answered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvcustody.errors import ConfigError
from kvcustody.integrations.identity.refusal import RequestRefused, malformed
from kvcustody.integrations.identity.request_body import OUR_KINDS_FIELD, OUR_LATENCY_FIELD
from kvcustody.integrations.identity.routes import Body

PASSED_HEADERS: Final = frozenset(
    (
        *("accept", "accept-encoding", "accept-language", "content-type", "user-agent"),
        *("traceparent", "tracestate", "anthropic-version"),
    )
)
RETURNED_HEADERS: Final = frozenset(
    (
        *(
            "content-type",
            "content-length",
            "content-encoding",
            "content-language",
            "cache-control",
            "date",
            "vary",
        ),
        *("allow", "retry-after", "www-authenticate", "x-request-id"),
    )
)
# Headers of one connection, which the door's own server and client write. A proxy writes `host` anew as well.
HOP_HEADERS: Final = frozenset(
    (
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"),
        *("te", "trailer", "transfer-encoding", "upgrade", "expect", "host", "content-length"),
    )
)
# Headers that a router or an engine acts on: names, and prefixes that end with `-`.
ACTED_ON_HEADERS: Final = (
    *("authorization", "x-api-key", "api-key", "cookie", "content-encoding", "baggage"),
    *("x-request-id", "request-id", "x-correlation-id", "x-trace-id"),
    *("x-tenant-id", "x-user-id", "x-session-id", "session-id", "x-claude-code-session-id", "program-id"),
    *("x-kvcustody-", "x-smg-", "x-llm-d-", "x-dynamo-", "x-gateway-", "x-envoy-", "x-worker-"),
    *("x-data-parallel-", "x-prefill-", "x-prefiller-", "x-encoder-", "x-forwarded-"),
    *sorted(HOP_HEADERS),
)

_SAMPLING: Final = (
    *(
        "n",
        "best_of",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
    ),
    *("max_tokens", "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("length_penalty", "repetition_detection", "logit_bias", "logprobs", "prompt_logprobs"),
    *("logprob_token_ids", "allowed_token_ids", "bad_words", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side"),
    *("use_beam_search", "early_stopping", "thinking_token_budget", "response_format", "structured_outputs"),
    *("guided_decoding_backend", "json_schema", "regex", "ebnf", "stop_regex", "no_stop_trim"),
    *("watermark", "watermarking"),
)
_STREAMED: Final = ("model", "stream", "stream_options", "stream_interval")
_RETURNED: Final = (
    *("echo", "return_token_ids", "return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text"),
    *("return_prompt_token_ids", "return_cached_tokens_details", "return_spec_tokens_details"),
    *("return_meta_info", "return_sampling_mask", "sampling_logprobs_mode"),
)
_RENDERED: Final = (
    *("messages", "add_generation_prompt", "add_special_tokens", "continue_final_message", "documents"),
    *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "images_config"),
    *("video_config", "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video"),
)
_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")
_OWN: Final = (OUR_KINDS_FIELD, OUR_LATENCY_FIELD, "request_id")
_CHAT: Final = (
    *(*_STREAMED, *_SAMPLING, *_RETURNED, *_RENDERED, *_TOOLS, *_OWN),
    *("max_completion_tokens", "top_logprobs", "reasoning_effort", "include_reasoning", "thinking"),
    *("separate_reasoning", "stream_reasoning", "task"),
)
_POOLING: Final = (
    *("model", "input", "data", "task", "dimensions", "encoding_format", "embed_dtype", "endianness"),
    *("truncate_prompt_tokens", "truncation_side", "use_activation", "padding", *_RENDERED, *_OWN),
)
_SCORING: Final = (
    *("model", "query", "queries", "documents", "items", "data_1", "data_2", "text_1", "text_2", "top_n"),
    *("return_documents", "instruction", "max_tokens_per_doc", "max_tokens_per_query", "padding"),
    *("truncate_prompt_tokens", "truncation_side", "use_activation", "mm_processor_kwargs"),
    *("chat_template_kwargs", "label_token_ids", "apply_softmax", "item_first", "temperature", *_OWN),
)
PASSED_FIELDS: Final[Mapping[Body, frozenset[str]]] = {
    Body.COMPLETION: frozenset(
        (
            *(*_STREAMED, *_SAMPLING, *_RETURNED, *_OWN, "prompt", "prompt_embeds", "suffix"),
            *("add_special_tokens", "images_config", "mm_processor_kwargs"),
        )
    ),
    Body.CHAT: frozenset(_CHAT),
    Body.CHAT_BATCH: frozenset(_CHAT),
    Body.RESPONSES: frozenset(
        (
            *(*_STREAMED, *_SAMPLING, *_TOOLS, *_OWN, "input", "instructions", "prompt", "text", "reasoning"),
            *("max_output_tokens", "max_tool_calls", "previous_response_id", "previous_input_messages"),
            *("background", "store", "include", "include_reasoning", "truncation", "metadata"),
            *("top_logprobs", "enable_response_messages", "chat_template_kwargs", "media_io_kwargs"),
            "mm_processor_kwargs",
        )
    ),
    Body.MESSAGES: frozenset(
        (
            *("model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature"),
            *("top_p", "top_k", "thinking", "tools", "tool_choice", "output_config", "watermarking"),
            *("chat_template_kwargs", OUR_KINDS_FIELD, OUR_LATENCY_FIELD),
        )
    ),
    Body.GENERATE: frozenset(
        (
            *(*_STREAMED, *_OWN, "token_ids", "token_offsets", "content_parts", "sampling_params"),
            *("reasoning_ended", "reasoning_parser_kwargs", "return_token_ids", "output_mode"),
        )
    ),
    Body.SGLANG_GENERATE: frozenset(
        (
            *(*_STREAMED, "text", "input_ids", "image_data", "video_data", "audio_data", "modalities"),
            *("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
            *("token_ids_logprob", "return_text_in_logprobs", "return_prompt_token_ids", "return_bytes"),
            *("require_reasoning", "max_thinking_tokens", "use_audio_in_video", "video_config"),
            *("images_config", "mm_processor_kwargs", OUR_KINDS_FIELD, OUR_LATENCY_FIELD),
        )
    ),
    Body.POOLING: frozenset(_POOLING),
    Body.SCORING: frozenset(_SCORING),
}
# Inside `sampling_params`, of all prompts or of each.
PASSED_SAMPLING: Final = frozenset(
    (
        *_SAMPLING,
        *(
            "stream_interval",
            "detokenize",
            "flat_logprobs",
            "prompt_logprob_token_ids",
            "prompt_logprob_start",
        ),
        *("max_new_tokens", "min_new_tokens", "sampling_seed", "beam_width", "structural_tag"),
    )
)
# Of OpenAI's and Anthropic's API; engines ignore them, and a router might place by them.
DROPPED_FIELDS: Final = frozenset(
    (
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"),
        *("metadata", "store", "prediction", "modalities", "audio", "web_search_options", "verbosity"),
    )
)
# Fields by which routers or engines place, share, keep or reach blocks, run given code, or read given tensors.
ACTED_ON_FIELDS: Final = frozenset(
    (
        *("cache_salt", "extra_key", "nvext", "kv_transfer_params", "ec_transfer_params", "kv_hints"),
        *("agent_hint", "agent_hints", "priority", "session_id", "session_params", "conversation"),
        *("conversation_id", "conversation_params", "routing_key", "user_id", "program_id", "vllm_xargs"),
        *("extra_args", "custom_params", "custom_labels", "custom_logit_processor", "rid"),
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "decode_tp_size"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "encoder_urls"),
        *("disaggregated_params", "kv_cache_retention_config", "cache_salt_id", "skip_reading_prefix_cache"),
        *("lora_path", "lora_id", "lora_request", "features", "mm_payload", "mm_hashes", "mm_content_hashes"),
        *(
            "return_mm_kwargs",
            "input_embeds",
            "prompt_embeddings",
            "embed_overrides",
            "token_indices_to_pool",
        ),
        *("embed_override_token_id", "positional_embed_overrides", "query_embed_overrides"),
        *("item_embed_overrides", "return_hidden_states", "return_pooled_hidden_states"),
        *("return_routed_experts", "routed_experts_prompt_start", "routed_experts_start_len"),
        *("return_indexer_topk", "http_worker_ipc", "external_trace_header", "received_time"),
        *("need_wait_for_mm_inputs", "num_items_assigned", "log_metrics", "no_logs"),
    )
)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class PassedFields:
    """The forwarded fields: the lists above, and the operator's additions."""

    def __init__(self, fields: Iterable[str] = (), headers: Iterable[str] = (), returned: Iterable[str] = ()) -> None:
        """Raises `ConfigError` for a name that may not be added (rule 3)."""
        self._fields = frozenset(fields)
        self._headers = frozenset(_normal(header) for header in headers)
        self._returned = frozenset(_normal(header) for header in returned)
        for field in self._fields & ACTED_ON_FIELDS:
            raise ConfigError(f"field `{field}`: routers or engines act on it; clients may not set it", field=field)
        for header in self._headers | self._returned:
            if _is_acted_on(header):
                raise ConfigError(
                    f"header `{header}`: routers or engines act on it; clients may not set it", header=header
                )

    def header(self, name: str) -> bool:
        """Return whether a client's header is forwarded. Some servers read `_` as `-`, so no header with `_` is."""
        name = name.lower()
        return name in PASSED_HEADERS or name in self._headers

    def is_returned(self, name: str) -> bool:
        """Return whether an answer's header is returned to the client."""
        name = name.lower()
        return name in RETURNED_HEADERS or name in self._returned

    def check(self, kind: Body, body: dict[str, Any]) -> None:
        """Remove the dropped fields from a body.

        Raises:
            RequestRefused: a field is not listed.
        """
        self._check(body, PASSED_FIELDS[kind] | self._fields, "")
        sampling = body.get("sampling_params")
        for each in sampling if isinstance(sampling, list) else [sampling]:
            if isinstance(each, dict):
                self._check(each, PASSED_SAMPLING | self._fields, "sampling_params.")

    def _check(self, holder: dict[str, Any], passed: frozenset[str], before: str) -> None:
        for name in [name for name in holder if name not in passed]:
            if holder[name] is not None and name not in DROPPED_FIELDS:
                raise unlisted(before + name)
            del holder[name]


def unlisted(name: str) -> RequestRefused:
    """Return the 400 about a field that clients may not set."""
    if _PLAIN_NAME.fullmatch(name) is None:
        return malformed("body", "has a field that is not accepted from clients")
    return malformed(name, "is not accepted from clients")


def _normal(header: str) -> str:
    return header.lower().replace("_", "-")


def _is_acted_on(header: str) -> bool:
    return any(header.startswith(each) if each.endswith("-") else header == each for each in ACTED_ON_HEADERS)
