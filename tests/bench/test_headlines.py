"""Each headline at a tiny size: it gives figures, ratios fit the figures, and it is drawn."""

import json
from types import SimpleNamespace

import pytest

from bench.experiment import replace_rows, row
from bench.headlines.batching import Batching
from bench.headlines.goodput import Goodput, best_rate, is_good
from bench.headlines.kv_use import KVUse
from bench.headlines.shared_prefix import SharedPrefix
from bench.outcome import Outcome

EXPERIMENTS = {
    "batching": Batching(
        stack="tiny", requests=7, output_tokens=(1, 30), static_batch=3, max_model_len=256
    ),
    "shared-prefix": SharedPrefix(stack="tiny", requests=7, prompt_tokens=133, shared_tokens=96),
    "goodput": Goodput(stack="tiny", rates=(20.0, 40.0), window_s=0.2, prompt_tokens=(3, 9)),
}


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    return {name: row(f"headlines.{name}", e) for name, e in EXPERIMENTS.items()}


@pytest.fixture
def results(rows) -> dict[str, dict]:
    return {name: json.loads(line)["result"] for name, line in rows.items()}


def make_outcome(*chunk_s: float) -> Outcome:
    return Outcome(
        index=0,
        model="base",
        num_prompt_tokens=7,
        due_s=1.0,
        sent_s=1.0,
        end_s=9.0,
        chunk_s=chunk_s,
        token_ids=(1,) * len(chunk_s),
    )


def test_continuous_batching_is_compared_with_the_same_requests_sent_otherwise(results) -> None:
    result = results["batching"]
    speeds = result["output_tokens_per_s"]
    for name in ("one_at_a_time", "static", "continuous_same_size"):
        expected = speeds["continuous"] / speeds[name]
        assert result["continuous_to"][name] == pytest.approx(expected, rel=1e-2)


def test_blocks_waste_less_than_reservations(results) -> None:
    kv = results["batching"]["kv"]
    assert 0 < kv["waste"]["paged"] < kv["waste"]["to_own_length"] < kv["waste"]["to_max_model_len"]
    assert len({len(points) for points in kv["tokens"].values()}) == 1


def test_waste_is_what_was_taken_and_not_written_over_the_whole_run() -> None:
    def request(written: int, blocks: int) -> SimpleNamespace:
        return SimpleNamespace(
            num_computed_tokens=written,
            block_ids=[0] * blocks,
            num_prompt_tokens=10,
            max_tokens=30,
        )

    def core(*running: SimpleNamespace) -> SimpleNamespace:
        layout, queues = SimpleNamespace(block_size=16), SimpleNamespace(running=running)
        return SimpleNamespace(scheduler=SimpleNamespace(layout=layout, queues=queues))

    use = KVUse(max_model_len=100)
    use.sample(core(request(written=8, blocks=1)))
    use.sample(core(request(written=16, blocks=1), request(written=20, blocks=2)))
    summary = use.summary()
    assert summary["waste"]["paged"] == pytest.approx(1 - 44 / 64, rel=1e-3)
    assert summary["waste"]["to_own_length"] == pytest.approx(1 - 44 / 120, rel=1e-3)
    assert summary["waste"]["to_max_model_len"] == pytest.approx(1 - 44 / 300, rel=1e-3)


def test_a_shared_prefix_is_computed_once(results) -> None:
    result = results["shared-prefix"]
    cached, without = result["cached"], result["without_cache"]
    assert without["computed_prompt_tokens"] == 7 * 133
    assert cached["computed_prompt_tokens"] == 7 * 133 - 6 * 96
    gain = cached["requests_per_s"] / without["requests_per_s"]
    assert result["gain"] == pytest.approx(gain, rel=1e-2)


def test_goodput_is_measured_at_every_rate_in_every_way_of_sending(results) -> None:
    result = results["goodput"]
    assert set(result["curves"]) == {"continuous", "static", "one_at_a_time"}
    for curve in result["curves"].values():
        slow, fast = curve
        assert slow["sent_per_s"] < fast["sent_per_s"]
        assert all(p["good_per_s"] <= p["sent_per_s"] for p in curve)


@pytest.mark.parametrize(
    ("chunk_s", "expected"),
    [
        ((), False),  # never began
        ((2.0,), True),
        ((2.1,), False),  # 1.1 s after it was due
        ((2.0, 2.05, 2.19), True),  # the mean counts
        ((2.0, 2.05, 2.21), False),
    ],
)
def test_a_good_request_keeps_both_limits(chunk_s: tuple[float, ...], expected: bool) -> None:
    assert is_good(make_outcome(*chunk_s), ttft_limit_s=1.0, tpot_limit_s=0.1) is expected


def test_the_best_rate_is_the_highest_at_which_enough_requests_are_good() -> None:
    shares = ((2.0, 1.0), (3.8, 0.95), (5.0, 0.5))
    curve = [{"good_per_s": good, "good_share": share} for good, share in shares]
    assert best_rate(curve, attainment=0.9) == 3.8
    assert best_rate(curve[2:], attainment=0.9) == 0.0


def test_every_row_is_drawn_and_the_same_row_the_same_way(rows, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from bench.headlines.plots import draw_all

    path = tmp_path / "headlines.jsonl"
    replace_rows(path, list(rows.values()))
    drawn = {picture.name: picture.read_text() for picture in draw_all(path)}
    names = ("batching", "kv", "shared-prefix", "goodput")
    assert list(drawn) == [f"headlines-{name}.svg" for name in names]
    assert drawn == {picture.name: picture.read_text() for picture in draw_all(path)}
