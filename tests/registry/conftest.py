import pytest

from registry.base_model import BaseModel
from tests.registry.factories import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """Two layers, GQA: q and o are [16, 16], k and v [8, 16], gate and up [24, 16]."""
    return make_base(tmp_path_factory.mktemp("base") / "model")
