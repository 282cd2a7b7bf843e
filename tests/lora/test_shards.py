"""An adapter cut for several ranks: each rank has an equal part, and all parts are the whole."""

import hashlib
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import dictionaries, integers, sampled_from, tuples

from kernels.tiles import RANK_ROWS
from lora.errors import AdapterError
from lora.host import open_packed, read_packed
from lora.layout import CUT_BY_INPUTS, PROJECTIONS, Layout, ModelShape
from lora.packed import PackedForm
from lora.packing import pack
from lora.shard import Shard
from tests.tiny_models import canonical_object

SHAPE = ModelShape(2, 64, 160, 8, 8, 16)
RANKS = dictionaries(tuples(integers(0, 1), integers(0, 6)), integers(1, 40), min_size=1)
SIZES = sampled_from([1, 2, 4, 8])
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def form_of(num_shards, dtype="float32"):
    itemsize = DTYPES[dtype].itemsize
    return PackedForm(Layout.of(SHAPE, itemsize, num_shards=num_shards), dtype, "base-1")


def name_of(layer, projection):
    block = "self_attn" if projection < 4 else "mlp"
    return f"model.layers.{layer}.{block}.{PROJECTIONS[projection]}"


def make_modules(ranks):
    """(A, B) of random values by place, in PEFT's shapes: [rank, in] and [out, rank]."""
    rng = torch.Generator().manual_seed(len(ranks))
    modules = {}
    for place, rank in ranks.items():
        num_inputs, num_outputs = SHAPE.features(place[1])
        sizes = (rank, num_inputs), (num_outputs, rank)
        modules[place] = tuple(torch.randn(*size, generator=rng) for size in sizes)
    return modules


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


def packed_shards(folder, modules, form):
    """Shards of one packed file, as each rank reads its own."""
    data = canonical_object({name_of(*place): pair for place, pair in modules.items()})
    digest = hashlib.sha256(data).hexdigest()
    source, target = folder / "object", folder / "packed"
    source.write_bytes(data)
    target.write_bytes(b"")
    pack(source, digest, form, lambda _: target)
    size = form.layout.num_shards
    return [read_packed(target, digest, form, shard=Shard(i, size)) for i in range(size)]


def parts_of(packed, tile, layout, dtype):
    """A tile's part of A and of B in the slabs of one rank."""
    num_inputs, num_outputs = layout.shard_shape.features(tile.projection)
    slab = packed.slabs[tile.slab].view(dtype)[tile.offset_bytes // dtype.itemsize :]
    a = slab[: RANK_ROWS * num_inputs].view(RANK_ROWS, num_inputs)
    b = slab[RANK_ROWS * num_inputs :][: RANK_ROWS * num_outputs].view(RANK_ROWS, num_outputs)
    return a, b


def rows_of(matrix, tile):
    """The tile's eight rows, zeros past the rank."""
    rows = torch.zeros(RANK_ROWS, matrix.shape[1])
    found = matrix[tile.index * RANK_ROWS : (tile.index + 1) * RANK_ROWS]
    rows[: len(found)] = found
    return rows


@given(ranks=RANKS, size=SIZES, dtype=sampled_from(sorted(DTYPES)))
@settings(max_examples=40, deadline=None)
def test_the_shards_of_a_packed_file_put_together_are_the_whole_adapter(folder, ranks, size, dtype):
    modules, form = make_modules(ranks), form_of(size, dtype)
    assert form.layout.kv_bytes_per_token == form_of(1, dtype).layout.kv_bytes_per_token
    shards = packed_shards(folder, modules, form)
    assert len({packed.num_slabs for packed in shards}) == 1
    assert shards[0].size_bytes == sum(packed.slabs.nbytes for packed in shards)
    for tile in shards[0].header.tiles:
        a, b = modules[tile.layer, tile.projection]
        parts = [parts_of(p, tile, form.layout, DTYPES[dtype]) for p in shards]
        matrices = [rows_of(m, tile).to(DTYPES[dtype]) for m in (a, b.T)]
        cut = 0 if tile.projection in CUT_BY_INPUTS else 1
        assert torch.equal(torch.cat([part[cut] for part in parts], dim=1), matrices[cut])
        assert all(torch.equal(part[1 - cut], matrices[1 - cut]) for part in parts)


def test_a_rank_notices_damage_in_its_own_shard_only(folder):
    form = form_of(2)
    packed = packed_shards(folder, make_modules({(0, 3): 8}), form)[1]
    data = bytearray(packed.path.read_bytes())
    data[-packed.slabs.nbytes + 5] ^= 1
    packed.path.write_bytes(data)
    read_packed(packed.path, packed.digest, form, shard=Shard(0, 2))
    with pytest.raises(AdapterError, match="damaged"):
        read_packed(packed.path, packed.digest, form, shard=Shard(1, 2))


def test_a_file_packed_for_other_shards_is_another_form(folder):
    packed = packed_shards(folder, make_modules({(0, 3): 8}), form_of(2))[0]
    assert form_of(1).form_id != form_of(2).form_id != form_of(4).form_id
    with pytest.raises(AdapterError, match="not what it is named for"):
        open_packed(packed.path, packed.digest, form_of(1))
    assert PackedForm.from_json(asdict(form_of(2))) == form_of(2)


def test_a_file_that_lacks_a_shard_is_none(folder):
    packed = packed_shards(folder, make_modules({(0, 3): 8}), form_of(2))[0]
    cut = packed.path.read_bytes()[: -packed.slabs.nbytes]
    packed.path.write_bytes(cut)
    with pytest.raises(AdapterError, match="is not of the"):
        open_packed(packed.path, packed.digest, form_of(2), Shard(0, 2))


def test_a_shard_is_an_equal_part():
    assert [Shard(i, 4).part(12) for i in range(4)] == [slice(i, i + 3) for i in (0, 3, 6, 9)]
    with pytest.raises(AssertionError, match="13 cannot be cut into 4"):
        Shard(0, 4).part(13)


@pytest.mark.parametrize(("size", "expected"), [(1, 5_242_880), (2, 3_538_944), (4, 2_686_976)])
def test_a_rank_keeps_one_half_of_each_tile_whole(size, expected):
    llama = ModelShape(32, 4096, 14336, 32, 8, 128)
    assert Layout.of(llama, 2, num_shards=size).bytes_per_rank == expected
