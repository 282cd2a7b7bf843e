"""Packing without torch: the slabs hold the values that PEFT saved, to the bit."""

import hashlib
import os
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kernels.cpu.plain import CpuKernels
from kernels.tiles import RANK_ROWS
from kernels.work import Site
from lora.batch import DeviceTables, Segment, adapter_runs
from lora.errors import AdapterError
from lora.layout import PROJECTIONS, Layout, ModelShape
from lora.packed import PackedForm
from lora.packing import convert, pack
from lora.shard import Shard
from registry.base.base_model import BaseModel
from registry.formats.peft_format import EMBEDDING, HEAD, lora_names
from tests.registry.factories import parse_canonical
from tests.tiny_models import (
    canonical_bytes,
    canonical_object,
    packed_adapter,
    save_adapter,
    save_model,
)

SHAPE = ModelShape(2, 64, 160, 4, 2, 16)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def make_form(dtype="float32", shape=SHAPE, base_revision="base-1"):
    return PackedForm(Layout.of(shape, DTYPES[dtype].itemsize), dtype, base_revision)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A PEFT adapter of mixed ranks, and its canonical object."""
    folder = tmp_path_factory.mktemp("world")
    model_dir = save_model(folder / "model")
    adapter_dir = save_adapter(
        model_dir, folder / "a", seed=3, r=12, rank_pattern={"v_proj": 3}, use_rslora=True
    )
    base = BaseModel.load(model_dir, "tiny", folder / "cache")
    return adapter_dir, canonical_bytes(adapter_dir, base)


def pack_to(folder, data, form):
    (folder / "object").write_bytes(data)
    target = folder / "packed"

    def allocate(size_bytes):
        target.touch()
        os.truncate(target, size_bytes)
        sizes.append(size_bytes)
        return target

    sizes = []
    header = pack(folder / "object", hashlib.sha256(data).hexdigest(), form, allocate)
    assert sizes == [target.stat().st_size], "it takes no more room than it asked for"
    return header


# ---- contents of the slabs ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_tiles_apply_as_the_matrices_that_peft_saved(world, dtype, tmp_path):
    adapter_dir, data = world
    form, torch_dtype = make_form(dtype), DTYPES[dtype]
    packed = packed_adapter(data, form, tmp_path)
    # Slabs lie at scattered places of an arena that is NaN everywhere else.
    elems = form.layout.slab_bytes // torch_dtype.itemsize
    arena = torch.full((3 * packed.num_slabs, elems), torch.nan).to(torch_dtype)
    places = [3 * i + 1 for i in reversed(range(packed.num_slabs))]
    arena[torch.tensor(places)] = packed.slabs.view(torch_dtype)
    tables = DeviceTables.of(packed, form.layout, places, arena.view(torch.uint8))
    assert tables.base_revision == "base-1"
    runs = adapter_runs([Segment(1, 4, tables)], arena)
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    for projection, name in enumerate(PROJECTIONS):
        kind = "self_attn" if projection < 4 else "mlp"
        prefix = f"base_model.model.model.layers.1.{kind}.{name}"
        a, b = (tensors[f"{prefix}.lora_{x}.weight"] for x in "AB")
        rank = a.shape[0]
        assert rank == (3 if name == "v_proj" else 12)
        x = (torch.randn(5, a.shape[1]) / a.shape[1] ** 0.5).to(torch_dtype)
        y = torch.zeros(5, b.shape[0], dtype=torch_dtype)
        site = Site(1, (projection,), a.shape[1], (b.shape[0],))
        CpuKernels(None).add_lora(y, x, site, runs)
        scale = 16 / rank**0.5
        expected = scale * x.double() @ a.double().T @ b.double().T
        same_dtype = (x @ a.to(torch_dtype).T) @ b.to(torch_dtype).T * scale
        loss = (same_dtype.double() - expected).abs().max()
        assert (y[1:4].double() - expected[1:4]).abs().max() <= 4 * loss + 1e-6
        assert not y[0].any()
        assert not y[4].any(), "tokens on the base model are left alone"


@pytest.mark.parametrize("arena", DTYPES)
@pytest.mark.parametrize("stored", DTYPES.values())
def test_every_rank_row_is_where_its_tile_says_and_all_else_is_zero(stored, arena, tmp_path):
    names = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    ranks = dict(zip(names, (1, 19), strict=True))
    modules = {
        n: (torch.randn(r, 160).to(stored), torch.randn(64, r).to(stored)) for n, r in ranks.items()
    }
    form = make_form(arena)
    packed = packed_adapter(canonical_object(modules), form, tmp_path)
    left = packed.slabs.view(DTYPES[arena]).clone()
    for tile in packed.header.tiles:
        a, b = (t.to(DTYPES[arena]) for t in modules[names[tile.layer]])
        rows = slice(tile.index * RANK_ROWS, (tile.index + 1) * RANK_ROWS)
        for matrix, start in ((a, 0), (b.T, RANK_ROWS * 160)):
            wanted = matrix[rows]
            first = tile.offset_bytes // left.itemsize + start
            found = left[tile.slab, first : first + wanted.numel()]
            assert torch.equal(found.view(wanted.shape), wanted)
            found.zero_()
    assert not left.any()


def test_tensors_that_lie_unaligned_in_the_object_are_packed_alike(tmp_path):
    shape = ModelShape(2, 3, 160, 4, 2, 16)
    a, b = torch.randn(3, 3).half(), torch.randn(64, 3)
    data = canonical_object({"model.layers.0.self_attn.q_proj": (a, b)})
    info = parse_canonical(data).tensors[lora_names("model.layers.0.self_attn.q_proj")[1]]
    assert info.start % 4 == 2
    packed = packed_adapter(data, make_form(shape=shape), tmp_path)
    found = packed.slabs.view(torch.float32)[0, RANK_ROWS * 3 :][: 3 * 64]
    assert torch.equal(found.view(3, 64), b.T)


def test_a_fused_module_is_packed_as_its_projections_with_all_of_a_and_their_outputs_of_b(tmp_path):
    prefix = "model.layers.0"
    (a, b), (c, d) = ((torch.randn(3, 64), torch.randn(out, 3)) for out in (128, 320))
    fused = {f"{prefix}.self_attn.qkv_proj": (a, b), f"{prefix}.mlp.gate_up_proj": (c, d)}
    parts = {
        f"{prefix}.self_attn.q_proj": (a, b[:64]),
        f"{prefix}.self_attn.k_proj": (a, b[64:96]),
        f"{prefix}.self_attn.v_proj": (a, b[96:]),
        f"{prefix}.mlp.gate_proj": (c, d[:160]),
        f"{prefix}.mlp.up_proj": (c, d[160:]),
    }
    found, expected = (
        packed_adapter(canonical_object(modules), make_form(), tmp_path / str(len(modules)))
        for modules in (fused, parts)
    )
    assert torch.equal(found.slabs, expected.slabs)
    assert found.header.tiles == expected.header.tiles
    assert torch.equal(found.scales, expected.scales)


def test_a_projection_that_occurs_twice_is_refused(tmp_path):
    pair = {name: (torch.zeros(2, 64), torch.zeros(n, 2)) for name, n in (("qkv", 128), ("k", 32))}
    modules = {f"model.layers.0.self_attn.{name}_proj": value for name, value in pair.items()}
    with pytest.raises(AdapterError, match="no projection of this base model"):
        pack_to(tmp_path, canonical_object(modules), make_form())


def test_the_header_says_what_was_packed(world, tmp_path):
    _, data = world
    form = make_form()
    header = pack_to(tmp_path, data, form)
    assert header.digest == hashlib.sha256(data).hexdigest()
    assert (header.base_revision, header.form_id) == ("base-1", form.form_id)
    slabs = (tmp_path / "packed").read_bytes()[-header.num_slabs * header.slab_bytes :]
    assert header.checksums == (hashlib.sha256(slabs).hexdigest(),)
    modules = parse_canonical(data).modules
    assert len(header.scales) == len(modules) == 14
    assert {scale for *_, scale in header.scales} == {m.scale for m in modules.values()}
    assert header.invocation_tokens is None


def test_invocation_tokens_come_along(tmp_path):
    modules = {"model.layers.0.self_attn.q_proj": (torch.zeros(2, 64), torch.zeros(64, 2))}
    data = canonical_object(modules, invocation_tokens=(7, 8, 7))
    assert packed_adapter(data, make_form(), tmp_path).invocation_tokens == (7, 8, 7)


def test_packing_holds_one_slab_and_one_tile_at_a_time(tmp_path):
    shape = ModelShape(8, 512, 2048, 8, 8, 64)
    form = make_form(shape=shape)
    modules = {
        f"model.layers.{layer}.mlp.up_proj": (torch.zeros(64, 512), torch.zeros(2048, 64))
        for layer in range(8)
    }
    data = canonical_object(modules)
    assert len(data) > 5_000_000
    tracemalloc.start()
    try:
        pack_to(tmp_path, data, form)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    tile_bytes = form.layout.tile_bytes((0, PROJECTIONS.index("up_proj")))
    assert peak < 2 * form.layout.slab_bytes + 2 * tile_bytes + 200_000


def test_tables_are_made_for_as_many_slabs_as_were_packed_and_of_their_size(world, tmp_path):
    form = make_form()
    packed = packed_adapter(world[1], form, tmp_path)
    arena = torch.zeros(packed.num_slabs + 1, form.layout.slab_bytes, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="another arena"):
        DeviceTables.of(packed, form.layout, list(range(packed.num_slabs + 1)), arena)
    with pytest.raises(AssertionError, match="another arena"):
        DeviceTables.of(packed, form.layout, list(range(packed.num_slabs)), arena[:, 256:])


# ---- refused objects ----


def test_an_object_of_another_base_model_is_refused(world, tmp_path):
    _, data = world
    narrower = make_form(shape=ModelShape(2, 32, 160, 4, 2, 16))
    with pytest.raises(AdapterError, match="shapes") as refused:
        pack_to(tmp_path, data, narrower)
    assert refused.value.failure.kind == "incompatible"
    shallower = make_form(shape=ModelShape(1, 64, 160, 4, 2, 16))
    with pytest.raises(AdapterError, match="no projection of this base model"):
        pack_to(tmp_path, data, shallower)


@pytest.mark.parametrize("block", ["0.mlp", "00.self_attn", "0.cross_attn"])
def test_a_projection_by_another_name_is_refused(block, tmp_path):
    name = f"model.layers.{block}.q_proj"
    data = canonical_object({name: (torch.zeros(2, 64), torch.zeros(64, 2))})
    with pytest.raises(AdapterError, match="no projection of this base model"):
        pack_to(tmp_path, data, make_form())


@pytest.mark.parametrize("num_shards", [1, 2])
def test_each_chunk_of_an_end_has_its_tokens_and_a_copy_of_the_other_half(num_shards, tmp_path):
    layout = Layout.of(SHAPE, 4, num_shards=num_shards, vocab_size=292)
    form = PackedForm(layout, "float32", "base-1")
    head, embedding = (
        [torch.randn(9, 64), torch.randn(292, 9)],
        [torch.randn(2, 292), torch.randn(64, 2)],
    )
    data = canonical_object({HEAD: head, EMBEDDING: embedding})
    for index in range(num_shards):
        shard = Shard(index, num_shards)
        packed = packed_adapter(data, form, tmp_path / str(index), shard)
        tables = DeviceTables.of(packed, layout, [*range(packed.num_slabs)], packed.slabs)
        assert (tables.has_head, tables.has_embedding) == (True, True)
        seen = set()
        for tile in packed.header.tiles:
            place = (tile.layer, tile.projection)
            is_head = place in layout.head_places
            places = layout.head_places if is_head else layout.embedding_places
            tokens = layout.chunks[places.index(place)]
            a, b = head if is_head else embedding
            a, b = (a, b[tokens]) if is_head else (a[:, tokens], b)
            rows = slice(tile.index * RANK_ROWS, (tile.index + 1) * RANK_ROWS)
            values = packed.slabs[tile.slab, tile.offset_bytes :].view(torch.float32)
            for matrix, start in ((a[rows], 0), (b.T[rows], RANK_ROWS * a.shape[1])):
                found = values[start:][: matrix.numel()].view(matrix.shape)
                assert torch.equal(found, matrix)
            seen.add((place, tile.index))
        assert len(seen) == 3 * len(layout.chunks)


@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
def test_an_end_is_refused_where_it_is_not_served_and_where_it_does_not_fit(name, tmp_path):
    shapes = (292, 64) if name == EMBEDDING else (64, 292)
    data = canonical_object({name: (torch.zeros(2, shapes[0]), torch.zeros(shapes[1], 2))})
    with pytest.raises(AdapterError, match=f"LoRA on {name} is served on CPUs only"):
        pack_to(tmp_path, data, make_form())
    other = PackedForm(Layout.of(SHAPE, 4, vocab_size=293), "float32", "base-1")
    with pytest.raises(AdapterError, match="has shapes"):
        pack_to(tmp_path, data, other)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tensor", ["lora_A", "lora_B"])
def test_a_value_that_the_arenas_dtype_cannot_hold_is_refused(world, dtype, tensor, tmp_path):
    _, data = world
    name = f"base_model.model.model.layers.1.mlp.up_proj.{tensor}.weight"
    start = parse_canonical(data).tensors[name].start
    large = bytearray(data)
    large[start : start + 4] = struct.pack("<f", 1e5 if dtype == "float16" else 3.4e38)
    pack_to(tmp_path, bytes(large), make_form("float32"))
    with pytest.raises(AdapterError, match=rf"layers\.1\.mlp\.up_proj .* {dtype}") as refused:
        pack_to(tmp_path, bytes(large), make_form(dtype))
    assert refused.value.failure.kind == "incompatible"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stored_value_that_is_not_finite_is_refused(value, dtype, tmp_path):
    a, b = torch.zeros(2, 64, dtype=DTYPES[dtype]), torch.zeros(64, 2, dtype=DTYPES[dtype])
    b[63, 1] = value
    data = canonical_object({"model.layers.0.self_attn.q_proj": (a, b)})
    with pytest.raises(AdapterError, match=dtype):
        pack_to(tmp_path, data, make_form(dtype))


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"PK" + b"\0" * 100])
def test_damaged_bytes_are_refused(data, tmp_path):
    with pytest.raises(AdapterError) as refused:
        pack_to(tmp_path, data, make_form())
    assert refused.value.failure.kind == "incompatible"


# ---- rounding ----


def assert_converts_as_torch(values):
    """Assert that a torch tensor is converted to every dtype as torch converts it."""
    stored = values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
    for dtype, torch_dtype in DTYPES.items():
        expected = values.to(torch_dtype)
        found = convert(stored.numpy(), dtype)
        size = np.uint16 if expected.itemsize == 2 else np.uint32
        is_number = ~expected.isnan().numpy()
        bits = expected.view(torch.uint16 if size is np.uint16 else torch.uint32).numpy()
        assert np.array_equal(found.view(size)[is_number], bits[is_number])
        again = torch.from_numpy(found.copy()).view(torch_dtype)
        assert torch.equal(again.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_is_converted_as_torch_does(dtype):
    assert_converts_as_torch(torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype))


def test_float32_is_rounded_as_torch_does():
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    # Rounding is decided around every 16-bit value, and half-way between two of them.
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    ties = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = ties.view(np.uint32)
    near = [halves + np.uint32(d) for d in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    near += [ties + np.uint32(d) for d in (0, 1, 0xFFF, 0x1000, 0x1001)]
    limits = torch.tensor([65504.0, 65519.9, 65520.0, 3.3895e38, 3.4e38, 1e-45, 6e-8, 2.9e-8])
    limits = torch.cat([limits, -limits, torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    values = np.concatenate([bits, *near, limits.numpy().view(np.uint32)]).view(np.float32)
    assert_converts_as_torch(torch.from_numpy(values))
