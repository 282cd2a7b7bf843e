from types import SimpleNamespace

import pytest

from server.api.metrics import Metrics
from server.api.neighbours import Neighbours, merge
from server.pool.control_files import gateway_socket
from tests.server.bases import figures_only


def make_metrics(num_gets):
    metrics = Metrics(figures_only(), SimpleNamespace(lags={}))
    metrics.requests.labels("GET", "/ready", "200").inc(num_gets)
    return metrics


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with paths that are short enough for sockets."""
    monkeypatch.chdir(tmp_path)
    return tmp_path.relative_to(tmp_path)


async def test_each_tells_the_figures_of_all_and_how_many_are_missing(folder):
    gateways = [Neighbours(folder, number, 3, make_metrics(number)) for number in (1, 2)]
    for gateway in gateways:
        await gateway.start()
    gateway_socket(folder, 3).touch()  # of one that was killed
    texts = [(await gateway.render()).decode() for gateway in gateways]
    await gateways[1].close()
    texts.append((await gateways[0].render()).decode())
    await gateways[0].close()
    *both, alone = texts
    rest = 'method="GET",route="/ready",status="200"}'
    first = f'chorale_http_requests_total{{gateway="gateway",{rest} 1.0'
    second = f'chorale_http_requests_total{{gateway="gateway-2",{rest} 2.0'
    for text in both:
        assert first in text
        assert second in text
        assert text.count("# TYPE chorale_http_requests_total counter") == 1
        assert "chorale_gateways_missing 1.0" in text
    assert second not in alone
    assert "chorale_gateways_missing 2.0" in alone


def test_families_of_several_become_one_with_a_label():
    text = '# HELP a b\n# TYPE a gauge\na 1.0\na{x="{y} z"} 2.0\n'
    assert merge({"p": text, "q": "# HELP a b\n# TYPE a gauge\na 3.0\n"}) == (
        '# HELP a b\n# TYPE a gauge\na{gateway="p"} 1.0\na{gateway="p",x="{y} z"} 2.0\n'
        'a{gateway="q"} 3.0\n'
    )
