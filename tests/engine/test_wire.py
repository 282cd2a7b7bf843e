"""The wire format: every message decodes to itself, and a lost message is noticed."""

from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import (
    booleans,
    builds,
    fixed_dictionaries,
    floats,
    integers,
    lists,
    none,
    one_of,
    sampled_from,
    text,
    tuples,
)

from engine.wire import encoding as wire
from engine.wire.encoding import (
    NotSendable,
    Numbering,
    OtherWireVersion,
    WireError,
    decode,
    encode,
    read_vocabulary,
    write_vocabulary,
)
from engine.wire.messages import (
    ForgetDrafts,
    Heartbeat,
    Hello,
    RequestOutput,
    StepOutputs,
)
from engine.wire.records import EndRecord, JournalRecords, ResidencyRecord
from tests.engine.fakes import make_message

HEADER_BYTES = 10


def some(hint):
    """A value of a field of this type."""
    origin, of = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return next(some(each) for each in of if each is not type(None))
    if origin is Literal:
        return of[0]
    if origin is tuple:
        return (some(of[0]),) if of[1:] == (...,) else tuple(map(some, of))
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return hint(**{name: some(each) for name, each in get_type_hints(hint).items()})
    if hint is bytes:
        return b"\xff\n"
    return hint(1) if issubclass(hint, int | float) else hint("1")


def counted(value, numbers):
    """The value with numbers of other libraries in place of its own.   numbers: by kind."""
    if type(value) in numbers:
        return numbers[type(value)](value)
    if isinstance(value, tuple):
        parts = [counted(each, numbers) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value):
        fields = {f.name: counted(getattr(value, f.name), numbers) for f in dataclass_fields(value)}
        return replace(value, **fields)
    return value


NUMPY = {int: np.int64, float: np.float32, bool: np.bool_}
TORCH = {int: torch.tensor, float: torch.tensor, bool: torch.tensor}


@pytest.mark.parametrize(
    "message",
    [*map(some, wire.MESSAGES), ForgetDrafts(tenant_id="acme"), make_message(seed=2**63)],
    ids=lambda message: type(message).__name__,
)
def test_a_message_is_the_same_after_the_wire(message):
    assert Numbering().decode(Numbering().encode(message)) == message


@pytest.mark.parametrize("kind", wire.MESSAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("numbers", [NUMPY, TORCH], ids=["numpy", "torch"])
def test_every_number_of_every_message_is_sent_as_a_plain_one(kind, numbers):
    message = some(kind)
    assert encode(3, counted(message, numbers)) == encode(3, message)


def test_what_has_no_form_on_the_wire_is_said_with_the_message():
    for value in (object(), np.arange(2)):
        with pytest.raises(NotSendable, match="Hello: "):
            encode(0, Hello(gateway_id=value))


PLAIN = {int: integers(0, 2**32), float: floats(allow_nan=False), bool: booleans(), str: text()}


def values(hint):
    """The values of a field of this type."""
    origin, of = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return one_of(none() if each is type(None) else values(each) for each in of)
    if origin is Literal:
        return sampled_from(of)
    if origin is tuple:
        is_list = of[1:] == (...,)
        return lists(values(of[0]), max_size=2).map(tuple) if is_list else tuples(*map(values, of))
    return PLAIN[hint] if hint in PLAIN else builds(hint, **fields_of(hint))


def fields_of(kind):
    return {name: values(each) for name, each in get_type_hints(kind).items()}


FIELDS = fields_of(RequestOutput)
NEEDED = {name: FIELDS.pop(name) for name in ("request_id", "seq")}


@given(lists(fixed_dictionaries(NEEDED, optional=FIELDS), max_size=4))
def test_outputs_are_the_same_after_the_wire_with_any_fields_at_their_defaults(fields):
    message = StepOutputs(outputs=tuple(RequestOutput(**given) for given in fields))
    assert Numbering().decode(Numbering().encode(message)) == message


def test_an_output_of_an_engine_that_lacks_the_newest_fields_has_them_at_their_defaults():
    output = RequestOutput(request_id="r", seq=3, new_token_ids=(1, 2))
    for length in range(len(NEEDED), len(output) + 1):
        body = msgspec.msgpack.encode({"outputs": [output[:length]]})
        header = encode(0, StepOutputs(outputs=()))[:HEADER_BYTES]
        _, message = decode(header + body)
        known = RequestOutput(*output[:length])
        assert message == StepOutputs(outputs=(known,))


def test_a_message_of_another_version_is_refused_with_both_versions_and_what_to_do():
    frame = encode(0, Heartbeat())
    other = bytes([wire.WIRE_VERSION + 1]) + frame[1:]
    with pytest.raises(
        OtherWireVersion, match=r"version 2, .* reads version 1: run .* one release"
    ):
        decode(other)


def test_journal_records_of_both_kinds_come_in_the_order_of_their_numbers():
    records, end, residency = map(some, (JournalRecords, EndRecord, ResidencyRecord))
    ends = tuple(replace(end, seq=seq) for seq in (1, 3))
    sent = replace(records, ends=ends, residencies=(replace(residency, seq=2),))
    _, message = decode(encode(0, sent))
    assert [record.seq for record in message.records] == [1, 2, 3]


def test_a_gap_in_the_numbers_is_noticed():
    sender, receiver = Numbering(), Numbering()
    receiver.decode(sender.encode(Heartbeat()))
    sender.encode(Heartbeat())
    with pytest.raises(WireError, match="message 2 came where 1 was due"):
        receiver.decode(sender.encode(Heartbeat()))


def test_the_vocabulary_is_handed_over_as_bytes(tmp_path):
    vocabulary = [b"", b"a", b"\xf0\x9f"]
    write_vocabulary(tmp_path / "vocabulary", vocabulary)
    assert read_vocabulary(tmp_path / "vocabulary") == vocabulary
