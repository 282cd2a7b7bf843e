"""The checks import none of the packages that a bare GPU machine lacks."""

import subprocess
import sys

from tests.gpu.setting import Check, Setting

_MISSING = (
    "boto3", "fastapi", "httpx", "huggingface_hub", "hypothesis", "jinja2", "msgspec", "peft",
    "pydantic", "pytest", "sqlalchemy", "starlette", "tiktoken", "transformers", "uvicorn", "zmq",
)  # fmt: skip

_IMPORT_ALL = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {_MISSING}:
            raise ModuleNotFoundError(f"no module named {{name}}", name=name)

sys.meta_path.insert(0, Missing())
import bench.gpu.lease.__main__, bench.gpu.lease.first
import tests.gpu.checks, tests.gpu.compiling, tests.gpu.harness

try:
    import tests.tiny_models
except ModuleNotFoundError as missing:
    assert missing.name == "peft", missing
else:
    raise AssertionError("nothing was missing")
"""


def import_checks() -> dict[str, Check]:
    return {"imports": _check}


def _check(setting: Setting) -> None:
    done = subprocess.run((sys.executable, "-c", _IMPORT_ALL), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
