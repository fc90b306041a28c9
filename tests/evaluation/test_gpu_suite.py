"""`benchmarks.gpu_suite`: every part is a command that exists, and a second call goes on."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module

import pytest
import typer.main

from benchmarks import gpu_suite
from pillarattn.cli.main import app


class Parsed(Exception):
    pass


@pytest.mark.parametrize("part", gpu_suite.PARTS, ids=lambda part: part.name)
def test_every_part_is_a_command_with_these_options(part, monkeypatch, tmp_path):
    words = [*part.command.format(dataset="d.jsonl").split(), part.out, str(tmp_path / "r.jsonl")]
    if not part.is_module:
        command = typer.main.get_command(app)
        for _ in range(2):
            command, name = command.get_command(None, words[0]), words.pop(0)
        context = command.make_context(name, words)
        assert str(tmp_path / "r.jsonl") in map(str, context.params.values())
        return
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *arguments):
        raise Parsed(parse(self, *arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(Parsed) as found:
        import_module(f"benchmarks.{words[0]}").main()
    assert found.value.args[0].out == tmp_path / "r.jsonl"


def run(monkeypatch, out, *options):
    ran = []
    monkeypatch.setattr(gpu_suite, "_tests", lambda: ran.append("tests"))
    monkeypatch.setattr(gpu_suite, "_command", lambda part, words: ran.append(part.name))
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--out", str(out), *options])
    return ran


def test_a_second_call_goes_on_where_the_first_one_stopped(monkeypatch, tmp_path):
    names = [part.name for part in gpu_suite.PARTS]
    seconds = gpu_suite.PARTS[0].seconds + 1
    ran = run(monkeypatch, tmp_path, "--seconds", str(seconds), "--dataset", "d.jsonl")
    gpu_suite.main()
    assert ran[:2] == ["tests", names[0]] and names[1] not in ran
    later = run(monkeypatch, tmp_path, "--no-tests", "--dataset", "d.jsonl")
    gpu_suite.main()
    assert later == [name for name in names if name not in ran]
    records = [json.loads(line) for line in (tmp_path / "suite.jsonl").read_text().splitlines()]
    states = {part["name"]: part["state"] for part in records[0]["parts"]}
    assert states["tests"] == "done"
    assert states[names[1]] == "no time left"


def test_a_part_that_fails_is_named_and_runs_again(monkeypatch, tmp_path):
    ran = run(monkeypatch, tmp_path, "--only", "strict,generate_1")

    def command(part, words):
        ran.append(part.name)
        if part.name == "generate_1":
            raise SystemExit("no such device")

    monkeypatch.setattr(gpu_suite, "_command", command)
    for _ in range(2):
        with pytest.raises(SystemExit) as code:
            gpu_suite.main()
        assert code.value.code == 1
    assert ran == ["tests", "generate_1", "strict", "tests", "generate_1"]


def test_nothing_is_timed_that_is_not_right(monkeypatch, tmp_path):
    ran = run(monkeypatch, tmp_path)
    monkeypatch.setattr(gpu_suite, "_tests", lambda: 1 / 0)
    with pytest.raises(SystemExit, match="nothing is timed that is not right"):
        gpu_suite.main()
    assert ran == []


def test_an_unknown_part_is_refused(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, "--only", "generate_3")
    with pytest.raises(SystemExit, match="no part generate_3; there are kernels"):
        gpu_suite.main()
