"""Graphs: the steps that have one, and the shape to which they are padded."""

from dataclasses import replace

import pytest

from engine.gpu.graphs import StepGraphs
from engine.gpu.inputs import StepLimits, StepShape


def make_graphs(most_rows=64, most_tokens=2048, max_num_drafts=0):
    limits = StepLimits(most_rows, most_tokens, 4096, prefill_queries=32)
    return StepGraphs(replace(limits, max_num_drafts=max_num_drafts))


def mixed(num_tokens, num_items=1, num_rows=3, block_rows=0):
    return StepShape(num_tokens, num_rows, block_rows, num_items)


@pytest.mark.parametrize(
    ("most_rows", "max_num_drafts"),
    [*((most, 0) for most in (1, 3, 8, 9, 64, 300)), (3, 21), (64, 256), (256, 256)],
)
def test_every_number_of_rows_and_drafts_has_a_graph_and_none_is_padded_to_twice_its_size(
    most_rows, max_num_drafts
):
    plain, graphs = make_graphs(most_rows), make_graphs(most_rows, max_num_drafts=max_num_drafts)
    assert graphs.decode_sizes == sorted(set(graphs.decode_sizes))
    most = most_rows + max_num_drafts
    for num_tokens in range(1, most + 1):
        for has_lora in (True, False):
            shape = graphs.fit(StepShape.of_decodes(num_tokens, has_lora))
            assert num_tokens <= shape.num_tokens < 2 * num_tokens + 1
            assert shape in graphs.shapes()
            assert shape.has_lora == has_lora
    beyond = StepShape.of_decodes(most + 1, has_lora=False)
    assert graphs.fit(beyond) == beyond
    mixed_shape = graphs.fit(mixed(500, num_rows=most_rows + 1))
    assert mixed_shape.num_rows == min(mixed_shape.num_tokens, most)
    more = len(list(graphs.shapes())) - len(list(plain.shapes()))
    assert more <= 2 * (max_num_drafts // 32 + 3 * bool(max_num_drafts))


@pytest.mark.parametrize("most_tokens", [1, 96, 128, 300, 1024, 1025, 8192])
@pytest.mark.parametrize("block_rows", [0, 16, 64])
def test_every_mixed_step_of_up_to_1024_tokens_has_a_graph_with_less_than_128_more(
    most_tokens, block_rows
):
    graphs = make_graphs(most_tokens=most_tokens)
    shapes = set(graphs.shapes())
    for num_tokens in range(1, min(most_tokens, 1024) + 1):
        shape = graphs.fit(mixed(num_tokens, block_rows=block_rows))
        assert shape in shapes
        assert num_tokens <= shape.num_tokens < num_tokens + 128
        assert shape.num_tokens <= most_tokens
        assert shape.block_rows == block_rows


def test_a_step_that_one_token_or_one_item_is_too_much_for_takes_the_next_graph():
    graphs = make_graphs()
    full = mixed(256, num_items=256 // 32 + 16)
    assert (graphs.fit(full).num_tokens, graphs.fit(full).num_prefill_items) == (256, 24)
    assert graphs.fit(mixed(257)).num_tokens == 384
    assert graphs.fit(mixed(256, num_items=25)).num_tokens == 384


@pytest.mark.parametrize("shape", [mixed(1025), mixed(1024, num_items=49), mixed(200, 60, 60)])
def test_a_step_that_is_too_large_for_every_graph_keeps_its_own_shape(shape):
    graphs = make_graphs()
    assert graphs.fit(shape) == shape
    assert graphs.find(shape) is None


@pytest.mark.parametrize(("most_rows", "count"), [(64, 46), (256, 94)])
def test_there_are_three_graphs_for_eight_numbers_of_tokens_and_two_for_numbers_of_rows(
    most_rows, count
):
    graphs = make_graphs(most_rows)
    shapes = list(graphs.shapes())
    assert len(shapes) == len(set(shapes)) == count == 3 * 8 + 2 * len(graphs.decode_sizes)
    sizes = [shape.num_tokens for shape in shapes]
    assert sizes[0] == max(sizes), "the first graph's memory holds the others"


def test_there_are_no_more_choices_than_tokens():
    limits = StepLimits(16, 24, 4096, prefill_queries=32, max_num_drafts=100)
    assert (limits.most_choices, limits.most_tokens) == (24, 24)
    assert make_graphs(16, 24, 100).decode_sizes[-1] == 24
