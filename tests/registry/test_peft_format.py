import hashlib
import io
import json
from contextlib import suppress

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from registry.errors import InvalidAdapter
from registry.formats.peft_format import (
    CHUNK_BYTES,
    CanonicalAdapter,
    ModuleScale,
    canonical_header,
    lora_names,
    open_canonical,
    read_header,
    split_lora_name,
    write_canonical,
)
from tests.registry.factories import encode, encode_header, make_tensor, parse_canonical

FOUR_FLOATS = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def read(data, **limits):
    return read_header(io.BytesIO(data), len(data), **limits)


def refused(data, **limits):
    with pytest.raises(InvalidAdapter) as caught:
        read(data, **limits)
    assert str(caught.value).endswith(".")
    return caught.value.code


def test_offsets_count_from_the_beginning_of_the_file():
    data = encode({"x": ("F32", (2, 2), b"0123456789abcdef")})
    info = read(data).tensors["x"]
    assert data[info.start : info.end] == b"0123456789abcdef"
    assert (info.dtype, info.shape, info.size_bytes) == ("F32", (2, 2), 16)


def test_tensors_come_in_the_order_of_their_bytes():
    header = {
        "late": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]},
        "early": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
    }
    assert list(read(encode_header(header, b"12345")).tensors) == ["early", "late"]


class CountingFile(io.BytesIO):
    asked_bytes = 0

    def read(self, size=-1):
        self.asked_bytes += size
        return super().read(size)


def test_a_header_that_claims_a_gigabyte_is_refused_without_reading_it():
    file = CountingFile((1 << 30).to_bytes(8, "little") + b"{}")
    with pytest.raises(InvalidAdapter) as caught:
        read_header(file, 2 << 30)
    assert caught.value.code == "header_too_large"
    assert file.asked_bytes == 8


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "truncated_file"),
        (b"\x10\0\0\0", "truncated_file"),
        (b"\x10\0\0\0\0\0\0\0{}", "truncated_file"),
        (b"\x80\x02}q\x00X\x05\0\0\0", "pickle_refused"),
        (b"PK\x03\x04\x14\0\0\0\0\0", "pickle_refused"),
        (encode_header(b" {}"), "invalid_header"),
        (encode_header(b"[]"), "invalid_header"),
        (encode_header(b"{"), "invalid_json"),
        (encode_header(b"{} x"), "invalid_json"),
        (encode_header(b'{"\xff": 1}'), "invalid_json"),
        (encode_header(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "invalid_json"),
        (encode_header(b'{"a": ' + b"9" * 5000 + b"}"), "invalid_json"),
        (encode_header(b'{"a": {}, "a": {}}'), "duplicate_key"),
        (encode_header(b'{"x": {"dtype": "F32", "dtype": "F32"}}'), "duplicate_key"),
        (encode_header({"__metadata__": {"a": 1}}), "invalid_header"),
        (encode_header({"__metadata__": "a"}), "invalid_header"),
        (encode_header({"x": 1}), "invalid_header"),
        (encode_header({"x": FOUR_FLOATS | {"more": 1}}, b"0" * 16), "invalid_header"),
        (encode_header({"x": FOUR_FLOATS | {"dtype": "F33"}}, b"0" * 16), "unsupported_dtype"),
        (encode_header({"x": FOUR_FLOATS | {"dtype": ["F32"]}}, b"0" * 16), "unsupported_dtype"),
        (encode_header({"x": FOUR_FLOATS | {"shape": [-2, -2]}}, b"0" * 16), "invalid_header"),
        (encode_header({"x": FOUR_FLOATS | {"shape": [True, 4]}}, b"0" * 16), "invalid_header"),
        (encode_header({"x": FOUR_FLOATS | {"shape": [1] * 9}}, b"0" * 16), "invalid_header"),
        (encode_header({"x": FOUR_FLOATS | {"shape": [2**62, 4]}}, b"0" * 16), "bad_offsets"),
        (encode_header({"x": FOUR_FLOATS | {"shape": [2, 3]}}, b"0" * 16), "bad_offsets"),
        (encode_header({"x": FOUR_FLOATS | {"data_offsets": [16, 0]}}, b"0" * 16), "bad_offsets"),
        (encode_header({"x": FOUR_FLOATS | {"data_offsets": [0]}}, b"0" * 16), "bad_offsets"),
        (encode_header({"x": FOUR_FLOATS | {"data_offsets": [-16, 0]}}, b"0"), "bad_offsets"),
        (encode_header({"x": FOUR_FLOATS | {"data_offsets": [4, 20]}}, b"0" * 20), "bad_offsets"),
        (encode_header({"x": FOUR_FLOATS, "y": FOUR_FLOATS}, b"0" * 16), "bad_offsets"),
        (encode_header({"x": FOUR_FLOATS}, b"0" * 17), "bad_offsets"),
        (encode_header({"x": FOUR_FLOATS}, b"0" * 15), "truncated_file"),
    ],
)
def test_a_damaged_file_is_refused_by_the_name_of_its_fault(data, code):
    assert refused(data) == code


