"""The GPU's kernels in Triton's interpreter: the checks of `tests.gpu` on them at tiny sizes, the
same trials at odd ones, and what only the interpreter can show.
"""

import inspect
from dataclasses import replace

import pytest
import torch

from kernels import elementwise, reference
from kernels.gpu import ops, quantized
from kernels.gpu.launch import assume_capability
from kernels.packed import pack
from kernels.quantized import Rounding
from kernels.routing import choose_experts, group_by_expert
from tests.gpu.agreement import agreement_checks, check_trials
from tests.gpu.invariance import invariance_checks
from tests.gpu.setting import KERNELS_DRY, dry
from tests.gpu.trials.attention import DRAFTS, attend, attend_fp8, edges
from tests.gpu.trials.experts import expert_of_places
from tests.gpu.trials.lora import BLOCK_ROWS, lora_trials, sites
from tests.gpu.trials.lora import case_at as lora_case
from tests.gpu.trials.quantized import multiply, quantized_trials
from tests.gpu.trials.rope import plain, rope_trials
from tests.gpu.trials.rowwise import rowwise_trials
from tests.gpu.trials.sampling import sized_trials
from tests.gpu.trials.trial import CPU, randn, rows_far_apart
from tests.gpu.whole_numbers import whole_number_checks
from tests.kernels.attention_cases import make_case
from tests.kernels.quantized_cases import ROUNDINGS, random_weight
from tests.soak import soak

CHECKS = agreement_checks() | invariance_checks() | whole_number_checks()
SLOW = [name for name in CHECKS if name.startswith("invariance") and name.endswith("64")]
# 1,100 positions are so many splits that the order of their sums shows.
TINY = replace(
    dry(seed=0),
    kernels=replace(KERNELS_DRY, repeats=1, contexts=((1, 1), (1100, 1), (40, 33))),
)


def setting_of(dtype=torch.float16, **sizes):
    return replace(TINY, dtypes=(dtype,), kernels=replace(TINY.kernels, **sizes))


@pytest.mark.parametrize("name", [*(name for name in CHECKS if name not in SLOW), *soak(*SLOW)])
def test_a_check_of_kernels_passes(name):
    # Another order of sums shows in all bits of float32.
    is_exact = name.startswith("invariance")
    CHECKS[name](setting_of(torch.float32) if is_exact else TINY)


@pytest.mark.parametrize("number", [-(2**31), 0, 1, 2**31 - 1])
def test_tiles_of_any_numbers_are_wrong_and_no_error(number):
    """Kernels are compiled in advance without being run: tiles then hold what memory held."""
    logits = randn(19, 8, rng=TINY.rng("tiles"))
    routing = group_by_expert(*choose_experts(logits, 2, norms_weights=True), 8, 16)
    assert expert_of_places(routing).min() >= 0
    garbage = replace(routing, tiles=torch.full_like(routing.tiles, number))
    assert expert_of_places(garbage).min() < 0


def test_references_take_no_product_that_a_torch_may_lack_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", None)
    for trial in quantized_trials(TINY):
        trial.run(reference, CPU)


# 77 features are no whole number of steps.
ODD = {
    "hidden": 77, "intermediate": 1100, "heads": 3, "kv_heads": 1, "head_dim": 80, "vocab": 20_001,
    "tokens": 9,
}  # fmt: skip


@pytest.mark.parametrize("trials", [rowwise_trials, rope_trials, lora_trials, sized_trials])
def test_so_does_it_in_float32_at_odd_sizes(trials):
    check_trials(trials(setting_of(torch.float32, **ODD)), TINY)


@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1032), (9001, 8), *soak((16384, 4096))])
def test_rows_have_any_width(hidden, intermediate):
    sizes = {"hidden": hidden, "intermediate": intermediate, "tokens": 3}
    check_trials(rowwise_trials(setting_of(**sizes)), TINY)


@pytest.mark.parametrize(("dim", "kv_heads"), [(256, 1), *soak((8, 2), (64, 3))])
def test_heads_have_any_dimension_where_they_are_turned(dim, kv_heads):
    setting = setting_of(heads=3, kv_heads=kv_heads, head_dim=dim)
    check_trials([plain(setting, "", setting.dtype, setting.dtype, has_norms=True)], setting)


# ---- products with weights in few bits ----

FEW_BITS = [
    *((rounding, (5, rounding.group_size or 77), torch.float16) for rounding in ROUNDINGS),
    (Rounding(4, 32), (5, 192), torch.float32),
    (Rounding(4, 64, has_zeros=True), (5, 192), torch.float32),
    (Rounding(8), (5, 77), torch.float32),
]
# Weights of 300 outputs are written in two parts for 300 tokens.
WIDTHS = [
    (Rounding(4, 32), (300, 160)),
    (Rounding(4, 128, has_zeros=True), (1, 256)),
    (Rounding(8), (300, 95)),
    (Rounding(8, 32, has_zeros=True), (7, 96)),
]


@pytest.mark.parametrize(
    ("rounding", "shape", "dtype", "tokens"),
    [
        *((*case, (3, 257)) for case in FEW_BITS),
        *((*case, torch.float16, (1, 33, 256, 300)) for case in WIDTHS),
        *soak(*((*case, torch.float32, (7, 133, 300)) for case in WIDTHS)),
    ],
    ids=str,
)
def test_products_have_any_rounding_widths_and_number_of_tokens(
    rounding, shape, dtype, tokens, monkeypatch
):
    monkeypatch.setattr(quantized, "_SCRATCH_BYTES", 1 << 16)
    setting = setting_of(dtype)
    check_trials((multiply(setting, rounding, n, dtype, shape) for n in tokens), setting)


