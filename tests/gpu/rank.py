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
    from engine.models.ranks import TorchRanks
    from engine.models.weights import ShardedWeights, StoredWeights
    from lora.shard import Shard
    from tests.gpu import setting as settings
    from tests.gpu.models import make_form
    from tests.gpu.ranks import SIZE, logits_path, script_of

    setting = settings.dry(seed) if is_dry else settings.on_gpu(seed, index)
    shard = Shard(index, SIZE)
    ranks = TorchRanks(shard, folder / "store", setting.there.type)
    script, own = script_of(setting), folder / f"rank-{index}"
    own.mkdir()
    form = make_form(script.config, setting.dtype, SIZE)
    weights = ShardedWeights(StoredWeights(folder, setting.dtype), shard)
    stage = script.stage(own, form, weights, ranks=ranks)
    stage.runner.capture_graphs()
    for batch in script.batches():
        _, logits = stage.run(batch)
        if index == 0:
            np.save(logits_path(folder, batch.step), logits.numpy())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
