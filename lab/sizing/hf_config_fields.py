"""The fields of a Hugging Face `config.json`: nesting, aliases, class defaults, and errors that name them.

- A field is never guessed: it is in the config, or a documented default of its model type (and then noted),
  or the caller gets a `ConfigError` that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvcustody.errors import ConfigError

# Model types whose K/V heads equal the attention heads when the config does not say otherwise.
_MULTI_HEAD = frozenset((
    "bloom", "codegen", "cohere", "cohere2", "gemma", "gpt2", "gpt_neox", "gpt_oss", "gptj", "llama", "olmo",
    "olmo2", "olmo3", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "stablelm", "zamba2",
))  # fmt: skip
# Published configs of these types leave out what equals the class default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
        "max_position_embeddings": 131072, "vocab_size": 262208, "tie_word_embeddings": True,
    },
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "falcon": {"tie_word_embeddings": True},
}  # fmt: skip


# Fields whose name says that they change what a layer that attends keeps (`recurrent_state` has those of the others).
_OF_CACHE = re.compile(
    r"^per_layer_|^swa_|hybrid|compress|indexer|index_head_dim|cross_attention|cross_layer|^sparse_|attention_pattern"
    r"|other_setting|block_configs|^kv_|_kv_|^global_|window|attention_chunk|layer_types"
)
# Named alike, and no key or value depends on them.
_OF_NO_CACHE = frozenset((
    "keep_window_size", "window_size", "mlp_layer_types", "num_kv_heads", "kv_channels", "swa_num_attention_heads",
    "swa_rope_theta",
))  # fmt: skip


class ModelConfig:
    """A config's fields: nested `text_config` first, then aliases, class defaults, and named errors."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(f"a model config is a JSON object, not `{type(config).__name__}`")
        self._outer = config
        nested = config.get("text_config") or config.get("llm_config") or config.get("language_config")
        self._inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
        declared = self._inner.get("model_type") or config.get("model_type")
        if declared is None:
            raise ConfigError("field `model_type` is missing: give the model's whole config.json", field="model_type")
        self.model_type = str(declared)
        if self.model_type == "gemma3" and nested is not None:
            self.model_type = "gemma3_text"
        self.notes: list[str] = []
        self._read: set[str] = set()

    def raw(self, *names: str) -> Any:
        """Return the first of `names` that is set, or None."""
        self._read.update(names)
        for source in (self._inner, self._outer, _DEFAULTS.get(self.model_type, {})):
            for name in names:
                value = source.get(name)
                if value is not None:
                    if source is not self._inner and source is not self._outer:
                        self.note(f"`{name}` = {value} is the default of `{self.model_type}`, not in the config")
                    return value
        return None

    def decided_by(self, *names: str) -> None:
        """Mark these fields as read, whatever they hold."""
        self._read.update(names)

    def refuse_unread(self) -> None:
        """Refuse a field that has not been read and whose name says that it changes what a layer keeps."""
        for name, value in self._inner.items():
            if name in self._read or name in _OF_NO_CACHE or not value:
                continue
            if _OF_CACHE.search(name):
                raise ConfigError(
                    f"field `{name}` of `{self.model_type}` may change what a layer keeps, and this calculator does "
                    "not read it: size such a model by its engine's own figures",
                    field=name,
                    model_type=self.model_type,
                )

    def note(self, text: str) -> None:
        """Add a note about how the config was read, once."""
        if text not in self.notes:
            self.notes.append(text)

    def count(self, *names: str) -> int | None:
        """Return a positive integer field, or None where it is not set."""
        value = self.raw(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"field `{names[0]}` is `{value}`: a positive integer is needed", field=names[0], value=value
            )
        return value

    def need(self, *names: str, hint: str = "add it to the config") -> int:
        """Return a positive integer field that must be set."""
        value = self.count(*names)
        if value is None:
            raise ConfigError(
                f"field `{names[0]}` is missing in the config of `{self.model_type}`: {hint}",
                field=names[0],
                model_type=self.model_type,
            )
        return value

    @property
    def layers(self) -> int:
        """The number of transformer layers."""
        return self.need("num_hidden_layers", "n_layer", "n_layers", "num_layers")

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.need("hidden_size", "n_embd", "d_model")

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.need("num_attention_heads", "n_head", "n_heads")

    @property
    def head_dim(self) -> int:
        """The width of one head: as configured, else hidden size by heads."""
        if self.model_type == "zamba2":  # attends over the stream and the embeddings side by side; others' names differ
            return self.count("attention_head_dim") or 2 * self.hidden // self.heads
        given = self.count("head_dim", "kv_channels", "attention_head_dim")
        if given is not None:
            return given
        if self.hidden % self.heads:
            raise ConfigError(
                f"hidden size `{self.hidden}` is no multiple of `{self.heads}` heads: add `head_dim`",
                field="head_dim",
            )
        return self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        """The number of K/V heads: grouped, one (multi-query) or as many as query heads."""
        if self.model_type in ("falcon", "RefinedWebModel", "RefinedWeb"):
            if self.raw("new_decoder_architecture"):
                return self.need("num_kv_heads", "n_head_kv")
            return 1 if self.raw("multi_query") is not False else self.heads
        if self.model_type == "gpt_bigcode":
            return 1 if self.raw("multi_query") is not False else self.heads
        given = self.count("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
        if given is None and self.model_type in _MULTI_HEAD:
            self.note(f"`num_key_value_heads` is not in the config: multi-head, `{self.heads}`")
            return self.heads
        return given or self.need(
            "num_key_value_heads", hint="add it (equal to num_attention_heads for multi-head attention)"
        )

    @property
    def latent(self) -> bool:
        """Whether the cache is one compressed vector per token (MLA)."""
        return self.raw("kv_lora_rank") is not None
