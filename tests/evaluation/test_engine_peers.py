"""`benchmarks.engine_peers` on a tiny model: the same tokens from everybody, and who failed."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import engine_peers

SMALL = ["--batch", "3", "--length", "40", "--new-tokens", "6", "--k", "2", "--repeats", "1",
         "--device", "cpu"]  # fmt: skip


def run(monkeypatch, checkpoint, out, *options):
    words = ["engine_peers", "--model", str(checkpoint), *SMALL, "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", words)
    engine_peers.main()
    return read(out)


def read(out):
    return {one["variant"]: one for one in map(json.loads, out.read_text().splitlines())}


def test_everybody_decodes_the_same_tokens(monkeypatch, tiny_checkpoint, tmp_path, capsys):
    out = tmp_path / "peers.jsonl"
    found = run(monkeypatch, tiny_checkpoint, out)
    assert list(found) == list(engine_peers.VARIANTS)
    assert [one.get("error") for one in found.values()] == [None] * 5
    for name, one in found.items():
        assert one["different_requests"] == 0
        (timed,) = one["runs"]
        assert timed["whole_tokens"] == 3 * 6
        # What follows the last prompt: all but each request's first token, or a little less where
        # prompts are read one after the other.
        assert 3 * 3 <= timed["decode_tokens"] <= 3 * 5, name
        assert 0 < timed["decode_seconds"] <= timed["whole_seconds"]
        assert "torch" in str(one["environment"])
    assert "1.00x" in capsys.readouterr().out


def test_what_a_peer_cannot_do_is_told_and_the_others_go_on(
    monkeypatch, tiny_checkpoint, tmp_path, capsys
):
    def refused(self, model):
        raise RuntimeError("no paged attention here")

    monkeypatch.setattr(engine_peers.PeerCell, "_generate_batch", refused)
    out = tmp_path / "peers.jsonl"
    found = run(monkeypatch, tiny_checkpoint, out, "--variants", "dynamic,batching,plain")
    assert found["batching"]["error"] == "RuntimeError: no paged attention here"
    assert found["plain"]["different_requests"] == 0
    assert "batching: RuntimeError: no paged attention here" in capsys.readouterr().out


def test_other_tokens_of_the_engine_end_the_command(monkeypatch, tiny_checkpoint, tmp_path):
    steps = engine_peers._steps

    def wrong(*arguments):
        tokens, figures = steps(*arguments)
        return [[*row[:-1], row[-1] ^ 1] for row in tokens], figures

    monkeypatch.setattr(engine_peers, "_steps", wrong)
    out = tmp_path / "peers.jsonl"
    with pytest.raises(SystemExit, match="the engine failed or differs"):
        run(monkeypatch, tiny_checkpoint, out, "--variants", "dynamic,plain")
    assert read(out)["plain"]["error"].startswith("ValueError: 3 of 3 requests differ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--new-tokens", "1"], "--new-tokens must be at least 2, got 1"),
        (["--variants", "dynamic,vllm"], "no variant vllm; there are dynamic, static"),
    ],
)
def test_bad_options_are_named(options, message, capsys):
    with pytest.raises(SystemExit):
        engine_peers.parsed(options)
    assert message in capsys.readouterr().err
