"""What attention must know of a pass whose requests share one call a layer."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pillarattn.datatypes import Phase
from pillarattn.engine.paged_cache import PagedLayer
from pillarattn.kernels import mixed_attention, paged_row_scores
from pillarattn.kernels.mixed_attention import READS_ALL, KnownScores, work_list
from pillarattn.modules.attention import keep_queries
from pillarattn.modules.step import AttentionOptions

if TYPE_CHECKING:
    from pillarattn.engine.packed_pass import Segment
    from pillarattn.engine.step_buffers import StepBuffers


class Part(NamedTuple):
    """A request's rows in a pass.

    Attributes:
        segment: the request's.
        at: its first row.
        end: past its last one.
        place: where its row scores go, on the pass's side; None: nowhere.
    """

    segment: Segment
    at: int
    end: int
    place: int | None


class MixedStep:
    """One pass over `StepBuffers`; travels with the cache, as a `PackedStep` does.

    What layers share, such as the work list, is made by the first one that needs it: inside of the
    pass, so that it is recorded with it.

    Args:
        buffers: loaded.
        parts: the requests, in the order of the segments.
        rows: of the pass, those of nobody included.
        is_steady: as the function of that name says.
        scored: whether some request leaves row scores; None: as the parts say.
        exact: whether some of these are at a place of "scored", and take one more read of the
            keys: the others' drafts have left what scores in the same read need. None: all are.
        live: rows that are somebody's, the first ones; None: as the parts say.
        most_rows: of the largest request, if that is the same in all passes of this kind.
        pools: whether scores by what drafts have left are pooled over all rows of a request, and
            take the first line of its place alone. It takes `most_rows`.
        keeps: whether drafts may leave log-sum-exps, and scores go by them.
    """

    # Not a prefill: attention never goes to the model's own function.
    phase = Phase.VERIFY

    def __init__(
        self, buffers: StepBuffers, parts: list[Part], rows: int, *, is_steady: bool,
        scored: bool | None = None, exact: bool | None = None, live: int | None = None,
        most_rows: int | None = None, pools: bool = False, keeps: bool = True,
    ) -> None:  # fmt: skip
        self.buffers, self.parts, self.rows, self.is_steady = buffers, parts, rows, is_steady
        self.most_rows, self.pools, self.keeps = most_rows, pools, keeps
        self.visited: list[int] = []
        self.slots = buffers.named["slots"][:rows]
        own = any(part.place is not None for part in parts)
        self.is_scored = own if scored is None else scored
        self.is_exact = self.is_scored if exact is None else exact
        self.live = sum(len(part.segment.tokens) for part in parts) if live is None else live
        self.side = buffers.side if self.is_scored else 0
        self.scores = buffers.scores
        self._shared: dict[Any, Any] = {}

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What passes share that launch the same kernels over the same buffers."""
        return self.rows, *rest_of_kind(
            self.is_scored, self.is_exact, self.most_rows, pools=self.pools, keeps=self.keeps
        )

    def begin(self) -> None:
        """Forget what an earlier run of the same pass has left."""
        self.visited.clear()
        self._shared.clear()

    def inputs(self) -> dict[str, Tensor]:
        """Return token ids and positions, `[1, T]` each, at fixed addresses."""
        named = self.buffers.named
        return {
            "input_ids": named["tokens"][: self.rows].unsqueeze(0),
            "position_ids": named["positions"][: self.rows].unsqueeze(0),
        }

    def attend(
        self,
        query: Tensor,
        layer: PagedLayer,
        index: int,
        options: AttentionOptions,
        kernels: str,
    ) -> Tensor:
        """Attend from `query` `[1, Hq, T, D]`; return `[1, Hq, T, Dv]`."""
        assert layer.key_buffer is not None
        assert layer.value_buffer is not None
        for part in self.parts:
            if part.segment.seeds is not None:
                own = query[:, :, part.at : part.end]
                keep_queries(own, part.segment.seeds, index, options)
        self.buffers.kept.note(index, query.shape[1])
        rows = query[0].transpose(0, 1)
        pools = layer.key_buffer, layer.value_buffer
        lse = None
        if self.is_exact and index in self.buffers.sizes.scored:
            lse = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
        named: dict[str, Any] = {
            "scale": options.scale, "window": options.window, "softcap": options.softcap,
        }  # fmt: skip
        out = mixed_attention(
            rows, pools[0], pools[1], **self._requests(), **self._reading(rows, pools, index),
            **named, known=self._known(index), sinks=options.sinks, lse=lse, implementation=kernels,
        )  # fmt: skip
        if lse is not None:
            buffers = self.buffers
            paged_row_scores(
                rows, pools[0], lse, self.scores[buffers.sizes.scored.index(index)],
                scored=buffers.named["scored"], first_place=buffers.named["first_place"],
                **self._requests(), **named, implementation=kernels,
            )  # fmt: skip
        return out.transpose(0, 1).unsqueeze(0)

    def hand_over_scores(self) -> None:
        """Tell each request where its row scores lie, which hold until their side's turn."""
        if not self.is_scored:
            return
        self.buffers.kept_side = self.side
        sizes = self.buffers.sizes
        own = self.scores[:, self.side * sizes.places :][:, : sizes.places]
        layers = dict(zip(sizes.scored, own, strict=True))
        for part in self.parts:
            segment = part.segment
            if part.place is not None and segment.scores is not None:
                segment.scores.lend(
                    layers, part.place, rows=len(segment.tokens), length=segment.length
                )

    def _requests(self) -> dict[str, Any]:
        named = self.buffers.named
        return {
            "row_starts": named["row_starts"], "lengths": named["lengths"],
            "block_table": self.buffers.block_table, "block_size": self.buffers.block_size,
        }  # fmt: skip

    def _known(self, index: int) -> KnownScores | None:
        """Return where drafts leave their log-sum-exps in a layer, and who is scored by them."""
        buffers = self.buffers
        if not (self.keeps and buffers.kept.width) or index not in buffers.sizes.scored:
            return None
        place, named = buffers.sizes.scored.index(index), buffers.named
        scores = self.scores[place]
        return KnownScores(
            buffers.kept.values[place], named["kept_place"],
            scores[:, :, :1] if self.pools else scores, named["score_place"], named["first_place"],
            pooled_rows=self.most_rows if self.pools else None,
        )  # fmt: skip

    def _reading(self, rows: Tensor, pools: tuple[Tensor, Tensor], index: int) -> dict[str, Any]:
        """Return what each request reads in a layer, and the work list of layers like it."""
        buffers = self.buffers
        heads, named = pools[0].shape[1], buffers.named
        is_chosen = index in buffers.sizes.layers and buffers.sizes.width > 0
        key = is_chosen, rows.shape, pools[0].shape, pools[1].shape
        if key not in self._shared:
            batch = len(named["lengths"])
            if is_chosen:
                drafting = named["drafting"].view(1, -1, 1) > 0
                counts = buffers.counts.masked_fill(~drafting, READS_ALL)
                most = counts.amax(dim=0).masked_fill((counts < 0).any(dim=0), READS_ALL)
            else:
                counts = most = torch.full(
                    (batch, heads), READS_ALL, dtype=torch.int32, device=rows.device
                )
            work = work_list(
                rows,
                pools[0],
                pools[1],
                **self._requests(),
                counts=most,
                tail_start=named["tail_start"],
                most_rows=self.most_rows,
                strict=buffers.is_strict,
            )
            self._shared[key] = counts, work
        counts, work = self._shared[key]
        if is_chosen:
            place = buffers.sizes.layers.index(index)
            chosen = buffers.indices[place], counts[place], buffers.chosen_slots[place]
        else:
            none = counts.new_zeros(*counts.shape, 0)
            chosen = none, counts, none
        return {
            "indices": chosen[0], "counts": chosen[1], "slots": chosen[2], "work": work,
            "tail_start": named["tail_start"],
        }  # fmt: skip


def rest_of_kind(
    scored: bool, exact: bool, most_rows: int | None = None, *, pools: bool = False,
    keeps: bool = True,
) -> tuple[Hashable, ...]:  # fmt: skip
    """Return what makes up the kind of a `MixedStep` of such arguments beside its rows."""
    return scored, exact, most_rows, pools, keeps


def is_steady(segments: list[Segment]) -> bool:
    """Whether nobody reads a prompt in a pass: all logits are wanted, as in many other passes."""
    return all(s.seeds is None and s.keep == len(s.tokens) for s in segments)
