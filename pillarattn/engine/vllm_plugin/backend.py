"""vLLM's attention on a CPU, which also notes queries, and which computes drafts sparsely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from pillarattn.engine.vllm_plugin.sparse_rounds import RequestRound


@dataclass
class LayerNotes:
    """What one layer saw in the target's last pass.

    Attributes:
        query: `[T, Hq, D]`, a copy.
        metadata: vLLM's own, with `query_start_loc`, `seq_lens` and `block_table`.
        keys, values: `[blocks, Hkv, block_size, D]`, views of the pool.
    """

    query: torch.Tensor
    metadata: Any
    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class DraftMetadata:
    """Stands for vLLM's metadata in a draft pass: one row for each of these requests."""

    rounds: list[RequestRound]


class PillarCPUImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Computes as its base does; `notes_wanted` is set by a proposer on the layers that it uses."""

    notes_wanted = False
    notes: LayerNotes | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend; a draft's keys go to its round and not to the pool."""
        if isinstance(attn_metadata, DraftMetadata):
            for row, one in enumerate(attn_metadata.rounds):
                out = one.attend(query[row], key[row], value[row], scale=self.scale)
                output[row] = out.reshape(output[row].shape)
            return output
        done = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
        if self.notes_wanted and attn_metadata is not None:
            blocks, heads, size, _ = kv_cache.shape
            # A block holds all its keys and then all its values, head by head.
            halves = kv_cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
            count = attn_metadata.num_actual_tokens
            self.notes = LayerNotes(query[:count].clone(), attn_metadata, *halves)
        return done


class PillarCPUBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU backend with `PillarCPUImpl`."""

    @staticmethod
    def get_impl_cls() -> type[PillarCPUImpl]:
        """Return the class of a layer's attention."""
        return PillarCPUImpl
