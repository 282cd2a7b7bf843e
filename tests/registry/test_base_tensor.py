import io

import numpy as np
import pytest

from registry.base.base_tensor import BaseTensor, digest_of
from registry.formats.peft_format import read_header
from tests.registry.factories import encode, make_tensor


def stored(values, dtype):
    dtype, shape, raw = make_tensor(values, dtype)
    return BaseTensor(dtype, shape, digest_of(dtype, shape, [raw]))


def is_equal(values, dtype, base):
    data = encode({"x": make_tensor(values, dtype)})
    file = io.BytesIO(data)
    return base.equals(file, read_header(file, len(data)).tensors["x"])


EXACT = np.array([[1.5, -0.25, 0.0], [2.0, -3.0, 0.125]], np.float32)


@pytest.mark.parametrize("uploaded", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_equal_values_are_equal_in_every_dtype(dtype, uploaded):
    assert is_equal(EXACT, uploaded, stored(EXACT, dtype))
    changed = EXACT.copy()
    changed[1, 2] = 0.25
    assert not is_equal(changed, uploaded, stored(EXACT, dtype))


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_a_value_that_only_rounds_to_the_stored_one_was_trained(dtype):
    nearly = EXACT.copy()
    nearly[0, 0] = np.nextafter(np.float32(1.5), np.float32(2))
    assert not is_equal(nearly, "F32", stored(EXACT, dtype))
    assert not is_equal(np.full((2, 3), 1e30, np.float32), "F32", stored(EXACT, dtype))


def test_another_shape_is_another_tensor():
    assert not is_equal(EXACT.T, "F32", stored(EXACT, "F32"))
    assert not is_equal(EXACT.reshape(1, 6), "F32", stored(EXACT, "F32"))


def test_a_tensor_of_whole_numbers_equals_nothing():
    raw = np.arange(6, dtype="<i4").tobytes()
    base = BaseTensor("I32", (2, 3), digest_of("I32", (2, 3), [raw]))
    assert not is_equal(EXACT, "F32", base)
