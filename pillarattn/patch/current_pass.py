"""What this thread runs: whether it speculates, and which cache its forward pass writes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pillarattn.patch.cache_adapter import PillarCache

# Step state travels with the cache, and the cache with the keys that it returns. Models that make
# new keys of them (multi-head latent attention, heads repeated early) lose that thread on the way
# to their attention function; it finds the cache here. A context variable is private to its thread.
_CURRENT: ContextVar[PillarCache | None] = ContextVar("pillarattn_current_cache", default=None)
# The switch to the twins is a name in the model's config, which all threads see. One that did not
# switch it on can find it switched off between its mask and its attention.
_SPECULATES: ContextVar[bool] = ContextVar("pillarattn_speculates", default=False)


@contextmanager
def speculating() -> Iterator[None]:
    """Say that twins stay switched on for this thread inside the block."""
    token = _SPECULATES.set(True)
    try:
        yield
    finally:
        _SPECULATES.reset(token)


def speculates() -> bool:
    """Return whether this thread runs inside `speculating`."""
    return _SPECULATES.get()


@contextmanager
def current_cache(cache: PillarCache) -> Iterator[None]:
    """Name the cache of the forward pass inside the block."""
    token = _CURRENT.set(cache)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def find_cache() -> PillarCache | None:
    """Return the cache of the forward pass that runs in this thread, or None."""
    return _CURRENT.get()
