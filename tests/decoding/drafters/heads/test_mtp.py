"""Multi-token-prediction blocks: the order of their inputs, what they pass on, and loading."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from pillarattn.decoding.drafters import MtpHead
from pillarattn.decoding.drafters.heads.base import HeadStep
from pillarattn.decoding.drafters.heads.mtp import LAYOUTS
from pillarattn.modules.cache import ContiguousCache

CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 11,
}
BLOCK = {
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (16, 16),
    "self_attn.v_proj": (16, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}


class Target:
    table = torch.randn(11, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = torch.randn(16, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def embed(self, tokens):
        return self.table[tokens]

    def unembed(self, states):
        return states @ self.out


def checkpoint(layout, prefix):
    """Return a block's weights under the names of its family, among others of the model."""
    names, noise = LAYOUTS[layout], torch.Generator().manual_seed(3)
    shapes = {
        names.token_norm: (16,), names.feature_norm: (16,), names.projection: (16, 32),
        names.final_norm: (16,), **BLOCK,
    }  # fmt: skip
    weights = {
        f"{prefix}{name}.weight": torch.randn(shape, generator=noise, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    if layout == "mimo":
        for name in "qkv":
            bias = torch.randn(16, generator=noise, dtype=torch.float64)
            weights[f"{prefix}self_attn.{name}_proj.bias"] = bias
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(1)
    return weights


@pytest.mark.parametrize(
    ("layout", "prefix"), [("mimo", "model.mtp_layers.0."), ("deepseek", "model.layers.61.")]
)
def test_one_place_by_hand(layout, prefix):
    """With one key, attention returns its value: the block is a chain of linear maps."""
    weights = checkpoint(layout, prefix)
    weights[f"{prefix}embed_tokens.weight"] = torch.zeros(11, 16)
    weights[f"{prefix}shared_head.head.weight"] = torch.zeros(11, 16)
    head = MtpHead.from_state_dict(weights, CONFIG, layout=layout, prefix=prefix)
    assert head.taps(30) == (30,)
    target, feature = Target(), torch.randn(1, 1, 16, dtype=torch.float64)
    names = LAYOUTS[layout]
    w = {name.removeprefix(prefix): t for name, t in weights.items()}

    def norm(x, name):
        return rms_norm(x, (16,), w[f"{name}.weight"], 1e-5)

    for position in (0, 4):
        embedded = target.table[torch.tensor([[7]])] * (position > 0)
        pair = [norm(embedded, names.token_norm), norm(feature, names.feature_norm)]
        if layout == "mimo":
            pair = pair[::-1]
        x = linear(torch.cat(pair, -1), w[f"{names.projection}.weight"])
        y = norm(x, "input_layernorm")
        value = linear(y, w["self_attn.v_proj.weight"], w.get("self_attn.v_proj.bias"))
        x = x + linear(value, w["self_attn.o_proj.weight"])
        y = norm(x, "post_attention_layernorm")
        gate, up = (linear(y, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + linear(silu(gate) * up, w["mlp.down_proj.weight"])
        final = norm(x, names.final_norm)
        step = HeadStep(target, ContiguousCache(1), torch.tensor([[position]]))
        logits, following = head(head.fuse(feature), torch.tensor([[7]]), step)
        torch.testing.assert_close(logits, final @ target.out)
        torch.testing.assert_close(following, final if layout == "mimo" else x)


def test_errors_name_what_is_wrong(heads):
    with pytest.raises(ValueError, match="layout must be one of mimo, deepseek, got 'glm'"):
        heads.mtp("glm")
    with pytest.raises(ValueError, match=r"no weight begins with 'model.mtp_layers.0.'"):
        MtpHead.from_state_dict({"lm_head.weight": torch.zeros(1)}, CONFIG)
    weights = checkpoint("mimo", "p.")
    del weights["p.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight is missing"):
        MtpHead.from_state_dict(weights, CONFIG, prefix="p.")
