"""Read a model config, object or dict, under the many names that model families use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# First match wins. A decoder that comes from an encoder-decoder config names its own depth first.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "emb_dim", "dim"),
    "heads": (
        *("decoder_attention_heads", "num_attention_heads", "n_head", "n_heads"),
        *("attention_heads", "num_heads"),
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num"),
    "head_dim": ("attention_head_dim", "head_dim", "d_head", "dim_head", "d_kv"),
    "intermediate": (
        *("decoder_ffn_dim", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
        *("d_inner", "dim_ff", "dff", "d_ff"),
    ),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "active": (
        *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
        *("top_k_experts", "experts_per_token"),
    ),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_width": (
        *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        "shared_intermediate_size",
    ),
    "dense_first": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "window": ("sliding_window", "sliding_window_size", "local_attention"),
    "layer_types": ("layer_types", "layers_block_type"),
}
# Where multimodal configs keep their language model, and where some families nest a part.
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder_config")
NESTED = ("attn_config", "ffn_config")

_BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}


class ConfigFields:
    """One language model's config; a multimodal config is replaced by its text part.

    `source` is a Hugging Face config object, or the dict of its `config.json`. Nothing of
    transformers is imported: objects are asked by attribute, dicts by key.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.whole = source
        for _ in range(3):  # qwen omni nests twice
            self.source = _text_part(self.source)
        self.model_type = str(self._raw("model_type") or "")

    def get(self, name: str, default: Any = None) -> Any:
        """Return the first field of `NAMES[name]` (or the field `name`) that is set."""
        for field in NAMES.get(name, (name,)):
            value = self._raw(field)
            if value is not None:
                return value
        return default

    def layer(self, i: int) -> ConfigFields:
        """Return the config of layer `i`: this one, unless layers have settings of their own."""
        own = self._raw("per_layer_config")
        if isinstance(self.source, Mapping) and isinstance(own, Mapping):
            return ConfigFields({**self.source, **own.get(str(i), own.get(i, {}))})
        if getattr(self.source, "is_heterogeneous", False):
            return ConfigFields(self.source.per_layer_config[i])
        return self

    def need(self, name: str) -> int:
        """Return a field that must be there, as a positive integer.

        Raises:
            ValueError: it is missing or not a positive integer; the message says which names were
                looked for.
        """
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"the config of model type {self.model_type or 'unknown'!r} must give a positive "
                f"integer as one of {', '.join(NAMES.get(name, (name,)))}, got {value!r}"
            )
        return value

    def get_int(self, name: str, default: int) -> int:
        """Return a field as an integer, or `default` where it is not one."""
        value = self.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    @property
    def tied(self) -> bool:
        """Whether input embedding and output head are one matrix.

        A `config.json` leaves out what equals the base class's default, which is true.
        """
        value = self._raw("tie_word_embeddings")
        if value is None:
            value = _field(self.whole, "tie_word_embeddings")
        return True if value is None else bool(value)

    @property
    def weight_bytes(self) -> float:
        """Bytes of one parameter: by quantisation, then by dtype; 2 where neither is given."""
        quantised = _quantised_bytes(self._raw("quantization_config"))
        if quantised is None:
            quantised = _quantised_bytes(_field(self.whole, "quantization_config"))
        return quantised or self.dtype_bytes

    @property
    def dtype_bytes(self) -> float:
        """Bytes of one value of the config's dtype, 2 where it gives none."""
        for source in (self.source, self.whole):
            for name in ("dtype", "torch_dtype"):
                value = str(_field(source, name) or "").removeprefix("torch.")
                for known, size in _BYTES.items():
                    if value.startswith(known):
                        return size
        return 2.0

    def _raw(self, name: str) -> Any:
        value = _field(self.source, name)
        for part in NESTED:
            if value is None:
                value = _field(_field(self.source, part), name)
        return value


def _field(source: Any, name: str) -> Any:
    if isinstance(source, Mapping):
        return source.get(name)
    try:
        return getattr(source, name, None)
    except RuntimeError:
        # transformers refuses to read a setting that differs between layers: see `layer`.
        return vars(source).get(name)


def _text_part(source: Any) -> Any:
    chooser = getattr(source, "get_text_config", None)
    if callable(chooser):
        return chooser(decoder=True)
    for part in TEXT_PARTS:
        found = _field(source, part)
        if found is not None:
            return found
    return source


def _quantised_bytes(settings: Any) -> float | None:
    """Bytes of one quantised parameter, scales not counted; None where it is not quantised."""
    if settings is None:
        return None
    method = str(_field(settings, "quant_method") or "").rpartition(".")[2].lower()
    bits = _field(settings, "bits") or _field(settings, "nbits")
    if isinstance(bits, int):
        return bits / 8
    if _field(settings, "load_in_4bit") or "fp4" in method:
        return 0.5
    if _field(settings, "load_in_8bit") or "fp8" in method:
        return 1.0
    return None
