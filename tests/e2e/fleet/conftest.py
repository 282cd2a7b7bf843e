"""The two machines of compose.yaml on real services, which the files of this folder share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.composed import Fleet, running_fleet
from tests.e2e.folder_fixture import folder_fixture


@folder_fixture
def fleet(
    make_postgres: Callable[[str], str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """The machines, both ready."""
    with running_fleet(tmp_path_factory.mktemp("fleet"), tiny_model, make_postgres) as fleet:
        yield fleet
