"""One trace goes through gateway, engine, fetcher and settler, in processes of their own."""

from pathlib import Path

from tests.e2e.stack import running
from tests.server.traces.collector import collecting

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_request_for_a_cold_adapter_is_one_trace_to_its_settlement(
    tiny_model: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    with collecting() as collector:
        with running(tmp_path / "stack", tiny_model, otlp_endpoint=collector.url) as stack:
            tenant = stack.tenant("acme")
            tenant.push("alpha", tiny_adapters["alpha"])
            stack.restart_cold()
            # The next fetcher starts while the request goes on to the engine, where it has to wait.
            stack.kill("fetcher")
            body = {"model": "alpha", "prompt": [5, 6, 7], "max_tokens": 4}
            answer = tenant.http.post("/v1/completions", json=body, headers={"traceparent": CALLER})
            assert answer.status_code == 200, answer.text
            stack.settled_events(1)
        # The gateway sends what waits when it ends.
        (root,) = [root for root in collector.roots() if root.name.startswith("text_completion")]
    assert answer.headers["traceparent"] == f"00-{root.trace_id}-{root.span_id}-01"
    assert (root.trace_id, root.parent_id) == tuple(CALLER.split("-")[1:3])
    assert root.names == ["admission", "engine", "settle"]
    engine = root.part("engine")
    assert engine.names == ["load", "queue", "prefill", "decode"]
    load = engine.part("load")
    assert (load.attributes["chorale.load_tier"], load.names) == ("store", ["fetch"])
    assert 0 < load.part("fetch").seconds <= load.seconds
    assert root.part("settle").began_ns >= engine.began_ns
