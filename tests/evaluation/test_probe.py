"""The probe against one round after the other through the decoder's own parts; and its bounds."""

from __future__ import annotations

import copy

import pytest
import torch

import pillarattn
from pillarattn import PillarConfig, SelfSpeculativeGenerator
from pillarattn.datatypes import Phase
from pillarattn.evaluation.probe import acceptance_probe
from pillarattn.evaluation.probe_memory import ProbeMemory
from pillarattn.evaluation.probe_pass import TextPass, active
from pillarattn.modules import ScoreBuffer, StepState
from pillarattn.modules.strategies import STRATEGIES, OracleStrategy, UnionStrategy
from pillarattn.patch.cache_adapter import PillarCache
from pillarattn.patch.compat import cache_keyword
from pillarattn.patch.current_pass import current_cache

START, LENGTH = 41, 97
SPARSE = {"k": 4, "s": 0.25, "min_budget": 6, "recent": 3, "sink": 1}


def text(length=LENGTH):
    return torch.randint(1, 97, (length,), generator=torch.Generator().manual_seed(3))


def forward(model, cache, tokens, step):
    """Append a block of one row to the cache, in the decoder's own way."""
    cache.step, cache.written = step, None
    with current_cache(cache), torch.no_grad():
        output = model(input_ids=tokens[None], use_cache=True, **{cache_keyword(): cache})
    cache.step = None
    return output.logits[0]


def one_by_one(model, ids, config, start=START):
    """Yield each round's draft logits `[k, V]`: seed, draft token by token, verify, select."""
    patched, k = pillarattn.patch(copy.deepcopy(model)), config.k
    selector = SelfSpeculativeGenerator.from_config(config).new_selector()
    cache = PillarCache(limit=len(ids))
    limit = None
    if config.parity == "reference":
        packed = model.config.num_attention_heads // model.config.num_key_value_heads * (k + 1)
        limit = 32 if packed <= 48 else 64
    with patched.pillarattn_record.active():
        rows = max(k + 1, selector.strategy.seed_rows or 0)
        step = StepState(Phase.PREFILL, seed_rows=rows)
        forward(patched, cache, ids[:start], step)
        selections, emitted = {}, [0]
        if config.parity == "default":
            selections = selector.seed(cache, step.seeds, tokens=ids[None])
        for place in range(start, len(ids) - k + 1, k + 1):
            base = cache.lengths
            step = StepState(Phase.DRAFT, selections=dict(selections))
            if selector.strategy.refresh == "step":
                step.refresh = lambda i, *rest, base=base, emitted=emitted: selector.refresh(
                    base, emitted, cache.layers[i], *rest
                )
            drafts = [forward(patched, cache, ids[place + i][None], step) for i in range(k)]
            yield place, torch.cat(drafts)
            cache.roll_back(base)
            step = StepState(Phase.VERIFY, scores=ScoreBuffer(), row_limit=limit)
            step.scored_layers = frozenset(selector.sparse_layers(cache))
            forward(patched, cache, ids[place : place + k + 1], step)
            emitted = [k + 1]
            counted = [k + 1] if selector.all_rows else None
            selections = selector.select(
                cache, step.scores, emitted=emitted, rows=counted, tokens=ids[None]
            )


def expected(model, ids, config, temperature):
    """Return overlaps and greedy agreement, `[rounds, k]` each, from `one_by_one`."""
    with torch.no_grad():
        target = model(input_ids=ids[None]).logits[0]
    overlap, agree = [], []
    for place, drafted in one_by_one(model, ids, config):
        wanted = target[place : place + config.k]
        p, q = ((x.double() / temperature).softmax(-1) for x in (wanted, drafted))
        overlap.append(torch.minimum(p, q).sum(-1))
        agree.append((wanted.argmax(-1) == drafted.argmax(-1)).double())
    return torch.stack(overlap), torch.stack(agree)


