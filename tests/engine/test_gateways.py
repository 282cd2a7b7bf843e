"""An engine's socket: who is connected, and what happens to those who cannot be understood."""

from contextlib import ExitStack, contextmanager

import pytest
import zmq

from engine.gateways import Gateways
from engine.wire.encoding import encode
from engine.wire.messages import AbortRequests, Heartbeat, Hello
from tests.engine.test_process import make_config

HELLO = encode(0, Hello(gateway_id="gw"))


@contextmanager
def listening(directory):
    """Gateways without one, those that were lost, and a function that connects another socket."""
    lost = []
    folder = directory / "engine"
    folder.mkdir()
    gateways = Gateways(make_config(directory), lost.append)
    with zmq.Context() as context, ExitStack() as sockets:

        def connect(name):
            socket = sockets.enter_context(context.socket(zmq.DEALER))
            socket.setsockopt(zmq.IDENTITY, name.encode())
            socket.setsockopt(zmq.RCVTIMEO, 10_000)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{folder / 'engine.sock'}")
            return socket

        yield gateways, lost, connect
    gateways.close()


def greet(gateways, socket):
    socket.send(HELLO)
    ((name, message),) = gateways.receive(10_000)
    assert isinstance(message, Hello)
    return name


@pytest.mark.parametrize(
    "frame",
    [b"", b"x", HELLO[:1] + b"\xff" * 9, HELLO[:-1], HELLO[:9] + b"\xc8", HELLO[:1] + bytes(99),
     encode(2, Heartbeat())],
)  # fmt: skip
def test_frames_that_are_no_messages_hurt_nobody_but_their_sender(tmp_path, frame):
    with listening(tmp_path) as (gateways, lost, connect):
        good, bad = connect("good"), connect("bad")
        greet(gateways, good)
        greet(gateways, bad)
        bad.send(frame)
        assert list(gateways.receive(10_000)) == []
        assert (lost, len(gateways)) == (["bad"], 1)
        assert bad.recv() != encode(0, Heartbeat()), "with this number it begins anew"
        message = AbortRequests(request_ids=("r1",))
        good.send(encode(1, message))
        assert list(gateways.receive(10_000)) == [("good", message)]
        greet(gateways, bad)


def test_a_message_that_cannot_be_sent_ends_its_gateways_connection(tmp_path):
    with listening(tmp_path) as (gateways, lost, connect):
        gateways.send(greet(gateways, connect("gw")), Hello(gateway_id=object()))
        assert (lost, len(gateways)) == (["gw"], 0)


def test_a_gateway_that_says_hello_again_has_lost_what_it_had_before(tmp_path):
    with listening(tmp_path) as (gateways, lost, connect):
        socket = connect("gw")
        for times in range(3):
            greet(gateways, socket)
            assert (lost, len(gateways)) == (["gw"] * times, 1)


def test_two_gateways_at_a_time_are_relays_in_turn(tmp_path):
    with listening(tmp_path) as (gateways, _, connect):
        assert gateways.next_relays() == []
        names = [greet(gateways, connect(name)) for name in "abc"]
        turns = [gateways.next_relays() for _ in names]
    assert turns == [["a", "b"], ["c", "a"], ["b", "c"]]
