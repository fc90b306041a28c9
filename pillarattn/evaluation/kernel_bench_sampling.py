"""What `bench kernels` measures of sampling: from numbers of a vocabulary to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pillarattn.evaluation import kernel_bench_cells as base
from pillarattn.evaluation.kernel_bench_cells import largest
from pillarattn.evaluation.kernel_bench_selection import UntunedCell
from pillarattn.evaluation.kernel_bench_timing import Call
from pillarattn.kernels import gumbel_argmax, keyed_rejection, rejection_sample

# SmolLM2's and Qwen3's.
VOCABULARIES = (49_152, 151_936)
DRAFTED = 8
# Rows that a check compares, and inputs that are rotated at most.
CHECKED, MOST_INPUTS = 16, 64


class SamplingCell(UntunedCell):
    """An op over rows of a vocabulary: `batch` rows or sequences of `length` tokens."""

    def inputs(self) -> list[dict[str, Any]]:
        """Rotate as many as do not stay in a GPU's cache."""
        count = max(2, min(MOST_INPUTS, base.ROTATED_BYTES // self.bytes))
        return [self.sample() for _ in range(count)]

    def unequal(self, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
        """Return the share of numbers that differ: 0 or it is wrong."""
        return largest([float((a != b).double().mean()) for a, b in zip(got, want, strict=True)])


@dataclass(frozen=True)
class GumbelCell(SamplingCell):
    """A token for each of `batch` rows of logits over `length` tokens."""

    dtype: str = "float32"

    op = "gumbel_argmax"

    @property
    def bytes(self) -> int:
        """The logits once, and the tokens."""
        return self.batch * (self.length * getattr(torch, self.dtype).itemsize + 8)

    def sample(self) -> dict[str, Any]:
        """Return logits as peaked as a model's, and keys of one seed."""
        rows = torch.arange(self.batch, device=base.DEVICE)
        logits = torch.randn(self.batch, self.length, device=base.DEVICE) * 3
        return {
            "logits": logits.to(getattr(torch, self.dtype)),
            "keys": torch.stack([torch.full_like(rows, 7), rows // 9, 100 + rows % 9], dim=1),
        }

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Draw once."""
        return lambda: gumbel_argmax(**given, implementation="triton")

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Return the share of tokens that differ from the reference's."""
        got: Any = self.call(given, tiles)()
        last = {name: rows[-CHECKED:] for name, rows in given.items()}
        want = gumbel_argmax(**last, implementation="reference")
        return self.unequal((got[-CHECKED:],), (want,))


@dataclass(frozen=True)
class RejectionCell(SamplingCell):
    """A round of `batch` sequences that drafted 8 tokens each, fp32 laws, noise given."""

    op = "rejection_sample"

    @property
    def bytes(self) -> int:
        """One row of p, of q and of the fp64 noise a sequence; the rest is small."""
        return self.batch * self.length * (4 + 4 + 8)

    def sample(self) -> dict[str, Any]:
        """Return drafts of laws near the target's."""
        shape = (self.batch, DRAFTED + 1, self.length)
        logits = torch.randn(shape, device=base.DEVICE) * 3
        target = logits.softmax(dim=-1)
        draft = logits[:, :DRAFTED].add_(torch.rand((), device=base.DEVICE)).mul_(0.9)
        draft = draft.softmax(dim=-1)
        tokens = torch.multinomial(draft.flatten(0, 1), 1).view(self.batch, DRAFTED)
        uniforms = torch.rand(self.batch, DRAFTED, device=base.DEVICE).double()
        noise = torch.empty(self.batch, self.length, dtype=torch.float64, device=base.DEVICE)
        return {
            "draft_tokens": tokens, "target_probs": target, "draft_probs": draft,
            "uniforms": uniforms, "noise": noise.exponential_(),
        }  # fmt: skip

    def inputs(self) -> list[dict[str, Any]]:
        """Rotate fewer: laws of a whole round are large, of which a call reads a part."""
        count = max(2, base.ROTATED_BYTES // 4 // self.bytes)
        return [self.sample() for _ in range(count)]

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Judge one round."""
        return lambda: rejection_sample(**given, implementation="triton")

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Return the share of counts and tokens that differ from the reference's."""
        got: Any = self.call(given, tiles)()
        return self.unequal(got, rejection_sample(**given, implementation="reference"))


@dataclass(frozen=True)
class KeyedCell(SamplingCell):
    """The same of an engine's step, `batch` rounds among it: the store's rows, keyed noise."""

    op = "keyed_rejection"

    @property
    def bytes(self) -> int:
        """One row of p and of q a round; the rest is small."""
        return self.batch * self.length * (4 + 4)

    def sample(self) -> dict[str, Any]:
        """Return rounds as `RejectionCell`'s, with drafts in any order."""
        device, drafts = base.DEVICE, self.batch * DRAFTED
        logits = torch.randn(self.batch, DRAFTED + 1, self.length, device=device) * 3
        probs = logits.softmax(dim=-1).flatten(0, 1)
        draft = logits[:, :DRAFTED].add_(torch.rand((), device=device)).mul_(0.9)
        order = torch.randperm(drafts, device=device)
        laws = draft.softmax(dim=-1).flatten(0, 1)[order.argsort()]
        places = torch.zeros(self.batch, DRAFTED + 1, dtype=torch.int64, device=device)
        places[:, :DRAFTED] = order.view(self.batch, DRAFTED)
        at = torch.arange(self.batch, device=device)
        rows = torch.full_like(at, DRAFTED + 1)
        return {
            "probs": probs, "places": places.flatten(), "laws": laws, "longest": DRAFTED,
            "rounds": torch.stack([at * (DRAFTED + 1), rows, torch.full_like(at, 7), at], dim=1),
            "drafted": torch.multinomial(laws, 1).squeeze(1),
        }  # fmt: skip

    def inputs(self) -> list[dict[str, Any]]:
        """Rotate fewer, for the same reason."""
        count = max(2, base.ROTATED_BYTES // 4 // self.bytes)
        return [self.sample() for _ in range(count)]

    def call(self, given: dict[str, Any], tiles: Any) -> Call:
        """Judge all rounds."""
        return lambda: keyed_rejection(**given, implementation="triton")

    def error(self, given: dict[str, Any], tiles: Any) -> float:
        """Return the share of counts and tokens that differ from the reference's."""
        got: Any = self.call(given, tiles)()
        return self.unequal((got,), (keyed_rejection(**given, implementation="reference"),))
