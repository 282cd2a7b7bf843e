"""The process that reads untrusted files: it checks them and writes the canonical object.

The process has only what registry.checks.validator gives it: a few open files, little memory,
little time, no network and no secrets. It imports only numpy and the checks.
"""

import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from registry.base.base_model import BaseModel
from registry.base.base_tensor import BaseTensor, TensorPlace
from registry.checks.base_choice import choose_base
from registry.checks.confinement import confine
from registry.checks.validate import AdapterLimits, check_adapter
from registry.errors import InvalidAdapter, TooLarge
from registry.formats.own_tokenizer import BaseText, find_own, summary
from registry.formats.peft_format import write_canonical

READY = b"ready\n"
"""Line printed after the start: earlier failures are the server's fault, later ones the files'."""

CONFIG_KEYS = ("architectures", "model_type", "vocab_size", "tie_word_embeddings")


def main() -> None:
    """Read one request from stdin and print one answer, as registry.checks.validator documents."""
    request = json.load(sys.stdin)
    is_offline = begin(**request["confinement"])
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    answer = _answer(request) | {"is_offline": is_offline}
    sys.stdout.write(json.dumps(answer))


def begin(**confinement: int) -> bool:
    """Give up, for good, all that a check does not need; returns whether the network is gone."""
    # The checks use it. If its import failed after the next line, the files would be blamed.
    importlib.import_module("numpy")
    return confine(**confinement)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _validate(request)
    except (InvalidAdapter, TooLarge) as error:
        kind = "too_large" if isinstance(error, TooLarge) else "refused"
        return {kind: {"code": error.code, "message": str(error), "param": error.param}}
    except OSError as error:
        # The disk is full or broken, which no adapter can cause.
        return {"unavailable": str(error)}


def _validate(request: dict[str, Any]) -> dict[str, Any]:
    bases = [_base(facts) for facts in request["bases"]]
    config = request["config"].encode("latin-1")
    limits = AdapterLimits(**request["limits"])
    started = time.perf_counter()
    with open(request["weights_fd"], "rb") as weights, open(request["target_fd"], "wb") as target:
        base = choose_base(bases, config, weights, limits)
        checked = check_adapter(config, weights, base, limits)
        checked_at = time.perf_counter()
        written = write_canonical(target, weights, checked.adapter)
    seconds = {"check": checked_at - started, "write": time.perf_counter() - checked_at}
    rounded = {stage: round(spent, 3) for stage, spent in seconds.items()}
    passport = asdict(checked.passport) | {"seconds": rounded}
    own, text = None, request["text"]
    if text is not None:
        of_base = BaseText(**text["bases"][bases.index(base)])
        num_ids = checked.adapter.vocab_size or base.config["vocab_size"]
        own = find_own(text["files"], of_base, num_ids)
    return {
        "passport": passport | ({"tokenizer": summary(own)} if own else {}),
        **asdict(written),
        "base_model": base.model_id,
        "tokenizer": json.dumps(own, sort_keys=True) if own else None,
    }


def _base(facts: dict[str, Any]) -> BaseModel:
    """Read a base model from the request.   facts: its fields, with CONFIG_KEYS of its config."""
    tensors = {
        name: BaseTensor(dtype, tuple(shape), digest)
        for name, (dtype, shape, digest) in facts["tensors"].items()
    }
    places = {name: TensorPlace(*place) for name, place in facts["places"].items()}
    return BaseModel(**facts | {"path": Path(facts["path"]), "tensors": tensors, "places": places})
