"""The decoder block that published heads are made of: rotary attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from pillarattn.datatypes import Phase
from pillarattn.modules.attention import PillarAttention
from pillarattn.modules.cache.contiguous import ContiguousLayer
from pillarattn.modules.step import StepState


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head, as a checkpoint's config names them.

    Attributes:
        hidden_size: D of the head.
        target_hidden_size: D of the target.
        intermediate_size: width of the MLP.
        heads, kv_heads, head_dim: of the attention.
        vocab_size: tokens of the target.
        draft_vocab_size: tokens that the head can draft.
        eps: of the RMS norms.
        rope_theta, rope_factor: base of the rotary embedding, and what divides its positions.
        attention_bias: whether q, k and v have a bias.
        norm_before_residual: whether the residual is taken after the feature's norm (EAGLE-3).
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    attention_bias: bool = False
    norm_before_residual: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a `config.json` of the Llama or Qwen shape.

        Raises:
            ValueError: a field is missing, or the head is of a shape that is not implemented.
        """
        missing = [
            name
            for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
            if config.get(name) is None
        ]
        if missing:
            raise ValueError(f"the head's config lacks {', '.join(missing)}")
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f"a head's hidden_act must be 'silu', got {activation!r}")
        theta, factor = _rope(config)
        heads = int(config["num_attention_heads"])
        vocab = int(config["vocab_size"])
        return cls(
            hidden_size=int(config["hidden_size"]),
            target_hidden_size=int(config.get("target_hidden_size") or config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=vocab,
            draft_vocab_size=int(config.get("draft_vocab_size") or vocab),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_factor=factor,
            attention_bias=bool(config.get("attention_bias", False)),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
        )


class HeadAttention(nn.Module):
    """Causal attention over the head's own cache, with rotary positions."""

    def __init__(self, shape: HeadShape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        bias, dim = shape.attention_bias, shape.head_dim
        self.q_proj = nn.Linear(input_size, shape.heads * dim, bias=bias)
        self.k_proj = nn.Linear(input_size, shape.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(input_size, shape.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(shape.heads * dim, shape.hidden_size, bias=False)
        self.attention = PillarAttention()

    def forward(self, x: Tensor, layer: ContiguousLayer, positions: Tensor) -> Tensor:
        """Attend from `x` `[B, Q, input_size]` and append its keys to `layer`."""
        batch, rows, _ = x.shape
        q, k, v = (
            project(x).view(batch, rows, -1, self.shape.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        layer.append(self._rotate(k, positions), v)
        out = self.attention(self._rotate(q, positions), layer, StepState(Phase.VERIFY))
        joined: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return joined

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn pairs (i, i + D/2) of `x` `[B, H, Q, D]` by position * theta^(-2i/D)."""
        half = x.shape[-1] // 2
        rate = torch.arange(half, device=x.device, dtype=torch.float64) / half
        rate = self.shape.rope_theta**-rate
        angle = positions[:, None, :, None].double() / self.shape.rope_factor * rate
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class HeadMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., hidden_size]`."""
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _rope(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return theta and the linear factor of old and new configs."""
    nested = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or nested
    theta = config.get("rope_theta") or nested.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear"):
        raise ValueError(
            f"the head's config asks for rope_type={kind!r}; 'default' and 'linear' are "
            "implemented. Pass config= with its rope_scaling changed to go on without it: drafts "
            "get worse far into the text, the output stays the target's"
        )
    return float(theta), float(scaling.get("factor", 1.0)) if kind == "linear" else 1.0
