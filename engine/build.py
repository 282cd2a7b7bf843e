"""Builds an engine: device, weights, arena, adapters, scheduler, runner, journal."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from engine.config import DEVICE_DEFAULTS, EngineConfig
from engine.core import EngineCore
from engine.cpu.backend import cpu_backend
from engine.cpu.draft_model import open_draft_model
from engine.drafts.model import ModelDrafter
from engine.drafts.pools import DraftPools
from engine.drafts.speculation import Speculation
from engine.drafts.text import TextDrafter
from engine.errors import UnsupportedModel
from engine.grammar.matcher import Grammars
from engine.journal.journal import Journal
from engine.kv.swap import PreemptionCosts, SwapSpace
from engine.models.config import DecoderConfig
from engine.models.ranks import Ranks
from engine.models.rounding import NO_ROUNDING, WeightRounding
from engine.models.weights import ServedNumbers, load_config
from engine.proofs.merged import MergedModel
from engine.ranks.group import LeadingRunner, RankGroup
from engine.scheduling.scheduler import Scheduler
from engine.steps.backend import Backend
from engine.steps.measurement import DEVICE_SIZES, SIZES, measure_steps, steps_of
from engine.steps.meter import TokenMeter
from engine.steps.runner import Runner
from engine.steps.segments import Tables
from lora.arena import Arena
from lora.batch import DeviceTables
from lora.filling import SlabFiller
from lora.layout import Layout, default_sum_ranks
from lora.loader import ThreadLoader
from lora.manager import AdapterManager
from lora.packed import PackedForm
from lora.residency import ResidencyConfig
from registry.formats.peft_format import MAX_ADDED_TOKENS

logger = logging.getLogger(__name__)

_DEFAULT_MAX_MODEL_LEN = 8192
_PROOF_PRECISION = {True: 0.005, False: 0.05}
"""Share of an adapter's effect that serving may lose (engine.proofs), by whether all is float32."""
_DRAFT_SHARE = 1 / 8
"""Share of the arena that a draft model's KV may have from idle prefixes and adapters."""


def resolve_device(config: EngineConfig) -> EngineConfig:
    """Resolve "auto" and None in `config` to their values on this machine."""
    device, dtype = config.device, config.dtype
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else _half_dtype(Path(config.model_dir))
    defaults = DEVICE_DEFAULTS[device].items()
    unset = {name: value for name, value in defaults if getattr(config, name) is None}
    return replace(config, device=device, dtype=dtype, **unset)


def _half_dtype(model_dir: Path) -> Literal["float16", "bfloat16"]:
    """The checkpoint's own 16-bit type; `torch_dtype` is how transformers 4 spelled it."""
    checkpoint = load_config(model_dir)
    saved = checkpoint.get("dtype") or checkpoint.get("torch_dtype")
    return "float16" if saved == "float16" else "bfloat16"


def resolve_max_model_len(
    config: EngineConfig, model_config: DecoderConfig, num_tokens: int | None = None
) -> EngineConfig:
    """Resolve a max_model_len of None to the length that the model was made for, within reason.

    num_tokens: tokens that the arena holds, which also limit it, if they are known before.
    """
    if config.max_model_len is not None:
        return config
    longest = min(model_config.max_position_embeddings, _DEFAULT_MAX_MODEL_LEN)
    if model_config.longest_of_ropes is not None:
        # Longer sequences would change the frequencies of shorter ones.
        longest = min(longest, model_config.longest_of_ropes)
    longest = longest if num_tokens is None else min(longest, num_tokens)
    return replace(config, max_model_len=longest)


def resolve_sum_ranks(
    config: EngineConfig, layout: Layout, weight_bytes: int, used_share: float
) -> EngineConfig:
    """Resolve a max_sum_ranks_per_step of None to the layout's default."""
    if config.max_sum_ranks_per_step is not None:
        return config
    step_tokens = config.max_num_batched_tokens if config.device == "cuda" else None
    sum_ranks = default_sum_ranks(layout, weight_bytes, step_tokens, used_share)
    return replace(config, max_sum_ranks_per_step=sum_ranks)


