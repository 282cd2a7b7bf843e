"""Messages arrive whole and in order, or the channel reports that the other end is gone."""

import contextlib
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis.strategies import binary, lists

from engine.ranks import channel as channels
from engine.ranks.channel import MAX_BYTES, Channel, ChannelClosed


@contextlib.contextmanager
def connected():
    """A channel, and the socket at its other end."""
    here, there = socket.socketpair()
    with here, there:
        yield Channel(here), there


@given(lists(binary(max_size=99), max_size=5))
@settings(max_examples=100, deadline=None)
def test_messages_arrive_as_they_were_sent(messages):
    with connected() as (channel, there):
        other = Channel(there)
        for message in messages:
            channel.send(message)
        assert [other.receive() for _ in messages] == messages


def test_a_message_larger_than_any_buffer_arrives_whole():
    message = bytes(range(256)) * (1 << 15)
    with connected() as (channel, there):
        thread = threading.Thread(target=channel.send, args=(message,))
        thread.start()
        assert Channel(there).receive() == message
        thread.join()


def test_an_end_that_is_gone_is_told_when_sending_and_when_waiting():
    with connected() as (channel, there):
        there.close()
        with pytest.raises(ChannelClosed):
            channel.receive()
        with pytest.raises(ChannelClosed):
            channel.send(b"1")


def test_a_message_that_is_cut_short_is_none():
    with connected() as (channel, there):
        there.sendall((24).to_bytes(8, "little") + bytes(16))
        there.close()
        with pytest.raises(ChannelClosed, match="ended"):
            channel.receive()


def test_who_does_not_answer_in_time_counts_as_gone():
    with connected() as (channel, _), pytest.raises(ChannelClosed, match="timed out"):
        channel.receive(timeout_s=0.01)


def test_a_length_beyond_the_limit_is_refused_before_it_is_allocated():
    with connected() as (channel, there):
        there.sendall((MAX_BYTES + 1).to_bytes(8, "little"))
        with pytest.raises(ChannelClosed, match="a message of"):
            channel.receive()


class SendsBeforeItReads(socket.socket):
    """A socket on which another thread sends just before the first one waits for its own."""

    def recv_into(self, *arguments):
        if not hasattr(self, "has_sent"):
            self.has_sent = True
            Channel.send(self.channel, b"7")
        return super().recv_into(*arguments)


def test_a_message_that_is_sent_leaves_the_receivers_time_limit_as_it_is(monkeypatch):
    monkeypatch.setattr(channels, "_SEND_TIMEOUT_S", 0.05)
    here, there = socket.socketpair()
    with there, SendsBeforeItReads(fileno=here.detach()) as busy:
        busy.channel = Channel(busy)
        answered = threading.Timer(0.3, lambda: Channel(there).send(b"9"))
        answered.start()
        assert busy.channel.receive() == b"9"
        answered.join()
        assert Channel(there).receive() == b"7"
