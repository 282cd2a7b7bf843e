"""A base model that sleeps: which requests wake it, and what is charged if that is in vain."""

from dataclasses import replace

import pytest

from server.limits.memory import MemoryLimiter
from server.pool.control_files import WantedEngines
from server.pool.keeper import Keeper
from server.pool.pool_settings import PoolSettings
from tests.server.bases import change_base
from tests.server.factories import NOW_MS, limit_budget
from tests.server.in_process import InProcess

CONFIG = PoolSettings(model="base", sleep_after_s=60.0, wake_timeout_s=0.0)
LONG_CHAT = [{"role": "user", "content": "Good day to you. " * 300}]


class Sleep:
    """The clock of a keeper whose model sleeps in the beginning."""

    def __init__(self, product, tmp_path):
        self.product, self.now_s = product, 0.0
        self.home = tmp_path / "home"
        self.home.mkdir()
        base = product.gateway.bases.default
        keeper = Keeper(base.engines, base.running, self.home, CONFIG, lambda: self.now_s)
        change_base(product.gateway, keeper=keeper)
        product.gateway = replace(product.gateway, limiter=MemoryLimiter(lambda: NOW_MS))
        self.pass_time(60)
        assert self.state == "asleep"
        product.engines.is_ready = False

    @property
    def keeper(self):
        return self.product.gateway.bases.default.keeper

    @property
    def state(self):
        return self.keeper.state

    def pass_time(self, seconds):
        self.now_s += seconds
        self.keeper.turn()


@pytest.fixture
def sleep(product: InProcess, tmp_path):
    return Sleep(product, tmp_path)


def over_its_limit(product):
    user = product.user("busy", requests_per_minute=1)
    assert user.call("POST", "/tokenize", {"model": "base", "prompt": "Hi"}).status_code == 200
    return user, {}


def without_money(product):
    user = product.user("poor")
    limit_budget(product.gateway.database, user.tenant_id, 9)
    return user, {}


def too_long(product):
    return product.user("long"), {"messages": LONG_CHAT}


REFUSED = [
    (over_its_limit, "rate_limit_exceeded"),
    (without_money, "insufficient_quota"),
    (too_long, "context_length_exceeded"),
]


def chat(user, **changes):
    ask = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}
    return user.call("POST", "/v1/chat/completions", ask | changes)


@pytest.mark.parametrize("is_length_known", [True, False])
@pytest.mark.parametrize(("whose", "code"), REFUSED)
def test_a_request_that_is_refused_wakes_nothing(sleep, product, whose, code, is_length_known):
    if not is_length_known:  # no engine has said how long a prompt may be
        product.engines.welcome = None
    user, changes = whose(product)
    answer = chat(user, **changes)
    assert answer.json()["error"]["code"] == code
    assert (sleep.state, WantedEngines(sleep.home).latest()) == ("asleep", 0)


@pytest.mark.parametrize(("whose", "code"), REFUSED)
def test_requests_that_are_refused_keep_nothing_awake(sleep, product, whose, code):
    product.engines.is_ready = True
    sleep.keeper.open()
    user, changes = whose(product)
    for _ in range(7):
        assert chat(user, **changes).json()["error"]["code"] == code
        sleep.pass_time(10)
    assert (sleep.state, WantedEngines(sleep.home).latest()) == ("asleep", 0)


def test_what_an_engine_that_wakes_says_of_the_length_counts(sleep, product):
    welcome, product.engines.welcome = product.engines.welcome, None
    ask = {"model": "base", "prompt": [5] * 600, "max_tokens": 9}
    user = product.user("good", requests_per_minute=1)
    assert user.call("POST", "/v1/completions", ask).json()["error"]["code"] == "model_waking"
    product.engines.welcome, product.engines.is_ready = welcome, True
    sleep.pass_time(1)
    answer = user.call("POST", "/v1/completions", ask)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("is_long", [False, True])
def test_a_request_that_may_run_wakes_it_and_has_nothing_charged_if_that_takes_long(
    sleep, product, is_long
):
    user = product.user("good", requests_per_minute=3, max_concurrency=1)
    content = "Good day to you. " * 300 if is_long else "Hello"
    ask = {"model": "base", "prompt": content, "max_tokens": 9, "truncate_prompt_tokens": 9}
    for _ in range(4):
        answer = user.call("POST", "/v1/completions", ask)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_waking")
    assert (sleep.state, WantedEngines(sleep.home).latest()) == ("awake", 1)
    product.engines.is_ready = True
    sleep.pass_time(1)
    answer = user.call("POST", "/v1/completions", ask)
    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-remaining-requests"] == "2"
    sleep.pass_time(59)
    assert sleep.state == "awake", "a request that was served is one that was asked"
