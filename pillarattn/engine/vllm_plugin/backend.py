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
        keys, values: `[blocks, Hkv, block_size, D]`, a plain copy of the pool.
    """

    query: torch.Tensor
    metadata: Any
    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class DraftMetadata:
    """Stands for vLLM's metadata in a draft pass: one row for each of these requests."""

    rounds: list[RequestRound]


class PillarCPUImpl(CPUAttentionBackendImpl):
    """Computes as its base does; `notes_wanted` is set by a proposer on the layers that it uses."""

    notes_wanted = False
    notes: LayerNotes | None = None
    pool: tuple[torch.Tensor, torch.Tensor] | None = None

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
            assert self.pool is not None
            count = attn_metadata.num_actual_tokens
            self.notes = LayerNotes(query[:count].clone(), attn_metadata, *self.pool)
        return done

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write to vLLM's pool, whose blocks its kernels pack as they like, and to a plain one."""
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if not self.notes_wanted:
            return
        blocks, heads, size, _ = kv_cache.shape
        shape = (blocks, heads, size, key.shape[-1])
        if self.pool is None or self.pool[0].shape != shape:
            self.pool = (key.new_empty(shape), value.new_empty(shape))
        # Padding has slot -1.
        used = slot_mapping >= 0
        slots = slot_mapping[used].long()
        for pool, new in zip(self.pool, (key, value), strict=True):
            pool[slots // size, :, slots % size] = new[: len(slot_mapping)][used]


class PillarCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend with `PillarCPUImpl`."""

    @staticmethod
    def get_impl_cls() -> type[PillarCPUImpl]:
        """Return the class of a layer's attention."""
        return PillarCPUImpl
