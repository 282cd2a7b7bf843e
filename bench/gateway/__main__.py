"""`python -m bench.gateway`: what the gateway costs in front of an engine without a model, beside
LiteLLM's proxy: added time, the highest rate held, streams.

Databases and the journal are under TMPDIR. Set it to a folder on a real disk: in a folder in memory
every commit is free. `--set litellm_env=FOLDER` puts LiteLLM beside it, in a virtual environment
that is made in FOLDER if there is none.
"""

from dataclasses import dataclass
from pathlib import Path

from bench.databases import DATABASES
from bench.gateway import litellm_proxy, ours
from bench.gateway.generator import Target, find_held_rate, run_rate, run_streams
from bench.measurement import Figures, Measurement, main
from bench.report import rounded


@dataclass(frozen=True, kw_only=True)
class Peer(Measurement):
    """A measurement with a peer.   litellm_env: folder of its environment; empty: no peer."""

    litellm_env: str = ""

    def setup(self) -> Figures:
        return super().setup() | {"litellm_env": bool(self.litellm_env)}


@dataclass(frozen=True, kw_only=True)
class Overhead(Peer):
    """The cost that a gateway adds to whole answers: latency at a rate, processor time, and the
    highest rate held. The bound is one durable commit for each hold, then Python.

    Each side is measured without its gateway, too: ours by a client on the engine's socket, the
    peer by HTTP to its own upstream. `added_ms` is the difference of the percentiles.
    """

    rate: float = 20.0
    duration_s: float = 15.0
    max_tokens: int = 16
    first_rate: float = 40.0
    attempt_s: float = 4.0
    database: str = "postgresql"

    def measure(self, folder: Path) -> Figures:
        with ours.engine_alone(_made(folder / "engine")) as socket:
            engine = self._rate(ours.engine_target(socket, self.max_tokens))
        place = _made(folder / "ours")
        with (
            DATABASES[self.database](place / "db") as url,
            ours.serving(place, url) as gateway,
        ):
            with_it = self._all(gateway.target(self.max_tokens), gateway.pid)
        result = {"engine": engine, "ours": with_it | {"added_ms": _added(with_it, engine)}}
        if self.litellm_env:
            result |= self._peer(_made(folder / "peer"))
        return result

    def _peer(self, folder: Path) -> Figures:
        command = litellm_proxy.make_environment(Path(self.litellm_env))
        with litellm_proxy.upstream(folder) as upstream_port:
            upstream = self._rate(litellm_proxy.target(upstream_port, self.max_tokens))
            with litellm_proxy.serving(command, upstream_port, folder) as (port, pid):
                proxy = self._all(litellm_proxy.target(port, self.max_tokens), pid)
        proxy["version"] = f"{litellm_proxy.VERSION}, without a database"
        return {"upstream": upstream, "litellm": proxy | {"added_ms": _added(proxy, upstream)}}

    def _all(self, target: Target, pid: int) -> Figures:
        at_rate = self._rate(target, pid)
        return at_rate | find_held_rate(target, self.first_rate, self.attempt_s)

    def _rate(self, target: Target, pid: int | None = None) -> Figures:
        result = run_rate(target, self.rate, self.duration_s, pid)
        assert not result["errors"], result["errors"]
        return result


@dataclass(frozen=True, kw_only=True)
class Streams(Peer):
    """The share of the tokens of an engine that keeps a pace which reaches the clients of many
    streams; the gateway sends an event per token.

    tokens_per_s: rate of each stream, the engine's steps per second.   max_tokens: length of
    each stream; no stream ends in the window.   peer_streams: the peer's, whose cost per token
    is the same with more. `lost_share` is what a gateway does not carry of the pace, which is
    measured by a client on the engine's socket.
    """

    streams: int = 1000
    tokens_per_s: float = 20.0
    window_s: float = 12.0
    max_tokens: int = 900
    database: str = "postgresql"
    peer_streams: int = 50

    def measure(self, folder: Path) -> Figures:
        step_s = 1 / self.tokens_per_s
        with ours.engine_alone(_made(folder / "engine"), step_s=step_s) as socket:
            target = ours.engine_target(socket, self.max_tokens)
            result = {"engine": self._run(target, self.streams, None)}
        place = _made(folder / "ours")
        with (
            DATABASES[self.database](place / "db") as url,
            ours.serving(place, url, step_s=step_s) as gateway,
        ):
            target = gateway.target(self.max_tokens, stream=True)
            result["ours"] = self._run(target, self.streams, gateway.pid)
        paced = result["engine"]["events_per_s"]
        result["ours"]["lost_share"] = rounded(1 - result["ours"]["events_per_s"] / paced)
        if self.litellm_env:
            result["litellm"] = self._peer(_made(folder / "peer"), step_s)
        return result

    def _peer(self, folder: Path, step_s: float) -> Figures:
        command = litellm_proxy.make_environment(Path(self.litellm_env))
        with (
            litellm_proxy.upstream(folder, step_s=step_s) as upstream_port,
            litellm_proxy.serving(command, upstream_port, folder) as (port, pid),
        ):
            target = litellm_proxy.target(port, self.max_tokens, stream=True)
            result = self._run(target, self.peer_streams, pid)
        pace = self.peer_streams * self.tokens_per_s
        return result | {"lost_share": rounded(1 - result["events_per_s"] / pace)}

    def _run(self, target: Target, count: int, pid: int | None) -> Figures:
        result = run_streams(target, count, self.window_s, pid)
        assert not result["errors"], result["errors"]
        return result


def _added(with_it: Figures, without: Figures) -> dict[str, float]:
    a, b = with_it["latency_ms"], without["latency_ms"]
    return {name: rounded(a[name] - b[name]) for name in ("p50", "p99")}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


MEASUREMENTS = {
    "gateway.overhead": Overhead(),
    "gateway.streams": Streams(),
}

if __name__ == "__main__":
    main("bench.gateway", MEASUREMENTS, __doc__)
