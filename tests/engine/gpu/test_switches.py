"""Switches that turn off features that are broken on a GPU do not change the tokens."""

import logging
from dataclasses import replace
from functools import partial

import pytest

from engine.errors import UnsupportedModel
from engine.gpu.backend import SomeReferences
from engine.wire.messages import SamplingParams
from tests.engine.fakes import make_message, run_until_idle, tokens_of
from tests.engine.gpu.backends import fake_backend
from tests.engine.gpu.fake_device import FakeDevice
from tests.engine.gpu.recording import RecordingKernels
from tests.engine.real_core import add_adapter, build_core
from tests.tiny_models import save_adapter, save_model


class Watched(FakeDevice):
    """A device that counts graphs and overlapped work.

    num_good: captures that succeed after memory was measured; later ones fail.
    """

    def __init__(self, num_good=1000):
        super().__init__()
        self.num_good = num_good
        self.num_captures = self.num_beside = 0
        self.is_measured = False

    def measure(self, work):
        memory = super().measure(work)
        self.num_measured, self.num_captures, self.is_measured = self.num_captures, 0, True
        return memory

    def capture(self, work):
        self.num_captures += 1
        if self.is_measured and self.num_captures > self.num_good:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(work)

    def beside(self, work):
        self.num_beside += 1
        return super().beside(work)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A function that returns the tokens of an engine with given switches on a given device."""
    folder = tmp_path_factory.mktemp("switches")
    model_dir, objects = save_model(folder / "model"), {}
    adapter = save_adapter(model_dir, folder / "adapter", seed=1, r=4, lora_alpha=16)
    ref = add_adapter(objects, model_dir, adapter, folder)

    def ask(device, **switches):
        own = folder / str(len(list(folder.iterdir())))
        backend = partial(fake_backend, device=device, **switches)
        core = build_core(model_dir, own, objects, make_backend=backend)
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        for number in range(4):
            message = make_message(f"r{number}", prompt_len=5 + 3 * number)
            message = replace(message, adapter=ref if number % 2 else None, token_lease=6)
            core.handle("gw", replace(message, sampling_params=params))
        return {name: tokens_of(own) for name, own in run_until_idle(core).items()}

    return ask


@pytest.fixture(scope="module")
def usual(world):
    return world(Watched())


def test_an_eager_engine_captures_no_graph(world, usual):
    device = Watched()
    assert world(device, enforce_eager=True) == usual
    assert device.num_measured == device.num_captures == 0


@pytest.mark.parametrize("num_good", [0, 3])
def test_graphs_that_cannot_be_captured_are_launched_eagerly_and_the_log_says_so(
    world, usual, caplog, num_good
):
    device = Watched(num_good)
    with caplog.at_level(logging.WARNING):
        assert world(device) == usual
    (message,) = caplog.messages
    failed = device.num_captures - num_good
    assert device.num_measured > 0, "there is room for graphs beside the arena"
    assert message.startswith(f"{failed} of {device.num_captures} graphs could not be captured")
    assert message.endswith("operation not permitted when stream is capturing")


def test_without_overlap_nothing_runs_beside_a_product(world, usual):
    device = Watched()
    assert world(device, lora_overlap="none") == usual
    assert device.num_beside == 0
    overlapped = Watched()
    world(overlapped)
    assert overlapped.num_beside > 0


def test_a_kernel_that_is_replaced_is_not_called_and_no_graph_is_captured(
    world, usual, monkeypatch
):
    def be_broken(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(RecordingKernels, "shrink", be_broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        world(Watched())
    device = Watched()
    assert world(device, reference_kernels=["shrink"]) == usual
    assert device.num_captures == 0


def test_a_name_that_is_no_kernel_is_refused():
    with pytest.raises(UnsupportedModel, match="reference_kernels: atention is no kernel"):
        SomeReferences(RecordingKernels(FakeDevice()), ["shrink", "atention"])
