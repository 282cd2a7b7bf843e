"""Each measurement of the registry at a tiny size: it gives figures, and ratios fit the figures."""

import json

import pytest

from bench.experiment import row
from bench.registry.__main__ import EXPERIMENTS
from bench.registry.listing import Listing
from bench.registry.servable import Servable
from bench.registry.upload import Upload
from bench.registry.validation import Validation


def measure(experiment):
    return json.loads(row("registry.test", experiment))["result"]


def test_a_check_is_measured_beside_hashing_the_same_file() -> None:
    result = measure(Validation(stack="tiny", rank=8, repeats=1))
    beside = result["check_s_per_100mb"] / result["sha256_s_per_100mb"]
    assert result["check_to_sha256"] == pytest.approx(beside, rel=1e-2)
    assert result["peak_rss_mb"] > 0


@pytest.mark.parametrize(
    "way",
    [
        "gateway to folder",
        pytest.param("gateway to bucket", marks=pytest.mark.soak),
        pytest.param("presigned to bucket", marks=pytest.mark.soak),
    ],
)
def test_an_upload_is_measured_beside_a_plain_copy_of_it(way: str) -> None:
    result = measure(Upload(stack="tiny", rank=8, repeats=1, ways=(way,), arena_bytes=64 << 20))
    figures = result[way]
    seconds = figures["seconds"]
    assert figures["transfer_to_copy"] == pytest.approx(
        seconds["transfer"] / seconds["copy"], rel=1e-2
    )
    total_s = seconds["transfer"] + seconds["completion"]
    assert figures["total_to_copy"] == pytest.approx(total_s / seconds["copy"], rel=1e-2)
    assert 0 < seconds["of_it_proof"] < seconds["completion"]
    memory = figures["peak_rss_mb"]
    assert 0 < memory["gateway_before"] <= memory["gateway"]
    assert 0 < memory["validator"] < memory["gateway"]


def test_the_first_token_of_an_upload_is_the_end_of_its_parts() -> None:
    result = measure(
        Servable(stack="tiny", rank=8, repeats=1, num_streams=2, stream_tokens=64, quiet_s=0.2)
    )
    for figures in (result["idle"], result["beside_streams"]):
        parts = sum(figures[f"{name}_s"] for name in ("transfer", "check", "proof", "first_token"))
        assert figures["total_s"] == pytest.approx(parts, rel=1e-2)
    noticed = result["beside_streams"]["streams"]
    quiet, proving = noticed["quiet_itl_ms"], noticed["proving_itl_ms"]
    assert min(quiet["gaps"], proving["gaps"]) > 0
    assert noticed["proving_to_quiet"]["p50"] == pytest.approx(
        proving["p50"] / quiet["p50"], rel=1e-2
    )


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)])
def test_pages_of_many_adapters_are_measured_beside_pages_of_a_few(database: str) -> None:
    result = measure(Listing(many=60, few=20, requests=3, databases=(database,)))
    for figures in result[database].values():
        of_many, of_few = figures["many"]["p50"], figures["few"]["p50"]
        assert figures["p50_many_to_few"] == pytest.approx(of_many / of_few, rel=1e-2)


def test_the_rows_are_about_what_the_issue_asks_for() -> None:
    assert EXPERIMENTS["listing"].many == 100_000
    assert EXPERIMENTS["upload_2gb"].repeats == 1
