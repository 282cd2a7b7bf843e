"""Many streams at once from an engine that keeps a pace: how many of its tokens reach the clients.

The gateway sends an event per token. The pace is the engine's own, measured by a client on its
socket; `lost_share` is the share of that pace that a gateway cannot carry.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.billing.measurement import Measurement
from bench.databases import DATABASES
from bench.gateway import litellm_proxy, ours
from bench.gateway.load import run_streams
from bench.report import rounded


@dataclass(frozen=True, kw_only=True)
class Streams(Measurement):
    """The share of an engine's tokens that reaches the clients of many streams.

    tokens_per_s: rate of each stream, the engine's steps per second.   max_tokens: length of
    each stream; no stream ends in the window.
    """

    streams: int = 1000
    tokens_per_s: float = 20.0
    window_s: float = 12.0
    max_tokens: int = 900
    database: str = "postgresql"
    litellm_env: str | None = None
    peer_streams: int = 50

    def measure(self, folder: Path) -> dict[str, Any]:
        folders = [folder / name for name in ("plain", "ours", "peer")]
        for each in folders:
            each.mkdir()
        step_s = 1 / self.tokens_per_s
        with ours.engine_alone(folders[0], step_s=step_s) as socket:
            target = ours.engine_target(socket, self.max_tokens)
            result: dict[str, Any] = {"engine": self._run(target, self.streams, None)}
            with ours.bare(socket, folders[0]) as (port, pid):
                target = ours.bare_target(port, self.max_tokens, stream=True)
                result["bare_http"] = self._run(target, self.streams, pid)
        with (
            DATABASES[self.database](folders[1] / "db") as url,
            ours.serving(folders[1], url, step_s=step_s) as gateway,
        ):
            target = gateway.target(self.max_tokens, stream=True)
            result["ours"] = self._run(target, self.streams, gateway.pid)
        if self.litellm_env:
            result["litellm"] = self._peer(folders[2], step_s)
        paced = result["engine"]["events_per_s"]
        for name in ("bare_http", "ours"):
            result[name]["lost_share"] = rounded(1 - result[name]["events_per_s"] / paced)
        return result

    def _peer(self, folder: Path, step_s: float) -> dict[str, Any]:
        """Measures the peer with fewer streams; its cost per token is the same with more."""
        assert self.litellm_env
        command = litellm_proxy.make_environment(Path(self.litellm_env))
        with (
            litellm_proxy.upstream(folder, step_s=step_s) as upstream_port,
            litellm_proxy.serving(command, upstream_port, folder) as (port, pid),
        ):
            target = litellm_proxy.target(port, self.max_tokens, stream=True)
            result = self._run(target, self.peer_streams, pid)
        pace = self.peer_streams * self.tokens_per_s
        return result | {"lost_share": rounded(1 - result["events_per_s"] / pace)}

    def _run(self, target: dict[str, Any], count: int, pid: int | None) -> dict[str, Any]:
        result = run_streams(target, count, self.window_s, pid)
        assert not result["errors"], result["errors"]
        return result
