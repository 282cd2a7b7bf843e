"""`kernels.reference` makes its tensors on the device of its inputs, so that it can stand in for a
kernel on a GPU.
"""

import pytest
import torch

from kernels import reference
from tests.gpu.agreement import GROUPS
from tests.gpu.setting import dry
from tests.gpu.trials.trial import CPU, is_same

TRIALS = [trial for trials in GROUPS.values() for trial in trials(dry(seed=0))]


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_no_tensor_is_made_on_the_default_device(trial):
    if "host" in trial.name:
        pytest.skip("the trial itself makes host memory")
    expected = trial.run(reference, CPU)
    # Tensors made on the default device would have no numbers.
    with torch.device("meta"):
        found = trial.run(reference, CPU)
    assert all(map(is_same, found, expected))