def build_core(
    config: EngineConfig, engine_id: str, vocabulary: Sequence[bytes]
) -> tuple[EngineCore, EngineConfig]:
    """Build the engine; return it with the resolved config.   vocabulary: token id -> bytes.

    With a tensor_parallel_size above 1, this starts the other ranks' processes.
    Raises UnsupportedModel, ArenaTooSmall and JournalCorrupt.
    """
    config = resolve_device(config)
    _refuse_beside_draft_model(config)
    model_config, form = _model(config)
    layout = form.layout
    config = replace(config, sliding_window=model_config.sliding_window)
    group = RankGroup(config) if config.tensor_parallel_size > 1 else None
    ranks = group.ranks if group else None
    config, model_config, backend = _backend(config, model_config, form, ranks)
    adapters = _adapters(config, form, backend, group)
    used_share = model_config.used_share
    config = resolve_sum_ranks(config, layout, backend.weight_bytes, used_share)
    data_dir = Path(config.data_dir)
    num_slots = _num_swap_slots(config, layout)
    meter = TokenMeter(data_dir / "meter")
    runner = backend.make_runner(adapters.tables, meter, num_slots)
    if group is not None:
        runner = LeadingRunner(runner, group, adapters.tables)
    swap = SwapSpace(num_slots, layout.slab_bytes, PreemptionCosts(runner.copy_bytes_per_s))
    # Tokens that adapters add have no bytes here.
    num_ids = model_config.vocab_size + (MAX_ADDED_TOKENS if layout.vocab_size else 0)
    words = [*vocabulary[:num_ids], *[b""] * (num_ids - len(vocabulary))]
    scheduler = Scheduler(
        config.scheduler,
        layout,
        adapters,
        words,
        config.eos_token_ids,
        swap,
        grammars=_grammars(config, num_ids),
        speculation=_speculation(config, model_config, runner, layout, backend, adapters.arena),
    )
    journal = Journal(
        data_dir / "journal",
        engine_id,
        config.base_revision,
        max_open=config.scheduler.max_num_seqs + config.max_waiting,
        damaged=config.damaged_journal,
    )
    num_slabs = len(backend.slabs)
    logger.info(
        "%d slabs of %d kB, %d KV tokens, %s on %s",
        num_slabs, layout.slab_bytes // 1024, num_slabs * layout.block_size, config.dtype,
        config.device,
    )  # fmt: skip
    rounding, there = WeightRounding.of(config.quantization), backend.slabs.device
    numbers = ServedNumbers(Path(config.model_dir), rounding, backend.rounds_rows_of, there)
    unrounded = _unrounded(config, model_config, numbers)
    reference = MergedModel(numbers, model_config, unrounded, backend.device)
    is_exact = config.dtype == "float32" and not numbers.is_quantized and not config.quantization
    precision = _PROOF_PRECISION[is_exact]
    core = EngineCore(
        scheduler,
        runner,
        journal,
        reference,
        precision,
        max_unsettled=config.max_unsettled_records,
        residency_interval_s=config.residency_interval_s,
    )
    return core, config


def _speculation(
    config: EngineConfig,
    model_config: DecoderConfig,
    runner: Runner,
    layout: Layout,
    backend: Backend,
    arena: Arena,
) -> Speculation:
    """Drafts, where they are wanted. Raises UnsupportedModel."""
    if config.speculation == "off":
        return Speculation.off()
    assert config.max_num_batched_tokens is not None, "not resolved yet"
    assert config.max_model_len is not None, "not resolved yet"
    curve = measure_steps(
        steps_of(runner),
        layout.block_size,
        len(backend.slabs),
        backend.most_choices or config.max_num_batched_tokens,
        config.max_model_len,
        DEVICE_SIZES if runner.lag else SIZES,
    )
    logger.info("%s", curve)
    pools = DraftPools(config.draft_pool_bytes)
    model = None
    if config.draft_model_dir is not None:
        draft_model = open_draft_model(config, model_config, backend.slabs)
        model = ModelDrafter(draft_model, arena, config.max_model_len, _DRAFT_SHARE)
    drafter = TextDrafter(pools)
    return Speculation(curve, drafter, pools, model, runner.lag, backend.most_choices)


def _unrounded(
    config: EngineConfig, model_config: DecoderConfig, served: ServedNumbers
) -> ServedNumbers | None:
    """The base model's weights before they were rounded, if they were. Raises UnsupportedModel."""
    if config.unquantized_model_dir is not None:
        folder = Path(config.unquantized_model_dir)
        shape = DecoderConfig.parse(load_config(folder)).shape
        if shape != model_config.shape:
            raise UnsupportedModel(
                f"unquantized_model: {folder} is {shape}, the served model is {model_config.shape}"
            )
        return ServedNumbers(folder, NO_ROUNDING, there=served.there)
    if config.quantization in ("int8", "int4") and not served.is_quantized:
        return ServedNumbers(Path(config.model_dir), NO_ROUNDING, there=served.there)
    return None


def _grammars(config: EngineConfig, vocab_size: int) -> Grammars | None:
    """The grammars of the model's tokens; None where llguidance is not installed."""
    path = Path(config.model_dir) / "tokenizer.json"
    if find_spec("llguidance") is None or not path.exists():
        return None
    from engine.grammar.llguidance_matcher import LlguidanceGrammars

    return LlguidanceGrammars(path, vocab_size, config.eos_token_ids)


