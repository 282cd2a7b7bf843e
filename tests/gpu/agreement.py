"""Every kernel agrees with its reference on a CPU, and gives the same bits each time it is run."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from kernels import reference
from kernels.gpu import ops
from tests.gpu.setting import Check, Setting
from tests.gpu.trials.attention import attention_trials
from tests.gpu.trials.experts import expert_trials
from tests.gpu.trials.lora import lora_trials
from tests.gpu.trials.quantized import quantized_trials
from tests.gpu.trials.rope import rope_trials
from tests.gpu.trials.rowwise import rowwise_trials
from tests.gpu.trials.sampling import sampling_trials
from tests.gpu.trials.trial import CPU, Trial, is_same

Trials = Callable[[Setting], Iterator[Trial]]

GROUPS: dict[str, Trials] = {
    "rowwise": rowwise_trials,
    "quantized": quantized_trials,
    "experts": expert_trials,
    "rope": rope_trials,
    "attention": attention_trials,
    "lora": lora_trials,
    "sampling": sampling_trials,
}


def agreement_checks() -> dict[str, Check]:
    return {f"kernels.{name}": _check(trials) for name, trials in GROUPS.items()}


@contextmanager
def empty_memory_is_nan() -> Iterator[None]:
    """Fill tensors from torch.empty with NaN, or with the highest integer of their dtype."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_trials(trials: Iterable[Trial], setting: Setting) -> None:
    """Raise AssertionError with what is wrong of the kernels, or of their references."""
    wrong = [f"{t.name}: {error}" for t in trials for error in _errors(t, setting)]
    assert not wrong, "\n".join(wrong)


def _check(trials: Trials) -> Check:
    return lambda setting: check_trials(trials(setting), setting)


def _errors(trial: Trial, setting: Setting) -> Iterator[str]:
    with empty_memory_is_nan():
        try:
            ours = trial.run(ops, setting.there)
            torchs = trial.run(reference, CPU)
            trial.judge([part.cpu() for part in ours], torchs)
        except AssertionError as error:
            yield str(error)
            return
        for _ in range(setting.kernels.repeats - 1):
            if not all(map(is_same, ours, trial.run(ops, setting.there))):
                yield "not the same bits again: an error that moves is a race"
                break
