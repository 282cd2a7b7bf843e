"""A gateway with the console, in this process, and visitors."""

from collections.abc import Callable

import pytest

from tests.server.console.browsing import Visitor
from tests.server.in_process import ADMIN_KEY, InProcess, User


@pytest.fixture(scope="module")
def product(shared_product: InProcess) -> InProcess:
    return shared_product


@pytest.fixture
def signed_in(product: InProcess) -> Callable[[User], Visitor]:
    """A function that gives a visitor who has signed in with a user's key."""

    def sign_in(user: User) -> Visitor:
        visitor = Visitor(product)
        assert visitor.sign_in(user.api_key).status_code == 303
        return visitor

    return sign_in


@pytest.fixture
def operator(product: InProcess) -> Visitor:
    visitor = Visitor(product)
    assert visitor.sign_in(ADMIN_KEY).status_code == 303
    return visitor
