"""The template from which every engine of a pool on a cluster is started."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from server.launch.children import write_private
from server.text.json_object import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTemplate:
    """The start parameters of all engines of a pool; a file in the pool's folder, mode 0600.

    model: a folder, or a hub id.   config: the fields of engine.config.EngineConfig but for those
    that a node gives.   stop_timeout_s: seconds between SIGTERM and SIGKILL.
    module: Python module of the engine.
    """

    model: str
    model_id: str
    config: JsonObject
    storage: str
    stop_timeout_s: float
    module: str = "engine"

    @property
    def template_id(self) -> str:
        """Hash of all fields: engines with the same id are started with the same parameters."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @staticmethod
    def path(pool_dir: Path) -> Path:
        return pool_dir / "pool" / "template.json"

    @staticmethod
    def vocabulary_path(pool_dir: Path) -> Path:
        return pool_dir / "pool" / "vocabulary"

    def publish(self, pool_dir: Path) -> None:
        """Write the template and the vocabulary that it names where all nodes can read them."""
        path = self.path(pool_dir)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        vocabulary = Path(self.config["vocabulary_path"]).read_bytes()
        write_private(self.vocabulary_path(pool_dir), vocabulary)
        write_private(path, asdict(self))

    @classmethod
    def read(cls, pool_dir: Path) -> "EngineTemplate":
        """Read the template that `publish` wrote. Raises OSError."""
        return msgspec.json.decode(cls.path(pool_dir).read_bytes(), type=cls)
