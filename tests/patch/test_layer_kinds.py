"""What a config says of a model's sparse layers is what a patched model selects keys in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import pillarattn
from pillarattn.decoding.loop import DecodingRun
from pillarattn.patch.layer_kinds import sparse_layer_count
from pillarattn.patch.support import describe
from tests.architectures import recipes

HYBRIDS = ["bamba", "qwen3_next", "zamba2", "falcon_h1", "nemotron_h", "gemma3n_text"]
OTHERS = ["llama", "mistral", "gemma2", "gpt2", "gpt_oss"]


@pytest.mark.parametrize("name", [*HYBRIDS, *OTHERS])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_count_is_that_of_a_run(name, prompt, monkeypatch):
    model = recipes.build(name)
    counted = sparse_layer_count(model.config)
    row = describe(model)
    assert row["verdict"] == "lossless" and row["sparse_layers"] == counted
    seen, accept = [], DecodingRun.accept

    def watch(run, *args):
        seen.append(len(run.selector.sparse_layers(run.target.cache)))
        return accept(run, *args)

    monkeypatch.setattr(DecodingRun, "accept", watch)
    pillarattn.patch(model)
    pillar = pillarattn.SelfSpeculativeGenerator(k=2, min_budget=4, recent=2)
    model.generate(prompt(1, 12), max_new_tokens=4, do_sample=False, assistant=pillar)
    assert seen and set(seen) == {counted}
    if name in HYBRIDS and name != "falcon_h1":
        assert 0 < counted < model.config.get_text_config(decoder=True).num_hidden_layers


def test_a_config_that_does_not_tell_is_no_error():
    broken = SimpleNamespace(layer_types=3)
    assert sparse_layer_count(SimpleNamespace(get_text_config=lambda decoder: broken)) is None
