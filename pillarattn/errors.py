"""Exceptions of the library: each message names the value, what is allowed and what to do next."""

from __future__ import annotations


class PillarError(Exception):
    """Base class of every error that pillarattn raises on purpose."""


class UnsupportedModelError(PillarError, ValueError):
    """The model cannot be decoded by sparse self-speculation without changing its output."""


class NotPatchedError(PillarError, ValueError):
    """A call needs a model that `pillarattn.patch` has prepared."""


class UnsupportedOptionError(PillarError, ValueError):
    """A generation option that sparse self-speculation cannot honour was set."""


class UnknownNameError(PillarError, ValueError):
    """A registry was asked for a name that it does not hold."""
