"""`python -m engine CONFIG.json` builds the engine that the supervisor configured, and serves."""

import gc

# What imports make stays: to look for garbage in it, now and later, takes a fifth of a start.
# ruff: noqa: E402
gc.disable()

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from engine.build import build_core
from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.journal.files import JournalGone
from engine.journal.lines import JournalCorrupt
from engine.leaving import Leaving
from engine.process import EngineProcess, engine_identity, lock_directory, welcome_of
from engine.scheduling.scheduler import ArenaTooSmall
from engine.wire.encoding import read_vocabulary
from lora import log_lines
from lora.beat import Beat

gc.freeze()
gc.enable()

logger = logging.getLogger(__name__)

_LOADING_S = 1800.0
"""Longest time in which the model is read, kernels are built and checked, and graphs captured."""


def main() -> None:
    log_lines.begin("engine", engine=Path(sys.argv[1]).stem)
    beat = Beat.inherited()
    config = EngineConfig(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        serve(config, beat)
    except (UnsupportedModel, ArenaTooSmall, JournalGone) as error:
        logger.error("%s", error)
        sys.exit(os.EX_CONFIG)  # starting again would end the same way
    except JournalCorrupt as error:
        logger.error("%s. Nothing is served, since usage in %s may be lost", error, config.data_dir)
        sys.exit(os.EX_CONFIG)


def serve(config: EngineConfig, beat: Beat) -> None:
    """Serve until the engine is asked to stop, or has no gateway any more.

    Raises UnsupportedModel, ArenaTooSmall, JournalCorrupt, JournalGone. Exits with EX_DATAERR after
    an unforeseen error of the model or of settings; the supervisor tries a few times.
    """
    torch.set_num_threads(config.threads)
    data_dir = Path(config.data_dir)
    with lock_directory(data_dir):
        engine_id, epoch = engine_identity(data_dir)
        vocabulary = read_vocabulary(Path(config.vocabulary_path))
        try:
            with beat.busy("loading the model", _LOADING_S):
                core, config = build_core(config, engine_id, vocabulary)
        except (UnsupportedModel, ArenaTooSmall, JournalCorrupt, OSError, MemoryError):
            raise  # the last two are the machine's, and the next start may find it well again
        except Exception as error:
            logger.exception("the model cannot be started: %s: %s", type(error).__name__, error)
            sys.exit(os.EX_DATAERR)
        welcome = replace(
            welcome_of(config, engine_id, epoch),
            block_size=core.scheduler.layout.block_size,
            tensor_parallel_size=config.tensor_parallel_size,
        )
        EngineProcess(core, welcome, config, Leaving(config.leave_timeout_s), beat).run()


if __name__ == "__main__":
    main()
