"""From a config to its layers: which attention each has, and what a token keeps in its cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pillarattn.theory.config_fields import ConfigFields
from pillarattn.theory.model_shape import LayerShape
from pillarattn.theory.state_layers import conv_layer, state_layer

MLA_CHOICES = ("latent", "expanded")
_LATENT_NOTE = (
    "attention is counted as a kernel that reads latents; transformers expands the whole cache in "
    "each pass: see mla='expanded'"
)
# transformers' words and older ones -> (attention, recurrent part).
_KINDS = {
    "full_attention": ("full", ""),
    "attention": ("full", ""),
    "sliding_attention": ("window", ""),
    "chunked_attention": ("window", ""),
    "indexed_attention": ("indexed", ""),
    "deepseek_sparse_attention": ("indexed", ""),
    "qwen_sparse_attention": ("indexed", ""),
    "minimax_m3_sparse": ("indexed", ""),
    "compressed_sparse_attention": ("window", ""),
    "heavily_compressed_attention": ("window", ""),
    "linear_attention": ("none", "state"),
    "mamba": ("none", "state"),
    "mamba2": ("none", "state"),
    "recurrent": ("none", "state"),
    "conv": ("none", "conv"),
    "hybrid": ("full", "state"),
    "hybrid_sliding": ("window", "state"),
    "moe": ("none", ""),
    "mlp": ("none", ""),
}
# Models without any attention layer, and one whose every layer has both.
_NO_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
_BOTH = ("falcon_h1",)


def layer_shapes(config: ConfigFields, mla: str = "latent") -> tuple[list[LayerShape], list[str]]:
    """Return one `LayerShape` a layer, and notes about what is left out.

    Args:
        config: fields of the language model.
        mla: how layers with latent attention (DeepSeek) read their cache. "latent": a kernel that
            works on the `kv_lora_rank + qk_rope_head_dim` cached values, with the projections
            absorbed into queries and outputs, and one list of keys for all heads. "expanded": what
            transformers does, where every pass reads all latents and writes and reads full keys and
            values of every head, also in a draft step.

    Raises:
        ValueError: a needed field is missing, a layer type is unknown, or `mla` is.
    """
    if mla not in MLA_CHOICES:
        raise ValueError(f"mla must be one of {', '.join(MLA_CHOICES)}, got {mla!r}")
    notes: list[str] = []
    names = _layer_types(config)
    known: dict[tuple[str, int], LayerShape] = {}
    layers = []
    for i, name in enumerate(names):
        own = config.layer(i)
        # Layers without settings of their own share one config, and so one shape a type.
        key = (name, -1 if own is config else i)
        if key not in known:
            known[key] = _layer(own, name, mla, notes)
        layers.append(known[key])
    shared = config.get_int("num_kv_shared_layers", 0)
    for i in range(len(layers) - shared, len(layers)):
        layers[i] = replace(layers[i], shared=True)
    return layers, list(dict.fromkeys(notes))


def _layer(config: ConfigFields, name: str, mla: str, notes: list[str]) -> LayerShape:
    if name not in _KINDS:
        raise ValueError(
            f"layer type {name!r} of model type {config.model_type!r} is unknown to the planner; "
            f"known types: {', '.join(sorted(_KINDS))}"
        )
    kind, recurrent = _KINDS[name]
    layer = LayerShape(kind)
    if "compressed" in name:
        notes.append("compressed keys beyond the window are not counted")
    if kind != "none":
        latent = config.get_int("kv_lora_rank", 0)
        layer = _latent(config, kind, latent, mla) if latent else _grouped(config, kind)
        if latent and mla == "latent":
            notes.append(_LATENT_NOTE)
    if kind == "window":
        layer = replace(layer, window=_window(config, name))
    if kind == "indexed":
        layer = _indexed(config, layer)
    if recurrent:
        found = conv_layer(config) if recurrent == "conv" else state_layer(config)
        if found is None:
            notes.append(f"recurrent state of {config.model_type or 'this model'} is not counted")
        else:
            layer = replace(layer, state=found[0])
    return layer


def head_sizes(config: ConfigFields, kind: str = "full") -> tuple[int, int, int, int]:
    """Return query heads, KV heads, key width and value width of one layer."""
    heads, hidden = config.need("heads"), config.need("hidden")
    # Gemma 4 and MiMo: layers of one kind have heads of their own.
    prefix = "global_" if kind == "full" else "swa_"
    kv_heads = config.get_int("kv_heads", heads)
    old_falcon = config.model_type == "falcon" and not config.get("new_decoder_architecture")
    if config.get("multi_query") and (old_falcon or config.model_type == "gpt_bigcode"):
        kv_heads = 1
    elif old_falcon:
        kv_heads = heads
    heads = config.get_int("swa_num_attention_heads", heads) if kind == "window" else heads
    kv_heads = config.get_int(
        "num_global_key_value_heads" if kind == "full" else "swa_num_key_value_heads", kv_heads
    )
    width = config.get_int("head_dim", 0) or config.get_int("kv_channels", 0) or hidden // heads
    width = config.get_int(f"{prefix}head_dim", width)
    value_width = config.get_int("v_head_dim", width)
    if kind == "window":
        value_width = config.get_int("swa_v_head_dim", value_width)
    return heads, kv_heads, width, value_width


def _grouped(config: ConfigFields, kind: str) -> LayerShape:
    heads, kv_heads, key_width, value_width = head_sizes(config, kind)
    values = kv_heads * (key_width + value_width)
    return LayerShape(
        kind,
        query_heads=heads,
        kv_heads=kv_heads,
        stored=values,
        read=values,
        key_values=kv_heads * key_width,
        attend_flops=2 * heads * (key_width + value_width),
    )


def _latent(config: ConfigFields, kind: str, rank: int, mla: str) -> LayerShape:
    """Multi-head latent attention: `rank` shared values and the rotary key are cached."""
    heads, rope = config.need("heads"), config.need("qk_rope_head_dim")
    key_width, value_width = config.need("qk_nope_head_dim") + rope, config.need("v_head_dim")
    stored = rank + rope
    if mla == "latent":
        return LayerShape(
            kind,
            query_heads=heads,
            kv_heads=1,
            stored=stored,
            read=stored,
            key_values=stored,
            attend_flops=2 * heads * (stored + rank),
        )
    full = heads * (key_width + value_width)
    return LayerShape(
        kind,
        query_heads=heads,
        kv_heads=heads,
        stored=stored,
        read=full,
        scanned=stored,
        expanded=full,
        key_values=heads * key_width,
        attend_flops=2 * full,
        expand_flops=2 * rank * heads * (key_width - rope + value_width),
    )


def _indexed(config: ConfigFields, layer: LayerShape) -> LayerShape:
    """Layers that rank all keys with a small indexer and attend the best (DeepSeek sparse)."""
    width, heads = config.get_int("index_head_dim", 0), config.get_int("index_n_heads", 1)
    blocks = config.get_int("index_topk_blocks", 0) * config.get_int("index_block_size", 1)
    return replace(
        layer,
        stored=layer.stored + width,
        scanned=layer.scanned + width,
        scan_flops=2 * heads * width,
        read_limit=config.get_int("index_topk", 0) or blocks or None,
    )


def _window(config: ConfigFields, name: str) -> int:
    found = config.get("attention_chunk_size") if name == "chunked_attention" else None
    found = found or config.get("window") or config.get("attention_window_size")
    if not isinstance(found, int) or found < 1:
        raise ValueError(
            f"layer type {name!r} of model type {config.model_type!r} needs sliding_window or "
            f"attention_chunk_size as a positive integer, got {found!r}"
        )
    return found


def _layer_types(config: ConfigFields) -> list[str]:
    """Return a type for each layer: listed in the config, or by the family's rule."""
    listed: Any = config.get("layer_types")
    if listed:
        return [str(name) for name in listed]
    depth = config.need("layers")
    if config.model_type in _NO_ATTENTION:
        return ["linear_attention"] * depth
    if config.model_type in _BOTH:
        return ["hybrid"] * depth
    is_full = _full_rule(config)
    if is_full is not None:
        other = "sliding_attention" if config.get("window") else "linear_attention"
        return ["full_attention" if is_full(i) else other for i in range(depth)]
    windowed = config.get("window") and config.get("use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * depth


def _full_rule(config: ConfigFields) -> Callable[[int], bool] | None:
    """Return which layers attend fully, for configs that give a period or a list instead."""
    listed = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    if listed:
        return lambda i: i in listed
    period = config.get_int("attn_layer_period", 0)
    if period:
        offset = config.get_int("attn_layer_offset", 0)
        return lambda i: i % period == offset
    period = config.get_int("sliding_window_pattern", 0)
    if period and config.get("window"):
        return lambda i: (i + 1) % period == 0
    return None
