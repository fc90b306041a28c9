"""The import rule, checked over the syntax trees; and what `import pillarattn` leaves alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pillarattn"

# A room may import itself, the rooms to its right, and the leaves. Leaves import only leaves.
ROOMS = ("cli", "evaluation", "engine", "patch", "decoding", "modules", "kernels")
LEAVES = ("config", "registry", "datatypes", "errors", "theory")
MAY_IMPORT_TRANSFORMERS = ("patch", "engine", "evaluation", "cli")
OUTSIDE = ("tests", "benchmarks", "examples", "notebooks")
DRAWERS = ("utils", "helpers", "common", "misc", "other")
LINE_LIMIT = 400


def imports_of(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield line and dotted target of every import, also nested, dynamic and type-only ones."""
    parts = PurePosixPath(path).with_suffix("").parts
    package = parts[:-1]  # of pillarattn/a/b.py and of pillarattn/a/__init__.py: pillarattn.a
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            # `from pillarattn import config` imports a module; what follows a full path is a name.
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            target = node.args[0]
            if name in ("import_module", "__import__") and isinstance(target, ast.Constant):
                yield node.lineno, str(target.value)


def violations(path: str, source: str) -> list[str]:
    """Return what `source` at `path` (relative to the repository root) does against the rules."""
    parts = PurePosixPath(path).with_suffix("").parts
    room = parts[1]
    at_root = room == "__init__"  # the public names: may import any room
    found = []
    if parts[-1] in DRAWERS:
        found.append(f"{path}: name the concept; {parts[-1]}.py is a drawer for anything")
    if (lines := source.count("\n")) > LINE_LIMIT:
        found.append(f"{path}: {lines} lines; split it at {LINE_LIMIT}")
    if not at_root and room not in ROOMS + LEAVES:
        found.append(f"{path}: {room} is neither a room nor a leaf")
    for line, target in imports_of(path, source):
        head, *rest = target.split(".")
        reason = None
        if head == "triton" and not (room == "kernels" and parts[-1] == "triton_kernel"):
            reason = "only kernels/*/triton_kernel.py import triton"
        elif head == "transformers" and room not in MAY_IMPORT_TRANSFORMERS:
            reason = f"only {', '.join(MAY_IMPORT_TRANSFORMERS)} import transformers"
        elif head in OUTSIDE:
            reason = "the package imports nothing from outside itself"
        elif head == "torch" and room == "theory":
            reason = "theory is pure Python"
        elif head == "pillarattn" and not at_root:
            reason = _against_the_order(room, rest[0] if rest else "")
        if reason:
            found.append(f"{path}:{line}: imports {target}: {reason}")
    return found


def _against_the_order(room: str, target: str) -> str | None:
    if target in LEAVES:
        return None
    if target not in ROOMS:
        # The command line is the leftmost room; anywhere else the package root would be a cycle.
        return None if room == "cli" else "import the module that defines it, not the package root"
    if room in LEAVES:
        return "a leaf imports only leaves"
    if room in ROOMS and ROOMS.index(target) < ROOMS.index(room):
        return f"imports go only rightwards: {' -> '.join(ROOMS)}"
    return None


FILES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_a_file_keeps_the_rules(path):
    assert violations(path, (ROOT / path).read_text()) == []


def test_the_checker_sees_the_whole_package():
    assert {"pillarattn/config.py", "pillarattn/kernels/dispatch.py"} <= set(FILES)


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        # Leftwards, in every form that Python offers.
        ("modules/a.py", "import pillarattn.decoding.loop", "rightwards"),
        ("modules/a.py", "import torch, pillarattn.patch as p", "rightwards"),
        ("modules/a.py", "from pillarattn.patch import patching", "rightwards"),
        ("modules/a.py", "from pillarattn import engine", "rightwards"),
        ("modules/a.py", "from ..decoding import loop", "rightwards"),
        ("modules/a.py", "from .. import decoding", "rightwards"),
        ("modules/strategies/a.py", "from ...decoding.loop import Loop", "rightwards"),
        ("modules/strategies/__init__.py", "from ...decoding import loop", "rightwards"),
        ("modules/a.py", "def f():\n    from pillarattn.cli import main", "rightwards"),
        ("modules/a.py", "if TYPE_CHECKING:\n    import pillarattn.engine", "rightwards"),
        ("modules/a.py", "importlib.import_module('pillarattn.patch')", "rightwards"),
        ("modules/a.py", "__import__('pillarattn.patch')", "rightwards"),
        ("kernels/op/reference.py", "from pillarattn.modules import attention", "rightwards"),
        ("engine/a.py", "from pillarattn.evaluation import probe", "rightwards"),
        ("evaluation/a.py", "from pillarattn.cli.main import app", "rightwards"),
        # Leaves.
        ("config.py", "from pillarattn.modules.strategies import base", "only leaves"),
        ("theory/planner.py", "from ..kernels import dispatch", "only leaves"),
        ("theory/planner.py", "import torch", "pure Python"),
        # The package root.
        ("decoding/a.py", "import pillarattn", "package root"),
        ("decoding/a.py", "from pillarattn import patch_me", "package root"),
        ("decoding/a.py", "from .. import PillarConfig", "package root"),
        # Confined libraries.
        ("decoding/a.py", "import transformers", "import transformers"),
        ("modules/a.py", "from transformers.cache_utils import Cache", "import transformers"),
        ("config.py", "from transformers import PretrainedConfig", "import transformers"),
        ("__init__.py", "import transformers", "import transformers"),
        ("kernels/dispatch.py", "import triton", "import triton"),
        ("kernels/op/reference.py", "from triton import language as tl", "import triton"),
        ("modules/triton_kernel.py", "import triton.language as tl", "import triton"),
        ("kernels/dispatch.py", "import_module('triton')", "import triton"),
        # Outside the package.
        ("evaluation/a.py", "from tests.conftest import tiny_model", "outside itself"),
        ("cli/a.py", "import benchmarks.run", "outside itself"),
        # Names and sizes.
        ("decoding/utils.py", "", "drawer"),
        ("kernels/op/helpers.py", "", "drawer"),
        ("common.py", "", "drawer"),
        ("tools/a.py", "", "neither a room nor a leaf"),
        ("decoding/a.py", "x = 1\n" * (LINE_LIMIT + 1), "split it"),
    ],
)
def test_the_checker_finds_a_fault(path, source, reason):
    found = violations(f"pillarattn/{path}", source)
    assert any(reason in line for line in found), found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__init__.py", "from pillarattn.patch.patching import patch\nfrom .engine import Engine"),
        ("cli/main.py", "from pillarattn import __version__\nimport transformers"),
        ("patch/a.py", "from transformers import Cache\nfrom pillarattn.decoding import loop"),
        ("decoding/a.py", "from ..modules.cache import base\nfrom .loop import run\nimport torch"),
        ("modules/strategies/__init__.py", "from . import pillar\nfrom ..budgets import ratio"),
        ("kernels/op/triton_kernel.py", "import triton\nimport triton.language as tl"),
        ("kernels/dispatch.py", "find_spec('triton')\nimport_module(name)"),
        ("kernels/a.py", "import tritonclient, transformers_extra, pillarattn_extra"),
        ("registry.py", "from pillarattn.errors import UnknownNameError"),
        ("theory/planner.py", "from .traffic import bytes_read\nimport math"),
        ("decoding/a.py", "x = 1\n" * LINE_LIMIT),
    ],
)
def test_the_checker_leaves_good_code_alone(path, source):
    assert violations(f"pillarattn/{path}", source) == []


