"""`PillarAttention`: full, draft or verify attention over a cache of ragged rows."""

from __future__ import annotations

from torch import Tensor, cat, nn

from pillarattn.datatypes import LiveLengths, Phase, RowLengths
from pillarattn.kernels import draft_attention, verify_attention
from pillarattn.kernels.workspace import Workspace
from pillarattn.modules.cache.contiguous import ContiguousLayer
from pillarattn.modules.step import AttentionOptions, SeedQueries, StepState


class PillarAttention(nn.Module):
    """Attention of the newest Q tokens of each row over a cache layer that already holds them.

    It has no parameters: projections and position embeddings belong to the model around it. The
    phase of the step decides: a prefill and a verify pass see every key causally, a verify pass
    also leaves row scores, and a draft reads only the selected keys and what was written since.

    Args:
        kernels: "auto", "reference" or "triton".
        strict: see `kernels.verify_attention`; drafts need not be.

    Attributes:
        workspace: where scored verify passes compute, by a caller who pools the scores of each pass
            before the next one; None: in fresh memory.

    Example without transformers:
        >>> layer = ContiguousLayer(); attention = PillarAttention()
        >>> layer.append(keys, values)                                # [B, Hkv, Q, D]
        >>> attention(query, layer, StepState(Phase.PREFILL))         # [B, Hq, Q, Dv]
    """

    def __init__(self, *, kernels: str = "auto", strict: bool = False) -> None:
        super().__init__()
        self.kernels = kernels
        self.strict = strict
        self.workspace: Workspace | None = None

    def forward(
        self,
        query: Tensor,
        layer: ContiguousLayer,
        step: StepState,
        layer_index: int = 0,
        options: AttentionOptions = AttentionOptions(),  # noqa: B008 - frozen
        keys_values: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend from `query` `[B, Hq, Q, D]` (post position embedding); return `[B, Hq, Q, Dv]`.

        Args:
            query: the newest Q tokens of each row.
            layer: its lengths say how many keys each row has.
            step: phase, selections and where scores go.
            layer_index: the layer's number in the cache.
            options: scale, window, soft cap and sinks.
            keys_values: `[B, Hkv, S, D]` and `[B, Hkv, S, Dv]` where they are not the layer's own,
                as in models that store latents and expand them.

        Raises:
            ValueError: the layer is empty.
        """
        layer.window = options.window
        step.visited.append(layer_index)
        keys_values = layer.views() if keys_values is None else keys_values
        if step.phase is Phase.DRAFT:
            return self._draft(query, layer, step, layer_index, options, keys_values)
        layer.drop_kept_keys()
        keep_queries(query, step, layer_index, options)
        scored = step.scores is not None and layer_index in step.scored_layers
        out, row_scores = self._full(
            query, layer, layer_index, options, keys_values, scored, step.row_limit
        )
        if row_scores is not None and step.scores is not None and layer.lengths is not None:
            step.scores.put(layer_index, row_scores, layer.lengths)
        return out

    def _draft(
        self,
        query: Tensor,
        layer: ContiguousLayer,
        step: StepState,
        layer_index: int,
        options: AttentionOptions,
        keys_values: tuple[Tensor, Tensor],
    ) -> Tensor:
        if step.selections.get(layer_index) is None:
            return self._full(query, layer, layer_index, options, keys_values, False, None)[0]
        assert layer.lengths is not None
        rows = query.shape[2]
        if rows == 1:
            return self._draft_row(
                query, layer, layer.lengths, step, layer_index, options, keys_values
            )
        # A block that drafts judge: each of its rows reads as if it were the newest.
        outs = [
            self._draft_row(
                query[:, :, row : row + 1],
                layer,
                layer.lengths.plus(row + 1 - rows),
                step,
                layer_index,
                options,
                keys_values,
            )
            for row in range(rows)
        ]
        return cat(outs, dim=2)

    def _draft_row(
        self,
        query: Tensor,
        layer: ContiguousLayer,
        lengths: RowLengths,
        step: StepState,
        layer_index: int,
        options: AttentionOptions,
        keys_values: tuple[Tensor, Tensor],
    ) -> Tensor:
        keys, values = keys_values
        selection = step.selections[layer_index]
        if step.refresh is not None:
            selection = step.refresh(layer_index, query, keys, lengths, options)
            step.selections[layer_index] = selection
        if self._gathers_once(layer, keys, options):
            found = layer.kept_keys(selection, lengths)
            if found is not None:
                kept, tail = found
                return kept.attend(
                    query, tail, scale=options.scale, softcap=options.softcap, sinks=options.sinks
                )
        return draft_attention(
            query,
            keys,
            values,
            indices=selection.indices,
            counts=selection.counts,
            tail_start=selection.tail_start,
            lengths=lengths.tensor,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
            implementation=self.kernels,
        )

    def _gathers_once(
        self, layer: ContiguousLayer, keys: Tensor, options: AttentionOptions
    ) -> bool:
        """Whether one copy of the selected keys serves all steps of a round.

        Not for a kernel that gathers by itself, for keys that each pass makes anew, where a window
        moves over the selection, or where the host does not know the lengths.
        """
        return (
            self.kernels != "triton"
            and not keys.is_cuda
            and not isinstance(layer.lengths, LiveLengths)
            and options.window is None
            and layer.holds_attended_keys
            and layer.key_buffer is not None
            and keys.data_ptr() == layer.key_buffer.data_ptr()
        )

    def _full(
        self,
        query: Tensor,
        layer: ContiguousLayer,
        layer_index: int,
        options: AttentionOptions,
        keys_values: tuple[Tensor, Tensor],
        return_scores: bool,
        row_limit: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        keys, values = keys_values
        assert layer.lengths is not None
        workspace = self.workspace if return_scores and not keys.is_cuda else None
        if workspace is not None:
            workspace.layer = layer_index
        return verify_attention(
            query,
            keys,
            values,
            lengths=layer.lengths.tensor,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
            return_scores=return_scores,
            row_limit=row_limit,
            workspace=workspace,
            strict=self.strict,
            implementation=self.kernels,
        )

    def extra_repr(self) -> str:
        """Name the kernels in the module's printed form."""
        return f"kernels={self.kernels!r}, strict={self.strict}"


def keep_queries(
    query: Tensor, step: StepState, layer_index: int, options: AttentionOptions
) -> None:
    """Keep a prefill's last query rows, which choose the keys of the first round."""
    if step.phase is Phase.PREFILL and step.seed_rows > 0:
        rows = query[:, :, -step.seed_rows :].detach().clone()
        previous = step.seeds.get(layer_index)
        if previous is not None and rows.shape[2] < step.seed_rows:
            # A chunked prefill may end with a chunk of a few tokens: older rows fill up.
            missing = step.seed_rows - rows.shape[2]
            rows = cat([previous.query[:, :, -missing:], rows], dim=2)
        step.seeds[layer_index] = SeedQueries(rows, options)
