"""The time of each kernel of a step, by torch's profiler."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu.check import note_wrong
from bench.gpu.engine_model import EngineUnderTest
from bench.report import rounded
from engine.steps.batch import ScheduledRow

_NAME = 80
"""Longest name of a kernel; torch's names of templates are longer than a line."""


def kernel_times(
    engine: EngineUnderTest, requests: Sequence[ScheduledRow], num_steps: int
) -> dict[str, dict[str, Any]]:
    """Return launches and microseconds a step of each kernel by its name, the longest first.

    Kernels on two streams overlap, so their times may add up to more than the step's. On a CPU the
    operators of torch take the place of kernels.
    """
    is_gpu = engine.machine.there.type == "cuda"
    activity = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(num_steps):
            engine.step(tuple(requests))
        if is_gpu:
            torch.cuda.synchronize()
    found: dict[str, dict[str, Any]] = {}
    for event in profiler.key_averages():
        if is_gpu and event.device_type != DeviceType.CUDA:
            continue
        total_us = event.self_device_time_total if is_gpu else event.self_cpu_time_total
        own = found.setdefault(event.key[:_NAME], {"launches": 0, "us": 0.0})
        own["launches"] += event.count / num_steps
        own["us"] += total_us / num_steps
    if not found:
        note_wrong("the profiler has seen no kernel")
    longest = sorted(found.items(), key=lambda item: -item[1]["us"])
    return {name: {key: rounded(value) for key, value in of.items()} for name, of in longest}