def test_many_tokens_are_multiplied_by_the_weights_of_the_reference():
    weight, x = pack(random_weight(Rounding(8), 450, 288)), randn(300, 288, rng=TINY.rng("many"))
    found, meant = (own.multiply_quantized(x, weight) for own in (ops, reference))
    assert torch.equal(found, meant)


# ---- attention ----


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        (3, 1, 80, torch.float32),
        (17, 1, 16, torch.float16),
        *soak((2, 2, 64, torch.float16), (8, 2, 32, torch.float32), (7, 1, 96, torch.float16)),
        *soak((4, 1, 128, torch.float16), (16, 2, 16, torch.float32)),
    ],
)
def test_queries_have_any_group_of_heads(heads, kv_heads, dim, dtype):
    setting = setting_of(dtype, heads=heads, kv_heads=kv_heads, head_dim=dim)
    rows = [(40, 1), (7, 1), (40, 8), (7, 3), (40, 40), (170, 30)]
    options = {"block_size": 32, "most_decoded": 8}
    check_trials([attend(setting, "", rows, dtype, 100, **options)], setting)


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(5, torch.float32), *soak((1, torch.float16), *((w, torch.float32) for w in (None, 1, 700)))],
)
def test_rows_that_end_beside_edges_see_their_own_positions_and_no_others(window, dtype):
    check_trials(edges(setting_of(dtype), [window]), TINY)


@pytest.mark.parametrize(
    ("capability", "dim"),
    [
        (80, 64),
        (86, 256),
        (90, 128),
        (100, 256),
        *soak((80, 128), (80, 256), (86, 64), (86, 128), (90, 64), (90, 256), (100, 64)),
    ],
)
def test_every_architecture_s_tiles_compute_the_same(capability, dim):
    setting = setting_of(heads=2, kv_heads=1, head_dim=dim)
    with assume_capability(capability):
        rows = [(200, 1), (230, 70)]
        check_trials([attend(setting, "", rows, setting.dtype, 100)], setting)
        if setting.has_fp8:
            check_trials([attend_fp8(setting, 30)], setting)


@pytest.mark.parametrize("window", [None, 5])
def test_the_reference_has_drafts_attend_as_prefills_do(window):
    rows = [row for row in DRAFTS[1:] if row[0] and row[1] <= 8]
    found = make_case(rows, most_decoded=8).run(reference.decode_attention, window)
    expected = make_case(rows).run(reference.prefill_attention, window)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


# ---- numbers beyond 2**31 elements ----

FAR = (
    "embed",
    "rms_norm",
    "add_rms_norm",
    "quantize_fp8, 520",
    "copy_slabs of 16 ",
    "adjust",
    "sample",
)


def test_rows_past_32_bits_are_their_own():
    setting = setting_of(tokens=7)
    trials = [*rowwise_trials(setting), *sized_trials(setting)]
    trials = [t for t in trials if t.name.startswith(FAR)]
    for name in FAR:
        assert any(t.name.startswith(name) for t in trials), f"no trial is of {name}"
    trials.append(multiply(setting, Rounding(4, 32), 3, setting.dtype, (5, 64)))
    # A stride that is more than 32 bits long itself would make any product wide.
    wide = setting_of(tokens=40)
    trials.append(plain(wide, "far", setting.dtype, setting.dtype, has_norms=False))
    # Each kernel writes the last token of one of them.
    for rows in ([(40, 1), (50, 20)], [(50, 20), (40, 1)]):
        trials.append(attend(setting, ", far", rows, setting.dtype, num_spare=0))
    with rows_far_apart():
        check_trials(trials, setting)


def test_a_tile_far_beyond_2_to_the_31_elements_is_found():
    site = sites(TINY.kernels)["down"]
    case = lora_case(site, [1] * 3, TINY.dtype, BLOCK_ROWS[0], seed=0)
    x = randn(3, site.in_features, rng=TINY.rng("far"), dtype=TINY.dtype)
    y = torch.zeros(3, site.out_features[0], dtype=TINY.dtype)
    expected = y.clone()
    ops.expand(expected, ops.shrink(x, case.work, site))
    near = case.work.arena
    far = torch.empty(2**32 // near.shape[1] + 2, near.shape[1], dtype=near.dtype)
    far[-2:] = near
    for table in case.tile_tables:
        table[table >= 0] += (len(far) - 2) * near.shape[1] * near.itemsize // 256
    ops.expand(y, ops.shrink(x, replace(case.work, arena=far), site))
    assert torch.equal(y, expected)


# ---- names ----

MEANT = [
    name
    for name, value in vars(reference).items()
    if inspect.isfunction(value)
    and value.__module__ in (reference.__name__, elementwise.__name__)
    and not name.startswith("_")
]


def test_every_kernel_that_has_a_meaning_is_there_and_is_called_as_its_meaning_is():
    assert {name for name in vars(ops) if not name.startswith("_")} == set(MEANT)
    for name in MEANT:
        ours, meant = (inspect.signature(getattr(module, name)) for module in (ops, reference))
        assert ours == meant, name
