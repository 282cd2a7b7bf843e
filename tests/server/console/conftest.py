"""A gateway with the console, in this process, and visitors."""

import pytest

from tests.server.console.browsing import SignIn, Visitor
from tests.server.in_process import InProcess, User, product_of_file

product = product_of_file


@pytest.fixture
def signed_in(product: InProcess) -> SignIn:
    def sign_in(user: User) -> Visitor:
        visitor = Visitor(product)
        assert visitor.sign_in(user.api_key).status_code == 303
        return visitor

    return sign_in


@pytest.fixture
def visitor(acme: User, signed_in: SignIn) -> Visitor:
    """A visitor who has signed in as acme."""
    return signed_in(acme)


@pytest.fixture
def operator(product: InProcess, signed_in: SignIn) -> Visitor:
    return signed_in(product.operator)