def check(model, config, *, temperature=0.6, piece=None, atol=1e-9):
    ids, model = text(), model.double()
    overlap, agree = expected(model, ids, config, temperature)
    (record,) = acceptance_probe(
        model, ids, config, temperature=temperature, start=START, piece=piece, per_round=True
    )
    assert record["rounds"] == len(overlap) > 5
    accepted = overlap.cumprod(dim=1)
    for name, wanted in {
        "accepted_per_round": accepted.sum(1),
        "overlap_by_position": overlap.mean(0),
        "accepted_by_position": accepted.mean(0),
        "mean_accepted": accepted.sum(1).mean(),
        "mean_overlap": overlap.mean(),
        "greedy_agreement": agree.mean(),
        "greedy_mean_accepted": agree.cumprod(1).sum(1).mean(),
    }.items():
        got = torch.tensor(record[name], dtype=torch.float64)
        torch.testing.assert_close(got, wanted, rtol=0, atol=atol)
    return record


# A round's own queries are known to the probe alone: the oracle of a generation is that of steps.
def strategy_of(name):
    return OracleStrategy(scope="step") if name == "oracle" else name


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_the_probe_equals_round_after_round_through_the_decoder(tiny_model, name):
    record = check(tiny_model("llama"), PillarConfig(strategy=strategy_of(name), **SPARSE))
    assert record["strategy"] == name
    assert name == "full" or record["mean_overlap"] < 0.99, "drafts were not sparse"


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("name", ["pillar", "quest", "oracle", "h2o"])
def test_other_families_windows_and_soft_caps(tiny_model, family, name):
    # Gemma computes more than its norms in fp32, whatever the weights are.
    atol = 1e-5 if family == "gemma2" else 1e-9
    check(tiny_model(family), PillarConfig(strategy=strategy_of(name), **SPARSE), atol=atol)


@pytest.mark.parametrize("piece", [5, 7, 50])
@pytest.mark.parametrize("name", ["vegas", "triforce"])
def test_pieces_of_the_text_change_nothing(tiny_model, piece, name):
    check(tiny_model("llama"), PillarConfig(strategy=name, **SPARSE), piece=piece)


@pytest.mark.parametrize("name", ["pillar", "quest"])
def test_rounds_one_at_a_time_change_nothing(tiny_model, monkeypatch, name):
    one = ProbeMemory(draft=1, selection=1)
    monkeypatch.setattr(ProbeMemory, "of", lambda device: one)
    check(tiny_model("llama"), PillarConfig(strategy=name, **SPARSE))


@pytest.mark.parametrize("name", ["pillar", "h2o", "oracle", "quest", "union"])
def test_a_gpus_memory_takes_few_forwards_and_changes_nothing(tiny_model, monkeypatch, name):
    model, ids, config = tiny_model("llama").double(), text(), PillarConfig(strategy=name, **SPARSE)
    (wanted,) = acceptance_probe(model, ids, config, start=START, piece=7, per_round=True)
    forwards = []
    plain = TextPass.forward
    monkeypatch.setattr(
        TextPass, "forward", lambda self, *a, **k: forwards.append(a) or plain(self, *a, **k)
    )
    monkeypatch.setattr(ProbeMemory, "of", lambda device: ProbeMemory.of_free(2**34))
    (found,) = acceptance_probe(model, ids, config, start=START, per_round=True)
    # A sample, the prompt in at most two, the text, and all drafts.
    assert len(forwards) <= 5
    for name in ("accepted_per_round", "overlap_by_position", "keys_read_per_draft_step"):
        assert found[name] == pytest.approx(wanted[name], abs=1e-9)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_every_k(tiny_model, k):
    check(tiny_model("llama"), PillarConfig(**{**SPARSE, "k": k}), temperature=1.0)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_parity_scores_and_selects_as_the_papers_code(tiny_model, kv_heads):
    # With four query heads a KV head, the paper's kernel takes 32 of 36 packed verify rows.
    config = PillarConfig(**{**SPARSE, "k": 8}, parity="reference")
    check(tiny_model("llama", num_key_value_heads=kv_heads), config)


