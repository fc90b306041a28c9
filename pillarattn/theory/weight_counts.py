"""How many parameters a pass reads: by the rules of a config, or counted in a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pillarattn.theory.config_fields import ConfigFields
from pillarattn.theory.layer_shapes import head_sizes
from pillarattn.theory.model_shape import LayerShape, Weights
from pillarattn.theory.state_layers import conv_layer, state_layer

# Families whose MLP has two matrices (up, down); all others have a gate too.
_TWO_MATRICES = """
apertus apertus1p5_text arcee bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot
blenderbot-small bloom camembert codegen ctrl data2vec-text electra ernie falcon fuyu git gpt-sw3
gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj jais2 marian mbart megatron-bert mpt mvp
nanochat nemotron nemotron_h openai-gpt opt pegasus persimmon phi plbart rembert roberta
roberta-prelayernorm roc_bert roformer starcoder2 trocr whisper xglm xlm xlm-roberta xlm-roberta-xl
xlnet xmod
"""
TWO_MATRIX_MLP = frozenset(_TWO_MATRICES.split())
# Query projections that also make an output gate.
_GATED_QUERY = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")
# Families whose layers are either a mixer or an MLP.
_ONE_PART = ("mamba", "mamba2", "falcon_mamba", "nemotron_h")
_TOWERS = re.compile(r"vision|visual|audio|image|speech|multi_?modal", re.IGNORECASE)


def weights_of_config(config: ConfigFields, layers: Sequence[LayerShape]) -> Weights:
    """Count the matrices of a decoder by the rules of its family.

    Norm scales, biases and position tables are left out: under 0.1 % of a real model. What a
    family adds to the common block (low-rank adapters, gates of their own) is left out too;
    `weights_of_model` counts everything.
    """
    hidden = config.need("hidden")
    matrices = 2 if config.model_type in TWO_MATRIX_MLP else 3
    experts = config.get_int("experts", 0) if config.get("is_moe", True) else 0
    expert_width = config.get_int("expert_width", config.get_int("intermediate", 4 * hidden))
    dense = moe_layers = 0
    for i, layer in enumerate(layers):
        own = config.layer(i)
        dense += _mixer(own, layer)
        if config.model_type in _ONE_PART and (layer.state or layer.kind != "none"):
            continue
        if experts and _has_experts(config, i):
            moe_layers += 1
            dense += hidden * experts + matrices * hidden * _shared_width(config, expert_width)
        else:
            dense += matrices * hidden * _mlp_width(own)
    vocab = config.need("vocab") * hidden
    return Weights(
        dense=dense,
        head=vocab,
        idle=0 if config.tied else vocab,
        expert=matrices * hidden * expert_width if moe_layers else 0,
        moe_layers=moe_layers,
        experts=experts,
        active=min(config.get_int("active", 1), experts),
    )


def _mlp_width(config: ConfigFields) -> int:
    """Width of the MLP of a layer without experts."""
    width = config.get_int("intermediate", 4 * config.need("hidden"))
    if config.get("block_auto_adjust_ff_dim"):  # LFM2 rounds two thirds up
        multiple = config.get_int("block_multiple_of", 256)
        width = -(-(2 * width // 3) // multiple) * multiple
    for own_name in ("intermediate_size_mlp", "dense_intermediate_size"):
        width = config.get_int(own_name, width)
    return width


def weights_of_model(model: Any, weights: Weights) -> Weights:
    """Count the parameters of a model, which may be on the meta device, by how they are read.

    The model is only asked for names, sizes and types of its modules. Everything is dense except:
    the output projection; tables that are looked up and towers of other modalities (idle); and
    matrices of routed experts, whose number and use `weights` (of the config) gives.
    """
    head = _weight(model.get_output_embeddings())
    tables = {
        id(_weight(module))
        for module in model.modules()
        if type(module).__name__.endswith("Embedding") and _weight(module) is not None
    }
    counts = {"dense": 0, "head": 0, "idle": 0, "expert": 0}
    for name, parameter in model.named_parameters():
        if parameter is head:
            part = "head"
        elif id(parameter) in tables or _TOWERS.search(name):
            part = "idle"
        elif ".experts." in name and weights.experts and parameter.dim() > 1:
            part = "expert"
        else:
            part = "dense"
        counts[part] += parameter.numel()
    routed = weights.moe_layers * weights.experts
    return Weights(
        dense=counts["dense"],
        head=counts["head"],
        idle=counts["idle"],
        expert=counts["expert"] // routed if routed else 0,
        moe_layers=weights.moe_layers,
        experts=weights.experts,
        active=weights.active,
    )


def bytes_of_model(model: Any) -> float:
    """Return the mean bytes of one parameter."""
    sizes = [(p.numel(), p.element_size()) for _, p in model.named_parameters()]
    return float(sum(n * size for n, size in sizes) / sum(n for n, _ in sizes))


def _weight(module: Any) -> Any:
    return getattr(module, "weight", None)


def _mixer(config: ConfigFields, layer: LayerShape) -> int:
    """Count the matrices of attention and of the recurrent part of one layer."""
    hidden, total = config.need("hidden"), 0
    if layer.state:
        found = conv_layer(config) if config.get("conv_L_cache") else state_layer(config)
        total += found[1] if found else 0
    if layer.kind == "none":
        return total
    heads, kv_heads, key_width, value_width = head_sizes(config, layer.kind)
    rank = config.get_int("kv_lora_rank", 0)
    if not rank:
        queries = heads * key_width * (2 if config.model_type in _GATED_QUERY else 1)
        cached = kv_heads * (key_width + value_width)
        return total + hidden * (queries + cached) + heads * value_width * hidden
    rope, nope = config.need("qk_rope_head_dim"), config.need("qk_nope_head_dim")
    value_width, low = config.need("v_head_dim"), config.get_int("q_lora_rank", 0)
    queries = heads * (nope + rope)
    total += low * (hidden + queries) if low else hidden * queries
    total += hidden * (rank + rope) + rank * heads * (nope + value_width)
    total += heads * value_width * hidden
    if layer.kind == "indexed":
        width, count = config.get_int("index_head_dim", 0), config.get_int("index_n_heads", 0)
        total += (low or hidden) * width * count + hidden * (width + count)
    return total


def _shared_width(config: ConfigFields, expert_width: int) -> int:
    """Width of the experts that every token uses, together."""
    width = config.get_int("shared_width", 0)
    if not width and config.model_type == "llama4_text":
        return expert_width
    return width or config.get_int("shared_experts", 0) * expert_width


def _has_experts(config: ConfigFields, i: int) -> bool:
    """Whether layer `i` has routed experts instead of one MLP, by whichever rule the config has."""
    if config.model_type == "nemotron_h":
        return str(config.get("layer_types")[i]) == "moe"
    kinds = config.get("mlp_layer_types")
    if kinds:
        return str(kinds[i]) in ("sparse", "moe", "hash_moe")
    listed = config.get("moe_layers")
    if isinstance(listed, (list, tuple)):
        return i in listed
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, (list, tuple)):
        return bool(frequency[i])
    if i in (config.get("mlp_only_layers") or ()) or i < config.get_int("dense_first", 0):
        return False
    period = config.get_int("expert_layer_period", 0)
    if period:
        return i % period == config.get_int("expert_layer_offset", 0)
    return (i + 1) % max(config.get_int("decoder_sparse_step", 1), 1) == 0
