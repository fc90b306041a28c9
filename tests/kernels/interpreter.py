"""A repair of Triton's interpreter, for tests that run kernels on the CPU."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np


def repair_interpreter() -> None:
    """Let Triton 3.6's interpreter compute as a GPU does; calling it again does nothing.

    Its loop bounds are arrays of one element, which NumPy 2.4 no longer turns into integers; and
    its maximum of a number and NaN is NaN, where that of a GPU is the number. Its checks that
    integers do not overflow take a quarter of its time, and their result is looked at only in
    debug mode, which is off: they are left out.
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
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
