"""Kinds of runners as options of `tests.engine.real_core.build_core`, by name."""

from tests.engine.cpu_kernels import kernels_of
from tests.engine.gpu.backends import fake_backend
from tests.engine.gpu.device_team import DeviceTeam

RUNNERS = {
    "cpu": {},
    "cpu, late": {"lag": 1},
    "C": {"make_kernels": kernels_of("native")},
    "device": {"make_backend": fake_backend},
    "two ranks": {"num_ranks": 2},
    "two devices": {"num_ranks": 2, "make_team": DeviceTeam},
}
