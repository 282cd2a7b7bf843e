"""Settings that an engine is started with. Frozen; derived sizes are computed where used."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

SchedulingPolicy = Literal["fcfs", "sjf", "vtc"]


class Bounds:
    """Limits of a number, by pydantic's names: ge, gt, le and lt.

    They are checked where an operator's settings are read; an engine takes what its file says. The
    engine runs without pydantic, which finds the method here by its name.
    """

    def __init__(self, **limits: float) -> None:
        self.__dict__.update(limits)

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        schema = handler(source)
        schema.get("schema", schema).update(self.__dict__)  # a number that may be None has one
        return schema


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """The settings of a scheduler that no engine derives.

    Here and in EngineSettings the comment above a field describes it. Fields without one are flags,
    which server/cli/serve.py describes.
    """

    # Most answers that wait in the queue of one engine; a request beyond them is refused with 503.
    max_waiting: Annotated[int, Bounds(ge=1)] = 1024
    # How often later requests may start before a request that waits for free memory in the arena;
    # then none behind it starts before it does.
    max_skips: Annotated[int, Bounds(ge=0)] = 64
    # Choice of the waiting request that starts next: vtc, one of the tenant that was served least
    # so far; fcfs, the one that came first; sjf, the one with the shortest expected answer.
    scheduling_policy: SchedulingPolicy = "vtc"
    # Whether the KV of prompts and answers is kept and used again for prompts of the same tenant
    # and adapter that begin alike.
    prefix_caching: bool = True


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(SchedulerSettings):
    """Limits of a step and of the queue, as an engine resolved them.

    public_prefixes: token ids of prompt prefixes that all tenants share in the base model's cache.
    sliding_window: most positions that a layer of the model sees; None if a layer sees all.
    base_revision: the model's revision, one of the things that cached KV depends on.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 128
    max_sum_ranks_per_step: int = 1024
    public_prefixes: tuple[tuple[int, ...], ...] = ()
    sliding_window: int | None = None
    base_revision: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineSettings(SchedulerSettings):
    """The settings that an operator gives for engines; `chorale serve` has each of them too.

    What is "auto" or None is resolved by `engine.build` from the machine, the checkpoint and the
    arena.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    tensor_parallel_size: Annotated[int, Bounds(ge=1, le=8)] = 1
    max_model_len: Annotated[int | None, Bounds(ge=16)] = None
    max_num_seqs: Annotated[int | None, Bounds(ge=1)] = None
    # Most tokens that one step of an engine computes, those of prompts and of answers together;
    # longer prompts are computed in chunks. (default: 128 on a CPU, 2048 on a GPU)
    max_num_batched_tokens: Annotated[int | None, Bounds(ge=16)] = None
    # Highest sum of the ranks of the distinct adapters in one step of an engine; a single adapter
    # with a larger rank runs alone. More ranks make steps longer, fewer make requests wait. By
    # default as many as take a tenth of the bytes of the base model's weights; on a GPU as many as
    # make a step no longer than max_num_batched_tokens of a prompt do; and at least 256.
    max_sum_ranks_per_step: Annotated[int | None, Bounds(ge=1)] = None
    # Bytes of host memory that each process of an engine has for the KV of preempted requests.
    # (default: 256 MiB on a CPU, 4 GiB beside a GPU)
    swap_bytes: Annotated[int | None, Bounds(ge=0)] = None
    # Tokens in a block of KV; the engine doubles it until a block has room for the parts that
    # adapters are stored in.
    block_size: Annotated[int, Bounds(ge=16)] = 16
    arena_bytes: Annotated[int | None, Bounds(ge=1 << 20)] = None
    memory_utilization: Annotated[float, Bounds(gt=0, lt=1)] = 0.9
    quantization: Literal["fp8", "int8", "int4"] | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    batch_invariant: bool = False
    speculation: Literal["auto", "off"] = "auto"
    # Bytes of host memory that an engine has for pools of drafts, which are for requests whose
    # speculation is shared; one tenant has a sixteenth of them at most. 0 keeps no pools.
    draft_pool_bytes: Annotated[int, Bounds(ge=0)] = 64 << 20
    # Whether a GPU's kernels are launched one by one, without CUDA graphs: slower, to track down
    # errors.
    enforce_eager: bool = False
    # Time at which a GPU multiplies by an adapter's A matrix: shrink, beside the base model's
    # product; none, before it, to track down errors.
    lora_overlap: Literal["shrink", "none"] = "shrink"
    # Names of GPU kernels, as in kernels/reference.py, that plain torch replaces: slow and without
    # CUDA graphs, to track down errors.
    reference_kernels: tuple[str, ...] = ()
    # Most bytes of packed adapters on the local disk, those being written included.
    disk_cache_bytes: Annotated[int, Bounds(ge=1 << 20)] = 10 << 30
    # Most bytes of packed adapters in the host memory beside a GPU, pinned at start; an adapter
    # that is larger is refused. A CPU needs none. (default: 4 GiB, 256 MiB on a CPU)
    host_cache_bytes: Annotated[int | None, Bounds(ge=1 << 20)] = None
    # Most adapters of one tenant that are loaded at a time before the engine has their requests.
    prefetch_per_tenant: Annotated[int, Bounds(ge=1)] = 4
    # Seconds that it may take to bring one adapter from the object store to the local disk.
    fetch_timeout_s: Annotated[float, Bounds(gt=0)] = 60.0
    # Most adapters that a machine brings from the object store at a time, for all its engines.
    max_fetches: Annotated[int, Bounds(ge=1, le=32)] = 8
    # Share of an engine's arena that pinned adapters may take.
    max_pinned_share: Annotated[float, Bounds(ge=0, le=1)] = 0.5
    # Seconds that an engine which leaves the pool has to end its requests and to have all of them
    # billed; then it is killed.
    leave_timeout_s: Annotated[float, Bounds(gt=0)] = 150.0
    # Whether an engine with a damaged line in its journal sets that segment aside and serves, or
    # stops. By default it serves: only that line is lost, at most the end of one request, which
    # `chorale audit` finds, while to stop would cost all tenants the service.
    damaged_journal: Literal["set_aside", "stop"] = "set_aside"


DEVICE_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "max_num_seqs": 64,
        # Products of 128 rows run as fast as of 512 (110 GFLOP/s in C), and decodes wait for a
        # chunk of 0.3 s instead of 1.1 s (135M shape, one thread; bench/LOG.md).
        "max_num_batched_tokens": 128,
        "arena_bytes": 1 << 30,
        "host_cache_bytes": 256 << 20,
        "swap_bytes": 256 << 20,
    },
    "cuda": {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        # It is pinned, and holds 48 adapters of rank 16 on all projections of an 8B model.
        "host_cache_bytes": 4 << 30,
        "swap_bytes": 4 << 30,
    },
}
"""Values of a device for settings that are None; a GPU's arena takes what its memory leaves."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineSettings):
    """Everything `python -m engine` needs, as the supervisor writes it to a JSON file.

    data_dir: folder of the journal and the socket.   model_dir: folder in Hugging Face format.
    threads: CPU threads that compute, of each rank.
    unquantized_model_dir: folder of the model from which a quantised checkpoint was made; with it,
    proofs tell how far that moves an adapter's answers.
    draft_model_dir: folder of a smaller model with the same vocabulary, which drafts; for CPUs.
    cpu_kernels: "auto" takes the first of the others that works.
    public_prefixes, sliding_window: see SchedulerConfig; `engine.build` fills the latter in.
    residency_interval_s: time between journal records of adapter residency.
    max_unsettled_records: number of journal records waiting for the settler at which the engine
    stops accepting requests.
    hold_lifetime_s: how long a gateway's hold lasts; see `engine.retired`.
    listen: "tcp://IP:PORT" for gateways on other machines, with the two keys of
    `engine.wire.tcp.listen`; "" for a Unix socket in data_dir.
    """

    data_dir: str
    model_dir: str
    base_revision: str
    vocabulary_path: str
    eos_token_ids: tuple[int, ...]
    adapter_cache_dir: str
    fetcher_socket: str
    threads: int
    unquantized_model_dir: str | None = None
    draft_model_dir: str | None = None
    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    public_prefixes: tuple[tuple[int, ...], ...] = ()
    sliding_window: int | None = None
    gateway_timeout_s: float = 10.0
    residency_interval_s: float = 900.0
    max_unsettled_records: int = 100_000
    hold_lifetime_s: float = 180.0
    listen: str = ""
    server_key: str = field(default="", repr=False)
    client_key: str = ""

    def __post_init__(self) -> None:
        # Values from JSON are lists.
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        object.__setattr__(self, "reference_kernels", tuple(self.reference_kernels))
        public = tuple(tuple(prefix) for prefix in self.public_prefixes)
        object.__setattr__(self, "public_prefixes", public)

    @property
    def scheduler(self) -> SchedulerConfig:
        given = {field.name: getattr(self, field.name) for field in fields(SchedulerConfig)}
        optional = given.pop("sliding_window")
        assert None not in given.values(), "not resolved yet"
        return SchedulerConfig(sliding_window=optional, **given)
