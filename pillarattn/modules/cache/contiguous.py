"""A preallocated key-value cache: written in place, each row its own length, roll back in O(1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pillarattn.datatypes import RowLengths, Selection
from pillarattn.kernels import kv_append
from pillarattn.modules.cache.kept_keys import KeptKeys

MIN_CAPACITY = 64
# A limit of at most so many times what is needed is allocated at once: to grow later would copy
# all there is.
NEAR = 1.25


class ContiguousLayer:
    """Keys and values of one layer, `[B, Hkv, C, D]` buffers of capacity C that only ever double.

    Where the limit is known and near, the buffers take it at once.

    Positions at or past a row's length are undefined. A view handed out stays valid until the next
    growth, which happens when a power of two is crossed.
    """

    def __init__(self, *, limit: int | None = None) -> None:
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None
        self.lengths: RowLengths | None = None
        self.limit = limit
        # Whether the first growth takes the whole limit.
        self.at_once = False
        self.window: int | None = None
        self.attended_heads: int | None = None
        # False where attention follows a pattern that drafts must follow too, such as chunks.
        self.is_selectable = True
        # What the drafts of the running round read, where it was gathered.
        self._kept: KeptKeys | None = None

    @property
    def kv_heads(self) -> int:
        """KV heads as attention sees them; a model that expands latents has more than it stores."""
        if self.attended_heads is not None:
            return self.attended_heads
        return 0 if self.key_buffer is None else int(self.key_buffer.shape[1])

    @property
    def holds_attended_keys(self) -> bool:
        """Whether attention reads the stored keys themselves, and not something made of them."""
        return self.attended_heads is None

    @property
    def capacity(self) -> int:
        """Tokens that fit a row before the buffers grow."""
        return 0 if self.key_buffer is None else self.key_buffer.shape[2]

    def append(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Write Q new tokens a row, `[B, Hkv, Q, D]`, and return views up to the longest row."""
        batch, tokens = new_keys.shape[0], new_keys.shape[2]
        if self.lengths is None:
            self.lengths = RowLengths([0] * batch, new_keys.device)
        if len(self.lengths.host) != batch:
            raise ValueError(
                f"the cache holds {len(self.lengths.host)} rows and {batch} were appended; "
                "use one cache per batch"
            )
        base = self.lengths
        grown = base.plus(tokens)
        self._reserve(grown.max, new_keys, new_values, written=grown.max if base.is_uniform else 0)
        assert self.key_buffer is not None
        assert self.value_buffer is not None
        start = base.max if base.is_uniform else base.tensor
        kv_append(
            self.key_buffer,
            self.value_buffer,
            new_keys.to(self.key_buffer.dtype),
            new_values.to(self.value_buffer.dtype),
            positions=start,
        )
        if self._kept is not None and not self._kept.extend(base, new_keys, new_values):
            self._kept = None
        self.lengths = grown
        return self.views()

    def advance(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Count `tokens` new tokens a row that the caller has written; return views as `append`.

        Raises:
            ValueError: they cannot have been: the buffers have no room for them.
        """
        if self.lengths is None or self.lengths.max + tokens > self.capacity:
            raise ValueError(f"{tokens} more tokens do not fit buffers of {self.capacity}")
        self._kept = None
        self.lengths = self.lengths.plus(tokens)
        return self.views()

    def kept_keys(self, selection: Selection, lengths: RowLengths) -> tuple[KeptKeys, int] | None:
        """Return the selection's keys side by side and how many tokens since then rows hold.

        They are gathered at the first call of a round. None where rows of `lengths` hold different
        numbers of tokens since the choice: these have no place side by side.
        """
        kept = self._kept
        if kept is None or kept.selection is not selection:
            kept = None
        tail = _common_tail(selection, lengths) if kept is None else kept.tail_of(lengths)
        if tail is None or tail < 0 or self.lengths is None:
            return None
        if kept is None or kept.filled < tail:
            keys, values = self.views()
            held = self.lengths.max - lengths.max + tail
            kept = self._kept = KeptKeys(selection, keys, values, held)
        return kept, tail

    def drop_kept_keys(self) -> None:
        """Forget what was gathered for drafts."""
        self._kept = None

    def views(self) -> tuple[Tensor, Tensor]:
        """Return keys and values up to the longest row, `[B, Hkv, S, D]`, without a copy."""
        if self.key_buffer is None or self.value_buffer is None or self.lengths is None:
            raise ValueError("the layer is empty; append keys and values first")
        end = self.lengths.max
        return self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]

    def roll_back(self, lengths: RowLengths) -> None:
        """Forget what lies past `lengths`; nothing is copied or cleared."""
        if self.lengths is None:
            return
        if len(lengths.host) != len(self.lengths.host) or any(
            not 0 <= new <= old for new, old in zip(lengths.host, self.lengths.host, strict=True)
        ):
            raise ValueError(
                f"cannot roll back rows of {list(self.lengths.host)} tokens to {list(lengths.host)}"
            )
        if self._kept is not None:
            self._kept.cut(lengths)
        self.lengths = lengths

    def take_rows(self, rows: Tensor) -> None:
        """Keep the rows `rows` (int64, repeats allowed), in that order."""
        if self.key_buffer is None or self.value_buffer is None or self.lengths is None:
            return
        self._kept = None
        index = rows.to(self.key_buffer.device)
        self.key_buffer = self.key_buffer.index_select(0, index)
        self.value_buffer = self.value_buffer.index_select(0, index)
        self.lengths = RowLengths([self.lengths.host[r] for r in rows.tolist()], index.device)

    def rearrange(self, source: Tensor, lengths: RowLengths) -> None:
        """Put position `source[b, j]` of row b at j; -1 leaves zeros. Sets the lengths."""
        if self.key_buffer is None or self.value_buffer is None:
            return
        self._kept = None
        self._reserve(source.shape[1], self.key_buffer, self.value_buffer)
        for buffer in (self.key_buffer, self.value_buffer):
            index = source.clamp_min(0)[:, None, :, None].expand(
                -1, buffer.shape[1], -1, buffer.shape[3]
            )
            moved = buffer.gather(2, index)
            moved.masked_fill_((source < 0)[:, None, :, None], 0.0)
            buffer[:, :, : source.shape[1]] = moved
        self.lengths = lengths

    def _reserve(
        self, tokens: int, like_keys: Tensor, like_values: Tensor, *, written: int = 0
    ) -> None:
        """Make room for `tokens` a row, of which the caller will write the first `written`."""
        if tokens <= self.capacity:
            return
        capacity = max(MIN_CAPACITY, 1 << (tokens - 1).bit_length())
        near = math.inf if self.at_once else tokens * NEAR
        if self.limit is not None and tokens <= self.limit <= near:
            capacity = self.limit
        elif self.limit is not None and tokens <= self.limit:
            capacity = min(capacity, self.limit)
        used = self.lengths.max if self.lengths is not None else 0
        self.key_buffer = _grown(self.key_buffer, like_keys, capacity, used, written)
        self.value_buffer = _grown(self.value_buffer, like_values, capacity, used, written)


class ContiguousCache:
    """A `ContiguousLayer` for each layer of a model, all rolled back together."""

    layers: list[ContiguousLayer]

    def __init__(self, num_layers: int, *, limit: int | None = None) -> None:
        self.layers = [ContiguousLayer(limit=limit) for _ in range(num_layers)]

    @property
    def used_layers(self) -> list[ContiguousLayer]:
        """Layers that hold keys (a model may share or skip some)."""
        return [layer for layer in self.layers if layer.lengths is not None]

    @property
    def lengths(self) -> RowLengths:
        """The rows' lengths, the same in every layer."""
        used = self.used_layers
        if not used or used[0].lengths is None:
            raise ValueError("the cache is empty; run a forward pass first")
        return used[0].lengths

    def roll_back(self, lengths: RowLengths) -> None:
        """Set every layer's row lengths to `lengths`, none longer than now."""
        for layer in self.layers:
            layer.roll_back(lengths)

    def compact(self, valid: Tensor) -> None:
        """Drop padding: keep positions where `valid` `[B, S]` is true, moved to the front."""
        counts = valid.sum(dim=1)
        order = torch.argsort((~valid).to(torch.int8), dim=1, stable=True)
        lengths = RowLengths(counts.tolist(), valid.device)
        for layer in self.layers:
            layer.rearrange(order[:, : lengths.max], lengths)

    def expand(self, valid: Tensor) -> None:
        """Undo `compact`: row b's tokens go to where `valid` `[B, T]` is true, zeros elsewhere."""
        batch, total = valid.shape
        source = torch.where(valid, valid.cumsum(dim=1) - 1, -1)
        lengths = RowLengths([total] * batch, valid.device)
        for layer in self.layers:
            layer.rearrange(source, lengths)


def _grown(buffer: Tensor | None, like: Tensor, capacity: int, used: int, written: int) -> Tensor:
    batch, heads, _, dim = like.shape
    grown = torch.empty(batch, heads, capacity, dim, dtype=like.dtype, device=like.device)
    if buffer is not None:
        grown[:, :, :used] = buffer[:, :, :used]
    # Zeros, because attention with a mask multiplies what it hides by 0, and 0 * NaN is NaN.
    grown[:, :, max(used, written) :] = 0.0
    return grown


def _common_tail(selection: Selection, lengths: RowLengths) -> int | None:
    starts = selection.tail_start.tolist()
    tails = {length - start for length, start in zip(lengths.host, starts, strict=True)}
    return tails.pop() if len(tails) == 1 else None