def test_half_a_verify_row_cannot_be_followed(tiny_model):
    odd = tiny_model("llama", hidden_size=80, num_attention_heads=5, num_key_value_heads=1)
    config = PillarConfig(**{**SPARSE, "k": 8}, parity="reference")
    with pytest.raises(ValueError, match="cuts a verify row in two"):
        acceptance_probe(odd, text(), config, start=START)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_all_keys_give_acceptance_1(tiny_model, family):
    everything = [
        PillarConfig(k=4, s=1.0),
        PillarConfig(k=3, strategy="full"),
        PillarConfig(k=5, s=1.0, strategy=OracleStrategy(scope="step")),
    ]
    for record in acceptance_probe(tiny_model(family), text(), everything, start=START):
        assert record["mean_overlap"] == pytest.approx(1, abs=1e-5)
        assert record["mean_accepted"] == pytest.approx(record["k"], abs=1e-4)
        assert record["greedy_agreement"] == 1


def test_the_oracle_of_a_round_chooses_by_the_rounds_own_queries(tiny_model):
    """Its sets are the Top-K of full attention from the coming rows, which pillar cannot know."""
    model, ids, k = pillarattn.patch(tiny_model("llama")), text(), SPARSE["k"]
    config = PillarConfig(strategy="oracle", **SPARSE)
    place = START + 2 * (k + 1)
    from pillarattn.evaluation.probe_rounds import RoundProbe

    with active(model):
        run = TextPass(model, ids)
        run.advance(START, logits=False, scored=[0, 1])
        run.advance(LENGTH, logits=True, scored=[0, 1])
        probe = RoundProbe(config, start=START)
        probe.next = place
        chosen = probe._select(run, [place])
        cache = PillarCache(limit=LENGTH)
        step = StepState(Phase.VERIFY, scores=ScoreBuffer(), scored_layers=frozenset((0, 1)))
        forward(model, cache, ids[: place + k], step)
    for layer in range(2):
        coming = step.scores.take(layer)[0, :, -k:, :place].mean(dim=1)
        for head in range(2):
            best = coming[head, 1 : place - k - 1].topk(chosen[layer].indices.shape[-1] - k - 2)
            wanted = sorted([0, *(best.indices + 1).tolist(), *range(place - k - 1, place)])
            assert chosen[layer].indices[0, head].tolist() == wanted


def test_several_configurations_share_one_pass(tiny_model):
    model, ids = tiny_model("llama"), text()
    configs = [
        PillarConfig(strategy=name, **{**SPARSE, "k": k, "s": s})
        for name, k, s in (("pillar", 4, 0.25), ("streaming", 2, 0.1), ("snapkv", 7, 0.25))
    ]
    together = acceptance_probe(model, ids, configs, start=START, piece=11)
    for config, record in zip(configs, together, strict=True):
        (alone,) = acceptance_probe(model, ids, config, start=START)
        assert (record["strategy"], record["k"], record["s"]) == (
            config.strategy, config.k, config.s,
        )  # fmt: skip
        assert record["mean_accepted"] == pytest.approx(alone["mean_accepted"], abs=1e-5)
        assert record["rounds"] == (LENGTH - START - config.k) // (config.k + 1) + 1


