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

sys.modules.update(dict.fromkeys({_MISSING}))  # an import of None fails
import bench.gpu.lease.__main__, bench.gpu.lease.parts
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
