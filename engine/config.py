"""Settings that an engine is started with. Frozen; derived sizes are computed where used."""

from dataclasses import dataclass, field, fields
from typing import Literal

from engine.fairness import SchedulingPolicy


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the queue.

    max_num_batched_tokens: tokens computed in one step.   max_num_seqs: requests in one step.
    max_waiting: requests queued; one more is refused.
    max_sum_ranks_per_step: sum of the ranks of the distinct adapters in one step; an adapter whose
    rank alone is larger runs as the only one.
    max_skips: how often other requests may pass one that lacks room.
    public_prefixes: token ids of prompt prefixes that all tenants share in the base model's cache.
    sliding_window: most positions that a layer of the model sees; None if a layer sees all.
    base_revision: the model's revision, one of the things that cached KV depends on.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 128
    max_waiting: int = 1024
    max_sum_ranks_per_step: int = 1024
    max_skips: int = 64
    scheduling_policy: SchedulingPolicy = "vtc"
    prefix_caching: bool = True
    public_prefixes: tuple[tuple[int, ...], ...] = ()
    sliding_window: int | None = None
    base_revision: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything `python -m engine` needs, as the supervisor writes it to a JSON file.

    data_dir: folder of the journal and the socket.   model_dir: folder in Hugging Face format.
    arena_bytes: size of KV and adapters together.   threads: CPU threads that compute.
    tensor_parallel_size: ranks (processes on one machine) that share the model, 8 at most;
    arena_bytes, swap_bytes and threads hold for each rank.
    memory_utilization: share of a GPU's memory that the engine takes if arena_bytes is None.
    quantization: what floating-point weights of the base model are rounded to: "int8", "int4" in
    groups of 32, or "fp8" on a GPU. Weights that the checkpoint has as codes stay as they are.
    unquantized_model_dir: folder of the model from which a quantised checkpoint was made; with it,
    proofs tell how far that moves an adapter's answers.
    kv_cache_dtype: "auto" or "fp8".
    batch_invariant: whether a request's tokens and logprobs are the same bits whatever else runs,
    and however the request was chunked, cached or computed again; for CPUs.
    cpu_kernels: "auto" takes the first of the others that works.
    enforce_eager: whether a GPU's steps are launched kernel by kernel, without captured graphs.
    speculation: "auto" verifies drafts where that brings more tokens a second, "off" never does.
    draft_pool_bytes: memory for pools of drafts, of which a tenant has a sixteenth at most; 0 for
    none.
    draft_model_dir: folder of a smaller model with the same vocabulary, which drafts; for CPUs.
    lora_overlap: when a GPU multiplies by an adapter's A: "shrink" is in parallel with the base
    model's product, "none" is before it.
    reference_kernels: names of GPU kernels that are replaced by the plain, slow torch of
    `kernels.reference`; if there are any, no graph is captured.
    device and dtype may be "auto", and arena_bytes, max_model_len, max_num_seqs,
    max_num_batched_tokens, max_sum_ranks_per_step, host_cache_bytes and swap_bytes None:
    `engine.build` replaces them by what the machine, the checkpoint and the arena give.
    swap_bytes: host memory for the KV of preempted requests.
    sliding_window: the model's own, filled in by `engine.build`.
    fetch_timeout_s: limit for one adapter, from the object store to disk.
    max_fetches: most adapters that are fetched at once.
    max_pinned_share: largest share of the arena's slabs for adapters that the operator pins.
    residency_interval_s: time between journal records of adapter residency.
    max_unsettled_records: number of journal records waiting for the settler at which the engine
    stops accepting requests.
    leave_timeout_s: longest time from SIGTERM to the exit.   hold_lifetime_s: how long a gateway's
    hold lasts; see `engine.retired`.
    damaged_journal: what to do with a damaged segment; see `engine.journal.Journal`.
    listen: "tcp://IP:PORT" for gateways on other machines, with the two keys of
    `engine.tcp.TcpListener`; "" for a Unix socket in data_dir.
    """

    data_dir: str
    model_dir: str
    base_revision: str
    vocabulary_path: str
    eos_token_ids: tuple[int, ...]
    adapter_cache_dir: str
    fetcher_socket: str
    device: str
    dtype: str
    arena_bytes: int | None
    threads: int
    max_model_len: int | None
    memory_utilization: float = 0.9
    quantization: Literal["fp8", "int8", "int4"] | None = None
    unquantized_model_dir: str | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    batch_invariant: bool = False
    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    enforce_eager: bool = False
    speculation: Literal["auto", "off"] = "auto"
    draft_pool_bytes: int = 64 << 20
    draft_model_dir: str | None = None
    lora_overlap: Literal["shrink", "none"] = "shrink"
    reference_kernels: tuple[str, ...] = ()
    sliding_window: int | None = None
    tensor_parallel_size: int = 1
    block_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_waiting: int = 1024
    max_sum_ranks_per_step: int | None = None
    max_skips: int = 64
    scheduling_policy: SchedulingPolicy = "vtc"
    prefix_caching: bool = True
    public_prefixes: tuple[tuple[int, ...], ...] = ()
    swap_bytes: int | None = None
    disk_cache_bytes: int = 10 << 30
    host_cache_bytes: int | None = None
    prefetch_per_tenant: int = 4
    fetch_timeout_s: float = 60.0
    max_fetches: int = 8
    max_pinned_share: float = 0.5
    gateway_timeout_s: float = 10.0
    residency_interval_s: float = 900.0
    max_unsettled_records: int = 100_000
    leave_timeout_s: float = 150.0
    hold_lifetime_s: float = 180.0
    damaged_journal: Literal["set_aside", "stop"] = "set_aside"
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
