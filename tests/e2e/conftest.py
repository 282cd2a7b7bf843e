"""Stacks that several tests share: the tiny random model with adapters, and two machines."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.e2e.composed import Fleet, running_fleet
from tests.e2e.stack import Stack, Tenant, running
from tests.tiny_models import LLAMA3_ROPE, save_adapter, save_model

DEMO = Path(__file__).parents[2] / "demo"
PUBLIC_PROMPT = (
    "You are a fox, and you answer every question as briefly as foxes do, never in prose."
)
"""The system prompt that all tenants of the tiny stack share."""


@dataclass
class TinyWorld:
    """A stack on a random model, and one tenant with three adapters. dirs: folders by adapter."""

    stack: Stack
    tenant: Tenant
    model_dir: Path
    dirs: dict[str, Path]


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


@pytest.fixture(scope="session")
def tiny(
    tiny_model: Path,
    tiny_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TinyWorld]:
    folder = tmp_path_factory.mktemp("tiny-stack")
    with running(folder, tiny_model, public_prompts=[PUBLIC_PROMPT]) as stack:
        tenant = stack.tenant("acme")
        for name, folder in tiny_adapters.items():
            tenant.push(name, folder)
        yield TinyWorld(stack, tenant, tiny_model, tiny_adapters)


@pytest.fixture(scope="module")
def fleet(
    make_postgres: Callable[[str], str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """The two machines of compose.yaml on real services, both ready."""
    with running_fleet(tmp_path_factory.mktemp("fleet"), tiny_model, make_postgres) as fleet:
        yield fleet
