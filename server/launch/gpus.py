"""The GPUs that an engine gets where several engines share those of a machine."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from server.launch.errors import ServeError
from server.launch.model_settings import ModelSettings

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia[0-9]+")


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """CUDA's names of the GPUs in the variable, or else of all in this machine or container."""
    if (given := environment.get(VARIABLE)) is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    found = [path for path in devices.glob("nvidia*") if _DEVICE.fullmatch(path.name)]
    return [str(number) for number in range(len(found))]


def gpus_for(
    settings: ModelSettings, visible: Sequence[str], taken: Collection[str]
) -> tuple[str, ...]:
    """The GPUs of all engines of a base model; none where it runs on a CPU.

    visible: GPUs of this machine.   taken: those of other models. Raises ServeError.
    """
    if settings.device == "cpu":
        return ()
    if settings.gpus is not None:
        return settings.gpus
    if not visible:
        return ()
    free = [gpu for gpu in visible if gpu not in taken]
    if len(free) < settings.most_processes:
        raise ServeError(
            f"{settings.most_engines} engines of {settings.tensor_parallel_size} GPUs need "
            f"{settings.most_processes}, and there are {len(free)} free here; choose fewer "
            "--engines and --max-engines, or --device cpu."
        )
    return tuple(free[: settings.most_processes])