@pytest.mark.parametrize("header_bytes", [0x80, 0x180, 0x4B50])
def test_a_header_whose_length_begins_like_a_pickle_or_a_zip_is_read(header_bytes):
    header = json.dumps({"x": FOUR_FLOATS}).encode().ljust(header_bytes)
    assert list(read(encode_header(header, b"0123456789abcdef")).tensors) == ["x"]


def test_the_metadata_is_limited():
    def with_metadata(key, value):
        return encode_header({"__metadata__": {key: value}})

    read(with_metadata("k", "v" * 65_535))
    for key, value in (("k", "v" * 65_536), ("k" * 65_536, "v"), ("k", "\u00e9" * 32_768)):
        assert refused(with_metadata(key, value)) == "metadata_too_large"


def test_the_number_of_tensors_is_limited():
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    data = encode_header({str(n): entry for n in range(4)})
    assert refused(data, max_tensors=3) == "too_many_tensors"
    assert len(read(data, max_tensors=4).tensors) == 4


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_raise_anything_else(tail):
    for data in (tail, encode_header(tail), encode_header(b"{" + tail)):
        with suppress(InvalidAdapter):
            read(data)


def test_an_error_carries_no_control_codes_of_the_caller():
    entry = FOUR_FLOATS | {"data_offsets": [4, 20]}
    with pytest.raises(InvalidAdapter) as caught:
        read(encode_header({"\ud800\x1b[31m\0": entry}, b"0" * 20))
    assert str(caught.value).isprintable()
    assert str(caught.value).isascii()


def test_peft_names_split_and_join():
    module = "model.layers.0.self_attn.q_proj"
    assert [split_lora_name(name) for name in lora_names(module)] == [(module, "A"), (module, "B")]
    assert split_lora_name(f"base_model.model.{module}.lora_magnitude_vector.weight") is None
    assert split_lora_name(f"{module}.lora_A.weight") is None


def make_canonical(tensors, modules, invocation_tokens=None):
    data = encode(tensors)
    out = io.BytesIO()
    adapter = CanonicalAdapter(modules, read(data).tensors, invocation_tokens)
    info = write_canonical(out, io.BytesIO(data), adapter)
    return out.getvalue(), info


def make_pair(module, rank=2, width=3, seed=0, dtype="F32"):
    rng = np.random.default_rng(seed)
    a, b = lora_names(module)
    return {
        a: make_tensor(rng.normal(size=(rank, width)), dtype),
        b: make_tensor(rng.normal(size=(width, rank)), dtype),
    }


def test_the_canonical_object_holds_the_same_tensors_and_the_effect_of_every_module(tmp_path):
    tensors = make_pair("model.layers.1.mlp.up_proj") | make_pair("m", seed=1, dtype="BF16")
    modules = {"m": ModuleScale(2, 0.5), "model.layers.1.mlp.up_proj": ModuleScale(2, 4.0)}
    raw, info = make_canonical(tensors, modules)
    (tmp_path / "object").write_bytes(raw)
    adapter = open_canonical(tmp_path / "object")
    assert adapter == parse_canonical(raw)
    assert adapter.modules == modules
    assert adapter.rank == 2
    assert info.digest == hashlib.sha256(raw).hexdigest()
    assert info.size_bytes == len(raw)
    found = {n: (t.dtype, t.shape, raw[t.start : t.end]) for n, t in adapter.tensors.items()}
    assert found == tensors


def test_safetensors_reads_the_canonical_object():
    tensors = make_pair("a") | make_pair("b", rank=3, dtype="F16")
    raw, _ = make_canonical(tensors, {"a": ModuleScale(2, 0.5), "b": ModuleScale(3, 0.5)})
    found = safetensors.numpy.load(raw)
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: tensor[2] for name, tensor in tensors.items()
    }


def test_the_canonical_data_is_aligned_to_eight_bytes():
    for module in ("m", "mm", "mmm", "mmmm"):
        tensors = make_pair(module)
        adapter = CanonicalAdapter({module: ModuleScale(2, 1.0)}, read(encode(tensors)).tensors)
        assert len(canonical_header(adapter)) % 8 == 0