# What an import may not touch, as text that compares equal before and after.
STATE = """
import json, logging, os, sys, warnings

class Blocked:
    # Finds what the other finders find, but for these: as if they were not installed.
    def __init__(self, finders, names):
        self.finders, self.names = finders, names
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            return None
        for finder in self.finders:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None
    def find_distributions(self, context=None):
        if context is None or context.name not in self.names:
            for finder in self.finders:
                if hasattr(finder, "find_distributions"):
                    yield from finder.find_distributions(context)
    def invalidate_caches(self):
        pass

BLOCKED = {blocked!r}
if BLOCKED:
    sys.meta_path[:] = [Blocked(list(sys.meta_path), BLOCKED)]

import torch, transformers
from transformers import AttentionInterface, AttentionMaskInterface

def state():
    return dict(
        attention={{k: id(v) for k, v in sorted(AttentionInterface().items())}},
        masks={{k: id(v) for k, v in sorted(AttentionMaskInterface().items())}},
        generate=[id(transformers.GenerationMixin.generate), id(transformers.PreTrainedModel)],
        rng=torch.get_rng_state().sum().item(),
        seed=torch.initial_seed(),
        dtype=str(torch.get_default_dtype()),
        device=str(torch.get_default_device()),
        grad=torch.is_grad_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        threads=[torch.get_num_threads(), torch.get_num_interop_threads()],
        matmul=torch.get_float32_matmul_precision(),
        handlers=[repr(h) for h in logging.getLogger().handlers],
        level=logging.getLogger().level,
        warnings=len(warnings.filters),
        environment=dict(os.environ),
        cuda=torch.cuda.is_initialized(),
    )

before = state()
{act}
after = state()
changed = sorted(key for key in before if before[key] != after[key])
loaded = sorted({{name.split(".")[0] for name in sys.modules}} & set(BLOCKED))
print(json.dumps(dict(changed=changed, loaded=loaded)))
"""


def run_fresh(act: str, blocked: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Run `act` in a new interpreter; return what it changed and which blocked names it loaded."""
    script = STATE.format(act=textwrap.dedent(act), blocked=blocked)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# Names may be loaded only when they are asked for, so every one is.
IMPORT = "import pillarattn; [getattr(pillarattn, name) for name in pillarattn.__all__]"
OPTIONAL = ("triton", "gguf", "datasets", "pandas", "matplotlib", "math_verify", "peft")


def test_importing_changes_no_global_state():
    assert run_fresh(IMPORT) == {"changed": [], "loaded": []}


def test_the_state_check_sees_every_change():
    act = """
    torch.rand(1)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    logging.basicConfig(level=logging.DEBUG)
    warnings.simplefilter("ignore")
    AttentionInterface.register("new", print)
    AttentionMaskInterface.register("sdpa", print)
    transformers.GenerationMixin.generate = print
    os.environ["SET_ON_IMPORT"] = "1"
    """
    seen = set(run_fresh(act)["changed"])
    assert seen == {
        "attention",
        "deterministic",
        "dtype",
        "environment",
        "generate",
        "grad",
        "handlers",
        "level",
        "masks",
        "matmul",
        "rng",
        "threads",
        "warnings",
    }


def test_importing_needs_no_optional_package():
    """What is blocked really cannot be imported."""
    act = f"""
    import importlib.util
    for name in ("pandas", "gguf"):
        assert importlib.util.find_spec(name) is None
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue
        raise SystemExit("the block does not block " + name)
    import yaml
    {IMPORT}
    """
    assert run_fresh(act, blocked=OPTIONAL) == {"changed": [], "loaded": []}
