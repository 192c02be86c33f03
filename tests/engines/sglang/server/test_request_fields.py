"""Every field of SGLang's requests is decided on by the door before a router: a release that adds one fails here."""

from __future__ import annotations

import dataclasses

import pytest
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from kvcustody.integrations.door.passed_fields import (
    ACTED_ON_FIELDS,
    DROPPED_FIELDS,
    PASSED_FIELDS,
    PASSED_SAMPLING,
)
from kvcustody.integrations.identity.routes import Body

ENGINES_OWN = {
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
    *("ebnf_full_assistant", "http_worker_ipc"),
}
# Of the engine's own HTTP server, refused as unknown.
UNLISTED = {
    *("watermark", "background", "return_entropy", "return_sampling_mask", "sampling_logprobs_mode"),
    *(
        "return_flat_raw_top_logprobs",
        "return_flat_raw_output_top_logprobs",
        "return_flat_raw_top_logprobs_b64",
    ),
    *("max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch"),
    *("multi_item_delimiter_indices", "return_flat_raw_output_top_logprobs", "return_input_ids_in_sglext"),
    *("return_output_ids_in_sglext", "input_ids"),
}


@pytest.mark.parametrize(
    ("name", "kind"), [("CompletionRequest", Body.COMPLETION), ("ChatCompletionRequest", Body.CHAT)]
)
def test_every_field_is_passed_dropped_or_refused(name: str, kind: Body) -> None:
    fields = getattr(protocol, name).model_fields.keys()
    assert not fields - PASSED_FIELDS[kind] - DROPPED_FIELDS - ACTED_ON_FIELDS - UNLISTED


def test_so_is_every_field_of_its_own_route() -> None:
    fields = {field.name for field in dataclasses.fields(GenerateReqInput)}
    passed = PASSED_FIELDS[Body.SGLANG_GENERATE]
    assert not fields - passed - DROPPED_FIELDS - ACTED_ON_FIELDS - UNLISTED


def test_so_is_every_sampling_parameter() -> None:
    fields = {field for field in SamplingParams.__struct_fields__ if not field.startswith("_")}
    assert not fields - PASSED_SAMPLING - ACTED_ON_FIELDS - ENGINES_OWN
