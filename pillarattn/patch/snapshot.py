"""Recurrent states and foreign caches, kept and put back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Grown by concatenation: an old tensor stays what it was. All else may be written in place.
_BY_REFERENCE = ("keys", "values")


STATES = ("conv_states", "recurrent_states", "has_previous_state")


class Snapshot:
    """The fields of caches or layers at one moment, so that they can be put back.

    Args:
        owners: objects whose fields are kept.
        names: the fields; None keeps all.
    """

    def __init__(self, owners: list[Any], names: tuple[str, ...] | None = None) -> None:
        self._names = names
        self._fields = [
            (
                owner,
                {
                    name: _kept(name, value)
                    for name, value in vars(owner).items()
                    if names is None or name in names
                },
            )
            for owner in owners
        ]

    def restore(self) -> None:
        """Put every field back; a snapshot may be restored many times."""
        for owner, fields in self._fields:
            if self._names is None:
                vars(owner).clear()
            vars(owner).update({name: _kept(name, value) for name, value in fields.items()})

    def take_rows(self, rows: list[int]) -> None:
        """Replace `rows` of the states kept here by what their owners hold now."""
        for owner, fields in self._fields:
            for name in STATES[:2]:
                for index, now in vars(owner).get(name, {}).items():
                    kept = fields[name][index]
                    if isinstance(now, Tensor) and isinstance(kept, Tensor):
                        kept[rows] = now[rows]


def _kept(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if name in _BY_REFERENCE else value.clone()
    if isinstance(value, dict):
        return {key: _kept(str(key), item) for key, item in value.items()}
    # The list of layers holds owners of their own.
    if isinstance(value, (list, tuple)) and name != "layers":
        return type(value)(_kept(name, item) for item in value)
    return value
