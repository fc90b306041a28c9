"""The promise: whatever is drafted, the output is what an untouched model gives by itself.

Every registered strategy is covered by being registered; drafters, chains and rules that sample
exactly are listed. Guards keep the tests from being vacuous: some round must emit several tokens at
once, and some draft must be rejected.
"""

from __future__ import annotations

import copy

import pytest
import torch

import pillarattn
from pillarattn.decoding.drafters import (
    AssistantDrafter,
    Eagle3Head,
    HeadDrafter,
    HeadShape,
    MtpHead,
)
from pillarattn.modules.strategies import STRATEGIES

NEW = 16
# Keys per draft step: a quarter of the context, and at least 8. Prompts cross it, and the windows.
SPARSE = {"s": 0.25, "min_budget": 8, "recent": 2, "sink": 1}
STRATEGY_NAMES = STRATEGIES.names()


@pytest.fixture(scope="module")
def world(tiny_model):
    """Return `world(family)`: untouched model, patched copy, and plain's output of each prompt."""
    worlds = {}

    def build(family):
        if family not in worlds:
            plain = tiny_model(family)
            patched = pillarattn.patch(copy.deepcopy(plain))
            outputs = {
                name: plain.generate(**inputs, max_new_tokens=NEW, do_sample=False).tolist()
                for name, inputs in prompts().items()
            }
            worlds[family] = patched, outputs
        return worlds[family]

    return build


