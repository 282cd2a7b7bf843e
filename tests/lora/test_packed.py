"""The packed file: its form has an id, and incomplete, damaged and wrong files are detected."""

import hashlib
import io
from dataclasses import replace

import pytest
import torch

from lora.errors import AdapterError
from lora.host import read_packed
from lora.layout import Layout, ModelShape, Tile
from lora.packed import MAX_HEADER_BYTES, PackedForm, PackedHeader, check_header, read_header

SHAPE = ModelShape(2, 64, 160, 4, 2, 16)
FORM = PackedForm(Layout.of(SHAPE, 4), "float32", "base-1")
DIGEST = hashlib.sha256(b"an adapter").hexdigest()
PAGE_BYTES = 4096


def make_file(num_slabs=3, **fields):
    """A packed file of slabs that are all different."""
    slab_bytes = FORM.layout.slab_bytes
    slabs = torch.arange(num_slabs * slab_bytes).to(torch.uint8).numpy().tobytes()
    header = PackedHeader(
        **{
            "digest": DIGEST,
            "base_revision": FORM.base_revision,
            "form_id": FORM.form_id,
            "num_slabs": num_slabs,
            "slab_bytes": slab_bytes,
            "tiles": (Tile(0, 3, 0, 0, 0), Tile(1, 3, 0, 2, 256)),
            "scales": ((0, 3, 0.5), (1, 3, 1 / 3)),
            "invocation_tokens": (5, 6),
            "checksums": (hashlib.sha256(slabs).hexdigest(),),
        }
        | fields
    )
    return header, header.to_bytes() + slabs


def assert_lost(data, tmp_path):
    """Assert that reading the header fails as "lost", and so does reading the file."""
    with pytest.raises(AdapterError) as refused:
        read_header(io.BytesIO(data))
    assert refused.value.failure.kind == "lost"
    assert_lost_by_the_reader(data, tmp_path)


def assert_lost_by_the_reader(data, tmp_path):
    (tmp_path / "packed").write_bytes(data)
    with pytest.raises(AdapterError) as refused:
        read_packed(tmp_path / "packed", DIGEST, FORM)
    assert refused.value.failure.kind == "lost"


# ---- the form ----


def test_the_form_id_names_layout_dtype_and_base():
    layouts = [
        Layout.of(SHAPE, 2),
        Layout.of(SHAPE, 2, 64),
        Layout.of(replace(SHAPE, num_layers=3), 2),
    ]
    forms = [PackedForm(layout, "float16", "base-1") for layout in layouts]
    forms += [PackedForm(layouts[0], "bfloat16", "base-1"), PackedForm(layouts[0], "float16", "b2")]
    assert len({form.form_id for form in forms}) == len(forms)


# ---- the header ----


def test_a_header_is_read_as_it_was_written_up_to_the_first_slab():
    header, data = make_file()
    file = io.BytesIO(data)
    assert read_header(file) == header
    assert file.tell() % PAGE_BYTES == 0
    assert len(data) - file.tell() == header.num_slabs * header.slab_bytes
    check_header(header, DIGEST, FORM)


def test_an_ordinary_adapter_has_no_invocation_tokens():
    header, data = make_file(invocation_tokens=None)
    assert read_header(io.BytesIO(data)).invocation_tokens is None


def test_headers_are_as_long_for_any_checksums():
    one, other = make_file(checksums=("0" * 64,))[0], make_file()[0]
    assert len(one.to_bytes()) == len(other.to_bytes())


@pytest.mark.parametrize("size_bytes", [0, 1, 8, 47, 48, 100, PAGE_BYTES, PAGE_BYTES + 1, -1])
def test_a_file_that_was_cut_short_is_lost(size_bytes, tmp_path):
    assert_lost(make_file()[1][:size_bytes], tmp_path)


def test_a_file_with_something_behind_its_slabs_is_lost(tmp_path):
    assert_lost(make_file()[1] + b"\0", tmp_path)


def test_another_kind_of_file_is_lost(tmp_path):
    assert_lost(b"{}" * 5000, tmp_path)
    assert_lost(bytes(len(make_file()[1])), tmp_path)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_an_absurd_length_is_not_believed(length, tmp_path):
    data = make_file()[1]
    assert_lost(data[:8] + length.to_bytes(8, "little") + data[16:], tmp_path)


@pytest.mark.parametrize("position", [0, 8, 16, 47, 48, 60, 300])
def test_a_flipped_bit_in_the_header_is_noticed(position, tmp_path):
    data = bytearray(make_file()[1])
    data[position] ^= 1
    assert_lost(bytes(data), tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", "{}", '{"tiles": 1}', "[" * 100_000], ids=lambda t: t[:5]
)
def test_a_header_that_is_no_such_json_is_lost(text, tmp_path):
    raw = text.encode()
    prefix = b"CHORPK02" + len(raw).to_bytes(8, "little") + hashlib.sha256(raw).digest()
    assert_lost((prefix + raw).ljust(PAGE_BYTES, b"\0"), tmp_path)


# ---- the arena that a file is for ----


def test_an_adapter_for_another_arena_is_lost():
    header, _ = make_file()
    other_base = PackedForm(FORM.layout, "float32", "base-2")
    other_layout = PackedForm(Layout.of(SHAPE, 4, 64), "float32", "base-1")
    for digest, form in ((DIGEST, other_base), (DIGEST, other_layout), ("0" * 64, FORM)):
        with pytest.raises(AdapterError) as refused:
            check_header(header, digest, form)
        assert refused.value.failure.kind == "lost"


# ---- reading ----


def test_the_slabs_are_read_as_they_lie_in_the_file(tmp_path):
    header, data = make_file(num_slabs=41)
    (tmp_path / "packed").write_bytes(data)
    packed = read_packed(tmp_path / "packed", DIGEST, FORM)
    size_bytes = 41 * FORM.layout.slab_bytes
    assert packed.slabs.shape == (41, FORM.layout.slab_bytes)
    assert packed.slabs.numpy().tobytes() == data[-size_bytes:]
    assert (packed.num_slabs, packed.size_bytes) == (41, size_bytes)
    assert packed.header == header
    expected = torch.zeros(2, 7)
    expected[:, 3] = torch.tensor([0.5, 1 / 3])
    assert torch.equal(packed.scales, expected)


@pytest.mark.parametrize("position", [-1, -FORM.layout.slab_bytes, -3 * FORM.layout.slab_bytes])
def test_a_flipped_bit_in_a_slab_is_noticed(position, tmp_path):
    data = bytearray(make_file()[1])
    data[position] ^= 128
    assert_lost_by_the_reader(bytes(data), tmp_path)


def test_a_file_that_is_not_there_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_packed(tmp_path / "packed", DIGEST, FORM)


def test_tiles_have_addresses_where_their_slabs_were_placed(tmp_path):
    _, data = make_file()
    (tmp_path / "packed").write_bytes(data)
    table = read_packed(tmp_path / "packed", DIGEST, FORM).tile_table(FORM.layout, [9, 4, 2])
    assert table.shape == (2, 7, 1)
    assert table[0, 3, 0] == 9 * FORM.layout.units_per_slab
    assert table[1, 3, 0] == 2 * FORM.layout.units_per_slab + 1
    assert int((table >= 0).sum()) == 2
