"""Takeover of what an older release left: its ledger, its journal, its adapters and its keys.

Commit 9afc8a9, the last before migration 0006, made tests/e2e/older_release.tar.xz, by a copy of
this file in a checkout of it: `python -m tests.e2e.test_upgrade older_release.tar.xz`.
"""

import json
import sys
import tarfile
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from server.billing.audit.run import audit
from server.database.database import Database
from tests.e2e.stack import Stack, running

DEMO = Path(__file__).parents[2] / "demo"
LEFT = ("chorale.db", "chorale.db-wal", "engine", "facts.json", "limits.json", "objects", "secrets")
FAKE = {"fake_engine": True, "max_model_len": 512, "environment": {"FAKE_STEP_S": "0.01"}}
BODY = {"prompt": "hello", "ignore_eos": True}


def ask(http: httpx.Client, model: str) -> str:
    """Return the URL of an answer's receipt."""
    answer = http.post("/v1/completions", json=BODY | {"model": model, "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    return f"/v1/receipts/{answer.json()['id']}"


def settled(stack: Stack, http: httpx.Client, url: str) -> Any:
    """Return a receipt, once it is there."""
    stack.wait(lambda: http.get(url).status_code == 200)
    return http.get(url).json()["receipt"]


def leave(data_dir: Path) -> None:
    """Die with a receipt, with an end that is not settled, and with a request under way."""
    with running(data_dir, DEMO / "model", **FAKE) as stack:
        owner, other = stack.tenant("acme", monthly_budget="1"), stack.tenant("globex")
        owner.push("pirate", DEMO / "adapters" / "pirate")
        owner.http.put(f"/v1/adapters/pirate/grants/{other.tenant_id}").raise_for_status()
        url = ask(owner.http, "pirate")
        facts = [owner.api_key, other.api_key, url, settled(stack, owner.http, url)]
        long = BODY | {"model": "pirate", "max_tokens": 400, "stream": True}
        with owner.http.stream("POST", "/v1/completions", json=long) as answer:
            lines = answer.iter_lines()
            next(lines)
            facts.append(ask(owner.http, "pirate"))
            stack.die()
    (data_dir / "facts.json").write_text(json.dumps(facts))


def test_this_release_takes_over_what_an_older_one_left_when_it_was_killed(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).with_name("older_release.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    *keys, url, receipt, unsettled = json.loads((tmp_path / "facts.json").read_text())
    with running(tmp_path, DEMO / "model", **FAKE) as stack:
        owner, other = map(stack.client, keys)
        assert settled(stack, owner, url) == receipt
        assert settled(stack, owner, unsettled)["amount_nanousd"] > 0
        (cut_off,) = [e for e in stack.settled_events(1) if e["stop_cause"] == "engine_failure"]
        assert cut_off["amount_nanousd"] == 0
        settled(stack, owner, ask(owner, "pirate"))
        settled(stack, other, ask(other, "acme/pirate"))
        with closing(Database(data_dir=tmp_path, exclusive=False)) as database:
            report = database.read_sync(lambda conn: audit(conn, engine_dirs=[tmp_path / "engine"]))
        assert not report.findings
        assert not report.incidents


if __name__ == "__main__":
    with TemporaryDirectory() as folder, tarfile.open(sys.argv[1], "w:xz") as archive:
        leave(Path(folder, "data"))
        for name in LEFT:
            archive.add(Path(folder, "data", name), name)
