"""Multi-token prediction: the block that a model was trained with to see one token further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from pillarattn.decoding.drafters.heads.base import HeadStep
from pillarattn.decoding.drafters.heads.block import HeadAttention, HeadMlp, HeadShape
from pillarattn.decoding.drafters.heads.checkpoint import fill


@dataclass(frozen=True)
class MtpLayout:
    """How a family names the parts of its block, and in which order it joins its inputs.

    Attributes:
        token_norm, feature_norm, projection, final_norm: names of the weights' prefixes.
        feature_first: whether the feature comes before the token in the projection's input.
        passes_normed: whether the next feature is taken after the final norm.
    """

    token_norm: str
    feature_norm: str
    projection: str
    final_norm: str
    feature_first: bool
    passes_normed: bool


LAYOUTS = {
    "mimo": MtpLayout(
        "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", True, True
    ),
    "deepseek": MtpLayout("enorm", "hnorm", "eh_proj", "shared_head.norm", False, False),
}


class MtpHead(nn.Module):
    """A multi-token-prediction block with dense attention and MLP, drafting with itself repeatedly.

    Features are the target's final states. Embeddings and the output layer are the target's.

    Args:
        shape: sizes.
        layout: a name in `LAYOUTS`.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; MiMo (arXiv 2505.07608).
    """

    cache_layers = 1

    def __init__(self, shape: HeadShape, *, layout: str = "mimo") -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        self.layout = LAYOUTS[layout]
        size, eps = shape.hidden_size, shape.eps
        self.token_norm = nn.RMSNorm(size, eps)
        self.feature_norm = nn.RMSNorm(size, eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = HeadAttention(shape, size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = HeadMlp(shape)
        self.final_norm = nn.RMSNorm(size, eps)

    @classmethod
    def from_state_dict(
        cls,
        weights: Mapping[str, Tensor],
        config: Mapping[str, Any],
        *,
        layout: str = "mimo",
        prefix: str = "model.mtp_layers.0.",
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Build a head from a model's checkpoint, whose MTP weights transformers leaves out.

        Args:
            weights: tensors by name; those without the prefix are ignored, and so are the copies of
                the embeddings and the output layer that some checkpoints repeat.
            config: the model's `config.json`.
            layout: the family.
            prefix: of the block's weights.
            dtype: of the head; None keeps the checkpoint's.

        Raises:
            ValueError: the weights do not fit; the message names them.
        """
        own = {name.removeprefix(prefix): t for name, t in weights.items() if prefix in name}
        if not own:
            raise ValueError(f"no weight begins with {prefix!r}; pass the prefix of the MTP block")
        shape = HeadShape.from_config({**config, "attention_bias": "self_attn.q_proj.bias" in own})
        head = cls(shape, layout=layout)
        names = head.layout
        renamed = {
            names.token_norm: "token_norm",
            names.feature_norm: "feature_norm",
            names.projection: "projection",
            names.final_norm: "final_norm",
        }
        fitted = {}
        for name, tensor in own.items():
            if name.startswith(("embed_tokens.", "shared_head.head.")):
                continue
            part, _, kind = name.rpartition(".")
            fitted[f"{renamed.get(part, part)}.{kind}"] = tensor
        fill(head, fitted, dtype=dtype)
        return head.eval()

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the final state."""
        return (num_layers,)

    def fuse(self, states: Tensor) -> Tensor:
        """Take the final state as it is."""
        return states.to(self.projection.weight.dtype)

    def forward(self, features: Tensor, tokens: Tensor, step: HeadStep) -> tuple[Tensor, Tensor]:
        """Return the target's logits of the block's output, and the next features."""
        embedded = step.target.embed(tokens).to(features.dtype)
        # The block never saw a first token in training.
        embedded = embedded.masked_fill((step.positions == 0).unsqueeze(-1), 0.0)
        pair = [self.feature_norm(features), self.token_norm(embedded)]
        if not self.layout.feature_first:
            pair.reverse()
        x = self.projection(torch.cat(pair, dim=-1))
        x = x + self.self_attn(self.input_layernorm(x), step.cache.layers[0], step.positions)
        x = x + self.mlp(self.post_attention_layernorm(x))
        normed: Tensor = self.final_norm(x)
        return step.target.unembed(normed), normed if self.layout.passes_normed else x
