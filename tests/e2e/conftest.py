"""Stacks that several tests share: the tiny random model with adapters, and the demo."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from tests.e2e.stack import Stack, Tenant, running
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


@pytest.fixture(scope="session")
def demo_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serve the demo's model and adapters, for two tenants as in `chorale demo`."""
    with running(tmp_path_factory.mktemp("demo-stack"), DEMO / "model") as stack:
        for name, adapters in {"acme": ("json", "shout"), "globex": ("python", "pirate")}.items():
            tenant = stack.tenant(name)
            for adapter in adapters:
                tenant.push(adapter, DEMO / "adapters" / adapter)
        yield stack


@pytest.fixture(scope="module")
def tenant(demo_stack: Stack) -> Tenant:
    """The demo's first tenant, where a module has none of its own."""
    return demo_stack.tenants[0]


@pytest.fixture
def client(tenant: Tenant) -> Iterator[openai.OpenAI]:
    """OpenAI's client with the tenant's key."""
    url = f"{tenant.stack.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key=tenant.api_key, max_retries=0) as client:
        yield client
