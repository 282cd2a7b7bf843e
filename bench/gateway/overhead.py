"""Cost that a gateway adds to whole answers: latency at a rate, processor time, highest rate held.

Each side is measured without its gateway, too: ours by a client on the engine's socket and by HTTP
around that client with nothing else, the peer by HTTP to its own upstream. `added_ms` is the
difference of the percentiles.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.billing.measurement import Measurement
from bench.databases import DATABASES
from bench.gateway import litellm_proxy, ours
from bench.gateway.load import Target, find_held_rate, run_rate
from bench.report import ratio, rounded

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Overhead(Measurement):
    """The cost that a gateway adds to whole answers.

    rate: requests per second at which latencies are taken.   litellm_env: None: no peer.
    """

    rate: float = 20.0
    duration_s: float = 15.0
    max_tokens: int = 16
    first_rate: float = 40.0
    attempt_s: float = 4.0
    database: str = "postgresql"
    litellm_env: str | None = None

    def measure(self, folder: Path) -> Row:
        result = self._plain(_made(folder / "plain")) | self._ours(_made(folder / "ours"))
        result["ours"]["added_ms"] = _added(result["ours"], result["engine"])
        result["ours"]["added_to_bare_http_ms"] = _added(result["ours"], result["bare_http"])
        if self.litellm_env:
            result |= self._peer(Path(self.litellm_env), _made(folder / "peer"))
            peer, own = result["litellm"], result["ours"]
            peer["added_ms"] = _added(peer, result["upstream"])
            result["added_p50_of_peers"] = ratio(own["added_ms"]["p50"], peer["added_ms"]["p50"])
            result["held_rate_to_peers"] = ratio(own["held_per_s"], peer["held_per_s"])
        return result

    def _plain(self, folder: Path) -> Row:
        """Measures the engine alone, and behind bare HTTP."""
        with ours.engine_alone(folder) as socket:
            engine = self._rate(ours.engine_target(socket, self.max_tokens))
            with ours.bare(socket, folder) as (port, pid):
                target = ours.bare_target(port, self.max_tokens)
                return {"engine": engine, "bare_http": self._all(target, pid)}

    def _ours(self, folder: Path) -> Row:
        with (
            DATABASES[self.database](folder / "db") as url,
            ours.serving(folder, url) as gateway,
        ):
            return {"ours": self._all(gateway.target(self.max_tokens), gateway.pid)}

    def _peer(self, environment: Path, folder: Path) -> Row:
        command = litellm_proxy.make_environment(environment)
        with litellm_proxy.upstream(folder) as upstream_port:
            upstream = self._rate(litellm_proxy.target(upstream_port, self.max_tokens))
            with litellm_proxy.serving(command, upstream_port, folder) as (port, pid):
                proxy = self._all(litellm_proxy.target(port, self.max_tokens), pid)
        version = f"{litellm_proxy.VERSION}, without a database"
        return {"upstream": upstream, "litellm": {"version": version} | proxy}

    def _all(self, target: Target, pid: int) -> Row:
        at_rate = self._rate(target, pid)
        return at_rate | find_held_rate(target, self.first_rate, self.attempt_s)

    def _rate(self, target: Target, pid: int | None = None) -> Row:
        result = run_rate(target, self.rate, self.duration_s, pid)
        assert not result["errors"], result["errors"]
        return result


def _added(with_it: Row, without: Row) -> dict[str, float]:
    a, b = with_it["latency_ms"], without["latency_ms"]
    return {name: rounded(a[name] - b[name]) for name in ("p50", "p99")}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
