"""The cache against a list of lists: written in place, grown by doubling, rolled back for free."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pillarattn.datatypes import RowLengths
from pillarattn.modules.cache import ContiguousCache, ContiguousLayer
from pillarattn.modules.cache.contiguous import MIN_CAPACITY

HEADS, DIM, VALUE_DIM = 2, 3, 4


def block(batch, tokens, start=0.0):
    """Return keys and values that are all different, `start` and up."""
    keys = torch.arange(batch * HEADS * tokens * DIM).view(batch, HEADS, tokens, DIM) + start
    values = torch.arange(batch * HEADS * tokens * VALUE_DIM).view(batch, HEADS, tokens, VALUE_DIM)
    return keys.double(), -values.double() - start


def filled(lengths, limit=None):
    """Return a layer with rows of `lengths`, and what it should hold."""
    layer = ContiguousLayer(limit=limit)
    keys, values = block(len(lengths), max(lengths))
    layer.append(keys, values)
    layer.roll_back(RowLengths(lengths, "cpu"))
    return layer, keys, values


def pointers(layer):
    return layer.key_buffer.data_ptr(), layer.value_buffer.data_ptr()


def test_buffers_move_only_when_a_power_of_two_is_crossed():
    layer = ContiguousLayer()
    moves, seen = [], None
    for length in range(1, 601):
        layer.append(*block(1, 1, start=length))
        if pointers(layer) != seen:
            moves.append(length)
            seen = pointers(layer)
        assert layer.capacity == max(MIN_CAPACITY, 1 << (length - 1).bit_length())
    assert moves == [1, 65, 129, 257, 513]
    assert torch.equal(layer.views()[0][0, 0, :, 0], torch.arange(1, 601).double())


@pytest.mark.parametrize("tokens", [1, 3, 64, 65, 100])
def test_blocks_and_single_tokens_store_the_same(tokens):
    keys, values = block(2, tokens)
    at_once, one_by_one = ContiguousLayer(), ContiguousLayer()
    views = at_once.append(keys, values)
    for i in range(tokens):
        one_by_one.append(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    for view, again, wanted in zip(views, one_by_one.views(), (keys, values), strict=True):
        assert torch.equal(view, wanted) and torch.equal(again, wanted)


def test_an_append_writes_its_own_tokens_and_nothing_else():
    layer, _, _ = filled([3, 7, 5])
    before = [buffer.clone() for buffer in (layer.key_buffer, layer.value_buffer)]
    new = block(3, 2, start=1000.0)
    layer.append(*new)
    for buffer, old, fresh in zip((layer.key_buffer, layer.value_buffer), before, new, strict=True):
        for row, length in enumerate((3, 7, 5)):
            assert torch.equal(buffer[row, :, length : length + 2], fresh[row])
            old[row, :, length : length + 2] = fresh[row]
        assert torch.equal(buffer.nan_to_num(-7.0), old.nan_to_num(-7.0))
    assert layer.lengths.host == (5, 9, 7)
    assert layer.views()[0].shape == (3, HEADS, 9, DIM)
    assert layer.views()[1].data_ptr() == layer.value_buffer.data_ptr()


def test_roll_back_runs_no_operation_on_the_buffers():
    cache = ContiguousCache(3)
    for layer in cache.layers:
        layer.append(*block(2, 30))
    kept = [(pointers(layer), layer.key_buffer.clone()) for layer in cache.layers]
    versions = [(layer.key_buffer._version, layer.value_buffer._version) for layer in cache.layers]
    lengths = RowLengths([4, 21], "cpu")
    cache.roll_back(lengths)
    for layer, (place, content), version in zip(cache.layers, kept, versions, strict=True):
        assert layer.lengths is lengths
        assert pointers(layer) == place
        assert (layer.key_buffer._version, layer.value_buffer._version) == version
        assert torch.equal(layer.key_buffer.nan_to_num(), content.nan_to_num())
    assert cache.lengths.host == (4, 21)


def test_layers_of_one_forward_share_their_lengths():
    cache = ContiguousCache(4)
    for layer in cache.layers:
        layer.append(*block(2, 9))
    cache.roll_back(RowLengths([3, 5], "cpu"))
    for layer in cache.layers:
        layer.append(*block(2, 1))
    assert len({id(layer.lengths) for layer in cache.layers}) == 1
    assert cache.lengths.tensor.tolist() == [4, 6]


@pytest.mark.parametrize("valid", [["00111", "11111", "00001"], ["10110", "01101", "11000"]])
def test_compact_drops_padding_and_expand_puts_tokens_back(valid):
    mask = torch.tensor([[int(c) for c in row] for row in valid]).bool()
    cache = ContiguousCache(2)
    keys, values = block(3, 5)
    for layer in cache.layers:
        layer.append(keys, values)
    cache.compact(mask)
    assert list(cache.lengths.host) == mask.sum(1).tolist()
    for layer in cache.layers:
        for row in range(3):
            count = int(mask[row].sum())
            assert torch.equal(layer.views()[0][row, :, :count], keys[row][:, mask[row]])
            assert torch.equal(layer.views()[1][row, :, :count], values[row][:, mask[row]])
    cache.expand(mask)
    hole = ~mask[:, None, :, None]
    for layer in cache.layers:
        assert layer.lengths.host == (5, 5, 5)
        assert torch.equal(layer.views()[0], keys.masked_fill(hole, 0.0))
        assert torch.equal(layer.views()[1], values.masked_fill(hole, 0.0))


def test_expand_may_grow_past_the_capacity():
    layer, keys, _ = filled([60, 60])
    cache = ContiguousCache(1)
    cache.layers = [layer]
    valid = torch.ones(2, 90, dtype=torch.bool)
    valid[0, :30], valid[1, 45:75] = False, False
    cache.expand(valid)
    assert layer.capacity == 128
    assert torch.equal(layer.views()[0][1][:, valid[1]], keys[1])
    assert layer.views()[0][0, :, :30].abs().sum() == 0


def test_take_rows_reorders_repeats_and_leaves_the_rest_alone():
    layer, keys, values = filled([2, 6, 4])
    layer.take_rows(torch.tensor([2, 0, 2, 1]))
    assert layer.lengths.host == (4, 2, 4, 6)
    for row, (source, length) in enumerate(((2, 4), (0, 2), (2, 4), (1, 6))):
        assert torch.equal(layer.views()[0][row, :, :length], keys[source, :, :length])
        assert torch.equal(layer.views()[1][row, :, :length], values[source, :, :length])
    layer.append(*block(4, 1, start=500.0))
    assert layer.views()[0][0, 0, 4, 0] != layer.views()[0][2, 0, 4, 0]


@pytest.mark.parametrize(("limit", "capacity"), [(70, 70), (40, 40), (300, 128), (None, 128)])
def test_limit_caps_the_doubling(limit, capacity):
    layer = ContiguousLayer(limit=limit)
    layer.append(*block(1, 40 if limit == 40 else 66))
    assert layer.capacity == capacity
    layer.append(*block(1, 4 if limit != 40 else 0))
    assert layer.capacity == capacity


def test_a_half_precision_cache_takes_what_it_is_given():
    layer = ContiguousLayer()
    layer.append(*(t.bfloat16() for t in block(1, 2)))
    layer.append(*block(1, 1))
    assert layer.views()[0].dtype == torch.bfloat16
    again = pickle.loads(pickle.dumps(layer))
    assert again.lengths.host == (3,) and torch.equal(again.views()[0], layer.views()[0])


def test_errors_say_what_is_wrong():
    cache, layer = ContiguousCache(2), ContiguousLayer()
    with pytest.raises(ValueError, match="run a forward pass first"):
        _ = cache.lengths
    with pytest.raises(ValueError, match="append keys and values first"):
        layer.views()
    cache.roll_back(RowLengths([1], "cpu"))
    layer.take_rows(torch.tensor([0]))
    assert layer.lengths is None
    layer.append(*block(2, 5))
    with pytest.raises(ValueError, match="holds 2 rows and 3 were appended"):
        layer.append(*block(3, 1))
    for lengths in ([6, 5], [5], [5, 5, 5]):
        with pytest.raises(ValueError, match="cannot roll back"):
            layer.roll_back(RowLengths(lengths, "cpu"))
    assert layer.lengths.host == (5, 5)


ROWS = st.integers(1, 3)
OPERATION = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 40)),
    st.tuples(st.just("roll back"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("take rows"), st.lists(st.integers(0, 2), min_size=1, max_size=3)),
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=ROWS, operations=st.lists(OPERATION, max_size=12))
def test_any_history_equals_a_list_of_lists(rows, operations):
    layer, model, stamp = ContiguousLayer(), [[] for _ in range(rows)], 0.0
    for name, argument in [("append", 1), *operations]:
        if name == "append":
            numbers = stamp + torch.arange(len(model) * argument).view(len(model), argument)
            stamp += numbers.numel()
            new = numbers.double()[:, None, :, None].expand(-1, HEADS, -1, DIM)
            layer.append(new, -new)
            for row, line in zip(model, numbers.tolist(), strict=True):
                row.extend(line)
        elif name == "roll back":
            noise = torch.Generator().manual_seed(argument)
            cut = [int(torch.randint(len(r) + 1, (), generator=noise)) for r in model]
            layer.roll_back(RowLengths(cut, "cpu"))
            model = [row[:n] for row, n in zip(model, cut, strict=True)]
        else:
            chosen = [r % len(model) for r in argument]
            layer.take_rows(torch.tensor(chosen))
            model = [list(model[r]) for r in chosen]
        assert layer.lengths.host == tuple(map(len, model))
        assert layer.lengths.tensor.tolist() == list(map(len, model))
        keys, values = layer.views()
        assert keys.shape[2] == max(map(len, model)) <= layer.capacity
        for row, line in enumerate(model):
            wanted = torch.tensor(line, dtype=torch.float64)
            assert torch.equal(keys[row, 1, : len(line), 2], wanted)
            assert torch.equal(values[row, 0, : len(line), 0], -wanted)
