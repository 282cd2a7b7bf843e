"""One trace goes through gateway, engine, fetcher and settler, in processes of their own."""

from tests.e2e.faulty.conftest import World
from tests.server.traces.collector import Exported

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_request_for_a_cold_adapter_is_one_trace_to_its_settlement(world: World) -> None:
    lora = world.make_lora()
    world.s3.fail("delay", key=lora.key, times=1, seconds=0.5)
    answer = world.ask(lora.name, headers={"traceparent": CALLER})
    assert answer.status_code == 200, answer.text

    def traced() -> list[Exported]:
        return [root for root in world.collector.roots() if root.trace_id == CALLER.split("-")[1]]

    # The settlement's span comes with a later batch than the request's.
    world.stack.wait(lambda: [root for root in traced() if "settle" in root.names])
    (root,) = traced()
    assert answer.headers["traceparent"] == f"00-{root.trace_id}-{root.span_id}-01"
    assert (root.trace_id, root.parent_id) == tuple(CALLER.split("-")[1:3])
    assert root.names == ["admission", "engine", "settle"]
    engine = root.part("engine")
    assert engine.names == ["load", "queue", "prefill", "decode"]
    load = engine.part("load")
    assert (load.attributes["chorale.load_tier"], load.names) == ("store", ["fetch"])
    assert 0 < load.part("fetch").seconds <= load.seconds
    assert root.part("settle").began_ns >= engine.began_ns
