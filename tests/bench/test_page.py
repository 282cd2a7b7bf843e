"""The page of benchmarks says what the newest rows say."""

from pathlib import Path

import pytest

from bench import page

ROWS = [
    {"bench": "flight", "setup": {"wings": 2}, "result": {"speed": 1}},
    {"bench": "flight", "setup": {"wings": 4}, "result": {"speed": 2}},
    {"bench": "flight", "setup": {"wings": 2}, "result": {"speed": 3}},
]


def test_the_newest_row_with_a_setup_counts() -> None:
    assert page.result(ROWS, "flight", {"wings": 2}) == {"speed": 3}
    assert page.result(ROWS, "flight", {"wings": 4}) == {"speed": 2}


def test_a_figure_that_no_row_has_is_an_error() -> None:
    with pytest.raises(LookupError, match="no row of flight"):
        page.result(ROWS, "flight", {"wings": 6})
    with pytest.raises(LookupError):
        page.render(ROWS)


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (106.1, 3, "106"),
        (99.96, 3, "100"),
        (37.4, 3, "37.4"),
        (5793.0, 4, "5,793"),
        (0.06273, 2, "0.063"),
        (4.0, 2, "4.0"),
    ],
)
def test_figures_have_significant_digits(number: float, digits: int, text: str) -> None:
    assert page.significant(number, digits) == text


def test_the_check_fails_where_a_row_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.md"
    assert page.main(["--check"], path) == 1
    assert "make reference" in capsys.readouterr().err
    assert page.main([], path) == 0
    assert page.main(["--check"], path) == 0


def test_the_readmes_figures_are_those_of_the_newest_rows() -> None:
    rows = page.read_rows(page.FOLDER / "results")
    float32 = {"precision": "float32", "adapters": 16}
    burst = "output_tokens_per_cpu_s"
    chorale = page.result(rows, "engine", {"system": "Chorale, C"} | float32)[burst]
    peers = [
        page.result(rows, "peers", {"system": system} | float32)[burst]
        for system in ("OpenVINO GenAI", "transformers + PEFT", "llama.cpp server")
    ]
    count = page.result(rows, "adapters.count", {})
    thousand, renamed = count["zipf"]["1000"], count["renamed"]
    storm = page.result(rows, "adapters.storm", {})["prefetches"]
    fair = page.result(rows, "scheduling.fairness", {})
    shares = page.result(rows, "grammar.shares", {})
    gateway = page.result(rows, "gateway.overhead", {})
    shown = page.significant
    expected = [
        (shown(chorale), f"{shown(peers[0])} OpenVINO, {shown(peers[1])} transformers + PEFT, "
         f"{shown(peers[2])} llama.cpp"),
        (f"{shown(thousand['output_tokens_per_s'])} tokens/s",
         f"{shown(renamed['output_tokens_per_s'])} when"),
        (f"{storm['storm']['itl_p99_ms']} ms", f"{storm['beside']['itl_p99_ms']} ms without"),
        (f"{shown(fair['vtc']['service_large_to_small'], 2)} times",
         f"{shown(fair['fcfs']['service_large_to_small'])} times"),
        (shown(shares["100"]["tokens_per_cpu_s"]),
         f"{shown(shares['0']['tokens_per_cpu_s'])} without"),
        (f"{shown(gateway['ours']['added_ms']['p50'], 2)} ms",
         f"{shown(gateway['litellm']['added_ms']['p50'])} ms LiteLLM"),
    ]  # fmt: skip
    readme = (page.PAGE.parents[2] / "README.md").read_text()
    section = readme.partition("## How fast it is")[2].partition("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    for row, (ours, theirs) in zip(table[1:], expected, strict=True):
        assert row[1].startswith(ours), row
        assert row[2].startswith(theirs), row
