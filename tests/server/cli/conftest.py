"""A server of fixed answers, those of the test's module, and the command line against it."""

import contextlib

import pytest

from tests.server.fake_api import Api, fixed, make_run


@pytest.fixture
def make_api():
    """A function that starts a server of a handler, which ends with the test."""
    with contextlib.ExitStack() as apis:
        yield lambda handle: apis.enter_context(contextlib.closing(Api(handle)))


@pytest.fixture
def api(make_api, request):
    return make_api(fixed(request.module.ANSWERS))


@pytest.fixture
def run(api, monkeypatch, tmp_path):
    return make_run(api.url, monkeypatch, tmp_path)
