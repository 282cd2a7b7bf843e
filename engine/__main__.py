"""`python -m engine CONFIG.json`: build the engine from what the supervisor wrote, and serve."""

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import UnsupportedModel
from engine.journal import Journal
from engine.messages import Welcome
from engine.meter import TokenMeter
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.process import EngineProcess, engine_identity, lock_directory
from engine.runner import ModelRunner
from engine.scheduler import ArenaTooSmall, Scheduler
from engine.swap import PreemptionCosts, SwapSpace
from engine.weights import load_config, load_weights
from engine.wire import read_vocabulary
from lora.arena import Arena
from lora.layout import Layout
from lora.loader import ThreadLoader
from lora.manager import AdapterManager
from lora.packed import PackedForm

logger = logging.getLogger(__name__)


_DEFAULT_MAX_MODEL_LEN = 8192
_STEP_TOKENS = {"cpu": 128, "cuda": 2048}
"""Tokens of a step. 128: on a CPU, products of 128 rows run as fast as of 512 (74 of 78 GFLOP/s),
and decodes wait for a chunk of 0.4 s instead of 1.4 s (135M shape, one thread; bench/LOG.md).
"""
_SWAP_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
_LEAST_SUM_RANKS = 256
_RANK_SHARE = 0.1
"""Of the bytes that a step reads anyway, the weights: what all its adapters together may add."""


def resolve_device(config: EngineConfig) -> EngineConfig:
    """`config` with what "auto", and no wish at all, stand for on this machine."""
    device, dtype = config.device, config.dtype
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else _half_dtype(Path(config.model_dir))
    step_tokens = config.max_num_batched_tokens or _STEP_TOKENS[device]
    swap_bytes = _SWAP_BYTES[device] if config.swap_bytes is None else config.swap_bytes
    return replace(
        config,
        device=device,
        dtype=dtype,
        max_num_batched_tokens=step_tokens,
        swap_bytes=swap_bytes,
    )


def _half_dtype(model_dir: Path) -> str:
    """The checkpoint's own 16-bit type; `torch_dtype` is how transformers 4 spelled it."""
    checkpoint = load_config(model_dir)
    saved = checkpoint.get("dtype") or checkpoint.get("torch_dtype")
    return str(saved) if saved in ("float16", "bfloat16") else "bfloat16"


def resolve_max_model_len(
    config: EngineConfig, model_config: DecoderConfig, num_tokens: int
) -> EngineConfig:
    """Without a wish: what the model was made for, within reason and the arena's tokens."""
    if config.max_model_len is not None:
        return config
    longest = min(
        model_config.max_position_embeddings,
        _DEFAULT_MAX_MODEL_LEN,
        num_tokens,
    )
    return replace(config, max_model_len=longest)


def resolve_sum_ranks(config: EngineConfig, layout: Layout, weight_bytes: int) -> EngineConfig:
    """Without a wish: a tenth of the step's bytes; small models, all adapters to them, get more."""
    if config.max_sum_ranks_per_step is not None:
        return config
    rank_bytes = layout.bytes_per_rank
    sum_ranks = max(_LEAST_SUM_RANKS, int(_RANK_SHARE * weight_bytes / rank_bytes))
    return replace(config, max_sum_ranks_per_step=sum_ranks)


def build_core(config: EngineConfig, engine_id: str) -> tuple[EngineCore, EngineConfig]:
    """Weights, arena, adapters, scheduler, runner, journal; and the config without open ends."""
    config = resolve_device(config)
    data_dir, device = Path(config.data_dir), torch.device(config.device)
    dtype: torch.dtype = getattr(torch, config.dtype)
    model_config = DecoderConfig.parse(load_config(Path(config.model_dir)))
    layout = Layout.of(model_config.shape, dtype.itemsize, config.block_size)
    num_slabs = config.arena_bytes // layout.slab_bytes
    config = resolve_max_model_len(config, model_config, num_slabs * layout.block_size)
    assert config.max_model_len is not None

    weights = load_weights(Path(config.model_dir), device, dtype)
    model = Decoder(model_config, weights, config.max_model_len)
    slabs = torch.zeros(num_slabs, layout.slab_bytes, dtype=torch.uint8, device=device)
    form = PackedForm(layout, config.dtype, config.base_revision)
    adapters = AdapterManager(
        Arena(num_slabs),
        ThreadLoader(
            Path(config.adapter_cache_dir),
            Path(config.fetcher_socket),
            form,
            slabs,
            timeout_s=config.fetch_timeout_s,
        ),
        host_cache_bytes=config.host_cache_bytes,
        disk_cache_bytes=config.disk_cache_bytes,
        arena_is_host=device.type == "cpu",
        max_fetches=config.max_fetches,
        prefetch_per_tenant=config.prefetch_per_tenant,
        max_pinned_share=config.max_pinned_share,
    )
    vocabulary = read_vocabulary(Path(config.vocabulary_path))
    vocabulary += [b""] * (model_config.vocab_size - len(vocabulary))
    weight_bytes = sum(tensor.nbytes for tensor in weights.values())
    config = resolve_sum_ranks(config, layout, weight_bytes)
    meter, num_slots = TokenMeter(data_dir / "meter"), (config.swap_bytes or 0) // layout.slab_bytes
    runner = ModelRunner(model, slabs, form, adapters.tables, meter, num_slots)
    swap = SwapSpace(num_slots, layout.slab_bytes, PreemptionCosts(runner.copy_bytes_per_s))
    limits = replace(config.scheduler, sliding_window=model_config.sliding_window)
    scheduler = Scheduler(limits, layout, adapters, vocabulary, config.eos_token_ids, swap)
    journal = Journal(data_dir / "journal", engine_id, config.base_revision)
    logger.info(
        "%d slabs of %d kB, %d KV tokens, %s on %s",
        num_slabs, layout.slab_bytes // 1024, num_slabs * layout.block_size, dtype, device,
    )  # fmt: skip
    return EngineCore(scheduler, runner, journal, config.max_unsettled_records), config


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s")
    config = EngineConfig(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(config.threads)
    data_dir = Path(config.data_dir)
    data_dir.mkdir(parents=True, exist_ok=True)
    with lock_directory(data_dir):
        engine_id, epoch = engine_identity(data_dir)
        try:
            core, config = build_core(config, engine_id)
        except (UnsupportedModel, ArenaTooSmall) as error:
            logger.error("%s", error)
            sys.exit(os.EX_CONFIG)  # starting again would end the same way
        assert config.max_model_len is not None
        welcome = Welcome(
            engine_id=engine_id,
            epoch=epoch,
            base_revision=config.base_revision,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            device=config.device,
            dtype=config.dtype,
        )
        process = EngineProcess(
            core,
            welcome,
            data_dir / "engine.sock",
            gateway_timeout_s=config.gateway_timeout_s,
        )
        process.run()


if __name__ == "__main__":
    main()
