"""Values arrive whole and in order, or the channel reports that the other end is gone."""

import contextlib
import threading

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, lists, none, recursive, text

from engine.ranks import channel as channels
from engine.ranks.channel import Channel, ChannelClosed

VALUES = recursive(none() | booleans() | integers() | text(), lambda some: lists(some).map(tuple))


@contextlib.contextmanager
def connected():
    """A channel, and the connection at its other end."""
    channel, there = Channel.pair()
    with channel._end, there:
        yield channel, there


@given(lists(VALUES, max_size=5))
@settings(max_examples=100, deadline=None)
def test_values_arrive_as_they_were_sent(values):
    with connected() as (channel, there):
        for value in values:
            channel.send(value)
        assert [Channel(there).receive() for _ in values] == values


def test_a_value_larger_than_any_buffer_arrives_whole():
    value = list(range(1 << 20))
    with connected() as (channel, there):
        thread = threading.Thread(target=channel.send, args=(value,))
        thread.start()
        assert Channel(there).receive() == value
        thread.join()


def test_an_end_that_is_gone_is_told_when_sending_and_when_waiting():
    with connected() as (channel, there):
        there.close()
        with pytest.raises(ChannelClosed, match="ended"):
            channel.receive()
        with pytest.raises(ChannelClosed):
            channel.send(1)


def test_who_does_not_answer_in_time_counts_as_gone():
    with connected() as (channel, _), pytest.raises(ChannelClosed, match="timed out"):
        channel.receive(timeout_s=0.01)


def test_a_value_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(channels, "_MOST_BYTES", 30)
    with connected() as (channel, there):
        there.send_bytes(bytes(31))
        with pytest.raises(ChannelClosed):
            channel.receive()
