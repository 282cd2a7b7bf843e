"""`chorale serve` with a model that its engine refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path


def test_a_model_that_the_engine_refuses_ends_serve_with_the_reason(
    tmp_path: Path, tiny_model: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    command = [sys.executable, "-m", "server.cli.main", "serve", "--model", str(model)]
    options = ["--data-dir", str(tmp_path / "data"), "--port", "0"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "cannot start with these settings" in ended.stderr
    assert "hidden_act gelu is not served" in ended.stderr