def prompts():
    """Return one prompt of 27 tokens, and four of 3 to 30 padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 97, (5, 30), generator=generator)
    lengths = torch.tensor([3, 14, 29, 30])
    mask = (torch.arange(30) >= 30 - lengths[:, None]).long()
    return {
        "single": {"input_ids": ids[:1, :27], "attention_mask": torch.ones(1, 27).long()},
        "ragged": {"input_ids": ids[1:] * mask, "attention_mask": mask},
    }


def decode(model, name, pillar, **kwargs):
    """Generate after the prompts `name`; greedy unless told otherwise."""
    kwargs = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return model.generate(**prompts()[name], **kwargs, assistant=pillar).tolist()


def longest(pillar):
    """Return the most drafts accepted in one round."""
    return max(max(row) for row in pillar.stats.accepted_per_round)


# Every strategy meets every family and every k meets both batches, without the full product.
CELLS = [
    (strategy, family, ("single", "ragged")[(i + j) % 2], (1, 4, 8)[(i + j) % 3])
    for i, strategy in enumerate(STRATEGY_NAMES)
    for j, family in enumerate(
        ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "gpt_neox", "mixtral",
         "qwen3_moe")
    )
]  # fmt: skip


# With full layers and with windows every strategy; of the other families each strategy meets half.
WHOLE = ("llama", "mistral", "gemma2")
MOST = [cell for n, cell in enumerate(CELLS) if cell[1] in WHOLE or (n // 10 + n % 10 // 2) % 2]


@pytest.mark.parametrize(("strategy", "family", "name", "k"), MOST)
def test_greedy_output_is_plain_decodings(world, strategy, family, name, k):
    patched, outputs = world(family)
    pillar = pillarattn.SelfSpeculativeGenerator(k=k, strategy=strategy, **SPARSE)
    assert decode(patched, name, pillar) == outputs[name]
    stats = pillar.stats
    assert stats.emitted == len(outputs[name]) * (NEW - 1)
    if strategy == "full":
        assert stats.accepted >= 0.95 * (stats.emitted - stats.rounds)
        assert longest(pillar) >= min(3, k)
    else:
        assert stats.keys_read < stats.keys_full, "drafts read everything"
    if strategy in ("pillar", "streaming", "uniform"):
        assert stats.accepted < stats.drafted, "no draft was rejected"


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("name", ["single", "ragged"])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_every_strategy_at_every_k_on_one_family(world, strategy, name, k):
    patched, outputs = world("llama")
    pillar = pillarattn.SelfSpeculativeGenerator(k=k, strategy=strategy, **{**SPARSE, "s": 0.8})
    assert decode(patched, name, pillar) == outputs[name]
    assert pillar.stats.accepted > 0


# A step of 7 through rows of 10 meets every strategy and every family.
@pytest.mark.parametrize(("strategy", "family", "name", "k"), CELLS[1::7])
def test_recorded_passes_give_plain_decodings_output(rehearsed, world, strategy, family, name, k):
    """What CUDA graphs replay, without the graph: fixed shapes, lengths on the device alone."""
    patched, outputs = world(family)
    pillar = pillarattn.SelfSpeculativeGenerator(k=k, strategy=strategy, **SPARSE)
    assert decode(patched, name, pillar) == outputs[name]
    (passes,) = rehearsed
    assert passes.reason is None
    at_steps = STRATEGIES.get(strategy).refresh == "step"
    assert passes.replayed > (0 if at_steps else 2)
    eager = pillarattn.SelfSpeculativeGenerator(k=k, strategy=strategy, **SPARSE, cuda_graphs=False)
    decode(patched, name, eager)
    assert pillar.stats.accepted_per_round == eager.stats.accepted_per_round
    assert len(rehearsed) == 1


# A step of 9 through rows of 10 meets every strategy but a few, and every family.
@pytest.mark.parametrize(("strategy", "family", "name", "k"), CELLS[3::9])
def test_compiled_parts_give_plain_decodings_output(traced, world, strategy, family, name, k):
    patched, outputs = world(family)
    pillar = pillarattn.SelfSpeculativeGenerator(k=k, strategy=strategy, **SPARSE, compile=True)
    assert decode(patched, name, pillar) == outputs[name]
    assert traced
    # Other tests use the same model.
    patched.pillarattn_record.compiled = type(patched.pillarattn_record.compiled)()


WAYS: dict[str, dict[str, bool]] = {
    "waits": {"delayed_verification": False}, "plans": {"cruise": False}, "cruises": {},
}  # fmt: skip


# Every strategy and every family with an engine that looks at each pass first, with one that does
# not, and with one that does without plans where it can.
@pytest.mark.parametrize(
    ("strategy", "family", "name", "k", "way"),
    [(*cell, way) for i, way in enumerate(WAYS) for cell in CELLS[2 * i :: 7]],
)
def test_the_engines_output_is_plain_decodings(world, strategy, family, name, k, way):
    """Rows of one batch, each a request of its own: packed, paged and in phases of their own."""
    patched, outputs = world(family)
    inputs = prompts()[name]
    texts = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    config = pillarattn.EngineConfig(
        kv_tokens=512, prefill_chunk=16, preflight=False, **WAYS[way],
        pillar=pillarattn.PillarConfig(k=k, strategy=strategy, **SPARSE),
    )  # fmt: skip
    engine = pillarattn.Engine(patched, config)
    # As on a GPU: passes over buffers, which may begin before the one before is looked at.
    engine.runner.uses_buffers = way != "waits"
    done = engine.generate(texts, pillarattn.SamplingParams(max_tokens=NEW))
    assert [list(o.token_ids) for o in done] == [row[-NEW:] for row in outputs[name]]
    assert sum(o.drafted for o in done) > 0
    assert engine.scheduler.pool.used == 0


def test_all_keys_give_acceptance_1(world, family):
    """s = 1: drafts are the target's own, so that blocks of k + 1 tokens come out."""
    patched, outputs = world(family)
    pillar = pillarattn.SelfSpeculativeGenerator(k=8, s=1.0)
    assert decode(patched, "ragged", pillar) == outputs["ragged"]
    assert pillar.stats.acceptance_rate == 1.0
    assert longest(pillar) == 8
    assert pillar.stats.keys_read == pillar.stats.keys_full


def test_the_papers_own_selection(world, family):
    """`parity="reference"`: fp16 scores, all rows, one tile of rows, a dense first round."""
    patched, outputs = world(family)
    pillar = pillarattn.SelfSpeculativeGenerator(k=8, **SPARSE, parity="reference")
    assert decode(patched, "ragged", pillar) == outputs["ragged"]
    assert pillar.stats.accepted < pillar.stats.drafted


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("name", ["single", "ragged"])
def test_seeded_samples_are_those_of_seeded_plain_sampling(world, strategy, name):
    """The rule compares noisy argmaxes, so that the path is that of k = 0, whatever is drafted."""
    patched, outputs = world("qwen2")
    sampling = {"do_sample": True, "temperature": 1.1, "top_k": 20}
    wanted = decode(patched, name, pillarattn.SelfSpeculativeGenerator(k=0, seed=7), **sampling)
    assert wanted != outputs[name]
    accepted = drafted = 0
    for k in (1, 4):
        options = {**SPARSE, "s": 0.6, "strategy": strategy}
        pillar = pillarattn.SelfSpeculativeGenerator(k=k, seed=7, **options)
        assert decode(patched, name, pillar, **sampling) == wanted
        accepted, drafted = accepted + pillar.stats.accepted, drafted + pillar.stats.drafted
    assert accepted > 0
    if strategy in ("pillar", "streaming", "uniform"):
        assert accepted < drafted


