"""The release and the build that this source tree is; pyproject.toml reads the release, too."""

import hashlib
from pathlib import Path

VERSION = "0.1.0"

_PACKAGES = ("engine", "kernels", "lora", "migrations", "registry", "server")


def build(root: Path = Path(__file__).parents[1]) -> str:
    """A digest of the code, the same for a clone, a wheel and an image of the same code."""
    digest = hashlib.sha256()
    for path in sorted(path for name in _PACKAGES for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
