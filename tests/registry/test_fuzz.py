"""Any upload is either refused with an error code or can be served; nothing crashes or hangs.

A failure names its mutant's number: `mutant(number)` makes the two files again.
"""

import hashlib
import io
import json
import re
import signal
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from kernels.tiles import RANK_ROWS
from lora.layout import PROJECTIONS, Layout
from lora.packed import PackedForm, read_header
from lora.packing import pack
from registry.base.base_model import BaseModel
from registry.checks.tensor_names import peft_name
from registry.checks.validate import AdapterLimits, check_adapter
from registry.errors import InvalidAdapter, TooLarge
from registry.formats.peft_format import lora_names, write_canonical
from tests.lora.factories import FORM, SHAPE
from tests.registry.mutants import mutant

LIMITS = AdapterLimits()
HANG_S = 1.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    save_model = pytest.importorskip("tests.tiny_models").save_model
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def base(model_dir, tmp_path_factory):
    return BaseModel.load(model_dir, "tiny", tmp_path_factory.mktemp("cache"))


def outcome(base, number):
    """Return the canonical object of a mutant and its check, or its refusal and None."""
    config, weights = mutant(number)
    try:
        checked = check_adapter(config, io.BytesIO(weights), base, LIMITS)
    except (InvalidAdapter, TooLarge) as error:
        return error, None
    written = io.BytesIO()
    write_canonical(written, io.BytesIO(weights), checked.adapter)
    return written.getvalue(), checked


@contextmanager
def no_hang():
    """Fail after HANG_S of processor time, which a busy machine does not use up."""

    def give_up(*_):
        raise AssertionError(f"more than {HANG_S} s")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def uploaded(number):
    """(A, B) by module of an accepted mutant, read with nothing of the registry but names."""
    _, weights = mutant(number)
    start = 8 + int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8:start])

    given = {peft_name(name): name for name in header if name != "__metadata__"}

    def tensor(name):
        entry = header[given[name]]
        first, end = entry["data_offsets"]
        raw = weights[start + first : start + end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[entry["dtype"]])
        return values.astype(np.float32).reshape(entry["shape"])

    modules = {name.removeprefix("base_model.model.").partition(".lora")[0] for name in given}
    return {module: [tensor(name) for name in lora_names(module)] for module in modules}


def packed(data, form, folder):
    (folder / "object").write_bytes(data)
    (folder / "packed").write_bytes(b"")
    digest = hashlib.sha256(data).hexdigest()
    pack(folder / "object", digest, form, lambda _: folder / "packed")
    return io.BytesIO((folder / "packed").read_bytes())


def effects(file):
    """scale * B @ A by (layer, projection) of a packed float32 file, summed over its tiles."""
    header = read_header(file)
    slabs = np.frombuffer(file.read(), np.float32).reshape(header.num_slabs, -1)
    scales = {(layer, projection): scale for layer, projection, scale in header.scales}
    sums = {}
    for tile in header.tiles:
        in_features, out_features = SHAPE.features(tile.projection)
        rows = slabs[tile.slab, tile.offset_bytes // 4 :][
            : RANK_ROWS * (in_features + out_features)
        ]
        a = rows[: RANK_ROWS * in_features].reshape(RANK_ROWS, in_features).astype(np.float64)
        b = rows[RANK_ROWS * in_features :].reshape(RANK_ROWS, out_features).astype(np.float64)
        place = tile.layer, tile.projection
        sums[place] = sums.get(place, 0.0) + scales[place] * b.T @ a
    return sums


def assert_a_sentence(refusal):
    assert re.fullmatch("[a-z_]+", refusal.code)
    assert str(refusal).isprintable()
    assert str(refusal).isascii()
    assert str(refusal).endswith(".")
    assert len(str(refusal)) < 500


def assert_served(number, data, checked, folder):
    """Assert that the mutant packs for every engine and that its packed deltas are the uploaded."""
    for dtype in ("float16", "bfloat16"):
        packed(data, PackedForm(Layout.of(SHAPE, 2), dtype, "base-1"), folder)
    added = effects(packed(data, FORM, folder))
    for module, (a, b) in uploaded(number).items():
        layer, projection = int(module.split(".")[2]), PROJECTIONS.index(module.rpartition(".")[2])
        wanted = checked.adapter.modules[module].scale * b.astype(np.float64) @ a.astype(np.float64)
        found = added.pop((layer, projection))
        # The order of sums differs, so the bound is relative to the largest terms: sums may cancel.
        room = (
            1e-12
            * checked.adapter.modules[module].scale
            * np.abs(b).max()
            * np.abs(a).max()
            * len(a)
        )
        assert np.abs(found - wanted).max() <= room
    assert not added


def fuzz(base, numbers, folder):
    """Count the mutants by outcome: `accepted` or the code of the refusal."""
    ends = Counter()
    for number in numbers:
        try:
            with no_hang():
                end, checked = outcome(base, number)
                if checked is None:
                    assert_a_sentence(end)
                else:
                    assert_served(number, end, checked, folder)
        except Exception as error:
            raise AssertionError(f"mutant({number})") from error
        ends[end.code if checked is None else "accepted"] += 1
    return ends


def test_every_mutant_is_served_or_refused_by_name(base, tmp_path):
    ends = fuzz(base, range(400), tmp_path)
    # The mutants would prove little if all were refused or all had the same outcome.
    assert ends["accepted"] > 40
    assert len(ends) > 15


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_one_of_a_hundred_thousand_mutants_is_served_or_refused_by_name(base, tmp_path):
    ends = fuzz(base, range(400, 100_400), tmp_path)
    assert ends["accepted"] > 10_000
    print(ends.most_common())  # noqa: T201
