"""EAGLE-3: one decoder block over features of three layers, with a small vocabulary of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from pillarattn.decoding.drafters.heads.base import HeadStep
from pillarattn.decoding.drafters.heads.block import HeadAttention, HeadMlp, HeadShape
from pillarattn.decoding.drafters.heads.checkpoint import fill, read_config, read_weights


class Eagle3Layer(nn.Module):
    """The block: attention reads token and feature side by side, the residual is the feature."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.norm_before_residual = shape.norm_before_residual
        self.self_attn = HeadAttention(shape, 2 * shape.hidden_size)
        self.mlp = HeadMlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.eps)

    def forward(self, features: Tensor, embedded: Tensor, step: HeadStep) -> Tensor:
        """Return the next features `[B, Q, hidden_size]`."""
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        residual = normed if self.norm_before_residual else features
        x: Tensor = residual + self.self_attn(both, step.cache.layers[0], step.positions)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Head(nn.Module):
    """The EAGLE-3 draft head; parameters are named as in published checkpoints.

    Features are `fc` of what layers 2, n/2 and n - 3 of the target get. The head drafts from a part
    of the vocabulary: its token i is the target's i + d2t[i], and all others have no mass.

    Args:
        shape: sizes.
        own_embedding: whether the head brings input embeddings; without, it uses the target's.

    Source: Li et al., EAGLE-3 (arXiv 2503.01840).
    """

    cache_layers = 1

    def __init__(self, shape: HeadShape, *, own_embedding: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.target_hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.embed_tokens = (
            nn.Embedding(shape.vocab_size, shape.hidden_size) if own_embedding else None
        )
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        config: dict[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Load a published checkpoint.

        Args:
            folder: has `config.json` and `model.safetensors` or `pytorch_model.bin`, with `fc`,
                `midlayer.*` (or `layers.0.*`), `norm`, `lm_head`, `d2t`, and perhaps `t2d` and
                `embed_tokens`.
            config: used in place of `config.json`.
            dtype: of the weights; None keeps the checkpoint's. Best the target's.
            device: where the weights go.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the weights do not fit the config; the message names them.
        """
        weights = {
            name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor
            for name, tensor in read_weights(folder).items()
        }
        # The same facts as d2t, seen from the target.
        weights.pop("t2d", None)
        shape = HeadShape.from_config(config or read_config(folder))
        head = cls(shape, own_embedding="embed_tokens.weight" in weights)
        if shape.draft_vocab_size == shape.vocab_size:
            weights.setdefault("d2t", head.d2t)
        fill(head, weights, dtype=dtype)
        known = torch.arange(shape.draft_vocab_size) + head.d2t.cpu()
        if bool(((known < 0) | (known >= shape.vocab_size)).any()):
            raise ValueError("d2t names tokens outside of the target's vocabulary")
        return head.to(device).eval()

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return what layers 2, n/2 and n - 3 get."""
        if num_layers < 6:
            raise ValueError(
                f"EAGLE-3 reads layers 2, n/2 and n - 3 of at least 6, got {num_layers}"
            )
        return 2, num_layers // 2, num_layers - 3

    def fuse(self, states: Tensor) -> Tensor:
        """Project three hidden states to one feature."""
        fused: Tensor = self.fc(states.to(self.fc.weight.dtype))
        return fused

    def forward(self, features: Tensor, tokens: Tensor, step: HeadStep) -> tuple[Tensor, Tensor]:
        """Return logits over the target's vocabulary, and the next features."""
        embed = step.target.embed if self.embed_tokens is None else self.embed_tokens
        features = self.midlayer(features, embed(tokens).to(features.dtype), step)
        drafted = self.lm_head(self.norm(features))
        logits = drafted.new_full((*drafted.shape[:-1], self.shape.vocab_size), float("-inf"))
        index = torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t
        return logits.index_copy(-1, index.to(logits.device), drafted), features
