"""The module without transformers: phases, selections, and what a draft step may touch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pillarattn import PillarAttention, PillarCache, SelfSpeculativeGenerator, patch
from pillarattn.datatypes import Phase, RowLengths, Selection
from pillarattn.modules import AttentionOptions, ContiguousLayer, ScoreBuffer, StepState
from pillarattn.patch.compat import decode_context
from pillarattn.patch.record import RECORD
from pillarattn.patch.target import HFTarget

HQ, HKV, DIM = 4, 2, 8


def layer_of(lengths, dtype=torch.float64):
    layer = ContiguousLayer()
    shape = (len(lengths), HKV, max(lengths), DIM)
    layer.append(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype))
    layer.roll_back(RowLengths(lengths, "cpu"))
    return layer


def dense(query, layer, kept):
    """Attend from each row's query heads to the positions `kept[b][h]` of its KV head."""
    out = torch.zeros_like(query)
    for b in range(query.shape[0]):
        for head in range(HQ):
            places = torch.as_tensor(kept[b][head // (HQ // HKV)])
            keys, values = (t[b, head // (HQ // HKV), places][None] for t in layer.views())
            out[b, head] = scaled_dot_product_attention(query[b, head][None], keys, values)[0]
    return out


def selection_of(rows, tail_start):
    width = max(len(places) for heads in rows for places in heads)
    padded = [[[*places, *[0] * (width - len(places))] for places in heads] for heads in rows]
    counts = [[len(places) for places in heads] for heads in rows]
    return Selection(
        torch.tensor(padded, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(tail_start),
    )


def test_a_draft_reads_the_selected_keys_and_the_tail_only():
    layer = layer_of([20, 14])
    rows = [[[0, 5, 9], [2, 3]], [[1], [4, 8, 11]]]
    step = StepState(Phase.DRAFT, selections={3: selection_of(rows, [17, 12])})
    query = torch.randn(2, HQ, 1, DIM, dtype=torch.float64)
    out = PillarAttention()(query, layer, step, 3)
    tails = ([17, 18, 19], [12, 13])
    kept = [[heads + list(tail) for heads in row] for row, tail in zip(rows, tails, strict=True)]
    torch.testing.assert_close(out, dense(query, layer, kept))
    assert step.visited == [3]


def test_a_layer_without_a_selection_drafts_with_all_keys():
    layer, step = layer_of([20, 14]), StepState(Phase.DRAFT)
    query = torch.randn(2, HQ, 1, DIM, dtype=torch.float64)
    wanted = dense(query, layer, [[range(20)] * 2, [range(14)] * 2])
    torch.testing.assert_close(PillarAttention()(query, layer, step), wanted)


def test_a_block_of_drafts_reads_as_if_each_row_were_the_newest():
    layer, rows = layer_of([20, 14]), [[[0, 5, 9], [2, 3, 1]]] * 2
    step = StepState(Phase.DRAFT, selections={0: selection_of(rows, [17, 11])})
    query = torch.randn(2, HQ, 3, DIM, dtype=torch.float64)
    out = PillarAttention()(query, layer, step)
    for i in range(3):
        kept = [[[*heads, *range(n, n + i + 1)] for heads in rows[0]] for n in (17, 11)]
        torch.testing.assert_close(out[:, :, i : i + 1], dense(query[:, :, i : i + 1], layer, kept))


def test_refresh_chooses_from_the_draft_query_and_is_remembered():
    layer, calls = layer_of([20, 14]), []
    rows = [[[0, 5, 9], [2, 3, 1]]] * 2

    def refresh(index, query, keys, lengths, options):
        calls.append((index, tuple(query.shape), tuple(keys.shape), lengths.host, options.scale))
        return selection_of(rows, [19, 13])

    step = StepState(Phase.DRAFT, selections={0: selection_of([[[7], [7]]] * 2, [19, 13])})
    step.refresh = refresh
    query = torch.randn(2, HQ, 1, DIM, dtype=torch.float64)
    out = PillarAttention()(query, layer, step, 0, AttentionOptions(scale=DIM**-0.5))
    kept = [[[*heads, last] for heads in rows[0]] for last in (19, 13)]
    torch.testing.assert_close(out, dense(query, layer, kept))
    assert calls == [(0, (2, HQ, 1, DIM), (2, HKV, 20, DIM), (20, 14), DIM**-0.5)]
    assert step.selections[0].indices.tolist() == selection_of(rows, [0, 0]).indices.tolist()


@pytest.mark.parametrize("window", [None, 4])
def test_a_verify_pass_is_causal_attention_and_leaves_scores(window):
    layer, buffer = layer_of([12, 9]), ScoreBuffer()
    step = StepState(Phase.VERIFY, scores=buffer, scored_layers=frozenset({1}))
    query = torch.randn(2, HQ, 3, DIM, dtype=torch.float64)
    attention, options = PillarAttention(), AttentionOptions(window=window)
    for index in (0, 1):
        out = attention(query, layer, step, index, options)
    for i in range(3):
        kept = [
            [range(0 if window is None else max(0, n - 2 + i - window), n - 2 + i)] * 2
            for n in (12, 9)
        ]
        torch.testing.assert_close(out[:, :, i : i + 1], dense(query[:, :, i : i + 1], layer, kept))
    assert 1 in buffer and 0 not in buffer
    pooled = buffer.pool([1], rows=torch.tensor([1, 1]), end=12)
    # One row sums to 1, apart from float32.
    torch.testing.assert_close(pooled.sum(-1), torch.ones(2, HKV))
    assert layer.window == window


@pytest.mark.parametrize(("chunks", "kept"), [([9], 4), ([7, 2], 4), ([8, 1], 4), ([2], 2)])
def test_a_prefill_keeps_its_last_query_rows(chunks, kept):
    layer, step, parts = ContiguousLayer(), StepState(Phase.PREFILL, seed_rows=4), []
    for tokens in chunks:
        new = torch.randn(1, HKV, tokens, DIM)
        layer.append(new, new)
        parts.append(torch.randn(1, HQ, tokens, DIM))
        PillarAttention()(parts[-1], layer, step, 2)
    query = step.seeds[2].query
    assert torch.equal(query, torch.cat(parts, dim=2)[:, :, -kept:])
    parts[-1].zero_()
    assert query.abs().sum() > 0
    PillarAttention()(parts[0], layer, verify := StepState(Phase.VERIFY, seed_rows=4))
    assert verify.seeds == {}


def test_errors_and_printed_form():
    with pytest.raises(ValueError, match="append keys and values first"):
        PillarAttention()(torch.randn(1, HQ, 1, DIM), ContiguousLayer(), StepState(Phase.DRAFT))
    shown = repr(PillarAttention(kernels="reference"))
    assert shown == "PillarAttention(kernels='reference', strict=False)"
    assert list(PillarAttention().parameters()) == []


# What reads part of its first argument: the whole of it does not count as touched.
GATHERS = {"index_select", "index", "gather", "embedding"}
# What writes part of its first argument: what it writes is its last tensor.
SCATTERS = {"index_put_", "_index_put_impl_", "scatter_", "index_copy_"}


def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def addresses(tensors):
    return {t.untyped_storage().data_ptr() for t in tensors}


class Touched(TorchDispatchMode):
    """Sums the bytes that operations read or write, and keeps the size of what they allocate."""

    def __init__(self, skip=frozenset()):
        super().__init__()
        self.bytes, self.largest, self.skip = 0, 0, skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        name = func._schema.name.split("::")[1]
        fresh = [t for t in outputs if not (addresses([t]) & addresses(inputs))]
        if addresses(inputs) & self.skip:
            return out  # weights
        self.largest = max([self.largest, *(t.numel() for t in fresh)])
        if name in SCATTERS:
            self.bytes += nbytes(inputs[1:])
        elif name in GATHERS:
            self.bytes += nbytes(inputs[1:]) + 2 * nbytes(fresh)
        elif fresh or func._schema.is_mutable:
            self.bytes += nbytes(inputs) + nbytes(fresh)
        return out


def touched_by_a_draft_step(model, length, batch=1, **options):
    """Return bytes and the largest allocation of one draft forward over `length` cached tokens."""
    generator = SelfSpeculativeGenerator(**options)
    prompt = torch.randint(1, 97, (batch, length))
    target = HFTarget(
        model,
        prompt,
        generation_config=model.generation_config,
        model_kwargs={"attention_mask": torch.ones_like(prompt), "use_cache": True},
        cache=(cache := PillarCache(limit=4096)),
    )
    selector = generator.new_selector()
    with getattr(model, RECORD).active(), decode_context(model), torch.no_grad():
        step = StepState(Phase.PREFILL, seed_rows=5)
        target.prefill(step)
        if batch > 1:
            cache.roll_back(RowLengths([length - 3 * row for row in range(batch)], "cpu"))
        chosen = selector.seed(cache, step.seeds)
        token = torch.full((batch, 1), 5)
        target.forward(token, StepState(Phase.DRAFT, selections=dict(chosen)))
        state = StepState(Phase.DRAFT, selections=dict(chosen))
        with Touched(addresses(model.parameters())) as counter:
            target.forward(token, state)
    assert all(int(s.counts.max()) == options["min_budget"] for s in chosen.values())
    return counter.bytes, counter.largest


@pytest.fixture(scope="module")
def long_model(tiny_model):
    return patch(tiny_model("llama", max_position_embeddings=4096))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_step_touches_as_much_of_a_long_cache_as_of_a_short_one(long_model, batch):
    options = {"strategy": "pillar", "s": 0.001, "min_budget": 32, "batch": batch}
    short, _ = touched_by_a_draft_step(long_model, 256, **options)
    long, largest = touched_by_a_draft_step(long_model, 2040, **options)
    # 32 bytes a layer would be 4 more keys of one head: not even the scores of the others fit.
    assert abs(long - short) <= 256
    assert largest < 2040 * 16


def copying_append(self, new_keys, new_values, append=ContiguousLayer.append):
    """Append as caches made with `torch.cat` do: the past is copied each time."""
    if self.key_buffer is None:
        return append(self, new_keys, new_values)
    past = self.views()
    self.key_buffer = torch.cat([past[0], new_keys], dim=2)
    self.value_buffer = torch.cat([past[1], new_values], dim=2)
    self.lengths = self.lengths.plus(new_keys.shape[2])
    return self.views()


def test_the_counter_sees_a_cache_that_copies(long_model, monkeypatch):
    monkeypatch.setattr(ContiguousLayer, "append", copying_append)
    options = {"strategy": "pillar", "s": 0.001, "min_budget": 32}
    short, _ = touched_by_a_draft_step(long_model, 256, **options)
    long, largest = touched_by_a_draft_step(long_model, 2040, **options)
    assert long - short > 2 * 1700 * 2 * 16 * 4
    assert largest >= 2040 * 16


def test_the_counter_sees_attention_over_all_keys(long_model, monkeypatch):
    draft = PillarAttention._draft

    def peek(self, query, layer, step, index, options, keys_values):
        (query @ layer.views()[0][:, :1].transpose(2, 3)).sum()
        return draft(self, query, layer, step, index, options, keys_values)

    monkeypatch.setattr(PillarAttention, "_draft", peek)
    options = {"strategy": "pillar", "s": 0.001, "min_budget": 32}
    short, _ = touched_by_a_draft_step(long_model, 256, **options)
    long, _ = touched_by_a_draft_step(long_model, 2040, **options)
    assert long - short > 1700 * 16 * 4