DRAFTERS = ["ngram", ("ngram", "sparse")]
DRAFTER_CELLS = [
    (drafter, family, ("single", "ragged")[(i + j) % 2], (1, 4, 8)[(i + j) % 3])
    for i, drafter in enumerate(DRAFTERS)
    for j, family in enumerate(("llama", "mistral", "gemma2", "gpt2", "mixtral"))
]


@pytest.mark.parametrize(("drafter", "family", "name", "k"), DRAFTER_CELLS)
def test_every_drafter_gives_plain_decodings_output(world, drafter, family, name, k):
    patched, outputs = world(family)
    pillar = pillarattn.SelfSpeculativeGenerator(k=k, drafter=drafter, inner_k=2, **SPARSE)
    assert decode(patched, name, pillar) == outputs[name]
    stats = pillar.stats
    assert stats.emitted == len(outputs[name]) * (NEW - 1)
    assert stats.accepted < stats.drafted
    if drafter == "ngram":
        assert stats.keys_read == stats.draft_steps == 0
        return
    # A chain's drafts are its last level's own.
    alone = pillarattn.SelfSpeculativeGenerator(k=k, **SPARSE)
    decode(patched, name, alone)
    assert stats.accepted_per_round == alone.stats.accepted_per_round


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_seeded_samples_of_every_drafter(world, drafter):
    patched, _ = world("qwen2")
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 5}
    wanted = decode(patched, "ragged", pillarattn.SelfSpeculativeGenerator(k=0, seed=8), **sampling)
    pillar = pillarattn.SelfSpeculativeGenerator(k=4, seed=8, drafter=drafter, **SPARSE)
    assert decode(patched, "ragged", pillar, **sampling) == wanted
    assert 0 < pillar.stats.accepted < pillar.stats.drafted


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("drafter", ["sparse", *DRAFTERS])
@torch.no_grad()
def test_samples_follow_the_models_law(world, acceptance, drafter):
    """500 rows of one prompt, and a chi-square test of the two tokens that rounds emit."""
    patched, _ = world("llama")
    ids = prompts()["single"]["input_ids"].repeat(500, 1)
    pillar = pillarattn.SelfSpeculativeGenerator(
        k=3, acceptance=acceptance, drafter=drafter, **{**SPARSE, "s": 0.6}
    )
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 3, "max_new_tokens": 3}
    out = patched.generate(ids, assistant=pillar, **sampling)
    assert pillar.stats.drafted > 0
    for place in (ids.shape[1] + 1, ids.shape[1] + 2):
        prefixes, counts = out[:, :place].unique(dim=0, return_counts=True)
        logits = patched(prefixes).logits[:, -1] / 0.7
        kept = logits.topk(3).values[:, -1:]
        laws = logits.masked_fill(logits < kept, float("-inf")).softmax(-1)
        expected = (laws * counts.unsqueeze(-1)).sum(0)
        seen = out[:, place].bincount(minlength=97)
        assert int(seen[expected == 0].sum()) == 0
        common = expected > 5
        chi = ((seen - expected) ** 2 / expected)[common].sum()
        assert torch.special.gammaincc(common.sum() / 2, chi / 2) > 1e-3


