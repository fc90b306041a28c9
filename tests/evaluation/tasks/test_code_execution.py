"""Programs are run apart, in time and within limits, and judged by what they print or return."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from pillarattn.evaluation.tasks.code_execution import run_cases

DOUBLE = "n = int(input())\nprint(2 * n)\n"
CASES = [{"input": "3\n", "output": "6\n"}, {"input": "5", "output": "10"}]


def test_standard_input_and_output():
    assert run_cases(DOUBLE, CASES).passed
    wrong = run_cases("print(6)", CASES)
    assert (wrong.passed, wrong.reason) == (False, "case 1: wrong output")


def test_spaces_at_the_ends_do_not_matter_and_lines_do():
    case = [{"input": "", "output": "1 2\n3\n"}]
    assert run_cases("print('1 2 ')\nprint(3)\nprint()", case).passed
    assert not run_cases("print('1 2 3')", case).passed


@pytest.mark.parametrize(
    "program",
    [
        "class Solution:\n    def add(self, a, b):\n        return a + b\n",
        "def add(a, b):\n    print('working')\n    return a + b\n",
    ],
)
def test_a_function_is_called_with_json_values(program):
    cases = [{"input": "[1]\n[2]", "output": "[1, 2]"}]
    assert run_cases(program, cases, function="add").passed
    assert not run_cases(program, [{"input": "1\n2", "output": "4"}], function="add").passed


def test_the_standard_library_is_there_as_on_contest_sites():
    program = (
        "class Solution:\n"
        "    def most(self, words: List[str]) -> str:\n"
        "        return Counter(words).most_common(1)[0][0] + str(gcd(4, 6) + pow(2, 3, 5))\n"
    )
    cases = [{"input": '["a", "b", "b"]', "output": '"b5"'}]
    assert run_cases(program, cases, function="most").passed


def test_an_exception_is_named():
    result = run_cases("raise KeyError('boom')", CASES)
    assert result.reason == "case 0: KeyError: 'boom'"
    assert "SyntaxError" in run_cases("def", CASES).reason


def test_a_program_that_does_not_end_is_stopped_with_all_it_started(tmp_path):
    mark = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    program = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "time.sleep(60)\n"
    )
    result = run_cases(program, CASES, seconds=1.0)
    assert result.reason == "case 0: no answer within 1 s"
    time.sleep(2.5)
    assert not mark.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="limits are tested where they exist")
def test_memory_and_file_size_are_limited():
    assert "MemoryError" in run_cases("x = bytearray(2**31)", CASES, megabytes=512).reason
    endless = "while True:\n    print('x' * 2**20)\n"
    assert "no answer" not in run_cases(endless, CASES, seconds=20).reason


def test_it_runs_in_an_empty_folder_without_the_environment(monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    program = "import os\nprint('SECRET_OF_MINE' in os.environ, os.getcwd())\n"
    assert not run_cases(program, [{"input": "", "output": f"False {Path.cwd()}"}]).passed
    program = "import os\nprint('SECRET_OF_MINE' in os.environ)\n"
    assert run_cases(program, [{"input": "", "output": "False"}]).passed
