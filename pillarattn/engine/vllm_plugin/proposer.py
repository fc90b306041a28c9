"""vLLM's `custom_class` proposer: the served model drafts, with attention over selected keys."""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import set_forward_context

from pillarattn.engine.vllm_plugin.backend import DraftMetadata, PillarCPUImpl
from pillarattn.engine.vllm_plugin.sparse_rounds import (
    RequestRound,
    RoundSettings,
    accepted_queries,
    gather_tokens,
    select_keys,
)
from pillarattn.errors import UnsupportedModelError, UnsupportedOptionError

# Key of `additional_config` that holds s, min_budget, recent and sink.
OPTIONS = "pillarattn"


class PillarProposer:
    """Proposes k tokens a request by k sparse passes of the target; vLLM verifies them.

    Drafts are greedy. For requests that sample, vLLM's rejection sampler takes them as proposals of
    probability one, so that the law of the output stays the target's.

    Args:
        vllm_config: of the engine; `num_speculative_tokens` is k.

    Raises:
        UnsupportedOptionError: options that are unknown, or an engine that is spread over ranks.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.world_size > 1 or parallel.data_parallel_size > 1:
            raise UnsupportedOptionError(
                f"the proposer runs in one process, got {parallel.world_size} ranks; "
                "set tensor_parallel_size=1 and pipeline_parallel_size=1"
            )
        options = dict((vllm_config.additional_config or {}).get(OPTIONS, {}))
        try:
            self.settings = RoundSettings(
                k=vllm_config.speculative_config.num_speculative_tokens, **options
            )
        except TypeError as error:
            raise UnsupportedOptionError(
                f"additional_config[{OPTIONS!r}] may hold s, min_budget, recent and sink: {error}"
            ) from None
        self.config = vllm_config
        self.longest = vllm_config.model_config.max_model_len
        self.model: Any = None
        self.layers: dict[str, PillarCPUImpl] = {}

    def load_model(self, target_model: Any) -> None:
        """Take the target, and have all its attention layers note their queries.

        Raises:
            UnsupportedModelError: a layer has another backend, a window, a cap, sinks or positions
                in its logits.
        """
        self.model = target_model
        for name, layer in self.config.compilation_config.static_forward_context.items():
            impl = getattr(layer, "impl", None)
            if not isinstance(impl, PillarCPUImpl):
                raise UnsupportedModelError(
                    f"layer {name} has attention of type {type(impl).__name__}, not "
                    "PillarCPUImpl; the plugin works with full attention on CPUs only, and "
                    "VLLM_PLUGINS, if set, must name 'pillarattn'"
                )
            plain = impl.sliding_window == -1 and not impl.logits_soft_cap
            if not plain or impl.sinks is not None or impl.alibi_slopes is not None:
                raise UnsupportedModelError(
                    f"layer {name} has a window, a cap, sinks or ALiBi, which the plugin's sparse "
                    "drafts do not compute; serve this model without it"
                )
            impl.notes_wanted = True
            self.layers[name] = impl

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return k drafts for each request that has just emitted tokens, none for the others.

        Args:
            sampled_token_ids: what each row of the batch emitted; empty in the middle of a prompt.
            num_tokens_no_spec: tokens of each row, the emitted ones included.
            token_ids_cpu: `[rows, tokens]`, those tokens.
            slot_mappings: not used: drafts write nothing to the pool.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [
            row
            for row, emitted in enumerate(sampled_token_ids)
            # The last draft is fed at position length + k - 2, and verified in a row more.
            if emitted and int(num_tokens_no_spec[row]) + self.settings.k <= self.longest
        ]
        if not rows:
            return drafts
        lengths = [int(num_tokens_no_spec[row]) for row in rows]
        rounds = {
            name: [self._begin(impl, row, n - 1) for row, n in zip(rows, lengths, strict=True)]
            for name, impl in self.layers.items()
        }
        metadata = {name: DraftMetadata(ones) for name, ones in rounds.items()}
        tokens = torch.tensor(
            [int(token_ids_cpu[row, n - 1]) for row, n in zip(rows, lengths, strict=True)]
        )
        positions = torch.tensor([n - 1 for n in lengths])
        for step in range(self.settings.k):
            with set_forward_context(metadata, self.config, num_tokens=len(rows)):
                hidden = self.model(input_ids=tokens, positions=positions + step)
            tokens = self.model.compute_logits(hidden).argmax(dim=-1)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                drafts[row].append(token)
        return drafts

    def _begin(self, impl: PillarCPUImpl, row: int, cached: int) -> RequestRound:
        """Select a layer's keys for one request, of which `cached` tokens are in the pool."""
        notes = impl.notes
        if notes is None:
            raise RuntimeError("no pass of the target came before the first proposal")
        keys = gather_tokens(notes.keys, notes.metadata.block_table[row], cached)
        values = gather_tokens(notes.values, notes.metadata.block_table[row], cached)
        begin, end = (int(at) for at in notes.metadata.query_start_loc[row : row + 2])
        length = int(notes.metadata.seq_lens[row])
        query = accepted_queries(
            notes.query[begin:end], length=length, cached=cached, most=self.settings.k + 1
        )
        chosen = select_keys(query, keys, values, scale=impl.scale, settings=self.settings)
        return RequestRound(keys, values, *chosen)
