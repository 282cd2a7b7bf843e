"""Rows with drafts on the device's runner alone; test_runner has them in engines."""

import pytest
import torch

from engine.steps.batch import BAD_LOGITS, Batch
from tests.engine.gpu.test_decoder import World

NUM_ROWS = 8


@pytest.fixture
def make_world(tmp_path):
    return lambda **limits: World(tmp_path, max_num_seqs=NUM_ROWS, **limits)


@pytest.fixture
def world(make_world):
    return make_world(max_num_drafts=40)


def make_row(world, drafts=(), name="r", **fields):
    """A row of one known token and drafts."""
    blocks = world.script.blocks[0]
    return world.row(name, (7, *drafts), 2, blocks, num_drafts=len(drafts), **fields)


def run(world, *rows):
    tokens, _ = world.stage.run(Batch(1, rows))
    return tokens.token_ids, tokens.num_accepted


def test_what_is_not_finite_behind_a_rejected_draft_fails_nobody(world):
    (chosen,), _ = run(world, make_row(world))
    other = (chosen + 1) % 100
    for broken, expected in ((other, chosen), (chosen, BAD_LOGITS)):
        world.runner.model.embedding[broken] = torch.nan
        assert run(world, make_row(world, (broken, 8))) == ([expected], {})


def test_a_row_whose_drafts_are_in_flight_is_in_no_other_step(world):
    world.runner.launch(Batch(1, (make_row(world, (8,)),)))
    with pytest.raises(AssertionError, match="nobody knows yet"):
        world.runner.launch(Batch(2, (make_row(world),)))
    world.runner.launch(Batch(2, (make_row(world, name="another"),)))


def test_a_row_whose_mask_was_late_chose_nothing_and_may_be_in_the_next_step(world):
    expected, _ = run(world, make_row(world))
    world.runner.launch(Batch(2, (make_row(world, (8, 9), is_constrained=True),)))
    world.runner.choose({})
    world.runner.launch(Batch(3, (make_row(world),)))
    late, found = world.runner.collect(), world.runner.collect()
    assert (late.token_ids, late.num_accepted) == ([None], {})
    assert found.token_ids == expected


@pytest.mark.parametrize("num_rows", [1, NUM_ROWS - 1, NUM_ROWS])
def test_a_step_has_no_more_drafts_than_there_is_memory_for(make_world, num_rows):
    world = make_world(max_num_drafts=1)
    others = [make_row(world, name=f"r{i}") for i in range(1, num_rows)]
    drafts = (8,) * (1 + NUM_ROWS - num_rows)
    run(world, make_row(world, drafts), *others)
    with pytest.raises(AssertionError):
        run(world, make_row(world, (*drafts, 9)), *others)
