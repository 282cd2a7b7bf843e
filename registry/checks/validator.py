"""Checks of uploaded files, each in a confined process of its own.

The files are untrusted. Whatever they do to the process that reads them, the gateway goes on, and
no other tenant's keys, files or memory are within the process's reach.

    request   JSON on stdin: confinement, limits, bases, config, and the numbers of open files: the
              weights, the target, a tokenizer's, and those with the ends of the bases
    answer    on stdout: `ready`, then JSON: passport, digest, size_bytes, base_model, tokenizer
              | refused | too_large | unavailable; and is_offline
"""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from registry.base.base_model import BaseModel
from registry.checks.confinement import isolated, kept_variables
from registry.checks.token_rows import most_bytes_of_rows
from registry.checks.validate import AdapterLimits
from registry.checks.validator_process import CONFIG_KEYS, READY
from registry.errors import InvalidAdapter, TooLarge, Unavailable
from registry.formats.chat_template import ChatTemplate, read_json
from registry.formats.own_tokenizer import TOKENIZER, TOKENIZER_CONFIG
from registry.formats.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES
from registry.formats.peft_format import MAX_CANONICAL_HEADER_BYTES, file_fault

_log = logging.getLogger(__name__)

_COMPLAINT_BYTES = 4000
# One thread, since each thread would take stacks and buffers from the memory limit.
_VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class ValidatorLimits:
    """Resources that validators may use.

    max_running: validators at once.   max_wait_s: longest wait for a turn.
    base_s, bytes_per_s: a check may take base_s + size / bytes_per_s of processor time, a few times
    what it needs.   wall_ratio: limit of wall time, as a multiple of that of processor time: a
    validator has a low priority, so the engine delays it.
    memory_bytes: address space.   max_answer_bytes: limit of the output, even after a failure.
    """

    max_running: int = 2
    max_wait_s: float = 120.0
    base_s: float = 30.0
    bytes_per_s: float = 20e6
    wall_ratio: float = 4.0
    memory_bytes: int = 1 << 30
    open_files: int = 16
    niceness: int = 10
    max_answer_bytes: int = 4 << 20

    def cpu_s(self, size_bytes: int) -> float:
        return self.base_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class ValidatedAdapter:
    """Answer of a validator. digest: sha256 of the canonical object, hex; size_bytes: its size.

    The digest is not checked again here. A tenant that makes the validator lie only gets an object
    under a wrong key in its own folder, and the fetcher, which compares digests, refuses it.
    base_model: name of the one that the adapter is for, one of those that it was checked for.
    is_offline: whether the validator had no network.
    tokenizer: JSON, what the adapter's tokenizer has of its own; None for nothing.
    """

    passport: dict[str, Any]
    digest: str
    size_bytes: int
    base_model: str
    is_offline: bool
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True)
class _Ended:
    """End of a validator process.

    cpu_s: its limit.   printed, complaints: the beginnings of its stdout and stderr.
    """

    status: int
    is_late: bool
    cpu_s: float
    printed: bytes
    complaints: bytes


class Validator:
    """Runs the checks of uploaded files. Any thread may call it.

    python: the interpreter that runs the validators.
    """

    def __init__(
        self,
        adapter_limits: AdapterLimits,
        limits: ValidatorLimits | None = None,
        python: str = sys.executable,
    ) -> None:
        self._adapter_limits = adapter_limits
        self._limits = limits or ValidatorLimits()
        self._python = python
        self._turns = threading.BoundedSemaphore(self._limits.max_running)

    def check(
        self,
        bases: Sequence[BaseModel],
        config: Path,
        weights: Path,
        target: Path | None = None,
        tokenizer: Mapping[str, Path] = MappingProxyType({}),
    ) -> ValidatedAdapter:
        """Check the files, and write the canonical object to `target`, if it is not None.

        tokenizer: those of TOKENIZER_FILES that there are, by name.
        bases: the base models that the adapter may be for; the files decide for which it is.
        Raises InvalidAdapter and TooLarge for faults of the files, crashes of the validator
        included; Unavailable if it did not start, got no turn or had no disk space.
        """
        if config.stat().st_size > MAX_CONFIG_BYTES:
            raise TooLarge.of(CONFIG_FILE, config.stat().st_size, MAX_CONFIG_BYTES)
        if not self._turns.acquire(timeout=self._limits.max_wait_s):
            raise unavailable("other uploads are being checked")
        try:
            target = target or Path(os.devnull)
            ended = self._run(bases, config.read_bytes(), weights, target, tokenizer)
        except OSError as error:
            raise unavailable(str(error)) from error
        finally:
            self._turns.release()
        validated = _validated(_answer_of(ended, self._limits.max_answer_bytes))
        if validated.base_model not in {base.model_id for base in bases}:
            raise _failed(ended)
        if not validated.is_offline:
            _log.warning("the validator had the gateway's network: no namespace can be made here")
        return validated

    def _run(
        self,
        bases: Sequence[BaseModel],
        config: bytes,
        weights: Path,
        target: Path,
        tokenizer: Mapping[str, Path],
    ) -> _Ended:
        """Run one process from start to end. Raises OSError if it cannot be started."""
        limits, size_bytes = self._limits, weights.stat().st_size
        most_bytes = most_canonical_bytes(bases, size_bytes)
        cpu_s = limits.cpu_s(size_bytes)
        passed: list[int] = []
        with ExitStack() as stack:

            def opened(path: Path | int, mode: str = "rb") -> int:
                passed.append(stack.enter_context(open(path, mode)).fileno())
                return passed[-1]

            paths = {place.path for base in bases for place in base.places.values()}
            fds = {path: opened(path) for path in paths}
            request = {
                "limits": asdict(self._adapter_limits),
                "bases": [_facts(base, fds) for base in bases],
                "config": config.decode("latin-1"),
                "weights_fd": opened(weights),
                "target_fd": opened(target, "wb"),
                "text": _text_request(bases, tokenizer, opened) if tokenizer else None,
                # The last entry, since it counts the files that those before it open.
                "confinement": {
                    "memory_bytes": limits.memory_bytes,
                    "file_bytes": most_bytes + MAX_CANONICAL_HEADER_BYTES + limits.max_answer_bytes,
                    "cpu_s": math.ceil(cpu_s),
                    "open_files": limits.open_files + len(passed),
                    "niceness": limits.niceness,
                },
            }
            return self._run_process(json.dumps(request).encode(), passed, cpu_s)

    def _run_process(self, request: bytes, passed_fds: Sequence[int], cpu_s: float) -> _Ended:
        # Output goes to files, not pipes, so that a runaway process does not fill the memory.
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as complaints:
            is_late = False
            with subprocess.Popen(
                isolated(self._python, "registry.checks.validator_process"),
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=complaints,
                pass_fds=passed_fds,
                cwd="/",
                env=_VARIABLES | kept_variables(),
                # Ctrl-C is for the gateway; here it would look like a crash caused by the files.
                start_new_session=True,
            ) as process:
                try:
                    process.communicate(request, cpu_s * self._limits.wall_ratio)
                except subprocess.TimeoutExpired:
                    is_late = True
                finally:
                    process.kill()
            return _Ended(
                status=process.returncode,
                is_late=is_late,
                cpu_s=cpu_s,
                printed=_head_of(printed, self._limits.max_answer_bytes + 1),
                complaints=_head_of(complaints, _COMPLAINT_BYTES),
            )


