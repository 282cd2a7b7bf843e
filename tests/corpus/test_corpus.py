"""Each folder of the corpus gives PEFT's tokens once it is pushed, or is refused with advice."""

from functools import cache

import pytest

from registry.errors import InvalidAdapter
from server.cli.adapter_folder import AdapterFolder
from tests.corpus.cases import BASES, CASES, Case, Refused, Served
from tests.corpus.folders import Folder
from tests.corpus.world import World, randomize

TRAINED_ON = "The config says that the adapter was trained on"
"""The beginning of a warning that every adapter has here: no base model has the folder's name."""


@pytest.fixture(scope="module")
def world_of(tmp_path_factory):
    """A function that makes one world for each family."""
    return cache(lambda base: World(tmp_path_factory.mktemp("corpus"), **BASES[base]))


def cases_of(kind):
    cases = [case for case in CASES if isinstance(case.outcome, kind)]
    return pytest.mark.parametrize("case", sorted(cases, key=lambda case: case.base), ids=str)


def write(case, world, path):
    """Write PEFT's folder of a case and the one that is pushed; return both."""
    model = world.adapted(case.options, case.num_added)
    saved = dict(case.saved)
    if case.is_converted:
        # PEFT would convert these, too, if the config named their initialization.
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(path / "initial")
        model.peft_config["default"].init_lora_weights = case.options["init_lora_weights"]
        saved["path_initial_model_for_weight_conversion"] = path / "initial"
    randomize(model)
    if case.train:
        case.train(model)
    model.save_pretrained(path / "peft", **saved)
    folder = Folder.load(path / "peft")
    for change in case.changes:
        change(folder)
    pushed = folder.save(path / "pushed")
    if case.layout:
        case.layout(pushed)
    return path / "peft", pushed


@cases_of(Served)
def test_a_folder_that_is_served_gives_the_tokens_of_peft(case: Case, world_of, tmp_path):
    world = world_of(case.base)
    peft_folder, pushed = write(case, world, tmp_path)
    with AdapterFolder.find(pushed).as_sent() as sent:
        answers = world.answers(sent)
        warnings = world.validate(sent).warnings
    assert answers != world.base_says
    world.assert_peft_says(peft_folder, answers, case.num_added)
    others = [warning for warning in warnings if not warning.startswith(TRAINED_ON)]
    for told, warning in zip(case.outcome.told, others, strict=True):
        assert told in warning


@cases_of(Refused)
def test_a_folder_that_is_refused_is_told_what_to_do(case: Case, world_of, tmp_path):
    world = world_of(case.base)
    _, pushed = write(case, world, tmp_path)
    with (
        AdapterFolder.find(pushed).as_sent() as sent,
        pytest.raises(InvalidAdapter) as caught,
    ):
        world.validate(sent)
    assert caught.value.code == case.outcome.code
    assert str(caught.value).endswith(case.outcome.advice)
