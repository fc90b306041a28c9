"""The names of `pillarattn.theory`, and that it is plain Python."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pillarattn import theory


def test_every_name_is_there_and_documented():
    assert len(set(theory.__all__)) == len(theory.__all__)
    for name in theory.__all__:
        value = getattr(theory, name)
        if callable(value) and name != "Acceptance":
            assert value.__doc__, name


@pytest.mark.parametrize("module", ["acceptance", "traffic", "hardware", "speedup", "planner"])
def test_the_parts_are_modules(module):
    assert getattr(theory, module).__name__ == f"pillarattn.theory.{module}"


def test_the_files_need_neither_torch_nor_transformers():
    """Load the package's own files alone, with nothing else of pillarattn but its errors."""
    script = """
import importlib, json, pathlib, sys, types
root = pathlib.Path(sys.argv[1])
package = types.ModuleType("pillarattn")
package.__path__ = [str(root)]
sys.modules["pillarattn"] = package
for path in sorted((root / "theory").glob("*.py")):
    importlib.import_module(f"pillarattn.theory.{path.stem}".removesuffix(".__init__"))
print(json.dumps(sorted({"torch", "transformers", "numpy"} & set(sys.modules))))
"""
    root = theory.__path__[0].removesuffix("/theory")
    done = subprocess.run(
        [sys.executable, "-c", script, root], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
