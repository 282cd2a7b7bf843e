"""The wire: every message survives it, and a lost one is noticed."""

import pytest

from engine.messages import AbortRequests, Heartbeat, Hello, RequestOutput, StepOutputs
from engine.wire import MessageLost, Numbering, read_vocabulary, write_vocabulary
from tests.engine.fakes import make_adapter, make_message

MESSAGES = [
    Hello(gateway_id="gw"),
    make_message(adapter=make_adapter(), stop=(b"\xff\n",), seed=2**63),
    AbortRequests(request_ids=("a", "b")),
    StepOutputs(outputs=(RequestOutput(request_id="r", seq=3, new_token_ids=(1, 2)),)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_is_the_same_after_the_wire(message):
    assert Numbering().decode(Numbering().encode(message)) == message


def test_a_gap_in_the_numbers_is_noticed():
    sender, receiver = Numbering(), Numbering()
    receiver.decode(sender.encode(Heartbeat()))
    sender.encode(Heartbeat())
    with pytest.raises(MessageLost):
        receiver.decode(sender.encode(Heartbeat()))


def test_the_vocabulary_is_handed_over_as_bytes(tmp_path):
    vocabulary = [b"", b"a", b"\xf0\x9f"]
    write_vocabulary(tmp_path / "vocabulary", vocabulary)
    assert read_vocabulary(tmp_path / "vocabulary") == vocabulary
