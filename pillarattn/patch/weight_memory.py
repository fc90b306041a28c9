"""Where weights lie: those of layers that read the same rows may lie one below the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

# A weight and a bias, or None.
Pair = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class LaidTogether:
    """Layers whose weights were moved, as long as there are such layers.

    Attributes:
        linears: those layers.
        memories: where what they share begins.
    """

    linears: tuple[ref[nn.Linear], ...]
    memories: frozenset[int]


def as_one(linears: Sequence[nn.Linear]) -> Pair | None:
    """Return weights and biases that follow each other in memory as one of each, uncopied.

    None where they do not.
    """
    weight = _view([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if weight is None or len(biases) not in (0, len(linears)):
        return None
    bias = _view(biases) if biases else None
    return None if biases and bias is None else (weight, bias)


def can_move(group: Sequence[nn.Linear]) -> bool:
    """Return whether `lay_together` would move the weights of layers."""
    return as_one(group) is None and all(map(_can_move, _parts(group)))


def lay_together(group: Sequence[nn.Linear]) -> LaidTogether | None:
    """Move the weights of layers to memory where they follow each other; None: it moved nothing.

    Parameters stay the objects that they are, with the values that they have; tensors that share
    their memory do so no longer. Weights are left where they are if they lie together already,
    differ in dtype, device or width, come twice, are transposed, or are part of a larger memory.
    Needs room for them once more.
    """
    if not can_move(group):
        return None
    parts = _parts(group)
    # All of the room is there before anything moves.
    with torch.inference_mode(False), torch.no_grad():
        memories = [torch.cat([one.data for one in part]) for part in parts]
        for part, memory in zip(parts, memories, strict=True):
            places = memory.split([one.shape[0] for one in part])
            for one, place in zip(part, places, strict=True):
                one.data = place
    starts = frozenset(memory.untyped_storage().data_ptr() for memory in memories)
    return LaidTogether(tuple(map(ref, group)), starts)


def lay_apart(groups: Iterable[LaidTogether]) -> None:
    """Give weights that were moved, and still lie where they were moved to, memory of their own."""
    for group in groups:
        for parameter in _parameters(filter(None, (held() for held in group.linears))):
            if parameter.untyped_storage().data_ptr() in group.memories:
                _give_own_memory(parameter)


def lay_copies_apart(linears: Iterable[nn.Linear]) -> None:
    """Give weights of a loaded model that lie in more memory than their own just that."""
    for parameter in _parameters(linears):
        if parameter.untyped_storage().nbytes() > parameter.nbytes:
            _give_own_memory(parameter)


def _parameters(linears: Iterable[nn.Linear]) -> Iterator[nn.Parameter]:
    """Yield plain weights and biases: of other kinds only they know where their numbers are."""
    for linear in linears:
        for name in ("weight", "bias"):
            parameter = getattr(linear, name, None)
            if type(parameter) is nn.Parameter and type(parameter.data) is Tensor:
                yield parameter


def _give_own_memory(parameter: nn.Parameter) -> None:
    with torch.inference_mode(False), torch.no_grad():
        parameter.data = parameter.data.clone()


def _view(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors `[N_i, ...]` that follow each other as one `[sum N_i, ...]`, or None."""
    first = parts[0]
    memory, place = first.untyped_storage().data_ptr(), first.data_ptr()
    if not memory:
        return None
    for part in parts:
        is_next = part.untyped_storage().data_ptr() == memory and part.data_ptr() == place
        if not is_next or not part.is_contiguous() or not _are_alike(first, part):
            return None
        place += part.nbytes
    height = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((height, *first.shape[1:]), first.stride())


def _parts(group: Sequence[nn.Linear]) -> list[list[Any]]:
    """Return the weights of layers, and their biases if any has one."""
    parts = [[linear.weight for linear in group]]
    if any(linear.bias is not None for linear in group):
        parts.append([linear.bias for linear in group])
    return parts


def _can_move(parts: Sequence[Tensor | None]) -> bool:
    first = parts[0]
    if len(set(map(id, parts))) < len(parts):
        return False
    return first is not None and all(
        type(part) is nn.Parameter
        and _are_alike(first, part)
        and part.device.type != "meta"
        and part.is_contiguous()
        and not part.is_inference()
        # Memory that somebody else has laid out stays as it is.
        and part.untyped_storage().nbytes() == part.nbytes
        for part in parts
    )


def _are_alike(first: Tensor, part: Tensor) -> bool:
    return (part.dtype, part.device, part.shape[1:]) == (first.dtype, first.device, first.shape[1:])
