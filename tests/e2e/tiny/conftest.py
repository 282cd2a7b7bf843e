"""A stack on the tiny random model with adapters, which the files of this folder share.

Each test has a tenant of its own where it counts something.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.folder_fixture import folder_fixture
from tests.e2e.oracle import TinyWorld
from tests.e2e.stack import running

PUBLIC_PROMPT = (
    "You are a fox, and you answer every question as briefly as foxes do, never in prose."
)
"""The system prompt that all tenants of the stack share."""


@folder_fixture
def tiny(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TinyWorld]:
    folder = tmp_path_factory.mktemp("tiny-stack")
    with running(folder, tiny_model, public_prompts=[PUBLIC_PROMPT]) as stack:
        yield TinyWorld.on(stack, tiny_model, tiny_adapters)
