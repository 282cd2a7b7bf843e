"""A server of fixed answers, those of the test's module, and the command line against it."""

import pytest

from tests.server.fake_api import Api, fixed, make_run


@pytest.fixture
def api(request):
    api = Api(fixed(request.module.ANSWERS))
    yield api
    api.close()


@pytest.fixture
def run(api, monkeypatch, tmp_path):
    return make_run(api.url, monkeypatch, tmp_path)
