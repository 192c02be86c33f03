"""Sizing against figures worked out by hand from well-known configs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcustody.errors import ConfigError
from kvcustody.lab.sizing.attention_layers import Attention
from kvcustody.lab.sizing.blocks_that_fit import (
    estimate_parameters,
    estimate_weights_bytes,
    format_bytes,
    parse_bytes,
    size_pool,
)
from kvcustody.lab.sizing.engine_blocks import engine_blocks
from kvcustody.lab.sizing.hf_config import KvDtype, parse_config

GIB = 2**30

LLAMA2_7B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
    "max_position_embeddings": 4096, "torch_dtype": "float16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_70B = LLAMA3_8B | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
}  # fmt: skip
FALCON_7B = {
    "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024, "torch_dtype": "bfloat16",
}  # fmt: skip
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
    "new_decoder_architecture": True,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280,
    "max_position_embeddings": 163840, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
MISTRAL_7B_V01 = {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "sliding_window": 4096,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL_8X7B = MISTRAL_7B_V01 | {"model_type": "mixtral", "sliding_window": None, "num_local_experts": 8}
GEMMA2_9B = {
    "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
    "sliding_window": 4096, "max_position_embeddings": 8192, "torch_dtype": "float32",
}  # fmt: skip
GEMMA3_4B = {  # as published: the nested config leaves out what equals the class default
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN2_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA4 = {
    "model_type": "llama4", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "no_rope_layers": [],
        "max_position_embeddings": 10485760,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        (LLAMA2_7B, 524_288),  # 2 x 32 layers x 32 heads x 128 x 2 bytes
        (LLAMA3_8B, 131_072),  # 2 x 32 x 8 x 128 x 2
        (LLAMA3_70B, 327_680),  # 2 x 80 x 8 x 128 x 2
        (FALCON_7B, 8_192),  # 2 x 32 x 1 x 64 x 2
        (FALCON_40B, 61_440 * 2),  # 2 x 60 x 8 x 64 x 2
        (DEEPSEEK_V3, 70_272),  # 61 x (512 + 64) x 2
        (MISTRAL_7B_V01, 131_072),
        (MIXTRAL_8X7B, 131_072),
        (GEMMA2_9B, 688_128),  # 2 x 42 x 8 x 256 x 4
        (GEMMA3_4B, 139_264),  # 2 x 34 x 4 x 256 x 2
        (GPT_OSS_20B, 49_152),  # 2 x 24 x 8 x 64 x 2
        (QWEN2_7B, 57_344),  # 2 x 28 x 4 x 128 x 2
        (LLAMA4, 196_608),  # 2 x 48 x 8 x 128 x 2
    ],
)
def test_bytes_per_token(config, bytes_per_token):
    assert parse_config(config).bytes_per_token == bytes_per_token


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (LLAMA2_7B, {"full": 32}),
        (DEEPSEEK_V3, {"latent": 61}),
        (MISTRAL_7B_V01, {"sliding-4096": 32}),
        (MIXTRAL_8X7B, {"full": 32}),
        (GEMMA2_9B, {"full": 21, "sliding-4096": 21}),
        (GEMMA3_4B, {"full": 5, "sliding-1024": 29}),
        (GPT_OSS_20B, {"full": 12, "sliding-128": 12}),
        (QWEN2_7B, {"full": 28}),
        (QWEN2_7B | {"use_sliding_window": True, "max_window_layers": 20}, {"full": 20, "sliding-131072": 8}),
        ({k: v for k, v in QWEN2_7B.items() if k != "use_sliding_window"}, {"full": 28}),
        (LLAMA4, {"chunked-8192": 36, "full": 12}),
        (MISTRAL_7B_V01 | {"sliding_window_pattern": "LLLG"}, {"full": 8, "sliding-4096": 24}),
        (GEMMA2_9B | {"num_kv_shared_layers": 2}, {"full": 20, "sliding-4096": 20}),
    ],
)
def test_layer_groups(config, groups):
    assert {group.name: group.layers for group in parse_config(config).groups} == groups


def test_dtype_comes_from_the_config_or_an_override():
    assert parse_config(LLAMA3_8B).dtype is KvDtype.BF16
    assert parse_config(LLAMA3_8B, kv_dtype="fp8").bytes_per_token == 65_536
    assert parse_config(LLAMA3_8B, kv_dtype="fp32").bytes_per_token == 262_144
    assert parse_config(LLAMA3_8B, kv_dtype="auto").dtype is KvDtype.BF16
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    eight = parse_config(LLAMA3_8B | {"quantization_config": scheme})
    assert eight.dtype is KvDtype.FP8
    assert any("kv_cache_scheme" in note for note in eight.notes)


def test_tensor_parallel_splits_heads_repeats_few_and_keeps_latents_whole():
    assert parse_config(LLAMA3_70B, tensor_parallel=8).bytes_per_token == 327_680 // 8
    repeated = parse_config(LLAMA3_70B, tensor_parallel=16)
    assert repeated.bytes_per_token == 327_680 // 8
    assert any("repeated over 16 shards" in note for note in repeated.notes)
    assert parse_config(FALCON_7B, tensor_parallel=4).bytes_per_token == 8_192
    assert parse_config(DEEPSEEK_V3, tensor_parallel=8).bytes_per_token == 70_272
    with pytest.raises(ConfigError, match="`8` K/V heads do not split over `3` shards"):
        parse_config(LLAMA3_70B, tensor_parallel=3)


def test_class_defaults_are_noted_not_silent():
    notes = parse_config(GEMMA3_4B).notes
    assert any("`num_key_value_heads` = 4 is the default of `gemma3_text`" in note for note in notes)
    multi_head = {name: value for name, value in LLAMA2_7B.items() if name != "num_key_value_heads"}
    assert parse_config(multi_head).bytes_per_token == 524_288
    assert any("multi-head" in note for note in parse_config(multi_head).notes)


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "`model_type` is missing"),
        (without(LLAMA3_8B, "num_hidden_layers"), "`num_hidden_layers` is missing"),
        (without(LLAMA3_8B, "num_attention_heads"), "`num_attention_heads` is missing"),
        (without(LLAMA3_8B, "hidden_size"), "`hidden_size` is missing"),
        (without(LLAMA3_8B, "torch_dtype"), r"`torch_dtype` is missing: say which with a KV dtype \(fp8"),
        (without(MISTRAL_7B_V01, "num_key_value_heads"), "`num_key_value_heads` is missing .* multi-head"),
        (without(DEEPSEEK_V3, "qk_rope_head_dim"), "`qk_rope_head_dim` is missing"),
        (LLAMA3_8B | {"num_hidden_layers": "32"}, "`num_hidden_layers` is `32`: a positive integer"),
        (LLAMA3_8B | {"num_key_value_heads": 0}, "a positive integer"),
        (LLAMA3_8B | {"torch_dtype": "int4"}, "`torch_dtype` is `int4`: use one of"),
        (LLAMA3_8B | {"num_attention_heads": 30}, "no multiple of `30` heads: add `head_dim`"),
        (GPT_OSS_20B | {"layer_types": ["full_attention"]}, "lists `1` layers of `24`"),
        (
            GPT_OSS_20B | {"layer_types": ["linear_attention"] * 24},
            "`layer_types` of `gpt_oss` has `linear_attention`",
        ),
        (without(GPT_OSS_20B, "sliding_window"), "`sliding_window` is missing"),
        (DEEPSEEK_V3 | {"index_head_dim": 100}, "`index_head_dim` is `100`"),
        (LLAMA3_8B | {"is_encoder_decoder": True, "decoder_layers": 4}, "`max_source_positions` is missing"),
        (GEMMA2_9B | {"num_kv_shared_layers": 42}, "`num_kv_shared_layers` is `42` of `42`"),
        ([], "a model config is a JSON object"),
    ],
)
def test_a_config_that_does_not_say_is_refused_by_field(config, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(config)


def test_one_group_is_blocks_times_size():
    report = size_pool(
        LLAMA3_8B,
        gpu_memory_bytes=80 * GIB,
        utilisation=0.9,
        weights_bytes=16 * GIB,
        workspace_bytes=2 * GIB,
        headroom_bytes=GIB,
    )
    # 72 GiB usable - 19 GiB = 53 GiB; a block of 16 tokens is 2 MiB.
    assert report.usable_bytes == 72 * GIB
    assert report.kv_bytes == 53 * GIB
    assert report.groups[0].bytes_per_block == 2 * 2**20
    assert report.blocks == 53 * 512 == 27_136
    assert report.tokens == 434_176
    assert report.sequences == 53.0  # of 8192 tokens, 1 GiB each
    assert report.metadata_bytes == 27_136 * 160
    assert not report.weights_estimated
    assert report.bytes_per_token_model == report.bytes_per_token == 131_072


def test_a_hybrid_is_sized_for_its_context_mix():
    report = size_pool(
        GEMMA3_4B,
        gpu_memory_bytes=24 * GIB,
        utilisation=1.0,
        weights_bytes=8 * GIB,
        context_mix=[(32_768, 1), (1_024, 3)],
    )
    full, sliding = report.groups
    assert (full.group.attention, sliding.group.attention) == (Attention.FULL, Attention.SLIDING)
    # A sequence of 32768 holds 2048 full blocks, and 65 of the window (it may straddle one more).
    assert full.blocks_per_sequence == (2048 + 3 * 64) / 4 == 560
    assert sliding.blocks_per_sequence == (65 + 3 * 64) / 4 == 64.25
    assert (full.bytes_per_block, sliding.bytes_per_block) == (327_680, 1_900_544)
    mean = 560 * 327_680 + 64.25 * 1_900_544
    assert report.sequences == pytest.approx(16 * GIB / mean)
    assert full.blocks == int(16 * GIB / mean * 560)
    assert report.tokens == int(report.sequences * (32_768 + 3 * 1_024) / 4)
    naive = 16 * GIB // (16 * report.bytes_per_token) * 16
    assert report.tokens > naive  # a per-token number for all layers would waste the windows' share
    assert 0 <= report.kv_bytes - sum(group.bytes for group in report.groups) < full.bytes_per_block * 8


def test_a_window_keeps_at_most_one_block_more_than_it_spans():
    (group,) = parse_config(MISTRAL_7B_V01).groups
    assert [group.blocks_for(tokens, 16) for tokens in (1, 16, 17, 4096, 4097, 32_768)] == [
        1,
        1,
        2,
        256,
        257,
        257,
    ]
    chunked = parse_config(LLAMA4).groups[0]
    assert [chunked.blocks_for(tokens, 16) for tokens in (8192, 9000)] == [512, 512]


def test_the_default_context_of_a_hybrid_is_noted():
    notes = size_pool(GEMMA2_9B, gpu_memory_bytes=80 * GIB, weights_bytes=0).notes
    assert any("contexts of 8192 tokens" in note for note in notes)


@given(
    config=st.sampled_from([LLAMA3_8B, DEEPSEEK_V3, GEMMA3_4B, GPT_OSS_20B, LLAMA4, MISTRAL_7B_V01]),
    memory=st.integers(GIB, 200 * GIB),
    block=st.sampled_from([1, 8, 16, 64, 256]),
    mix=st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 9)), min_size=1, max_size=4),
)
def test_blocks_never_need_more_than_the_memory(config, memory, block, mix):
    try:
        report = size_pool(config, gpu_memory_bytes=memory, weights_bytes=0, block_tokens=block, context_mix=mix)
    except ConfigError as error:
        assert "hold no block" in str(error)
        return
    assert sum(group.bytes for group in report.groups) <= report.kv_bytes <= memory
    assert report.blocks == sum(group.blocks for group in report.groups)
    assert all(group.blocks > 0 for group in report.groups)


@pytest.mark.parametrize(
    ("config", "parameters", "within"),
    [
        (LLAMA2_7B, 6_738_415_616, 0),
        (LLAMA3_8B, 8_030_261_248, 0),
        (LLAMA3_70B, 70_553_706_496, 0),
        (MISTRAL_7B_V01, 7_241_732_096, 0),
        (MIXTRAL_8X7B, 46_702_792_704, 0.001),
        (FALCON_7B, 6_921_720_704, 0.01),
        (DEEPSEEK_V3, 671_026_419_200, 0.001),
    ],
)
def test_parameters_are_estimated_from_the_config(config, parameters, within):
    assert abs(estimate_parameters(config) - parameters) <= within * parameters


def test_estimated_weights_are_said_to_be_estimated_and_split():
    assert estimate_weights_bytes(LLAMA3_8B) == 2 * 8_030_261_248
    assert estimate_weights_bytes(DEEPSEEK_V3) < 1.01 * 671_026_419_200  # fp8: one byte each
    assert estimate_weights_bytes(LLAMA3_8B | {"quantization_config": {"quant_method": "awq", "bits": 4}}) == (
        8_030_261_248 // 2
    )
    report = size_pool(LLAMA3_70B, gpu_memory_bytes=80 * GIB, tensor_parallel=4)
    assert report.weights_estimated
    assert report.weights_bytes == 2 * 70_553_706_496 // 4
    assert any("estimate" in note for note in report.notes)
    with pytest.raises(ConfigError, match=r"`vocab_size` is missing .* give the size of the weights"):
        estimate_parameters(without(LLAMA3_8B, "vocab_size"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_bytes": 8 * GIB, "weights_bytes": 16 * GIB}, "no memory is left for K/V"),
        ({"utilisation": 0.0}, r"utilisation `0.0` is outside 0\.\.1"),
        ({"utilisation": 90}, "utilisation `90`"),
        ({"block_tokens": 0}, "block size `0`"),
        ({"workspace_bytes": -1}, "workspace of `-1` bytes is negative"),
        ({"context_mix": []}, "context mix"),
        ({"context_mix": [(0, 1)]}, "context mix"),
        ({"gpu_memory_bytes": 2**20, "weights_bytes": 0}, "hold no block of each layer group"),
    ],
)
def test_numbers_that_do_not_work_out_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        size_pool(LLAMA3_8B, **({"gpu_memory_bytes": 80 * GIB, "weights_bytes": 16 * GIB} | options))


def test_sizes_in_words():
    assert parse_bytes("80GiB") == 80 * GIB
    assert parse_bytes("80GB") == 80_000_000_000
    assert parse_bytes("512MiB") == 512 * 2**20
    assert parse_bytes(" 1.5 GiB ") == 3 * 2**29
    assert (parse_bytes("4096B"), parse_bytes("0")) == (4096, 0)
    with pytest.raises(ConfigError, match="`80` has no unit: write 80GiB, 80GB or 80B"):
        parse_bytes("80")
    for bad in ("80G", "GiB", "-1GiB", "80gib", "", "1e9", "0x10"):
        with pytest.raises(ConfigError, match="is not a size"):
            parse_bytes(bad)
    assert [format_bytes(n) for n in (17, 1536, 80 * GIB, 3 * 2**40)] == [
        "17 B",
        "1.50 KiB",
        "80.00 GiB",
        "3.00 TiB",
    ]


QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 151936,
    "full_attention_interval": 4, "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_H_8B = {
    "model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
    "hybrid_override_pattern": "M-M*" * 13, "n_groups": 8,
    "conv_kernel": 4, "torch_dtype": "bfloat16", "vocab_size": 131072,
}  # fmt: skip
MINIMAX_TEXT = {
    "model_type": "minimax_text_01", "hidden_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1], "torch_dtype": "bfloat16",
}  # fmt: skip


BAMBA_9B = {
    "model_type": "bamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": "auto",
    "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
ZAMBA2_1B = {
    "model_type": "zamba2", "hidden_size": 2048, "num_hidden_layers": 38, "num_attention_heads": 32,
    "num_key_value_heads": 32, "kv_channels": 64, "attention_head_dim": 128, "n_mamba_heads": 64, "mamba_headdim": 64,
    "hybrid_layer_ids": [5, 11, 17, 23, 29, 35], "mamba_d_state": 128, "mamba_ngroups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
FALCON_H1 = {
    "model_type": "falcon_h1", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64,
    "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
LFM2_1B = {
    "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "conv_dim": 2048, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "attending", "recurrent", "state_bytes"),
    [
        # convolution: 3 x (2 x 16 x 128 + 32 x 128) x 2 bytes; state: 32 x 128 x 128 x 2
        (QWEN3_NEXT_80B, 12, 36, 3 * 8192 * 2 + 32 * 128 * 128 * 2),
        # convolution: 3 x (128 x 64 + 2 x 8 x 128) x 2 bytes; state in 32 bits: 128 x 64 x 128 x 4
        (NEMOTRON_H_8B, 13, 26, 3 * (8192 + 2048) * 2 + 128 * 64 * 128 * 4),
        (MINIMAX_TEXT, 1, 7, 64 * 128 * 128 * 2),
        # convolution over 8192 + 2 x 1 x 128; heads of 8192 / 128
        (BAMBA_9B, 3, 29, 3 * (8192 + 256) * 2 + 8192 * 128 * 2),
        (ZAMBA2_1B, 6, 38, 3 * (4096 + 256) * 2 + 4096 * 128 * 2),
        (FALCON_H1, 24, 24, 3 * (3072 + 512) * 2 + 3072 * 256 * 2),
        (LFM2_1B, 6, 10, 2 * 2048 * 2),
    ],
    ids=["qwen3-next", "nemotron-h", "minimax", "bamba", "zamba2", "falcon-h1", "lfm2"],
)
def test_recurrent_layers_keep_a_state_of_one_size(config, attending, recurrent, state_bytes):
    full, states = parse_config(config).groups
    assert (full.attention, full.layers) == (Attention.FULL, attending)
    assert (states.attention, states.layers, states.state_bytes) == (
        Attention.RECURRENT,
        recurrent,
        state_bytes,
    )
    assert states.bytes_per_token == 0 and states.blocks_for(100_000, 16) == states.blocks_for(1, 16) == 1
    half = parse_config(config, tensor_parallel=2).groups[1]
    shared = 0  # a single group goes with the heads of every shard
    if 1 in (config.get("mamba_n_groups"), config.get("mamba_ngroups")):
        shared = 3 * config["mamba_d_state"] * 2 * 2
    assert half.state_bytes == state_bytes // 2 + shared // 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA3_8B | {"ssm_state_size": 16}, "`ssm_state_size`: `llama` has recurrent layers"),
        (
            LLAMA3_8B | {"model_type": "zamba", "mamba_d_state": 64},
            "`mamba_d_state`: `zamba` has recurrent layers",
        ),
        (LLAMA3_8B | {"model_type": "rwkv7"}, "`model_type`: `rwkv7` has recurrent layers"),
        (without(BAMBA_9B, "attn_layer_indices"), "`attn_layer_indices` is not a list"),
        (LFM2_1B | {"full_attn_idxs": [16]}, "`full_attn_idxs` is not a list of some of `16` layers"),
        (LFM2_1B | {"layer_types": ["conv"] * 15 + ["mamba"]}, "`layer_types` of `lfm2` has `mamba`"),
        (
            ZAMBA2_1B | {"layers_block_type": ["mamba"] * 37 + ["x"]},
            "`layers_block_type` of `zamba2` has `x`",
        ),
        (
            LLAMA3_8B | {"layer_types": ["conv"] * 32},
            "`layer_types` of `llama` has `conv`, whose state is not known",
        ),
        (LLAMA3_8B | {"layer_types": ["mamba"] * 32}, "`layer_types` of `llama` has `mamba`"),
        (NEMOTRON_H_8B | {"hybrid_override_pattern": "M-X*"}, "`hybrid_override_pattern` has `X`"),
        (MINIMAX_TEXT | {"attn_type_list": [0, 2] * 4}, "`attn_type_list` of `minimax_text_01` has `2`"),
        (MINIMAX_TEXT | {"attn_type_list": [0, 1]}, "`attn_type_list` lists `2` of `8` layers"),
        (without(QWEN3_NEXT_80B, "linear_key_head_dim"), "`linear_key_head_dim` is missing"),
    ],
)
def test_a_kind_of_layer_that_is_not_known_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(config)


def test_zamba2s_heads_are_of_the_stream_and_the_embeddings_together():
    for config in (ZAMBA2_1B, without(ZAMBA2_1B, "attention_head_dim")):
        assert parse_config(config).groups[0].bytes_per_token == 6 * 32 * 2 * 128 * 2


def test_rwkvs_state_is_what_transformers_keeps():
    import torch
    import transformers as hf

    config = hf.RwkvConfig(vocab_size=64, context_length=64, hidden_size=48, num_hidden_layers=3)
    model = hf.RwkvModel(config).to(torch.bfloat16)
    kept = model(torch.tensor([[1, 2, 3]]), use_cache=True).state
    (states,) = parse_config(config.to_dict() | {"torch_dtype": "bfloat16"}).groups
    assert (states.attention, states.layers) == (Attention.RECURRENT, 3)
    assert states.state_bytes * states.layers == sum(one.numel() * one.element_size() for one in kept)
    known = config.to_dict() | {"torch_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="attention_hidden_size"):
        parse_config(known | {"attention_hidden_size": 64})
    with pytest.raises(ConfigError, match="over shards"):
        parse_config(known, tensor_parallel=2)


def test_models_that_name_only_attention_are_read_as_such():
    config = LLAMA3_8B | {"model_type": "minimax_m2", "attn_type_list": [1] * 32}
    assert [group.name for group in parse_config(config).groups] == ["full"]


def test_a_sparse_models_indexer_has_pages_of_its_own():
    latent, indexer = parse_config(DEEPSEEK_V3 | {"index_head_dim": 128}).groups
    assert (latent.bytes_per_token, indexer.bytes_per_token) == (61 * 576 * 2, 61 * (128 + 4))


@pytest.mark.parametrize(
    ("kv_dtype", "vector"),
    [("int8", 128 + 4), ("fp8_per_token_head", 128 + 4), ("nvfp4", 64 + 8), ("fp8", 128)],
)
def test_quantised_keys_and_values_count_their_scales(kv_dtype, vector):
    assert parse_config(LLAMA3_8B, kv_dtype=kv_dtype).bytes_per_token == 32 * 8 * 2 * vector


def test_an_engine_makes_blocks_in_which_a_state_fits():
    layout = parse_config(QWEN3_NEXT_80B)
    found = engine_blocks(layout, block_tokens=16, kv_bytes=40 * GIB)
    state = 3 * 8192 * 2 + 32 * 128 * 128 * 2
    assert found.block_tokens * 2048 >= state > (found.block_tokens - 16) * 2048
    assert (found.tables, found.layers_per_table) == (4, 12)
    assert found.blocks == 40 * GIB // (found.block_tokens * 2048 * 12)


WINDOWED_MOE = {  # MiMo's form: sliding layers have heads of their own
    "model_type": "mimo_v2_flash", "hidden_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
    "swa_v_head_dim": 128, "sliding_window": 128, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "dtype": "bfloat16",
}  # fmt: skip
WIDER_GLOBAL = {  # Gemma 4's form, as published
    "model_type": "gemma4_text", "hidden_size": 2304, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512, "dtype": "bfloat16",
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}  # fmt: skip


def test_sliding_layers_have_the_heads_of_their_own() -> None:
    full, sliding = parse_config(WINDOWED_MOE).groups
    assert (full.layers, full.bytes_per_token) == (2, 2 * 4 * (192 + 128) * 2)
    assert (sliding.layers, sliding.bytes_per_token) == (4, 4 * 8 * (192 + 128) * 2)
    as_saved = without(WINDOWED_MOE, "hybrid_layer_pattern", "swa_num_key_value_heads", "swa_head_dim") | {
        "layer_types": ["full_attention", *["sliding_attention"] * 4, "full_attention"]
    }
    assert parse_config(as_saved).groups == (full, sliding)


def test_a_layer_may_differ_from_all_others() -> None:
    """As transformers saves it: the layers' own fields, by number."""
    as_saved = without(WIDER_GLOBAL, "global_head_dim") | {"per_layer_config": {"05": {"head_dim": 512}}}
    assert parse_config(as_saved).groups == parse_config(WIDER_GLOBAL).groups
    assert parse_config(as_saved).groups[0].bytes_per_token == 4 * 2 * 512 * 2
    fewer = LLAMA3_8B | {"per_layer_config": {3: {"num_key_value_heads": 2, "intermediate_size": 8}}}
    assert [(group.layers, group.kv_heads) for group in parse_config(fewer).groups] == [(1, 2), (31, 8)]
    for wrong, message in (
        ({40: {"head_dim": 8}}, "names layer `40` of `32`"),
        ([{"head_dim": 8}], "no mapping"),
        ({1: {"head_dim": "8"}}, "positive integer"),
        ({1: {"kv_lora_rank": 8}}, "changes `kv_lora_rank` of layer `1`"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(LLAMA3_8B | {"per_layer_config": wrong})


def test_index_keys_are_counted_where_blocks_are_chosen_by_them() -> None:
    sparse = LLAMA3_8B | {
        "model_type": "minimax_m3_text",
        "sparse_attention_config": {"sparse_index_dim": 128, "sparse_attention_freq": [0] * 3 + [1] * 29},
    }
    full, keys = parse_config(sparse, tensor_parallel=4).groups
    assert (full.layers, keys.layers, keys.bytes_per_token) == (32, 29, 29 * 128 * 2)


@pytest.mark.parametrize(
    "field",
    ["compress_ratios", "swa_rope_heads", "cross_attention_layers", "indexer_types", "kv_sharing_interval"],
)
def test_a_field_of_the_cache_that_nothing_reads_is_refused(field: str) -> None:
    assert parse_config(LLAMA3_8B | {field: None}) == parse_config(LLAMA3_8B)
    with pytest.raises(ConfigError, match=f"field `{field}` of `llama` may change what a layer keeps"):
        parse_config(LLAMA3_8B | {field: [1, 2]})


def test_a_newer_gated_delta_net_keeps_its_states_as_it_says() -> None:
    newer = without(QWEN3_NEXT_80B, "layer_types") | {
        "model_type": "qwen3_5_moe_text", "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
    }  # fmt: skip
    attending, states = parse_config(newer).groups
    older = parse_config(QWEN3_NEXT_80B).groups
    assert (attending, states.layers) == (older[0], older[1].layers)
    assert states.state_bytes - older[1].state_bytes == 32 * 128 * 128 * 2, "the recurrent part alone is wider"


def test_what_the_estimate_of_weights_leaves_out_is_said() -> None:
    report = size_pool(GEMMA3_4B | {"num_nextn_predict_layers": 1}, gpu_memory_bytes=80 * GIB, context_mix=[(4096, 1)])
    assert "the estimate leaves out what `vision_config`, `num_nextn_predict_layers` describes" in report.notes
    assert not any("leaves out" in note for note in size_pool(LLAMA3_8B, gpu_memory_bytes=80 * GIB).notes)
