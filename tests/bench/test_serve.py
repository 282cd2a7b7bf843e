"""The command line of the serving benchmark."""

import pytest

from bench.measurement import describe, workloads
from bench.serve import parse_options
from bench.workload import Lengths


def parse(*arguments: str):
    return parse_options(arguments)


def test_a_running_server_needs_a_key(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.delenv("CHORALE_API_KEY", raising=False)
    with pytest.raises(SystemExit):
        parse("--url", "http://x")
    assert "CHORALE_API_KEY" in capsys.readouterr().err
    assert parse("--url", "http://x", "--key", "k").keys == ("k",)


def test_keys_are_one_for_all_models_or_one_for_each(capsys) -> None:
    assert parse("--url", "u", "--keys", "k,l", "--model-names", "a,b").keys == ("k", "l")
    with pytest.raises(SystemExit):
        parse("--url", "u", "--keys", "k,l", "--model-names", "a,b,c")
    assert "one key" in capsys.readouterr().err


def test_a_server_is_given_or_made_not_both(capsys) -> None:
    with pytest.raises(SystemExit):
        parse("--url", "u", "--key", "k", "--stack", "tiny")
    assert "not allowed" in capsys.readouterr().err


def test_every_rate_is_a_row_and_asks_something_else() -> None:
    options = parse("--stack", "tiny", "--rate", "inf,0.5", "--prompt-tokens", "3:9")
    burst, open_loop = workloads(options, "base", ("a", "b"), 63)
    assert (burst.rate, open_loop.rate) == (float("inf"), 0.5)
    assert burst.seed != open_loop.seed
    assert burst.prompt_tokens == Lengths(3, 9)


def test_a_setup_can_be_written_as_json_also_with_an_infinite_rate() -> None:
    (workload,) = workloads(parse("--stack", "tiny"), "base", ("a",), 63)
    assert describe(workload)["rate"] == "inf"


def test_settings_of_the_server_keep_their_types() -> None:
    options = parse("--stack", "tiny", "--set", "threads=2", "--set", "dtype=float32")
    assert options.settings == [("threads", 2), ("dtype", "float32")]


@pytest.mark.parametrize("rate", ["0", "-1", "fast", ""])
def test_a_rate_that_cannot_be_is_refused(rate: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse("--stack", "tiny", f"--rate={rate}")
    assert "--rate" in capsys.readouterr().err
