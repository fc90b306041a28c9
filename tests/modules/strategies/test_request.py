"""A request: forced places, budgets by head, and what is noise past a row's length."""

from __future__ import annotations

import pytest
import torch

from pillarattn.kernels import topk_select

ROWS = {"lengths": [30, 17], "budgets": [9, 6], "recent": [3, 2], "sink": 1, "starts": [0, 4]}


def test_budgets_may_differ_between_heads(builders):
    request = builders.request_of(**ROWS)
    wanted = torch.tensor([[4, 12], [6, 2]])
    indices, counts = request.keep_best(request.scores, budgets=wanted)
    assert counts.tolist() == wanted.tolist() and counts.dtype == torch.int32
    for row in range(2):
        for head in range(2):
            alone, count = topk_select(
                request.scores[row : row + 1, head : head + 1],
                lengths=request.lengths[row : row + 1],
                budgets=wanted[row : row + 1, head],
                recent=request.recent[row : row + 1],
                sink=1,
                starts=request.starts[row : row + 1],
            )
            n = int(count)
            assert indices[row, head, :n].tolist() == alone[0, 0, :n].tolist()


def test_contested_places_are_those_that_the_ranking_decides(builders):
    request = builders.request_of(**ROWS)
    places = request.contested()
    kept = [request.keep_best(s)[0] for s in (request.positions(), -request.positions())]
    for row in range(2):
        sets = [set(indices[row, 0, : ROWS["budgets"][row]].tolist()) for indices in kept]
        forced = sets[0] & sets[1]
        visible = set(range(ROWS["starts"][row], ROWS["lengths"][row]))
        assert set(places[row].nonzero().flatten().tolist()) == visible - forced
        assert set(request.visible()[row].nonzero().flatten().tolist()) == visible


@pytest.mark.parametrize("budget", [0, 1, 2, 40])
def test_how_many_places_are_left_to_the_ranking(builders, budget):
    request = builders.request_of([20], [budget], recent=[2], sink=1)
    free = int(request.contested().sum())
    assert free == {0: 20, 1: 19, 2: 18, 40: 17}[budget]


def test_what_lies_past_a_row_is_no_number_to_keep(builders):
    request = builders.request_of([5, 3], [2, 2])
    noise = torch.full((2, 2, 5), float("nan"))
    noise[1, :, :3] = 1.0
    assert request.committed(noise)[1].tolist() == [[1, 1, 1, 0, 0]] * 2


def test_parts_that_were_not_asked_for_say_which_flag_asks(builders):
    request = builders.request_of([5], [2])
    object.__setattr__(request, "score_rows", None)
    object.__setattr__(request, "query", None)
    with pytest.raises(ValueError, match="needs_row_scores = True"):
        request.row_scores(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="needs_queries = True"):
        request.grouped_query()


def test_query_heads_of_a_group_stay_together(builders):
    query = torch.arange(4.0).view(1, 4, 1).expand(1, 4, 4)
    request = builders.request_of([5], [2], query=query)
    assert request.grouped_query()[0, :, :, 0].tolist() == [[0, 1], [2, 3]]


def test_the_widest_choice_spares_a_look_at_the_counts(builders):
    request = builders.request_of(**ROWS)
    wanted = request.keep_best(request.scores)
    object.__setattr__(request, "widest", 9)
    for found, expected in zip(request.keep_best(request.scores), wanted, strict=True):
        assert torch.equal(found, expected)
    # Budgets of one's own may be larger.
    assert request.keep_best(request.scores, budgets=request.lengths)[1].max() == 30


def test_rounds_are_numbered_row_by_row(builders):
    request = builders.request_of([9, 7, 9, 7], [2] * 4, round_index=5, layers=2)
    assert request.round_numbers().tolist() == [5] * 4
    object.__setattr__(request, "rounds", (3, 4))
    assert request.round_numbers().tolist() == [3, 4, 3, 4]


def test_rows_of_one_text_end_where_the_longest_does(builders):
    request = builders.request_of([9, 7, 9, 7], [2] * 4, layers=2)
    assert request.of_texts(2) is request
    text = request.of_texts(1)
    assert text.lengths.tolist() == [9, 9] and text.lengths_on_host() == (9, 9)
