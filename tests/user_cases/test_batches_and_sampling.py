"""U04 to U06: many rows, many samples, and every warper at every position."""

from __future__ import annotations

import pytest
import torch
from transformers import set_seed

NEW = 12


@pytest.fixture
def ragged(prompt):
    """Four left-padded prompts of 5, 9, 22 and 23 tokens."""
    lengths = torch.tensor([5, 9, 22, 23])
    mask = (torch.arange(23) >= 23 - lengths[:, None]).long()
    return {"input_ids": prompt(4, 23) * mask, "attention_mask": mask}


def test_u04_a_batch_whose_rows_accept_different_counts(
    plain, patched, draft_model, ragged, rejecting
):
    kwargs = {"max_new_tokens": NEW, "do_sample": False}
    with pytest.raises(ValueError, match="batch_size = 1"):
        plain.generate(**ragged, **kwargs, assistant_model=draft_model)
    pillar = rejecting(s=0.8)
    together = patched.generate(**ragged, **kwargs, assistant=pillar)
    rounds = zip(*pillar.stats.accepted_per_round, strict=False)
    assert any(len(set(counts)) > 1 for counts in rounds), "nothing was ragged"
    for row in range(4):
        ids = ragged["input_ids"][row][ragged["attention_mask"][row].bool()].unsqueeze(0)
        alone = plain.generate(ids, **kwargs)[0, ids.shape[1] :]
        assert together[row, 23:].tolist() == alone.tolist()
    order = torch.tensor([2, 0, 3, 1])
    moved = {name: value[order] for name, value in ragged.items()}
    got = patched.generate(**moved, **kwargs, assistant=rejecting(s=0.8))
    assert got.tolist() == together[order].tolist()


def test_u05_several_samples_and_seeds(plain, patched, draft_model, prompt, rejecting):
    kwargs = {"max_new_tokens": 5, "do_sample": True, "num_return_sequences": 4}
    with pytest.raises(ValueError, match="num_return_sequences"):
        plain.generate(prompt(1, 8), **kwargs, assistant_model=draft_model)

    def sample(global_seed, **options):
        set_seed(global_seed)
        out = patched.generate(prompt(1, 8), **kwargs, assistant=rejecting(**options))
        return [tuple(row) for row in out.tolist()]

    first = sample(1)
    assert first == sample(1)
    assert first != sample(2)
    assert len(set(first)) > 1
    own = sample(1, seed=5)
    assert own == sample(2, seed=5)
    assert own != sample(1, seed=6)
    assert len(set(own)) > 1


def test_u05_a_sample_follows_the_models_own_law(plain, patched, prompt, rejecting):
    """1200 tokens of a first round against the exact law of the second new token."""
    ids = prompt(1, 10)
    step = {"do_sample": True, "top_k": 5, "temperature": 2.0, "return_dict_in_generate": True}
    pillar = rejecting(s=0.4, k=2)
    out = patched.generate(
        ids.repeat(1200, 1), max_new_tokens=2, assistant=pillar, **step
    ).sequences[:, 10:]
    first = plain.generate(ids, max_new_tokens=1, output_scores=True, **step).scores[0][0]
    expected = torch.zeros(97)
    for token in first.softmax(0).nonzero().flatten().tolist():
        text = torch.cat([ids, torch.tensor([[token]])], dim=1)
        mask = torch.ones_like(text)
        after = plain.generate(
            text, attention_mask=mask, max_new_tokens=1, output_scores=True, **step
        ).scores[0][0]
        expected += first.softmax(0)[token] * after.softmax(0)
    counts = torch.bincount(out[:, 1], minlength=97).float()
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    wanted = 1200 * expected[seen]
    chi_square = float(((counts[seen] - wanted).square() / wanted).sum())
    freedom = int(seen.sum()) - 1
    # Five standard deviations of the chi-square law; the seed is fixed.
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_u06_warpers_at_every_position(plain, patched, prompt, rejecting, reject_guard):
    """`min_p` for drafted tokens too, not for the last token of a block alone."""
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "min_p": 0.15}
    ids = prompt(1, 10).repeat(32, 1)
    pillar = rejecting()
    out = patched.generate(ids, max_new_tokens=5, assistant=pillar, **options)
    reject_guard(pillar)
    for i in range(10, 15):
        step = plain.generate(
            out[:, :i], attention_mask=torch.ones_like(out[:, :i]), max_new_tokens=1,
            return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
        assert step.scores[0].gather(1, out[:, i : i + 1]).isfinite().all()
        assert step.scores[0].isinf().any()
        assert out[:, i].unique().numel() > 1
