"""Models and adapters that the stacks of several folders serve."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.folder_fixture import end_of
from tests.tiny_models import LLAMA3_ROPE, save_adapter, save_model

DEMO = Path(__file__).parents[2] / "demo"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny") / "model", rope=LLAMA3_ROPE)


@pytest.fixture(scope="session")
def tiny_adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of ranks 4, 8 and 16, one with rsLoRA and few targets, one with a rank pattern."""
    folder = tmp_path_factory.mktemp("adapters")
    specs = {
        "alpha": {"r": 4, "lora_alpha": 16},
        "beta": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj",
        "up_proj"]}, "gamma": {"r": 8, "lora_alpha": 16, "rank_pattern": {"v_proj": 3}},
    }  # fmt: skip
    return {
        name: save_adapter(tiny_model, folder / name, seed=100 + i, **spec)
        for i, (name, spec) in enumerate(specs.items())
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    end_of(item, nextitem)
