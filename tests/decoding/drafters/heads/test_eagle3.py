"""The EAGLE-3 head: its formula written out, and checkpoints in the published layout."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from pillarattn.decoding.drafters import Eagle3Head, HeadShape
from pillarattn.decoding.drafters.heads.base import HeadStep
from pillarattn.modules.cache import ContiguousCache

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "vocab_size": 11,
    "draft_vocab_size": 7,
}
D2T = [0, 0, 1, 1, 2, 4, 4]


class Target:
    """Embeds tokens; heads with an embedding of their own never ask."""

    def __init__(self, table):
        self.table = table

    def embed(self, tokens):
        return self.table[tokens]


def published(**changes) -> dict[str, Tensor]:
    """Return random weights under the names of published checkpoints."""
    noise = torch.Generator().manual_seed(3)
    config = {**CONFIG, **changes}
    d, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "fc.weight": (d, 3 * config.get("target_hidden_size", d)),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * d),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * d),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * d),
        "midlayer.self_attn.o_proj.weight": (d, heads),
        "midlayer.mlp.gate_proj.weight": (inner, d),
        "midlayer.mlp.up_proj.weight": (inner, d),
        "midlayer.mlp.down_proj.weight": (d, inner),
        "midlayer.hidden_norm.weight": (d,),
        "midlayer.input_layernorm.weight": (d,),
        "midlayer.post_attention_layernorm.weight": (d,),
        "norm.weight": (d,),
        "lm_head.weight": (config["draft_vocab_size"], d),
    }
    weights = {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
    t2d[torch.arange(7) + torch.tensor(D2T)] = True
    return {**weights, "d2t": torch.tensor(D2T), "t2d": t2d}


def written(folder, weights, *, config=CONFIG, file="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(weights, folder / file)
    else:
        torch.save(weights, folder / file)
    return folder


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight


def rotate(x, theta):
    """Turn pairs of `[T, H, D]` as complex numbers."""
    half = x.shape[-1] // 2
    pair = torch.complex(x[..., :half], x[..., half:])
    angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half).double() / half)
    turned = pair * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def by_hand(w, states, tokens, table, *, norm_before_residual=False):
    """Return logits and features of one row, `[T, V]` and `[T, D]`, straight from the paper."""
    w = {name: t.double() if t.is_floating_point() else t for name, t in w.items()}
    feature = linear(states, w["fc.weight"])
    normed = norm(feature, w["midlayer.hidden_norm.weight"])
    x = torch.cat([norm(table[tokens], w["midlayer.input_layernorm.weight"]), normed], -1)
    q, k, v = (
        linear(x, w[f"midlayer.self_attn.{name}_proj.weight"]).view(len(x), -1, 6) for name in "qkv"
    )
    q, k = rotate(q, CONFIG["rope_theta"]), rotate(k, CONFIG["rope_theta"])
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 6**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    h = (normed if norm_before_residual else feature) + linear(
        out, w["midlayer.self_attn.o_proj.weight"]
    )
    y = norm(h, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (linear(y, w[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    h = h + linear(silu(gate) * up, w["midlayer.mlp.down_proj.weight"])
    drafted = linear(norm(h, w["norm.weight"]), w["lm_head.weight"])
    logits = torch.full((len(x), 11), float("-inf"), dtype=torch.float64)
    logits[:, [i + shift for i, shift in enumerate(D2T)]] = drafted
    return logits, h


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}, {"target_hidden_size": 9}])
@pytest.mark.parametrize("parts", [[5], [3, 1, 1]])
def test_it_is_the_papers_formula(tmp_path, changes, parts):
    weights = published(**changes)
    head = Eagle3Head.from_pretrained(
        written(tmp_path / "head", weights, config={**CONFIG, **changes}), dtype=torch.float64
    )
    noise = torch.Generator().manual_seed(8)
    size = changes.get("target_hidden_size", 16)
    states = torch.randn(5, 3 * size, dtype=torch.float64, generator=noise)
    table = torch.randn(11, 16, dtype=torch.float64, generator=noise)
    tokens = torch.randint(0, 11, (5,), generator=noise)
    cache, got = ContiguousCache(1), []
    for part, place in zip(states.split(parts), torch.arange(5).split(parts), strict=True):
        step = HeadStep(Target(table), cache, place[None])
        got.append(head(head.fuse(part[None]), tokens[place][None], step))
    wanted = by_hand(
        weights, states, tokens, table,
        norm_before_residual=changes.get("norm_before_residual", False),
    )  # fmt: skip
    for i in range(2):
        torch.testing.assert_close(torch.cat([pair[i][0] for pair in got]), wanted[i])


def test_taps_are_low_middle_and_high(heads):
    assert heads.eagle().taps(36) == (2, 18, 33)
    with pytest.raises(ValueError, match="at least 6, got 4"):
        heads.eagle().taps(4)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_published_folder_loads(tmp_path, file):
    weights = {name: t.bfloat16() if t.is_floating_point() else t
               for name, t in published().items()}  # fmt: skip
    head = Eagle3Head.from_pretrained(written(tmp_path / "head", weights, file=file))
    assert head.lm_head.weight.dtype == torch.bfloat16 and head.d2t.dtype == torch.int64
    assert torch.equal(head.fc.weight, weights["fc.weight"])
    assert torch.equal(head.d2t, weights["d2t"]) and not head.training
    assert head.embed_tokens is None
    assert Eagle3Head.from_pretrained(tmp_path / "head", dtype=torch.float32).fc.weight.dtype == (
        torch.float32
    )


def test_other_spellings_and_an_embedding_of_its_own(tmp_path):
    weights = published()
    table = torch.randn(11, 16)
    spelled = {f"model.{n.replace('midlayer.', 'layers.0.')}": t for n, t in weights.items()}
    spelled["model.embed_tokens.weight"] = table
    head = Eagle3Head.from_pretrained(written(tmp_path / "head", spelled))
    assert torch.equal(head.embed_tokens.weight, table)
    other = Eagle3Head.from_pretrained(written(tmp_path / "other", weights))
    states, tokens = torch.randn(1, 4, 48), torch.randint(0, 11, (1, 4))
    outs = [
        one(one.fuse(states), tokens, HeadStep(target, ContiguousCache(1), torch.arange(4)[None]))
        for one, target in ((head, None), (other, Target(table)))
    ]
    assert torch.equal(outs[0][0], outs[1][0])


def test_a_head_of_the_whole_vocabulary_needs_no_map(tmp_path):
    config = {**CONFIG, "draft_vocab_size": None, "vocab_size": 7}
    weights = published()
    del weights["d2t"], weights["t2d"]
    head = Eagle3Head.from_pretrained(written(tmp_path / "head", weights, config=config))
    assert head.d2t.tolist() == [0] * 7


def test_what_does_not_fit_is_named(tmp_path):
    weights = published()
    weights["extra"] = weights.pop("norm.weight")
    weights["fc.weight"] = torch.zeros(16, 16)
    with pytest.raises(ValueError, match=r"norm.weight is missing; extra has no place; fc.weight "
                       r"has shape \[16, 16\], wanted \[16, 48\]"):  # fmt: skip
        Eagle3Head.from_pretrained(written(tmp_path / "head", weights))
    bad = {**published(), "d2t": torch.tensor([0, 0, 0, 0, 0, 0, 9])}
    with pytest.raises(ValueError, match="outside of the target's vocabulary"):
        Eagle3Head.from_pretrained(written(tmp_path / "bad", bad))


def test_missing_files_and_fields_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model.safetensors, pytorch_model.bin"):
        Eagle3Head.from_pretrained(tmp_path)
    folder = written(tmp_path / "head", published())
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        Eagle3Head.from_pretrained(folder)
    assert Eagle3Head.from_pretrained(folder, config=CONFIG).shape.rope_theta == 500.0
    with pytest.raises(ValueError, match="lacks intermediate_size, vocab_size"):
        HeadShape.from_config({"hidden_size": 8, "num_attention_heads": 2})


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, (500.0, 1.0)),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7.0}}, (7.0, 1.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, (500.0, 4.0)),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, (500.0, 1.0)),
    ],
)
def test_rotary_settings_of_old_and_new_configs(changes, rope):
    shape = HeadShape.from_config({**CONFIG, **changes})
    assert (shape.rope_theta, shape.rope_factor) == rope


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="rope_type='yarn'"):
        HeadShape.from_config({**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    with pytest.raises(ValueError, match="hidden_act must be 'silu', got 'gelu'"):
        HeadShape.from_config({**CONFIG, "hidden_act": "gelu"})
