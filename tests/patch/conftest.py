"""Fixtures of the Hugging Face glue: an untouched model beside a patched one, prompts, counters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import pillarattn

# Few enough keys that drafts are really sparse on short prompts, and get rejected.
SMALL = {"k": 4, "s": 0.7, "min_budget": 4, "recent": 2, "sink": 1}


@pytest.fixture(scope="session")
def pair(tiny_model: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Return `pair(family="llama", **overrides) -> (plain, patched)`: the same weights twice.

    The models are shared by all tests of the session: a test that changes one builds its own.
    """
    pairs: dict[Any, tuple[Any, Any]] = {}

    def build(family: str = "llama", **overrides: Any) -> tuple[Any, Any]:
        key = family, repr(sorted(overrides.items()))
        if key not in pairs:
            plain = tiny_model(family, **overrides)
            pairs[key] = plain, pillarattn.patch(copy.deepcopy(plain))
        return pairs[key]

    return build


@pytest.fixture
def drafting() -> Callable[..., pillarattn.SelfSpeculativeGenerator]:
    """Return `drafting(**options)`: a generator whose drafts are sparse on short prompts."""
    return lambda **options: pillarattn.SelfSpeculativeGenerator(**{**SMALL, **options})


@pytest.fixture
def all_accepted() -> pillarattn.SelfSpeculativeGenerator:
    """Return a generator that drafts with every key, so that every draft is accepted: k = 7."""
    return pillarattn.SelfSpeculativeGenerator(k=7, s=1.0)


@pytest.fixture
def prompt() -> Callable[..., Tensor]:
    """Return `prompt(batch, length, seed=1)`: random token ids, never the padding token."""

    def build(batch: int, length: int, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, 97, (batch, length), generator=generator)

    return build


@pytest.fixture
def ragged(prompt: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Return four left-padded prompts of 5, 9, 23 and 24 tokens, with their mask."""
    lengths = torch.tensor([5, 9, 23, 24])
    mask = (torch.arange(24) >= 24 - lengths[:, None]).long()
    return {"input_ids": prompt(4, 24) * mask, "attention_mask": mask}


@pytest.fixture
def same() -> Callable[..., Tensor]:
    """Return `same(plain, patched, assistant, **kwargs)`: assert equal output, and return it.

    Callables are built anew for each run by `fresh`, a function that returns more arguments.
    """

    def check(
        plain: Any, patched: Any, assistant: Any, *, fresh: Any = dict, **kwargs: Any
    ) -> Tensor:
        kwargs.setdefault("do_sample", False)
        wanted = plain.generate(**kwargs, **fresh())
        got = patched.generate(**kwargs, **fresh(), assistant=assistant)
        assert got.tolist() == wanted.tolist()
        return got

    return check


@contextmanager
def _counted(model: Any) -> Iterator[list[int]]:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    handle = model.register_forward_pre_hook(count)
    try:
        yield calls
    finally:
        handle.remove()


@pytest.fixture
def forwards() -> Callable[..., Any]:
    """Return a context manager `forwards(model) -> [count]` that counts forward passes."""
    return _counted


@pytest.fixture
def most_in_a_round() -> Callable[[Any], int]:
    """Return a function: the most drafts that any row had accepted in one round of `.stats`."""
    return lambda assistant: max(max(row, default=0) for row in assistant.stats.accepted_per_round)