def test_the_canonical_object_is_written_in_bounded_pieces():
    class Pieces(io.BytesIO):
        largest = 0

        def write(self, piece):
            self.largest = max(self.largest, len(piece))
            return super().write(piece)

    data = encode(make_pair("m", rank=3, width=200_001))
    out = Pieces()
    adapter = CanonicalAdapter({"m": ModuleScale(3, 1.0)}, read(data).tensors)
    write_canonical(out, io.BytesIO(data), adapter)
    assert out.largest == CHUNK_BYTES


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(6)), st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_the_digest_does_not_depend_on_order_or_metadata_of_the_upload(order, metadata):
    tensors = make_pair("a", seed=1) | make_pair("b", seed=2) | make_pair("c", seed=3)
    modules = {name: ModuleScale(2, 1.5) for name in "abc"}
    names = list(tensors)
    data = encode({names[n]: tensors[names[n]] for n in order}, metadata)
    shuffled = {"abc"[n // 2]: modules["abc"[n // 2]] for n in order}
    adapter = CanonicalAdapter(shuffled, read(data).tensors)
    info = write_canonical(io.BytesIO(), io.BytesIO(data), adapter)
    assert info == make_canonical(tensors, modules)[1]


@given(st.floats(0.125, 64, width=32), st.floats(0.125, 64, width=32))
def test_another_scale_is_another_digest(one, other):
    digests = {
        make_canonical(make_pair("m"), {"m": ModuleScale(2, scale)})[1].digest
        for scale in (one, other)
    }
    assert len(digests) == len({one, other})


def test_the_digest_of_an_ordinary_adapter_is_what_it_always_was():
    """Versions name objects by the digest, so changing the canonical form would orphan them all."""
    tensors = {
        name: (dtype, shape, bytes(range(24))) for name, (dtype, shape, _) in make_pair("m").items()
    }
    _, info = make_canonical(tensors, {"m": ModuleScale(2, 0.5)})
    assert info.digest == "7501b7616f4a86ad649d9006f542c42ee4662862ed289ee1964b1dc534db37d6"


def test_an_activated_lora_is_another_object_than_the_same_weights_without():
    modules = {"m": ModuleScale(2, 0.5)}
    raws = [make_canonical(make_pair("m"), modules, tokens)[0] for tokens in (None, (7, 1), (7,))]
    assert [parse_canonical(raw).invocation_tokens for raw in raws] == [None, (7, 1), (7,)]
    assert len({hashlib.sha256(raw).digest() for raw in raws}) == 3


def canonical_with(config, tensors=None):
    metadata = {"format": "chorale.adapter.v1", "config": json.dumps(config)}
    return encode(tensors or make_pair("m"), metadata)


@pytest.mark.parametrize(
    "raw",
    [
        encode(make_pair("m")),
        canonical_with({}),
        canonical_with({"modules": {}}),
        canonical_with({"modules": {"m": 1}}),
        canonical_with({"modules": {"m": {"rank": 2}}}),
        canonical_with({"modules": {"m": {"rank": 3, "scale": 1.0}}}),
        canonical_with({"modules": {"m": {"rank": True, "scale": 1.0}}}),
        canonical_with({"modules": {"n": {"rank": 2, "scale": 1.0}}}),
        canonical_with({"modules": {"m": {"rank": 2, "scale": 1.0}}}, make_pair("m", dtype="F64")),
        canonical_with({"modules": {"m": {"rank": 2, "scale": 1.0}}, "invocation_tokens": []}),
        canonical_with({"modules": {"m": {"rank": 2, "scale": 1.0}}, "invocation_tokens": [-1]}),
        canonical_with({"modules": {"m": {"rank": 2, "scale": 1.0}}, "invocation_tokens": "7"}),
    ],
)
def test_an_object_that_is_not_canonical_is_not_opened(raw):
    with pytest.raises(InvalidAdapter) as caught:
        parse_canonical(raw)
    assert caught.value.code == "not_canonical"


def test_the_embedding_has_names_of_its_own():
    names = lora_names("model.embed_tokens")
    assert names == (
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.lora_embedding_B",
    )
    assert [split_lora_name(name) for name in names] == [
        ("model.embed_tokens", "A"),
        ("model.embed_tokens", "B"),
    ]
    assert split_lora_name("base_model.model.model.embed_tokens.lora_A.weight") is None
    assert split_lora_name("base_model.model.lm_head.lora_embedding_A") is None
