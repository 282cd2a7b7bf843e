"""A real Prometheus that scrapes a stack."""

import math
import shutil
import subprocess
from pathlib import Path

import httpx
import yaml

from tests import needs
from tests.e2e.stack import Stack
from tests.ports import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"


class Prometheus:
    """A Prometheus with our rules that scrapes `target` (host:port) every second."""

    def __init__(self, folder: Path, target: str) -> None:
        shutil.copy(DEPLOY / "prometheus-rules.yaml", folder)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["prometheus-rules.yaml"],
            "scrape_configs": [{"job_name": "chorale", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        command = [
            needs.program("prometheus", "prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
        self._process = subprocess.Popen(command)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30)
        Stack.wait(lambda: self.http.get(f"http://127.0.0.1:{port}/-/ready").status_code == 200)

    def finds(self, query: str) -> bool:
        """Whether the query's answer has a number; the quotient of two zeros is none."""
        answer = self.http.get("/query", params={"query": query})
        assert answer.status_code == 200, f"{query}: {answer.text}"
        found = answer.json()["data"]["result"]
        return any(not math.isnan(float(sample["value"][1])) for sample in found)

    def close(self) -> None:
        self.http.close()
        self._process.terminate()
        self._process.wait()
