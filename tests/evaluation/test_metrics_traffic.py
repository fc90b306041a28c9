"""Bytes read from the cache, counted by hand for small cases and against plain decoding."""

from __future__ import annotations

import pytest
import torch

import pillarattn
from pillarattn.decoding.stats import GenerationStats
from pillarattn.evaluation.metrics_traffic import KVLayer, Traffic, kv_layers, traffic


@pytest.mark.parametrize(
    ("family", "width", "windows"),
    [
        # KV heads * (key + value) * 16 dimensions * 4 bytes.
        ("llama", 2 * 2 * 16 * 4, [None, None]),
        ("gpt2", 4 * 2 * 16 * 4, [None, None]),
        ("mistral", 2 * 2 * 16 * 4, [16, 16]),
        ("gemma2", 2 * 2 * 16 * 4, [16, None, 16, None]),
    ],
)
def test_the_cache_says_its_shape(tiny_model, family, width, windows):
    layers = kv_layers(tiny_model(family))
    assert [layer.bytes_per_token for layer in layers] == [width] * len(windows)
    assert [layer.window for layer in layers] == windows


def stats(**counters):
    return GenerationStats(**counters)


def test_one_round_by_hand():
    # Prompt of 10; one round drafts 3, reads 4 + 5 + 6 keys, accepts 2 and emits 3.
    found = traffic(
        [KVLayer(8), KVLayer(2)],
        stats(accepted_per_round=[[2]], drafted=3, draft_steps=3, keys_read=15.0),
        prompt_lengths=[10],
        new_tokens=[4],
        extra_reads_per_step=2.0,
    )
    # The verify pass sees the 10 of the prompt, the newest token and the 3 drafts; plain decoding
    # would read 11, 12 and 13.
    assert found == Traffic(15 * 10, 6 * 10, 14 * 10, 36 * 10, 3)
    assert found.bytes_per_token == (15 + 6 + 14) * 10 / 3
    assert found.plain_bytes_per_token == 120


def test_windows_bound_what_is_read():
    found = traffic(
        [KVLayer(1, window=5), KVLayer(1)],
        stats(accepted_per_round=[[2, 0]], drafted=6, draft_steps=6, keys_read=0.0),
        prompt_lengths=[10],
        new_tokens=[5],
    )
    # Rounds begin at 10 and 13: windowed 5 + 5, full 11 + 14; both layers read the 6 drafts.
    assert found.verify_bytes == 10 + 25 + 12
    assert found.plain_bytes == 4 * 5 + (11 + 12 + 13 + 14)


def test_traffic_adds_up():
    total = Traffic(1, 2, 3, 4, 5) + Traffic(10, 20, 30, 40, 50)
    assert total == Traffic(11, 22, 33, 44, 55)
    assert Traffic().bytes_per_token == Traffic().plain_bytes_per_token == 0


def test_with_every_key_and_no_draft_lost_it_reads_what_plain_decoding_reads(tiny_model):
    model = pillarattn.patch(tiny_model("llama"))
    ids = torch.randint(1, 97, (1, 20))
    full = pillarattn.SelfSpeculativeGenerator(k=4, strategy="full")
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, assistant=full,
                   do_sample=False)  # fmt: skip
    assert full.stats.acceptance_rate == 1.0
    found = traffic(kv_layers(model), full.stats, prompt_lengths=[20], new_tokens=[16])
    rounds = full.stats.accepted_per_round[0]
    # A round of k drafts reads as k + 1 plain steps do, for the k + 1 tokens that it emits.
    assert sum(rounds) + len(rounds) == found.tokens == 15
    assert found.bytes_per_token == pytest.approx(found.plain_bytes_per_token)


def test_layers_without_keys_are_left_out():
    class Layer:
        keys = values = None

    class Cached(Layer):
        keys = torch.zeros(1, 2, 1, 4)
        values = torch.zeros(1, 2, 1, 8)

    class Model:
        device = torch.device("cpu")

        def __call__(self, **_):
            cache = type("Cache", (), {"layers": [Layer(), Cached()]})()
            return type("Output", (), {"cache": cache, "past_key_values": cache})()

    assert kv_layers(Model()) == [KVLayer(2 * (4 + 8) * 4)]