def most_canonical_bytes(bases: Sequence[BaseModel], size_bytes: int) -> int:
    """Most bytes of the tensors of the canonical object that is made of weights of this size."""
    return size_bytes + max(map(most_bytes_of_rows, bases), default=0)


def _facts(base: BaseModel, fds: Mapping[Path | int, int]) -> dict[str, Any]:
    """Fields of a base model for the process; of its folder's path only the name.

    fds: numbers of the open files that hold its embedding and its head.
    """
    return {
        "model_id": base.model_id,
        "path": base.path.name,
        "modules": base.modules,
        "base_revision": base.base_revision,
        "served_as": base.served_as,
        "config": {name: base.config.get(name) for name in CONFIG_KEYS},
        "tensors": {
            name: (tensor.dtype, tensor.shape, tensor.digest)
            for name, tensor in base.tensors.items()
        },
        "places": {name: (fds[place.path], place.start) for name, place in base.places.items()},
    }


def _text_request(
    bases: Sequence[BaseModel], tokenizer: Mapping[str, Path], opened: Callable[[Path], int]
) -> dict[str, Any]:
    """The tokenizer's files and the base models' texts, for registry.formats.own_tokenizer."""
    texts = []
    for base in bases:
        template = ChatTemplate.load(base.path, read_json(base.path / TOKENIZER_CONFIG))
        known = base.path / TOKENIZER
        texts.append(
            {
                "tokenizer": opened(known) if known.exists() else None,
                "chat_template": template.default,
                "special_tokens": template.special_tokens,
            }
        )
    return {"files": {name: opened(path) for name, path in tokenizer.items()}, "bases": texts}


def _head_of(file: IO[bytes], size_bytes: int) -> bytes:
    file.seek(0)
    return file.read(size_bytes)


def _answer_of(ended: _Ended, max_answer_bytes: int) -> dict[str, Any]:
    """Parse the answer of a process.

    Raises Unavailable if the process did not start, InvalidAdapter if it failed after it.
    """
    if not ended.printed.startswith(READY):
        reason = "it took too long to start" if ended.is_late else "it did not start"
        _log.error("validator: %s: %a", reason, ended.complaints)
        raise unavailable(reason)
    if ended.is_late or ended.status == -signal.SIGXCPU:
        message = f"The files could not be checked in {ended.cpu_s:.0f} s of work; "
        raise file_fault("validator_timeout", f"{message}save the adapter with PEFT again")
    try:
        if ended.status != 0 or len(ended.printed) > max_answer_bytes:
            raise ValueError
        answer: dict[str, Any] = json.loads(ended.printed[len(READY) :])
    except ValueError:
        raise _failed(ended) from None
    return answer


def _failed(ended: _Ended) -> InvalidAdapter:
    _log.warning("a validator ended with %d: %a", ended.status, ended.complaints)
    message = "The check of the files crashed because of them; save the adapter with PEFT again"
    return file_fault("validator_failed", message)


def unavailable(reason: str) -> Unavailable:
    """The fault of files that could not be checked for want of a process, a turn or disk space.

    reason: a note for the log, which clients do not see.
    """
    message = "The files cannot be checked at the moment; ask to complete again later."
    fault = Unavailable(message, code="validator_unavailable", retry_after_s=5.0)
    fault.add_note(reason)
    return fault


def _validated(answer: dict[str, Any]) -> ValidatedAdapter:
    if "refused" in answer:
        raise InvalidAdapter(**answer["refused"])
    if "too_large" in answer:
        raise TooLarge(**answer["too_large"])
    if "unavailable" in answer:
        raise unavailable(answer["unavailable"])
    return ValidatedAdapter(**answer)
