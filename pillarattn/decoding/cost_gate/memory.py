"""What gates have learnt of a model, from one generation to the next."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

from pillarattn.decoding.cost_gate.outlook import Outlook


class GateMemory:
    """Costs and acceptance by model and kind of call, for as long as the model lives.

    A generation works on a copy, so that those of several threads do not disturb each other; the
    one that ends last is remembered. A copied or pickled memory is empty: it would be another
    model's, or another machine's.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[Hashable, Outlook]] = WeakKeyDictionary()

    def recall(self, model: Any, call: Hashable) -> Outlook | None:
        """Return a copy of what is known of such calls, or None."""
        known = self._known.get(model, {}).get(call)
        return copy.deepcopy(known)

    def keep(self, model: Any, call: Hashable, outlook: Outlook) -> None:
        """Remember what a generation has learnt."""
        self._known.setdefault(model, {})[call] = outlook

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def __reduce__(self) -> tuple[type[GateMemory], tuple[()]]:
        return GateMemory, ()
