"""The Ray cluster that all tests here share."""

from collections.abc import Iterator

import pytest

from tests.ray.stack import Cluster, short


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with short() as folder:
        cluster = Cluster(folder)
        yield cluster
        cluster.close()
