"""A repair of Triton's interpreter, for tests that run kernels on the CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np


def repair_interpreter() -> None:
    """Let Triton 3.6's interpreter compute as a GPU does; calling it again does nothing.

    Its loop bounds are arrays of one element, which NumPy 2.4 no longer turns into integers; and
    its maximum of a number and NaN is NaN, where that of a GPU is the number.
    """
    interpreter = import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor
    if getattr(original, "repaired", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.repaired = True
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(
        lhs, rhs, np.fmax
    )
    interpreter._patch_lang_tensor = patched
