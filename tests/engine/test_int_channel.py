"""Rows of numbers arrive whole and in order, or the channel reports that the other end is gone."""

import contextlib
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, lists

from engine.ranks import int_channel
from engine.ranks.int_channel import MAX_NUMBERS, ChannelClosed, IntChannel

NUMBERS = integers(-(1 << 63), (1 << 63) - 1)


@contextlib.contextmanager
def connected():
    """A channel, and the socket at its other end."""
    here, there = socket.socketpair()
    with here, there:
        yield IntChannel(here), there


@given(lists(lists(NUMBERS, max_size=40), max_size=5))
@settings(max_examples=100, deadline=None)
def test_rows_arrive_as_they_were_sent(rows):
    with connected() as (channel, there):
        other = IntChannel(there)
        for row in rows:
            channel.send(row)
        assert [list(other.receive()) for _ in rows] == rows


def test_a_row_larger_than_any_buffer_arrives_whole():
    row = list(range(1 << 20))
    with connected() as (channel, there):
        thread = threading.Thread(target=channel.send, args=(row,))
        thread.start()
        assert list(IntChannel(there).receive()) == row
        thread.join()


def test_an_end_that_is_gone_is_told_when_sending_and_when_waiting():
    with connected() as (channel, there):
        there.close()
        with pytest.raises(ChannelClosed):
            channel.receive()
        with pytest.raises(ChannelClosed):
            channel.send([1])


def test_a_row_that_is_cut_short_is_none():
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
        there.sendall((8 * MAX_NUMBERS + 8).to_bytes(8, "little"))
        with pytest.raises(ChannelClosed, match="a row of"):
            channel.receive()


class SendsBeforeItReads(socket.socket):
    """A socket on which another thread sends a row just before the first one waits for its own."""

    def recv_into(self, *arguments):
        if not hasattr(self, "has_sent"):
            self.has_sent = True
            IntChannel.send(self.channel, [7])
        return super().recv_into(*arguments)


def test_a_row_that_is_sent_leaves_the_receivers_time_limit_as_it_is(monkeypatch):
    monkeypatch.setattr(int_channel, "_SEND_TIMEOUT_S", 0.05)
    here, there = socket.socketpair()
    with there, SendsBeforeItReads(fileno=here.detach()) as busy:
        busy.channel = IntChannel(busy)
        answered = threading.Timer(0.3, lambda: IntChannel(there).send([9]))
        answered.start()
        assert list(busy.channel.receive()) == [9]
        answered.join()
        assert list(IntChannel(there).receive()) == [7]
