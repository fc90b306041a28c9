"""`benchmarks.engine_peers` on a tiny model: the same tokens from everybody, and who failed."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import engine_peers, peer_cell

SMALL = ["--batch", "3", "--length", "40", "--new-tokens", "6", "--k", "2", "--repeats", "2",
         "--device", "cpu"]  # fmt: skip


class Scripted:
    """A cell whose variants give set tokens; a text in their place is what one raises."""

    def __init__(self, **tokens):
        self.tokens, self.order = tokens, []

    def run(self, name):
        self.order.append(name)
        said = self.tokens[name]
        if isinstance(said, str):
            raise RuntimeError(said)
        # Whatever runs later is faster, and the plain engine twice as fast as that.
        seconds = (1 if name == "plain" else 2) / len(self.order)
        return said, {
            "whole_seconds": 2 * seconds, "whole_tokens": 8, "processor_seconds": seconds,
            "decode_seconds": seconds, "decode_tokens": 6,
        }  # fmt: skip


def taken(cell, *, repeats=1, exact=True):
    turns = engine_peers.Turns(cell, list(cell.tokens), repeats=repeats, exact=exact)
    turns.take()
    return turns


def run(monkeypatch, checkpoint, out, *options):
    words = ["engine_peers", "--model", str(checkpoint), *SMALL, "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", words)
    engine_peers.main()
    return read(out)


def read(out):
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {one["variant"]: one for one in lines if one["kind"] == engine_peers.KIND}


def test_everybody_decodes_the_same_tokens(monkeypatch, tiny_checkpoint, tmp_path, capsys):
    out = tmp_path / "peers.jsonl"
    found = run(monkeypatch, tiny_checkpoint, out, "--static")
    assert list(found) == list(engine_peers.VARIANTS)
    assert [one.get("error") for one in found.values()] == [None] * 5
    for name, one in found.items():
        assert one["different_requests"] == 0
        assert one["compared_with"] == "dynamic"
        assert len(one["runs"]) == 2
        for timed in one["runs"]:
            assert timed["whole_tokens"] == 3 * 6
            # What follows the last prompt: all but each request's first token, or a little less
            # where prompts are read one after the other.
            assert 3 * 3 <= timed["decode_tokens"] <= 3 * 5, name
            assert 0 < timed["decode_seconds"] <= timed["whole_seconds"]
        assert "torch" in str(one["environment"])
        assert "commit" in one
        assert one["plain_over"]["decode"] > 0
    assert found["plain"]["plain_over"] == {"decode": 1.0, "whole": 1.0}
    assert "1.00x" in capsys.readouterr().out


def test_static_is_passed_over_on_a_cpu(monkeypatch, tiny_checkpoint, tmp_path):
    out = tmp_path / "peers.jsonl"
    found = run(monkeypatch, tiny_checkpoint, out, "--variants", "dynamic,static")
    assert "--static" in found["static"]["skipped"]
    assert "runs" not in found["static"]
    with pytest.raises(SystemExit, match="nothing to run"):
        run(monkeypatch, tiny_checkpoint, out, "--variants", "static")


def test_generate_batch_leaves_the_models_of_others_alone(tiny_checkpoint):
    given = engine_peers.parsed(["--model", str(tiny_checkpoint), *SMALL])
    cell = peer_cell.PeerCell(given)
    before = cell.model.config._attn_implementation
    tokens, found = cell.run("batching")
    assert found["attention"].endswith("sdpa")
    cell.run("plain")
    assert cell.model.config._attn_implementation == before
    assert not hasattr(cell.model, "_cached_continuous_batching_manager")
    assert cell.run("dynamic")[0] == tokens


def test_requests_that_do_not_come_back_are_told(monkeypatch, tiny_checkpoint):
    given = engine_peers.parsed(["--model", str(tiny_checkpoint), *SMALL])
    cell = peer_cell.PeerCell(given)
    monkeypatch.setattr(type(cell.model), "generate_batch", lambda self, **_: {})
    with pytest.raises(RuntimeError, match="brought 0 of 3 requests back: its log says why"):
        cell.run("batching")


def test_variants_take_turns():
    cell = Scripted(dynamic=[[1]], batching=[[1]], plain=[[1]])
    found = taken(cell, repeats=2).found
    assert cell.order == [
        "dynamic", "batching", "plain", "batching", "plain", "dynamic", "plain", "dynamic",
        "batching",
    ]  # fmt: skip
    # Turns 6 and 8 of `generate` took 2/6 and 2/8 seconds for 6 tokens: 18 and 24 a second.
    assert found["dynamic"]["decode_spread"] == pytest.approx([18, 24])
    assert found["dynamic"]["decode_tokens_per_second"] == pytest.approx(21)
    assert found["dynamic"]["whole_tokens_per_second"] == pytest.approx(14)
    # The engine's, 5 and 7: 30 and 42.
    assert found["dynamic"]["plain_over"]["decode"] == pytest.approx(36 / 21)


def test_each_timed_run_is_told_as_it_ends():
    cell, told = Scripted(dynamic=[[1]], plain=[[1]]), []
    turns = engine_peers.Turns(
        cell, ["dynamic", "plain"], repeats=1, exact=True,
        on_done=lambda name, run: told.append((name, run, len(cell.order))),
    )  # fmt: skip
    turns.take()
    assert [(name, after) for name, _, after in told] == [("plain", 3), ("dynamic", 4)]
    assert turns.found["plain"]["runs"] == [told[0][1]]


def test_what_a_peer_cannot_do_is_told_and_the_others_go_on():
    cell = Scripted(dynamic=[[1]], batching="no paged attention here", plain=[[1]])
    turns = taken(cell)
    assert turns.found["batching"]["error"] == "RuntimeError: no paged attention here"
    assert cell.order.count("batching") == 1
    assert turns.found["plain"]["different_requests"] == 0
    assert turns.differing == []


def test_other_tokens_are_an_error_in_fp32_and_counted_in_half_precision():
    cell = Scripted(dynamic=[[1], [2], [3]], batching=[[1], [0], [0]], plain=[[1], [2], [3]])
    turns = taken(cell)
    assert turns.differing == ["batching"]
    assert turns.found["batching"]["error"].startswith("ValueError: 2 of 3 requests")
    assert "error" not in turns.found["plain"]
    turns = taken(cell, exact=False)
    assert turns.differing == []
    assert turns.found["batching"]["different_requests"] == 2
    assert turns.found["batching"]["decode_tokens_per_second"] > 0


@pytest.mark.parametrize("variant", ["batching", "plain"])
def test_other_tokens_end_the_command(monkeypatch, tiny_checkpoint, tmp_path, variant):
    own = peer_cell.PeerCell.run

    def wrong(self, name):
        tokens, figures = own(self, name)
        if name == variant:
            tokens = [[*row[:-1], row[-1] ^ 1] for row in tokens]
        return tokens, figures

    monkeypatch.setattr(peer_cell.PeerCell, "run", wrong)
    out = tmp_path / "peers.jsonl"
    with pytest.raises(SystemExit, match=f"other tokens in fp32: {variant}"):
        run(monkeypatch, tiny_checkpoint, out, "--variants", "dynamic,batching,plain")
    assert read(out)[variant]["error"].startswith("ValueError: 3 of 3 requests")


def test_an_engine_that_fails_ends_the_command(monkeypatch, tiny_checkpoint, tmp_path):
    def refused(self, engine):
        raise RuntimeError("no room")

    monkeypatch.setattr(peer_cell.PeerCell, "_engine", refused)
    out = tmp_path / "peers.jsonl"
    with pytest.raises(SystemExit, match="the engine failed: plain"):
        run(monkeypatch, tiny_checkpoint, out, "--variants", "dynamic,plain")
    assert read(out)["dynamic"]["decode_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--new-tokens", "1"], "--new-tokens must be at least 2, got 1"),
        (["--s", "0"], "--s must be above 0 and at most 1, got 0.0"),
        (["--variants", "dynamic,vllm"], "no variant vllm; there are dynamic, static"),
    ],
)
def test_bad_options_are_named(options, message, capsys):
    with pytest.raises(SystemExit):
        engine_peers.parsed(options)
    assert message in capsys.readouterr().err
