"""`python -m server.cluster.node PARTS`: runs an engine and its fetcher on a cluster's node.

The parts are the fields of `Node`, in order.

The node is checked first: it must have the same model at the same place, and reach the object
store. What is missing is written to LOCAL, for the placer's log.
"""

import logging
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlparse

from engine.leaving import is_settled
from lora import log_lines
from registry.base.base_model import BaseModel, UnsupportedBaseModel
from server.launch.children import Kind, engine_child, fetcher_child
from server.launch.engine_template import EngineTemplate
from server.launch.errors import ServeError
from server.launch.homes import MAX_SOCKET_PATH
from server.launch.model_folder import find_model
from server.launch.supervisor import ChildSpec, Supervisor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """An engine's node, as the actor's command names it.

    pool_dir: shared by all nodes; `folder`, the engine's, lies in it.   local: this node's own
    folder.   ip: address at which gateways reach this node.
    """

    pool_dir: Path
    folder: Path
    local: Path
    kind: Kind
    ip: str


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Ray's workers ignore it, and this inherits that
    pool_dir, folder, local, kind, ip = sys.argv[1:]
    node = Node(Path(pool_dir), Path(folder), Path(local), cast("Kind", kind), ip)
    log_lines.begin("node", engine=node.folder.name)
    try:
        template = EngineTemplate.read(node.pool_dir)
        children = prepare(node, template)
        with Supervisor(children) as supervisor:
            supervisor.run(until=lambda: node.kind == "retired" and is_settled(node.folder))
    except (ServeError, OSError) as error:
        logger.error("%s", error)
        (node.local / "problem").write_text(f"{node.folder.name} on {node.ip}: {error}")
        sys.exit(os.EX_CONFIG)
    if node.kind == "retired" and is_settled(node.folder):
        (node.local / "done").touch()


def prepare(node: Node, template: EngineTemplate) -> list[ChildSpec]:
    """Write the engine's configuration. Returns the processes in the order of their start.

    Raises ServeError.
    """
    _check_local(node.local)
    config = template.config | {
        "data_dir": str(node.folder),
        "vocabulary_path": str(template.vocabulary_path(node.pool_dir)),
        "adapter_cache_dir": str(node.local / "adapters"),
        "fetcher_socket": str(node.local / "fetch.sock"),
        "listen": f"tcp://[{node.ip}]:0" if ":" in node.ip else f"tcp://{node.ip}:0",
    }
    if node.kind == "engine":
        config["model_dir"] = str(_check_model(node, template))
        _check_storage(template.storage, node)
    path = node.pool_dir / f"{node.folder.name}.json"
    engine = engine_child(node.folder.name, node.kind, path, config, template.module)
    engine = replace(engine, stop_timeout_s=template.stop_timeout_s)
    return [engine] if node.kind == "retired" else [fetcher_child(config, template.storage), engine]


def _check_local(local: Path) -> None:
    """Check that `local` is this user's: it lies in a folder that everybody may write to.

    Raises ServeError, OSError.
    """
    if len(os.fsencode(local / "fetch.sock")) > MAX_SOCKET_PATH:
        raise ServeError(f"the path {local} is too long for a socket in it; set a shorter TMPDIR")
    for folder in (local, local.parent):
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ServeError(f"{folder} is not this user's alone; remove it, or set TMPDIR")
    probe = tempfile.NamedTemporaryFile(dir=local)  # noqa: SIM115
    probe.close()


def _check_model(node: Node, template: EngineTemplate) -> Path:
    """The model's folder on this node. Raises ServeError."""
    path = find_model(template.model)
    try:
        base = BaseModel.load(path, template.model_id, node.local.parent / "models")
    except UnsupportedBaseModel as error:
        raise ServeError(str(error)) from error
    revision: str = template.config["base_revision"]
    if base.base_revision != revision:
        raise ServeError(
            f"the model in {path} is another here ({base.base_revision[:16]}) than at the gateway "
            f"({template.config['base_revision'][:16]}); put the same files there"
        )
    return path


def _check_storage(url: str, node: Node) -> None:
    parsed = urlparse(url)
    if parsed.scheme == "file" and not Path(unquote(parsed.path)).is_dir():
        raise ServeError(
            f"the object store {url} is no folder on this node; share it, or use one on S3"
        )


if __name__ == "__main__":
    main()
