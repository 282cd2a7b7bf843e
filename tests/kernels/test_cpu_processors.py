"""The C kernels compile for other processors, and compute what this one's do.

Another processor adds in vectors of another width, so results agree to rounding. Those of this
processor are compared with the formulas in test_cpu_kernels.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import kernels.cpu
from kernels.cpu.compiler import FLAGS as LIBRARY_FLAGS
from kernels.cpu.compiler import levels_of
from tests.soak import soak

SOURCES = [Path(__file__).parent / "cpu_driver.c"]
SOURCES += sorted((Path(kernels.cpu.__file__).parent / "csrc").glob("*.c"))
FLAGS = [flag for flag in LIBRARY_FLAGS if flag not in ("-fPIC", "-shared")]


def results(folder, compiler, *flags, emulator=()):
    for tool in (compiler, *emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    program = folder / f"driver-{len(list(folder.iterdir()))}"
    command = [compiler, *FLAGS, *flags, "-static", *SOURCES, "-o", program, "-lm"]
    subprocess.run(command, check=True, timeout=100)
    done = subprocess.run([*emulator, program], check=True, capture_output=True, timeout=100)
    return torch.tensor([float(line) for line in done.stdout.split()])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Results of the plainest vectors of x86-64, which every such processor has."""
    found = results(tmp_path_factory.mktemp("native"), "cc")
    assert len(found) > 10_000
    assert found.isfinite().all()
    return found


def has_features(*names):
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return set(names) <= set(words)


@pytest.mark.parametrize("level", ["avx2", *soak("avx512", "avx512vnni")])
def test_kernels_for_wider_vectors_compute_the_same(tmp_path, expected, level):
    features = levels_of("x86_64")[level]
    if not has_features(*features):
        pytest.skip(f"this processor has no {level}")
    found = results(tmp_path, "cc", *(f"-m{feature.replace('_', '')}" for feature in features))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_kernels_for_arm_compute_the_same_under_emulation(tmp_path, expected):
    found = results(tmp_path, "aarch64-linux-gnu-gcc", emulator=["qemu-aarch64"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
