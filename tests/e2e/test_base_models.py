"""Several base models behind one gateway: each answers as it should, and none minds the others.

The supervisor, the gateway, the fetchers and the engines are real, and so are the models: that of
the demo beside a random one of another shape and vocabulary, and beside SmolLM2 where there is one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.e2e.base_models import (
    DEMO,
    PROMPTS,
    Pair,
    ask,
    check_a_killed_engine,
    check_answers,
    check_replacing,
    check_waking,
    error_of,
    models_of,
    state_of,
    tables,
    tokens_of,
    wait_serving,
)
from tests.e2e.stack import running
from tests.tiny_models import save_adapter


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_adapters: dict[str, Path]
) -> Iterator[Pair]:
    """The demo's model and a random one."""
    dirs = {"base": DEMO / "model", "other": tiny_model}
    adapters = {
        "base": {"pirate": DEMO / "adapters" / "pirate"},
        "other": {"alpha": tiny_adapters["alpha"]},
    }
    with running(tmp_path_factory.mktemp("pair"), DEMO, models=tables(dirs)) as stack:
        yield Pair.on(stack, dirs, adapters)


@pytest.fixture(scope="module")
def smollm2_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The demo's model and SmolLM2, which are both pretrained, with tokenizers of their own."""
    dirs = {"base": DEMO / "model", "other": needs.smollm2()}
    folder = tmp_path_factory.mktemp("smollm2")
    adapters = {
        "base": {"pirate": DEMO / "adapters" / "pirate"},
        "other": {"alpha": save_adapter(dirs["other"], folder / "alpha", seed=11)},
    }
    other = {"dtype": "float32", "arena_bytes": 512 << 20, "max_model_len": 512}
    models = tables(dirs, other=other)
    with running(folder / "stack", DEMO, models=models) as stack:
        yield Pair.on(stack, dirs, adapters)


@pytest.mark.parametrize("name", ["pair", pytest.param("smollm2_pair", marks=pytest.mark.soak)])
def test_every_model_answers_as_peft_does_with_its_own_adapters(
    name: str, request: pytest.FixtureRequest
) -> None:
    check_answers(request.getfixturevalue(name))


def test_an_engine_that_is_killed_ends_its_own_models_streams_and_no_others(
    pair: Pair,
) -> None:
    check_a_killed_engine(pair, "other")


def test_a_drained_model_says_so_and_serves_again_when_it_is_told_to(pair: Pair) -> None:
    stack, tenant = pair.stack, pair.tenant
    stack.operator.post("/admin/v1/models/other/drain").raise_for_status()
    refused = ask(tenant, "alpha", PROMPTS[0])
    assert error_of(refused)[:2] == (503, "model_drained")
    assert int(refused.headers["retry-after"]) > 0
    assert tokens_of(ask(tenant, "pirate", PROMPTS[0])), "the other goes on"
    stack.wait(lambda: state_of(stack, "other") == "drained")
    stack.operator.post("/admin/v1/models/other/resume").raise_for_status()
    wait_serving(stack, "other")
    assert tokens_of(ask(tenant, "alpha", PROMPTS[0]))


def test_a_model_is_added_replaced_and_removed_under_load_and_no_request_fails(
    pair: Pair, tmp_path: Path
) -> None:
    check_replacing(pair, tmp_path)


def test_a_model_that_cannot_be_served_says_why_and_the_others_serve(pair: Pair) -> None:
    stack = pair.stack
    body = {"name": "nothing", "model": "/no/such/folder"}
    stack.operator.post("/admin/v1/models", json=body).raise_for_status()
    stack.wait(lambda: state_of(stack, "nothing") == "failed")
    (problem,) = [it["problem"] for it in models_of(stack) if it["name"] == "nothing"]
    assert "/no/such/folder" in problem
    assert tokens_of(ask(pair.tenant, "base", PROMPTS[0]))
    stack.operator.delete("/admin/v1/models/nothing").raise_for_status()
    refused = stack.operator.post("/admin/v1/models", json=body | {"settings": {"quantisation": 1}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "settings.quantisation"


def test_a_model_that_nobody_asks_for_sleeps_and_a_request_wakes_it(
    pair: Pair, tiny_model: Path
) -> None:
    body = {"name": "sleeper", "model": str(tiny_model), "settings": {"sleep_after_s": 1.0}}
    pair.stack.operator.post("/admin/v1/models", json=body).raise_for_status()
    check_waking(pair.stack, pair.tenant, "sleeper", other="base")
