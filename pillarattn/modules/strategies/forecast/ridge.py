"""Ridge regression that learns on: one small set of weights for each row and KV head."""

from __future__ import annotations

import torch
from torch import Tensor


class OnlineRidge:
    """Weights that map F features of a key to a target, from sums that forget.

    It minimises `sum_t forget**(now - t) sum_i w_i (y_i - f_i . b)**2 + ridge * |b - prior|**2`,
    where the ridge is a share of the features' mean power, so that their scale does not matter.
    The sums hold F * F + F numbers a head, whatever the context.

    Args:
        prior: `[F]`, the weights before anything is learnt.
        forget: what one round leaves of the sums, 0 < forget <= 1.
        ridge: share of the mean diagonal that pulls towards the prior, > 0.
    """

    def __init__(self, prior: Tensor, *, forget: float, ridge: float) -> None:
        self.prior = prior
        self.forget = forget
        self.ridge = ridge
        self._moments: Tensor | None = None
        self._targets: Tensor | None = None

    def add(self, moments: Tensor, targets: Tensor) -> None:
        """Forget a little, and learn from the sums of a round (`kernels.forecast_moments`).

        Args:
            moments: `[rows, heads, F, F]` fp32, `sum y f f'`.
            targets: `[rows, heads, F]` fp32, `sum y**2 f`.
        """
        if self._moments is None or self._targets is None:
            self._moments, self._targets = moments, targets
        else:
            self._moments = self._moments * self.forget + moments
            self._targets = self._targets * self.forget + targets

    def weights(self, rows: int, heads: int) -> Tensor:
        """Return the weights, `[rows, heads, F]`: the prior where nothing was learnt."""
        if self._moments is None or self._targets is None:
            return self.prior.expand(rows, heads, -1)
        power = self._moments.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
        pull = (self.ridge * power + 1e-12).unsqueeze(-1)
        system = self._moments + torch.diag_embed(pull.expand(-1, -1, len(self.prior)))
        right = (self._targets + pull * self.prior).unsqueeze(-1)
        # The plain call would wait for the device to look for singular systems; the pull forbids
        # them.
        solved: Tensor = torch.linalg.solve_ex(system, right).result
        return solved.squeeze(-1)
