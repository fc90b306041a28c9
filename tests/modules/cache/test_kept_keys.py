"""Keys that are gathered once a round, against a gather at every step, in fp64."""

from __future__ import annotations

import pytest
import torch

from pillarattn import PillarAttention
from pillarattn.datatypes import Phase, RowLengths, Selection
from pillarattn.kernels import draft_attention
from pillarattn.modules import AttentionOptions, ContiguousLayer, StepState
from pillarattn.modules.cache import kept_keys
from pillarattn.modules.cache.kept_keys import MIN_ROOM

HKV, GROUP, DIM, VALUE_DIM = 2, 3, 8, 6
NAN = float("nan")


def append(layer, tokens):
    batch = len(layer.lengths.host)
    layer.append(
        torch.randn(batch, HKV, tokens, DIM, dtype=torch.float64),
        torch.randn(batch, HKV, tokens, VALUE_DIM, dtype=torch.float64),
    )


def layer_of(lengths):
    """Return a layer of ragged rows with NaN past their ends."""
    layer = ContiguousLayer()
    layer.lengths = RowLengths([0] * len(lengths), "cpu")
    append(layer, max(lengths))
    layer.roll_back(RowLengths(lengths, "cpu"))
    for row, length in enumerate(lengths):
        layer.key_buffer[row, :, length:] = NAN
        layer.value_buffer[row, :, length:] = NAN
    return layer


def selection_of(layer, counts):
    """Choose random keys of each row and head; indices past the counts are out of range."""
    width = max(max(row) for row in counts)
    indices = torch.full((len(counts), HKV, width), 10**6, dtype=torch.int32)
    for row, heads in enumerate(counts):
        for head, count in enumerate(heads):
            chosen = torch.randperm(layer.lengths.host[row])[:count].sort().values
            indices[row, head, :count] = chosen.to(torch.int32)
    return Selection(indices, torch.tensor(counts, dtype=torch.int32), layer.lengths.tensor)


def assert_draft(layer, selection, options=AttentionOptions(), rows=1):  # noqa: B008 - frozen
    batch = len(layer.lengths.host)
    query = torch.randn(batch, HKV * GROUP, rows, DIM, dtype=torch.float64)
    step = StepState(Phase.DRAFT, selections={0: selection})
    out = PillarAttention()(query, layer, step, 0, options)
    keys, values = layer.views()
    for row in range(rows):
        wanted = draft_attention(
            query[:, :, row : row + 1], keys, values,
            indices=selection.indices, counts=selection.counts, tail_start=selection.tail_start,
            lengths=layer.lengths.tensor + row + 1 - rows,
            scale=options.scale, softcap=options.softcap, sinks=options.sinks,
        )  # fmt: skip
        torch.testing.assert_close(out[:, :, row : row + 1], wanted, rtol=1e-12, atol=1e-12)


@pytest.fixture
def gathers(monkeypatch):
    """Count the gathers that whole rounds take."""
    calls, gather = [], kept_keys.gather_rows

    def counted(cache, positions):
        calls.append(positions.shape[-1])
        return gather(cache, positions)

    monkeypatch.setattr(kept_keys, "gather_rows", counted)
    return calls


OPTIONS = {
    "plain": AttentionOptions(),
    "scale": AttentionOptions(scale=0.3),
    "softcap": AttentionOptions(softcap=2.0),
    "sinks": AttentionOptions(sinks=torch.randn(HKV * GROUP, dtype=torch.float64)),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([30], [[5, 5]]),
        ([30, 21, 25], [[4, 4], [4, 4], [4, 4]]),
        ([30, 21, 25], [[7, 2], [3, 7], [1, 0]]),
    ],
    ids=["one", "ragged", "counts"],
)
def test_every_step_of_a_round_equals_a_gather_of_its_own(options, lengths, counts, gathers):
    layer = layer_of(lengths)
    selection = selection_of(layer, counts)
    for _ in range(MIN_ROOM):
        append(layer, 1)
        assert_draft(layer, selection, options)
    # Keys and values, once.
    assert gathers == [max(map(max, counts)) + MIN_ROOM] * 2


def test_a_long_tail_makes_more_room(gathers):
    layer = layer_of([30, 21])
    selection = selection_of(layer, [[4, 4], [4, 3]])
    for _ in range(3 * MIN_ROOM):
        append(layer, 1)
        assert_draft(layer, selection)
    assert len(gathers) == 2 * 3


def test_drafts_that_were_forgotten_are_not_read_again():
    layer = layer_of([30, 21])
    selection = selection_of(layer, [[4, 4], [4, 3]])
    for tokens, back in ((3, 2), (1, 1), (2, 4), (5, 0)):
        append(layer, tokens)
        assert_draft(layer, selection)
        layer.roll_back(layer.lengths.plus(-back) if back else layer.lengths)
    # Rows that part company have no place side by side.
    layer.roll_back(RowLengths([32, 21], "cpu"))
    append(layer, 1)
    assert_draft(layer, selection)
    append(layer, 1)
    assert_draft(layer, selection)
    layer.roll_back(RowLengths([31, 22], "cpu"))
    append(layer, 1)
    assert_draft(layer, selection)


def test_a_block_of_drafts_reads_the_same_copy(gathers):
    layer = layer_of([30, 21])
    selection = selection_of(layer, [[4, 4], [4, 3]])
    append(layer, 3)
    assert_draft(layer, selection, rows=3)
    append(layer, 2)
    assert_draft(layer, selection, rows=2)
    assert len(gathers) == 2


def test_another_selection_and_moved_rows_are_gathered_anew(gathers):
    layer = layer_of([30, 21])
    first, second = (selection_of(layer, [[4, 4], [4, 3]]) for _ in range(2))
    append(layer, 1)
    for selection in (first, second, second):
        assert_draft(layer, selection)
    assert len(gathers) == 4
    layer.take_rows(torch.tensor([1, 0]))
    swapped = Selection(first.indices.flip(0), first.counts.flip(0), first.tail_start.flip(0))
    append(layer, 1)
    assert_draft(layer, swapped)
    # Rows that were rolled back into the selected keys and written again.
    selection = selection_of(layer, [[21, 21], [21, 21]])
    append(layer, 1)
    assert_draft(layer, selection)
    layer.roll_back(RowLengths([10, 10], "cpu"))
    append(layer, 25)
    assert_draft(layer, Selection(selection.indices, selection.counts, torch.tensor([34, 34])))


def test_a_verify_pass_lets_the_copy_go():
    layer = layer_of([30, 21])
    selection = selection_of(layer, [[4, 4], [4, 3]])
    append(layer, 1)
    assert_draft(layer, selection)
    assert layer._kept is not None
    query = torch.randn(2, HKV * GROUP, 1, DIM, dtype=torch.float64)
    PillarAttention()(query, layer, StepState(Phase.VERIFY))
    assert layer._kept is None


def test_positions_outside_the_cache_are_refused():
    layer = layer_of([30, 21])
    good = selection_of(layer, [[2, 2], [2, 2]])
    bad = Selection(good.indices + 40, good.counts, good.tail_start)
    append(layer, 1)
    with pytest.raises(ValueError, match=r"positions to read must be in 0\.\.30"):
        assert_draft(layer, bad)
