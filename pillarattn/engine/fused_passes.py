"""Passes over the pool by fused layers, which are compared with the model's own code first."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn

from pillarattn.engine.paged_cache import PagedCache, PagedPools
from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch.fused_layers import FusedLayers, FusedSwitch
from pillarattn.patch.graph_recorder import fault_reason, logits_gap
from pillarattn.patch.joined_weights import JoinedWeights

# Rows whose logits are compared at most: those of a whole pass could take gigabytes.
COMPARED = 64


class FusedPasses:
    """Runs a model's passes with `FusedLayers` where its layers allow it.

    The first pass is run by the model's own code too, whose logits, keys and scores stand: fused
    layers that give others, or fail, are not used, after one warning. So is the first one after
    the model has changed. In strict mode theirs stand, and passes without them are refused.

    Args:
        model: patched.
        switch: the model's.
        kernels: "auto", "reference" or "triton".
        is_strict: whether no product may be joined with others, and what fused layers give stands
            from the first pass on.

    Attributes:
        is_on: False runs the model's own code alone.
        reason: why fused layers are not used though the model has such, or None.
    """

    def __init__(
        self, model: nn.Module, switch: FusedSwitch, *, kernels: str, is_strict: bool = False
    ) -> None:
        self._model, self._switch, self._kernels = model, switch, kernels
        self._is_strict = is_strict
        self.is_on = True
        self.reason: str | None = None
        self._cache: PagedCache | None = None
        self._layers: FusedLayers | None = None
        self._joined = JoinedWeights()
        self._is_proven = False

    @property
    def has_layers(self) -> bool:
        """Whether the model has layers that can be fused, as far as was looked."""
        return self._layers is not None

    @property
    def layers(self) -> FusedLayers | None:
        """The layers that passes run fused, or None."""
        return self._layers

    @property
    def is_settled(self) -> bool:
        """Whether passes run as they will from now on: these may be recorded."""
        return not self.is_on or self._layers is None or self._is_proven

    def use(self, cache: PagedCache) -> None:
        """Run passes over another pool from now on."""
        self._cache = cache
        if self._layers is not None:
            self._layers = self._over(cache)

    def renew(self) -> None:
        """Look which layers can be fused: the model runs other code, or other weights."""
        assert self._cache is not None
        self._layers, self._joined = None, JoinedWeights()
        self.reason, self._is_proven = None, False
        layers = self._over(self._cache)
        self._layers = layers if layers.layers else None

    def refill(self) -> None:
        """Follow weights that were written to where they are."""
        if self._layers is not None:
            self._layers.refill()

    def run(self, play: Callable[[], Tensor], *, live: int | None) -> Tensor:
        """Return the logits of the pass that `play` runs, `[T, V]`.

        Args:
            play: runs the pass; may be called twice.
            live: rows that count, the first ones. None: `play` may be called once, so that nothing
                is compared.
        """
        layers = self._layers
        if self._is_strict and self.is_on and layers is None:
            self._refuse(self.reason or "the model has layers of other classes, hooks or adapters")
        if not self.is_on or layers is None:
            return play()
        if not self._is_proven:
            return play() if live is None else self._compared(layers, play, live)
        with layers.active():
            return play()

    def give_up(self, gap: float, allowed: float) -> None:
        """Use the model's own code until it changes: logits were too far from its own."""
        self._give_up(f"logits differ by {gap:.2g} of their spread (allowed: {allowed:g})")

    def _over(self, cache: PagedCache) -> FusedLayers:
        return FusedLayers(
            self._model, PagedPools(cache), self._switch, joined=self._joined,
            kernels=self._kernels, joins=not self._is_strict,
        )  # fmt: skip

    def _compared(self, layers: FusedLayers, play: Callable[[], Tensor], live: int) -> Tensor:
        """Run a pass both ways; return its own logits, or in strict mode those of fused layers."""
        every = slice(0, live, -(-live // COMPARED))
        try:
            with layers.active():
                fused = play()[every].clone()
        except (torch.OutOfMemoryError, MemoryError):
            # It will be run again, and says nothing about the code.
            raise
        except Exception as error:
            self._give_up(fault_reason(error))
            return play()
        stands = own = play()
        gap, allowed = logits_gap(fused, own[every])
        if layers.ran < len(layers.layers):
            self._give_up("their keys have no place in the pool as they are")
        elif gap <= allowed:
            self._is_proven = True
            if self._is_strict:
                # Keys of both ways must not mix.
                with layers.active():
                    stands = play()
        else:
            self.give_up(gap, allowed)
        return stands

    def _give_up(self, reason: str) -> None:
        self.reason, self._layers, self._joined = reason, None, JoinedWeights()
        if self._is_strict:
            self._refuse(reason)
        warnings.warn(
            f"layers run without fused kernels, slower and with the same output: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedOptionError(
            f"strict=True needs fused layers, and they cannot be used here: {reason}; "
            "use strict=False"
        )
