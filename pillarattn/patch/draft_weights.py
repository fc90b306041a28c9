"""Copies of linear weights in fewer bits, which only the drafts of one run compute with."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from pillarattn.datatypes import Phase
from pillarattn.errors import UnsupportedOptionError
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import PreTrainedModel
from pillarattn.patch.current_pass import find_cache

Product = Callable[[Tensor], Tensor]

_TINY = torch.finfo(torch.float32).tiny
# Runs of several threads share a model.
_LOCK = Lock()


class DraftWeights:
    """Lets the draft passes over one cache use rounded weights; all other passes keep the model's.

    A draft is judged by a verify pass of the model itself, so that rounding costs accepted drafts
    and never changes the output. On a CPU a draft pass mostly streams weights, and takes as much
    less time as they take less memory.

    Args:
        model: fp32, on the CPU; linear layers of a plain kind take part.
        kind: a name in `PRODUCTS`.
        cache: the passes that write to it in the draft phase are the ones meant.

    Raises:
        UnsupportedOptionError: no layer can take part.
    """

    def __init__(self, model: PreTrainedModel, kind: str, cache: PillarCache) -> None:
        self._cache = cache
        self._linears: list[nn.Module] = []
        try:
            for module in filter(_can_round, model.modules()):
                self._round(module, PRODUCTS[kind](module))
        except BaseException:
            # There may be no room for all copies: the layers before that one keep none either.
            self.close()
            raise
        if not self._linears:
            raise UnsupportedOptionError(
                f"weights={kind!r} rounds fp32 linear layers on a CPU, and "
                f"{type(model).__name__} on {model.device} in {model.dtype} has none; "
                "leave the drafter's weights at 'own'"
            )

    def _round(self, module: nn.Module, product: Product) -> None:
        with _LOCK:
            # Runs of other threads may round the same layer for caches of their own.
            forward = module.__dict__.get("forward") or _Rounded(module)
            forward.products[id(self._cache)] = product
            module.forward = forward
        self._linears.append(module)

    def close(self) -> None:
        """Leave the model as it was."""
        for module in self._linears:
            with _LOCK:
                products = module.__dict__["forward"].products
                del products[id(self._cache)]
                if not products:
                    del module.__dict__["forward"]
        self._linears = []


class _Rounded:
    """The forward of one linear layer while runs last; each has a product of its own."""

    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear
        self.products: dict[int, Product] = {}

    def __call__(self, input: Tensor) -> Tensor:
        # Named as in `nn.Linear.forward`: a model may pass it by name.
        # Another thread may run the same model: which pass this is, its own context tells.
        cache = find_cache()
        step = None if cache is None else cache.step
        product = self.products.get(id(cache))
        if product is not None and step is not None and step.phase is Phase.DRAFT:
            return product(input)
        return nn.Linear.forward(self.linear, input)  # type: ignore[arg-type]


def _can_round(module: nn.Module) -> bool:
    # Wrapped layers (adapters, hooks, shards of a parallel model) do more than a product.
    if type(module) is not nn.Linear:
        return False
    forward = module.__dict__.get("forward")
    if forward is not None and not isinstance(forward, _Rounded):
        return False
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
    )


def _bfloat16(linear: Any) -> Product:
    weight = linear.weight.detach().to(torch.bfloat16)
    bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16)

    def product(states: Tensor) -> Tensor:
        return nn.functional.linear(states.to(torch.bfloat16), weight, bias).to(states.dtype)

    return product


def _int8(linear: Any) -> Product:
    """Codes of 8 bits on both sides: a scale for each output of the layer, and one for each row."""
    weight = linear.weight.detach()
    scales = (weight.abs().amax(dim=1) / 127).clamp_min(_TINY)
    # The product takes the transposed view without a copy.
    codes = (weight / scales.unsqueeze(1)).round_().to(torch.int8).t()
    bias = None if linear.bias is None else linear.bias.detach()

    def product(states: Tensor) -> Tensor:
        rows = states.reshape(-1, states.shape[-1])
        largest = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp_min_(_TINY)
        sums = torch._int_mm((rows / largest).round_().to(torch.int8), codes)
        out = sums.to(states.dtype).mul_(largest).mul_(scales)
        if bias is not None:
            out += bias
        return out.view(*states.shape[:-1], -1)

    return product


PRODUCTS: dict[str, Callable[[Any], Product]] = {"bfloat16": _bfloat16, "int8": _int8}
