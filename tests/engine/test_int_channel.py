"""Rows of numbers arrive whole and in order, or the channel reports that the other end is gone."""

import contextlib
import threading

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, lists

from engine.ranks import int_channel
from engine.ranks.int_channel import ChannelClosed, IntChannel

NUMBERS = integers(-(1 << 63), (1 << 63) - 1)


@contextlib.contextmanager
def connected():
    """A channel, and the connection at its other end."""
    channel, there = IntChannel.pair()
    with channel._end, there:
        yield channel, there


@given(lists(lists(NUMBERS, max_size=40), max_size=5))
@settings(max_examples=100, deadline=None)
def test_rows_arrive_as_they_were_sent(rows):
    with connected() as (channel, there):
        for row in rows:
            channel.send(row)
        assert [list(IntChannel(there).receive()) for _ in rows] == rows


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
        with pytest.raises(ChannelClosed, match="ended"):
            channel.receive()
        with pytest.raises(ChannelClosed):
            channel.send([1])


def test_who_does_not_answer_in_time_counts_as_gone():
    with connected() as (channel, _), pytest.raises(ChannelClosed, match="timed out"):
        channel.receive(timeout_s=0.01)


def test_a_row_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(int_channel, "MAX_NUMBERS", 3)
    with connected() as (channel, there):
        there.send_bytes(bytes(8 * 4))
        with pytest.raises(ChannelClosed):
            channel.receive()
