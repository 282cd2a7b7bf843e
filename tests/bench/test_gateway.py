"""The gateway's benchmark at a tiny size, and the client that counts its answers."""

import json

import pytest

from bench.gateway.__main__ import row
from bench.gateway.commits import Commits
from bench.gateway.http_client import _Connection
from bench.gateway.overhead import Overhead
from bench.gateway.streams import Streams
from bench.gateway.traced import Traced
from bench.gateway.watched import Watched


def measure(measurement):
    return json.loads(row("test", measurement))["result"]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_counted_however_their_bytes_come(size):
    events = b"".join(b'10\r\ndata: {"text": "%d"}\n\n\r\n' % i for i in range(5))
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + events
    answer += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    seen = []
    connection = _Connection()
    connection._begin(seen.append)
    for start in range(0, len(answer), size):
        connection.data_received(answer[start : start + size])
    assert sum(seen) == 5


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_what_a_gateway_adds_is_measured_beside_the_engine_alone():
    result = measure(Overhead(rate=5, duration_s=2, max_tokens=3, first_rate=2, attempt_s=1))
    ours, engine = result["ours"], result["engine"]
    assert ours["requests"] == engine["requests"] == 10
    added = ours["latency_ms"]["p50"] - engine["latency_ms"]["p50"]
    assert ours["added_ms"]["p50"] == pytest.approx(added, rel=1e-2)
    assert ours["held_per_s"] >= 2
    assert ours["server_cpu_us_per_request"] > 0


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_streams_of_a_paced_engine_reach_their_clients():
    result = measure(Streams(streams=7, window_s=1.0, max_tokens=200))
    assert 0 < result["engine"]["events_per_s"] <= 7 * 20 * 1.1
    assert result["ours"]["was_whole"]
    assert result["ours"]["lost_share"] < 0.5


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_gateway_is_measured_alone_and_watched_by_turns():
    result = measure(Watched(rate=5, duration_s=2, rounds=2, max_tokens=3, page_s=0.1))
    alone, watched = (sorted(result[name]) for name in ("alone_p50_ms", "watched_p50_ms"))
    assert result["added_p50_ms"] == pytest.approx(sum(watched) / 2 - sum(alone) / 2, abs=0.01)
    assert all(min(looks.values()) > 1 for looks in result["looks"])


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_gateway_is_measured_with_traces_and_without_by_turns():
    result = measure(Traced(rate=5, duration_s=2, rounds=1, max_tokens=3))
    on, off = (result["cpu_us_per_request"][name][0] for name in ("on", "off"))
    assert result["on_to_off"] == pytest.approx(on / off, rel=1e-2)
    assert 0 < result["code_us_when_off"] < off


@pytest.mark.soak
def test_commits_are_measured_on_every_database():
    result = measure(Commits(commits=5))
    assert min(figures["p50"] for figures in result.values()) > 0
