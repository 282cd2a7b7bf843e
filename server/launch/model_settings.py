"""The settings that each base model may have for itself, at the top or in its [[models]] table."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from server.pool.files import MAX_ENGINES
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


class ModelSettings(BaseModel):
    """The settings of one base model and of its engines.

    The comment above a field describes it, and the comment behind a field says what None means.
    Fields without a comment are flags, which server/cli/serve.py describes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = ""
    model_name: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    engines: int = Field(1, ge=1, le=MAX_ENGINES)
    max_engines: int | None = Field(None, ge=1, le=MAX_ENGINES)
    # Seconds within which 9 of 10 first tokens should come; where they come later, another engine
    # is started, up to max_engines.
    slo_first_token_s: float = Field(2.0, gt=0)
    # Seconds without an admitted request after which the model's engines end and let go of their
    # memory; the next one starts them again.
    sleep_after_s: float | None = Field(None, gt=0)  # default: never
    # Seconds that a request waits for the engines of a model that slept, before it is refused with
    # 503; 0 refuses at once.
    wake_timeout_s: float = Field(30.0, ge=0)
    tensor_parallel_size: int = Field(1, ge=1, le=8)
    # GPUs of this machine, as CUDA_VISIBLE_DEVICES names them, which the model's engines take in
    # this order; models that name the same GPU share it. By default the next ones that are free.
    gpus: tuple[str, ...] | None = None
    max_model_len: int | None = Field(None, ge=16)
    max_num_seqs: int | None = Field(None, ge=1)
    # Most tokens that one step of an engine computes, those of prompts and of answers together;
    # longer prompts are computed in chunks.
    max_num_batched_tokens: int | None = Field(None, ge=16)  # default: 128 on a CPU, 2048 on a GPU
    # Most answers that wait in the queue of one engine; a request beyond them is refused with 503.
    max_waiting: int = Field(1024, ge=1)
    # Highest sum of the ranks of the distinct adapters in one step of an engine; a single adapter
    # with a larger rank runs alone. More ranks make steps longer, fewer make requests wait. By
    # default as many as take a tenth of the bytes of the base model's weights; on a GPU as many as
    # make a step no longer than max_num_batched_tokens of a prompt do; and at least 256.
    max_sum_ranks_per_step: int | None = Field(None, ge=1)
    # Whether the KV of prompts and answers is kept and used again for prompts of the same tenant
    # and adapter that begin alike.
    prefix_caching: bool = True
    # System messages and prompt prefixes whose KV all tenants share on the base model.
    public_prompts: tuple[str, ...] = ()
    # Bytes of host memory that each process of an engine has for the KV of preempted requests.
    swap_bytes: int | None = Field(None, ge=0)  # default: 256 MiB on a CPU, 4 GiB beside a GPU
    # Tokens in a block of KV; the engine doubles it until a block has room for the parts that
    # adapters are stored in.
    block_size: int = Field(16, ge=16)
    arena_bytes: int | None = Field(None, ge=1 << 20)
    memory_utilization: float = Field(0.9, gt=0, lt=1)
    quantization: Literal["fp8", "int8", "int4"] | None = None
    # Folder of the model from which a quantised checkpoint was made. With it, an adapter's passport
    # tells how far the quantised base moves its answers.
    unquantized_model: Path | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    batch_invariant: bool = False
    speculation: Literal["auto", "off"] = "auto"
    # Bytes of host memory that an engine has for pools of drafts, which are for requests whose
    # speculation is shared; one tenant has a sixteenth of them at most. 0 keeps no pools.
    draft_pool_bytes: int = Field(64 << 20, ge=0)
    # Folder of a smaller model with the same vocabulary, which drafts where texts do not; for one
    # rank on a CPU.
    draft_model: Path | None = None
    # Whether a GPU's kernels are launched one by one, without CUDA graphs: slower, to track down
    # errors.
    enforce_eager: bool = False
    # Time at which a GPU multiplies by an adapter's A matrix: shrink, beside the base model's
    # product; none, before it, to track down errors.
    lora_overlap: Literal["shrink", "none"] = "shrink"
    # Names of GPU kernels, as in kernels/reference.py, that plain torch replaces: slow and without
    # CUDA graphs, to track down errors.
    reference_kernels: tuple[str, ...] = ()
    threads: int = Field(default_factory=_default_threads, ge=1)
    # Most bytes of packed adapters on the local disk, those being written included.
    disk_cache_bytes: int = Field(10 << 30, ge=1 << 20)
    # Most bytes of packed adapters in the host memory beside a GPU, pinned at start; an adapter
    # that is larger is refused. A CPU needs none.
    host_cache_bytes: int | None = Field(None, ge=1 << 20)  # default: 4 GiB, 256 MiB on a CPU

    @field_validator("public_prompts", "gpus", mode="before")
    @classmethod
    def _parse_list(cls, value: Any) -> Any:
        return parse_list(value)

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
    def most_engines(self) -> int:
        """How many engines may run at once."""
        return self.max_engines or self.engines

    @property
    def most_processes(self) -> int:
        """How many processes the engines may have at once."""
        return self.most_engines * self.tensor_parallel_size

    @property
    def model_id(self) -> str:
        return self.model_name or Path(self.model).name


def parse_list(value: Any) -> Any:
    """Decode the JSON list that an environment variable holds."""
    return json.loads(value) if isinstance(value, str) else value