def with_models(tiny_model, kind):
    """Return a drafter with a model or a head of its own; heads need six layers of the target."""
    small = pillarattn.patch(tiny_model("llama", seed=4, num_hidden_layers=1))
    shape = HeadShape(64, 64, 48, 4, 2, 16, 97, 97)
    return {
        "assistant": AssistantDrafter(small),
        "assistant+sparse": [AssistantDrafter(small), "sparse"],
        "ngram+assistant+sparse": ["ngram", AssistantDrafter(small), "sparse"],
        "eagle3": HeadDrafter(Eagle3Head(shape).requires_grad_(False)),
        "eagle3+sparse": [HeadDrafter(Eagle3Head(shape).requires_grad_(False)), "sparse"],
        "mtp": HeadDrafter(MtpHead(shape).requires_grad_(False)),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["assistant", "assistant+sparse", "ngram+assistant+sparse", "eagle3", "eagle3+sparse", "mtp"],
)
@pytest.mark.parametrize(("family", "k"), [("llama", 4), ("qwen3", 1)])
def test_drafters_with_models_of_their_own(tiny_model, kind, family, k):
    plain = tiny_model(family, num_hidden_layers=6)
    patched = pillarattn.patch(copy.deepcopy(plain))
    options = {"drafter": with_models(tiny_model, kind), "k": k, **SPARSE}
    pillar = pillarattn.SelfSpeculativeGenerator(**options)
    inputs = prompts()["ragged"]
    out = patched.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant=pillar)
    assert out.equal(plain.generate(**inputs, max_new_tokens=NEW, do_sample=False))
    assert 0 < pillar.stats.drafted > pillar.stats.accepted
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 5, "max_new_tokens": NEW}
    pillar = pillarattn.SelfSpeculativeGenerator(seed=7, **options)
    wanted = pillarattn.SelfSpeculativeGenerator(k=0, seed=7)
    out = patched.generate(**inputs, **sampling, assistant=pillar)
    assert out.equal(patched.generate(**inputs, **sampling, assistant=wanted))


@pytest.mark.parametrize("drafter", ["sparse", ("ngram", "sparse")])
@pytest.mark.parametrize(
    "policy",
    [
        {"draft_length": "acceptance"},
        {"draft_length": {"name": "confidence", "threshold": 0.9}},
        {"draft_share": {"name": "acceptance", "target": 0.9, "gain": 1.0}},
    ],
    ids=lambda policy: next(iter(policy)),
)
def test_policies_change_the_drafts_and_not_the_output(world, drafter, policy):
    patched, outputs = world("llama")
    options = {"k": 8, "drafter": drafter, **SPARSE}
    constant = pillarattn.SelfSpeculativeGenerator(**options)
    assert decode(patched, "ragged", constant) == outputs["ragged"]
    pillar = pillarattn.SelfSpeculativeGenerator(**options, **policy)
    assert decode(patched, "ragged", pillar) == outputs["ragged"]
    if "draft_length" in policy:
        assert 0 < pillar.stats.drafted < 0.8 * constant.stats.drafted
    else:
        more = pillar.stats.keys_read / pillar.stats.keys_full
        assert more > 1.1 * constant.stats.keys_read / constant.stats.keys_full


@pytest.mark.parametrize("distance", [-1, 0, 1])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_texts_that_cross_the_budget_and_the_window(tiny_model, world, family, distance):
    """The prompt ends just before, at and after 16: the window of two families, and the budget."""
    plain, patched = tiny_model(family), world(family)[0]
    ids = prompts()["single"]["input_ids"][:, : 16 + distance]
    kwargs = {"max_new_tokens": NEW, "do_sample": False}
    wanted = plain.generate(ids, **kwargs)
    pillar = pillarattn.SelfSpeculativeGenerator(k=4, s=0.01, min_budget=16, recent=2, sink=1)
    assert patched.generate(ids, **kwargs, assistant=pillar).equal(wanted)
    assert pillar.stats.rounds > 0


def test_a_strategy_object_that_keeps_the_worst_keys(world):
    """Nothing that a strategy does can change the output."""

    class Worst(pillarattn.Strategy):
        needs_scores = STRATEGIES.get("pillar").needs_scores

        def __init__(self):
            self.inner = STRATEGIES.get("pillar")()

        def reset(self):
            self.inner.reset()

        def select(self, request):
            turned = copy.copy(request)
            object.__setattr__(turned, "scores", -request.scores)
            return self.inner.select(turned)

    patched, outputs = world("llama")
    pillar = pillarattn.SelfSpeculativeGenerator(k=4, strategy=Worst(), **SPARSE)
    assert decode(patched, "ragged", pillar) == outputs["ragged"]
    assert pillar.stats.acceptance_rate < 0.5
