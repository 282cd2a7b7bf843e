"""`python -m tests.gpu.rank FOLDER SEED --index=I [--dry]`: one rank of `tests.gpu.ranks`."""

import argparse
from pathlib import Path

import numpy as np
import torch

from tests import interpreter


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.gpu.rank", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if options.dry:
        # The interpreter is chosen before kernels are defined.
        interpreter.use()
    run(options.folder, options.seed, options.index, options.dry)


def run(folder: Path, seed: int, index: int, is_dry: bool) -> None:
    """Run all steps of the script; the first rank saves their logits."""
    from engine.ranks import TorchRanks
    from engine.weights import ShardedWeights, StoredWeights
    from kernels.gpu import ops
    from lora.shard import Shard
    from tests.gpu import setting as settings
    from tests.gpu.models import make_form, pack_adapter
    from tests.gpu.ranks import SIZE, Script, logits_path
    from tests.gpu.stage import eager_stage

    setting = settings.dry(seed) if is_dry else settings.on_gpu(seed, index)
    shard = Shard(index, SIZE)
    ranks = TorchRanks(shard, folder / "store", setting.there.type)
    script, own = Script.of(setting), folder / f"rank-{index}"
    own.mkdir()
    form = make_form(script.config, setting.dtype, SIZE)
    weights = ShardedWeights(StoredWeights(folder, setting.dtype), shard)
    stage = eager_stage(
        own, script.config, form, weights, setting.device, ops, script.num_slabs, ranks,
        **script.limits,
    )  # fmt: skip
    for number, data in enumerate(script.adapters):
        packed = pack_adapter(data, form, own, shard)
        stage.place(str(number), packed, script.slabs_of(number, packed))
    stage.runner.capture_graphs()
    for batch in script.batches():
        _, logits = stage.run(batch)
        if index == 0:
            np.save(logits_path(folder, batch.step), logits.numpy())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
