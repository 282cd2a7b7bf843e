"""The settings that each base model may have for itself, at the top or in its [[models]] table."""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from server.pool.pool_settings import PoolSettings
from server.text.json_object import JsonObject


def _default_threads(values: JsonObject) -> int:
    """All cores but one, divided among the processes of all engines of all models that may run.

    The one core is left to the gateway and the fetcher.
    """
    num_engines: int = values["max_engines"] or values["engines"]
    ranks: int = values["tensor_parallel_size"]
    return threads_for(num_engines * ranks)


def threads_for(num_processes: int) -> int:
    """Threads of each of `num_processes` that share the machine."""
    return max(1, ((os.cpu_count() or 2) - 1) // num_processes)


def parse_list(value: Any) -> Any:
    """Decode the JSON list that an environment variable holds."""
    return json.loads(value) if isinstance(value, str) else value


class ModelSettings(BaseModel, PoolSettings, frozen=True):
    """The settings of one base model, with comments as in PoolSettings."""

    model_config = ConfigDict(extra="forbid")

    # GPUs of this machine, as CUDA_VISIBLE_DEVICES names them, which the model's engines take in
    # this order; models that name the same GPU share it. By default the next ones that are free.
    gpus: tuple[str, ...] | None = None
    # System messages and prompt prefixes whose KV all tenants share on the base model.
    public_prompts: tuple[str, ...] = ()
    # Folder of the model from which a quantised checkpoint was made. With it, an adapter's passport
    # tells how far the quantised base moves its answers.
    unquantized_model: Path | None = None
    # Folder of a smaller model with the same vocabulary, which drafts where texts do not; for one
    # rank on a CPU.
    draft_model: Path | None = None
    threads: int = Field(default_factory=_default_threads, ge=1)

    _parse_lists = field_validator("public_prompts", "gpus", mode="before")(parse_list)

    @field_validator("max_engines")
    @classmethod
    def _check_max_engines(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("engines", 1):
            raise ValueError("must be at least `engines`")
        return value

    @field_validator("gpus")
    @classmethod
    def _check_gpus(cls, value: tuple[str, ...] | None, info: ValidationInfo) -> Any:
        most = info.data.get("max_engines") or info.data.get("engines", 1)
        needed = most * info.data.get("tensor_parallel_size", 1)
        if value is not None and len(value) < needed:
            raise ValueError(f"must name {needed} GPUs, tensor_parallel_size for each engine")
        return value

    @property
    def most_processes(self) -> int:
        """How many processes the engines may have at once."""
        return self.most_engines * self.tensor_parallel_size


_FOR_ALL = {
    "max_skips", "scheduling_policy", "prefetch_per_tenant", "fetch_timeout_s", "max_fetches",
    "max_pinned_share", "leave_timeout_s", "damaged_journal", "max_queue_share", "gateways",
}  # fmt: skip
"""Settings that all base models share."""
MODEL_FIELDS = ModelSettings.model_fields.keys() - _FOR_ALL
"""Names of the settings that each base model may have for itself."""
