"""Run a model's program against test cases, each in a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 6.0
MEGABYTES = 2048

# Runs inside the child: limits first, so that the program cannot lift them.
_RUNNER = """
import json, sys
try:
    import resource
    size = int(sys.argv[2]) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**24, 2**24))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except ImportError:
    pass
task = json.loads(open(sys.argv[1]).read())
names = {"__name__": "__main__" if task["function"] is None else "solution"}
# Contest sites offer the standard library unasked: starter code says List[int] without an import.
exec(
    "import bisect, collections, functools, heapq, itertools, math, random, re, string, sys\\n"
    "from typing import *\\nfrom collections import *\\nfrom itertools import *\\n"
    "from functools import *\\nfrom heapq import *\\nfrom bisect import *\\n"
    # Not all of math: its pow would hide the built-in one.
    "from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log, log2, prod, sqrt",
    names,
)
sys.setrecursionlimit(50_000)
exec(compile(task["program"], "solution.py", "exec"), names)
if task["function"] is not None:
    owner = names["Solution"]() if "Solution" in names else None
    call = getattr(owner, task["function"]) if owner is not None else names[task["function"]]
    arguments = [json.loads(line) for line in task["input"].splitlines() if line.strip()]
    print(json.dumps(call(*arguments)))
"""


@dataclass(frozen=True)
class CaseResult:
    """What one test case gave: whether it passed, and if not, why."""

    passed: bool
    reason: str = ""


def run_cases(
    program: str,
    cases: Sequence[Mapping[str, Any]],
    *,
    function: str | None = None,
    seconds: float = SECONDS,
    megabytes: int = MEGABYTES,
) -> CaseResult:
    """Run `program` on each case until one fails.

    This is no sandbox: the program runs with the user's rights, in an empty working folder, with
    limits on time, memory and file size. Only call it for code that you would run by hand.

    Args:
        program: Python source.
        cases: mappings with `input` and `output`, both text.
        function: a function (of the class `Solution`, where there is one) that takes the JSON
            values in `input`, one a line; None: `input` is standard input, `output` what is
            printed.
        seconds: time for one case.
        megabytes: memory for one case, where the system can limit it.
    """
    for number, case in enumerate(cases):
        reason = _failure(program, case, function, seconds, megabytes)
        if reason:
            return CaseResult(False, f"case {number}: {reason}")
    return CaseResult(True)


def _failure(
    program: str, case: Mapping[str, Any], function: str | None, seconds: float, megabytes: int
) -> str:
    """Return why a case fails, or an empty text."""
    with tempfile.TemporaryDirectory() as folder:
        task = {"program": program, "function": function, "input": case["input"]}
        where = Path(folder) / "task.json"
        where.write_text(json.dumps(task))
        command = [sys.executable, "-I", "-c", _RUNNER, str(where), str(megabytes)]
        code = _run(command, case["input"] if function is None else "", Path(folder), seconds)
        if code is None:
            return f"no answer within {seconds:g} s"
        printed, errors = (_read(Path(folder) / name) for name in ("stdout", "stderr"))
    if code:
        last = errors.strip().splitlines()[-1:] or [f"exit code {code}"]
        return last[0][:200]
    if function is None:
        same = _lines(printed) == _lines(str(case["output"]))
    else:
        same = _same_json(printed, str(case["output"]))
    return "" if same else "wrong output"


def _run(command: list[str], given: str, folder: Path, seconds: float) -> int | None:
    """Run a command in `folder`, which gets its output; return its exit code, None if too slow."""
    (folder / "stdin").write_text(given)
    # Output goes to files, which the child's limits bound; a pipe would fill this process's memory.
    with (
        (folder / "stdin").open("rb") as stdin,
        (folder / "stdout").open("wb") as stdout,
        (folder / "stderr").open("wb") as stderr,
        subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env={"PATH": "", "HOME": str(folder)},
            start_new_session=True,
        ) as child,
    ):
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # The group, so that nothing that the program has started outlives it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _lines(text: str) -> list[list[str]]:
    """Return the words of each line, without empty lines at the end."""
    return [line.split() for line in text.strip().splitlines()]


def _same_json(left: str, right: str) -> bool:
    try:
        # A solution may print on its own; the result is the last line.
        return bool(json.loads(left.strip().splitlines()[-1]) == json.loads(right))
    except (IndexError, json.JSONDecodeError):
        return left.strip() == right.strip()