def build_rank(config: EngineConfig, ranks: Ranks) -> tuple[SlabFiller, Callable[[Tables], Runner]]:
    """Build one of the ranks that `build_core` starts and that only compute: what fills its arena,
    and a function that makes its runner from its adapters' tables.

    config: as the first rank resolved it. Raises UnsupportedModel.
    """
    model_config, form = _model(config)
    config, _, backend = _backend(config, model_config, form, ranks)
    # Only the first rank counts for the engine; nobody reads this rank's meter.
    meter = TokenMeter(Path(config.data_dir) / "ranks" / f"meter-{ranks.shard.index}")
    num_slots = _num_swap_slots(config, form.layout)
    # One adapter is loaded at a time, and the first rank accepts none that is too large.
    host_bytes = min(config.host_cache_bytes or 0, form.layout.most_adapter_bytes)
    filler = SlabFiller(form, backend.slabs, backend.device, ranks.shard, host_bytes)
    return filler, lambda tables: backend.make_runner(tables, meter, num_slots)


def _model(config: EngineConfig) -> tuple[DecoderConfig, PackedForm]:
    """Read the model's config, and the form of adapters in its arena. Raises UnsupportedModel."""
    model_config = DecoderConfig.parse(load_config(Path(config.model_dir)))
    size = config.tensor_parallel_size
    model_config.shard(size)  # it raises where there are no equal parts
    dtype: torch.dtype = getattr(torch, config.dtype)
    kv_itemsize = 1 if config.kv_cache_dtype == "fp8" else dtype.itemsize
    # On a GPU no kernel applies adapters of the embedding and the head yet.
    vocab_size = model_config.vocab_size if config.device == "cpu" else 0
    layout = Layout.of(
        model_config.shape, dtype.itemsize, config.block_size, kv_itemsize, size, vocab_size
    )
    return model_config, PackedForm(layout, config.dtype, config.base_revision)


def _num_swap_slots(config: EngineConfig, layout: Layout) -> int:
    return (config.swap_bytes or 0) // layout.slab_bytes


def _backend(
    config: EngineConfig, model_config: DecoderConfig, form: PackedForm, ranks: Ranks | None
) -> tuple[EngineConfig, DecoderConfig, Backend]:
    """Make the backend, for the greatest length of a request. Raises UnsupportedModel."""
    _refuse_wishes(config)
    num_tokens = None
    if config.device == "cpu":
        assert config.arena_bytes is not None, "not resolved yet"
        num_tokens = config.arena_bytes // form.layout.slab_bytes * form.layout.block_size
    config = resolve_max_model_len(config, model_config, num_tokens)
    assert config.max_model_len is not None, "just resolved"
    model_config = model_config.at_length(config.max_model_len)
    if config.device == "cpu":
        return config, model_config, cpu_backend(config, model_config, form, ranks)
    # This is imported here, since without a GPU there is no Triton either.
    from engine.gpu.backend import gpu_backend

    return config, model_config, gpu_backend(config, model_config, form, ranks)


def _refuse_wishes(config: EngineConfig) -> None:
    """Raise UnsupportedModel for settings that are for the other device."""
    if config.device == "cuda" and config.batch_invariant:
        raise UnsupportedModel(
            "batch_invariant is for CPUs: the products of a GPU's library sum a row in another "
            "order when there are more rows; leave it out, or take device cpu"
        )
    if config.device == "cpu" and "fp8" in (config.quantization, config.kv_cache_dtype):
        raise UnsupportedModel(
            "FP8 weights and FP8 KV are for GPUs: take quantization int8, int4 or none, leave out "
            "kv_cache_dtype, or take device cuda"
        )


def _refuse_beside_draft_model(config: EngineConfig) -> None:
    """Raise UnsupportedModel for settings that a draft model does not go with."""
    if config.draft_model_dir is None:
        return
    wishes = {
        "device cuda": config.device == "cuda",
        f"tensor_parallel_size {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
        "speculation off": config.speculation == "off",
    }
    for name, is_wanted in wishes.items():
        if is_wanted:
            raise UnsupportedModel(
                f"draft_model {config.draft_model_dir} does not go with {name}: a draft model is "
                "for one rank on a CPU with speculation; leave one of the two out"
            )


def _adapters(
    config: EngineConfig, form: PackedForm, backend: Backend, group: RankGroup | None
) -> AdapterManager[DeviceTables]:
    assert config.host_cache_bytes is not None, "not resolved yet"
    loader = ThreadLoader(
        Path(config.adapter_cache_dir),
        Path(config.fetcher_socket),
        form,
        backend.slabs,
        device=backend.device,
        host_cache_bytes=config.host_cache_bytes,
        others=group,
        timeout_s=config.fetch_timeout_s,
        max_fetches=config.max_fetches,
    )
    return AdapterManager(
        Arena(len(backend.slabs)),
        loader,
        ResidencyConfig(
            host_cache_bytes=config.host_cache_bytes,
            disk_cache_bytes=config.disk_cache_bytes,
            arena_is_host=backend.device is None,
            max_fetches=config.max_fetches,
            prefetch_per_tenant=config.prefetch_per_tenant,
            max_pinned_share=config.max_pinned_share,
        ),
    )