def test_parts_of_a_record_fit_together(tiny_model):
    union = UnionStrategy(("pillar", "streaming"), shares=(3, 1))
    config = PillarConfig(strategy=union, **SPARSE)
    records = acceptance_probe(
        tiny_model("llama"), text(), [config, "quest"], start=START, per_round=True
    )
    record = records[0]
    assert record["strategy_options"] == repr(union)
    bins = record["by_length"]
    assert [(b["from"], b["to"]) for b in bins] == [(32, 64), (64, 128)]
    assert sum(b["rounds"] for b in bins) == record["rounds"] == len(record["round_starts"])
    for name in ("mean_accepted", "mean_overlap", "greedy_mean_accepted"):
        mean = sum(b["rounds"] * b[name] for b in bins) / record["rounds"]
        assert mean == pytest.approx(record[name])
    assert record["acceptance_rate"] == pytest.approx(record["mean_accepted"] / 4)
    assert record["acceptance_length"] == pytest.approx(record["mean_accepted"] + 1)
    each = torch.tensor(record["accepted_per_round"])
    assert record["standard_error"] == pytest.approx(float(each.std()) / len(each) ** 0.5, rel=1e-4)
    # A quarter of the context and at least 6, and 1 to 4 tokens of the round itself.
    budgets = [max(6, -(-n // 4)) for n in record["round_starts"]]
    assert record["keys_read_per_draft_step"] == pytest.approx(sum(budgets) / len(budgets) + 2.5)
    starts = records[1]["round_starts"]
    assert records[1]["extra_reads_per_draft_step"] == pytest.approx(sum(starts) / len(starts) / 16)


def test_greedy_and_text_input(tiny_model):
    ids = text()

    class Words:
        def __call__(self, words):
            return {"input_ids": [int(w[1:]) for w in words.split()]}

    words = " ".join(f"w{i}" for i in ids.tolist())
    model, config = tiny_model("llama"), PillarConfig(**SPARSE)
    greedy = acceptance_probe(
        model, words, config, tokenizer=Words(), temperature=0, start=START, max_tokens=80
    )[0]
    sampled = acceptance_probe(model, ids[:80], config, start=START)[0]
    assert greedy["mean_overlap"] == greedy["greedy_agreement"] == sampled["greedy_agreement"]
    assert greedy["mean_accepted"] == pytest.approx(greedy["greedy_mean_accepted"])
    assert greedy["rounds"] == sampled["rounds"]


def test_the_model_is_left_as_it_was_and_progress_is_told(tiny_model):
    model, ids, told = tiny_model("llama"), text(), []
    before = model(input_ids=ids[None]).logits
    acceptance_probe(model, ids[None], "pillar", start=START, piece=9, on_progress=told.append)
    assert not hasattr(model, "pillarattn_record")
    assert torch.equal(model(input_ids=ids[None]).logits, before)
    assert told == sorted(told) and told[-1] == 1 and len(told) > 3


def test_a_generators_settings_are_a_configuration(tiny_model):
    pillar = SelfSpeculativeGenerator(k=3, s=0.3, strategy="streaming", min_budget=5)
    (record,) = acceptance_probe(tiny_model("llama"), text(), pillar, start=START)
    assert (record["strategy"], record["k"], record["min_budget"]) == ("streaming", 3, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"configs": []}, "no configuration"),
        ({"configs": "best"}, "unknown strategy 'best'"),
        ({"configs": [3]}, "PillarConfig objects or strategy names"),
        ({"configs": PillarConfig(k=0)}, "k >= 1"),
        ({"configs": PillarConfig(drafter="ngram")}, "measures drafter='sparse', got 'ngram'"),
        ({"configs": PillarConfig(draft_length="acceptance")}, "measures draft_length='constant'"),
        ({"configs": PillarConfig(k=60)}, "too few for a round of k=60"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"start": 0}, "start must be at least 1"),
        ({"piece": 0}, "piece must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"text_or_ids": "words"}, "a text needs tokenizer="),
        ({"text_or_ids": torch.ones(2, 9).long()}, "reads one text"),
        ({"text_or_ids": torch.ones(9)}, "reads one text"),
    ],
)
def test_bad_input_is_refused_before_any_compute(options, message):
    arguments = {"text_or_ids": text(), "configs": "pillar", "start": START, **options}
    with pytest.raises(ValueError, match=message):
        # No model: whoever touched it would raise something else.
        acceptance_probe(None, **arguments)
