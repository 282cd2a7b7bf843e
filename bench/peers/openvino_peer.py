"""OpenVINO GenAI with continuous batching, in the environment that the command line names."""

import os
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from bench.checkpoint import THREADS
from bench.peers.peer import PeerFailed, Setting, log_tail
from bench.peers.worker import Worker, working

_WORKER = Path(__file__).with_name("openvino_worker.py")
_WEIGHTS = {"float32": "fp32", "int8": "int8"}
"""The value of --weight-format by precision."""
_IMPORTS = "import openvino_genai, optimum.intel, nncf, numpy"
_EXPORT_TIMEOUT_S = 900


class OpenVINO:
    """Implements bench.peers.peer.Peer. python: interpreter with openvino-genai, optimum-intel."""

    system = "OpenVINO GenAI"
    precisions = tuple(_WEIGHTS)

    def __init__(self, python: str) -> None:
        self._python = python

    def missing(self) -> str | None:
        if not self._python:
            return "openvino names no interpreter"
        try:
            done = subprocess.run((self._python, "-c", _IMPORTS), capture_output=True)
        except OSError as error:
            return str(error)
        return None if done.returncode == 0 else done.stderr.decode()[-200:]

    def serving(self, setting: Setting) -> AbstractContextManager[Worker]:
        return working((self._python, str(_WORKER)), setting, self._export(setting))

    def _export(self, setting: Setting) -> Path:
        """Export the model in OpenVINO's own form and return its folder."""
        exported = setting.folder / f"openvino-{setting.precision}"
        if exported.exists():
            return exported
        unfinished = setting.folder / f"openvino-{setting.precision}-unfinished"
        command = (
            self._python, "-m", "optimum.commands.optimum_cli", "export", "openvino",
            "--model", str(setting.checkpoint.model_dir), "--task", "text-generation-with-past",
            "--weight-format", _WEIGHTS[setting.precision], str(unfinished),
        )  # fmt: skip
        log = setting.folder / "openvino-export.log"
        with log.open("w") as file:
            environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
            done = subprocess.run(
                command, env=environment, stdout=file, stderr=file, timeout=_EXPORT_TIMEOUT_S
            )
        if done.returncode:
            raise PeerFailed(f"the export failed: {log_tail(log)}")
        return unfinished.rename(exported)
