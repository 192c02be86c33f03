"""A language model of 140 thousand random weights and a vocabulary of words, saved as vLLM loads one.

- Everything is a function of a seed, so that two engines, or two test runs, compute the same tokens.
- A word is a token: `w17` is token 17, so a test chooses token ids through text too.
"""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 2, 2, 32, 2
CONTEXT_TOKENS = 1024
WINDOW_TOKENS = 64
FIRST_WORD = 16  # smaller ids are markers and roles
_CHAT = "{% for m in messages %}{{ 'w10' if m['role'] == 'user' else 'w11' }} {{ m['content'] }} {% endfor %}w12"


def words(tokens: list[int]) -> str:
    """Text that the tokenizer turns into exactly `tokens`."""
    return " ".join(f"w{token}" for token in tokens)


def save_model(folder: Path, *, kind: str = "full", context_tokens: int = CONTEXT_TOKENS) -> Path:
    """The model, its tokenizer and chat template in `folder`.

    kind: `full` attention; `windowed`, every second layer has a sliding window; `mla`, multi-head latent attention;
    `hybrid`, every second layer is a Mamba layer.
    """
    import torch
    import transformers as hf

    torch.manual_seed(7)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 128,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": context_tokens,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "initializer_range": 0.2,  # far from ties: greedy decoding must not depend on how a batch was cut
    }
    match kind:
        case "windowed":
            config = hf.Gemma3TextConfig(
                **common,
                head_dim=HEAD_DIM,
                num_hidden_layers=2 * LAYERS,
                sliding_window=WINDOW_TOKENS,
                layer_types=["sliding_attention", "full_attention"] * LAYERS,
            )
            model = hf.Gemma3ForCausalLM(config)
        case "mla":  # the sizes of a cached token are those that kernels are written for
            sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
            dense = {"q_lora_rank": None, "first_k_dense_replace": LAYERS, "n_routed_experts": 2}
            heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
            config = hf.DeepseekV2Config(**common | heads | sizes | dense, num_hidden_layers=LAYERS)
            model = hf.DeepseekV2ForCausalLM(config)
        case "hybrid":
            state = {"mamba_n_heads": 4, "mamba_d_head": HEAD_DIM, "mamba_d_state": 16, "mamba_n_groups": 1}
            dense = {"num_local_experts": 0, "shared_intermediate_size": 128, "tie_word_embeddings": False}
            config = hf.GraniteMoeHybridConfig(
                **common | state | dense,
                num_hidden_layers=2 * LAYERS,
                layer_types=["mamba", "attention"] * LAYERS,
                position_embedding_type="rope",
                attention_multiplier=HEAD_DIM**-0.5,
            )
            model = hf.GraniteMoeHybridForCausalLM(config)
        case _:
            config = hf.LlamaConfig(**common, num_hidden_layers=LAYERS, tie_word_embeddings=False)
            model = hf.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}
    vocabulary |= {f"w{token}": token for token in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = _CHAT
    return fast
