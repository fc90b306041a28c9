"""Functions on tensors that the rest of the library computes with; each op is a package here."""

from pillarattn.kernels.draft_attention import draft_attention
from pillarattn.kernels.gumbel_argmax import gumbel_argmax
from pillarattn.kernels.key_forecast import forecast_mass, forecast_moments
from pillarattn.kernels.keyed_rejection import keyed_rejection
from pillarattn.kernels.kv_append import kv_append
from pillarattn.kernels.layer_ops import add_rms_norm, rotary_write, silu_mul
from pillarattn.kernels.mixed_attention import mixed_attention
from pillarattn.kernels.pool_layers import pool_layers
from pillarattn.kernels.pooled_select import pooled_select
from pillarattn.kernels.rejection_sample import rejection_sample
from pillarattn.kernels.row_scores import paged_row_scores
from pillarattn.kernels.topk_select import topk_select
from pillarattn.kernels.verify_attention import (
    attention_scores,
    pool_rows,
    pooled_attention,
    verify_attention,
)

__all__ = [
    "add_rms_norm",
    "attention_scores",
    "draft_attention",
    "forecast_mass",
    "forecast_moments",
    "gumbel_argmax",
    "keyed_rejection",
    "kv_append",
    "mixed_attention",
    "paged_row_scores",
    "pool_layers",
    "pool_rows",
    "pooled_attention",
    "pooled_select",
    "rejection_sample",
    "rotary_write",
    "silu_mul",
    "topk_select",
    "verify_attention",
]
