"""Numbers that a strategy remembers from round to round, by layer, KV head and position."""

from __future__ import annotations

import torch
from torch import Tensor

from pillarattn.modules.strategies.request import SelectionRequest


class PositionHistory:
    """One number for each (layer, row, KV head, position) of a generation.

    What lies at or past a row's length is forgotten at each access, so that a position that was
    rolled back and written again starts from 0.

    Args:
        dtype: of the numbers; what is written is converted to it.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._values: dict[tuple[int, ...], Tensor] = {}
        self._lengths: dict[tuple[int, ...], tuple[int, ...]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
        self._lengths.clear()

    def read(self, request: SelectionRequest) -> Tensor:
        """Return what is remembered of the request's rows, `[R, Hkv, S]`; 0 where nothing is.

        Raises:
            ValueError: the rows are not those of the generation so far.
        """
        rows, heads, size = request.lengths.shape[0], request.kv_heads, request.max_length
        out = torch.zeros(rows, heads, size, dtype=self.dtype, device=request.lengths.device)
        known = self._values.get(request.layer_indices)
        if known is not None:
            if known.shape[:2] != out.shape[:2]:
                raise ValueError(
                    f"the history holds {known.shape[0]} rows of {known.shape[1]} KV heads and "
                    f"{rows} of {heads} were asked for; call reset() between generations"
                )
            shared = min(size, known.shape[-1])
            out[..., :shared] = known[..., :shared]
        out = request.committed(out)
        self._keep(request, out)
        return out

    def write(self, request: SelectionRequest, values: Tensor) -> None:
        """Remember `values` `[R, Hkv, S]`, replacing what was there."""
        self._keep(request, request.committed(values.to(self.dtype)))

    def known_lengths(self, request: SelectionRequest) -> tuple[int, ...]:
        """Return how many tokens of each row the last access covered; 0 before the first one."""
        known = self._lengths.get(request.layer_indices)
        return (0,) * request.lengths.shape[0] if known is None else known

    def _keep(self, request: SelectionRequest, values: Tensor) -> None:
        self._values[request.layer_indices] = values
        self._lengths[request.layer_indices] = request.lengths_on_host()
