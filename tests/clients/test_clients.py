"""Other projects' clients work with Chorale unchanged, or get documented refusals."""

import json
import os
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import groupby
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from demo.evaluate import Model, load_adapted, load_base, load_tokenizer
from tests import needs
from tests.clients.clients import (
    CLIENTS,
    HERE,
    INSTALLED,
    RECORDED,
    TOTAL_S,
    Clients,
    NotGiven,
    newest_version,
    why_old,
)
from tests.clients.conftest import DEMO, MAX_NUM_BATCHED_TOKENS
from tests.clients.table import DOCUMENT, Table
from tests.e2e.stack import Stack

# Clients have limits of their own; this limit is for the case that those do not work.
pytestmark = pytest.mark.timeout(TOTAL_S + 60)


def run(name: str, clients: Clients, server: Stack, cwd: Path) -> list[str]:
    """Return the lines a client's script printed; skip the test if its packages are missing."""
    if "npm" in CLIENTS[name]:
        needs.node()
    urls = {"CHORALE_URL": server.base_url, "CHORALE_API_KEY": server.tenants[0].api_key}
    try:
        return clients.run(name, cwd, **urls, CHORALE_MODEL=str(DEMO / "model"))
    except NotGiven as reason:
        pytest.skip(f"{name} cannot be installed: {reason}")


@pytest.mark.parametrize("name", [n for n in INSTALLED if n != "lm-eval"])
def test_a_client_works_unchanged(
    name: str, clients: Clients, server: Stack, table: Table, tmp_path: Path
) -> None:
    table.add(name, run(name, clients, server, tmp_path))


@pytest.mark.parametrize("name", ["lm-eval"])
def test_lm_eval_measures_what_transformers_and_peft_compute(
    name: str, clients: Clients, server: Stack, table: Table, tmp_path: Path
) -> None:
    """Samples are compared for the base and an adapter, with prompts in chunks, without and with a
    warm prefix cache.
    """
    printed = run(name, clients, server, tmp_path)
    samples = json.loads((tmp_path / "samples.json").read_text())
    tokenizer = load_tokenizer(DEMO / "model")
    oracles = {
        "chorale-demo": Oracle(load_base(DEMO / "model"), tokenizer),
        "json": Oracle(load_adapted(DEMO / "model", DEMO / "adapters" / "json"), tokenizer),
    }
    for sample in samples:
        oracle = oracles[sample["model"]]
        for (context, asked), [answer] in zip(sample["arguments"], sample["resps"], strict=True):
            if sample["task"] == "tell":
                assert answer == oracle.answer(context, asked["max_gen_toks"])
            else:
                logprob, is_greedy = oracle.loglikelihood(context, asked)
                assert answer[0] == pytest.approx(logprob, abs=1e-4)
                assert answer[1] == is_greedy
    kinds = [(s["model"], s["cache"], s["task"]) for s in samples]
    assert [len(list(of_kind)) for _, of_kind in groupby(kinds)] == [12] * 8
    last = {"model": "json", "prompt": context, "max_tokens": 1}
    usage = server.tenants[0].http.post("/v1/completions", json=last).json()["usage"]
    assert usage["prompt_tokens"] > MAX_NUM_BATCHED_TOKENS
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    table.add(name, [*printed, "works: loglikelihoods within 1e-4 of transformers and PEFT"])


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_of_this_week_and_of_the_newest_version(name: str) -> None:
    """Time alone fails nothing in CI: there, this is a skip that says why."""
    if why := why_old(name, date.today(), newest_version(name)):
        (pytest.skip if os.environ.get("TESTS_IN_CI") else pytest.fail)(why)


@pytest.mark.parametrize(
    ("days", "newest", "why"),
    [
        (7, "0.33.0", None),
        (7, None, None),
        (8, "0.33.0", "are 8 days old. Record"),
        (0, "0.34.0", "are of vllm==0.33.0, and 0.34.0 is out. Record"),
        (9, "1.0", "are 9 days old and are of"),
    ],
)
def test_a_recorded_request_that_is_old_is_told(
    days: int, newest: str | None, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = date(2026, 3, 2)
    client = {"pip": ["vllm==0.33.0"], "recorded_on": today - timedelta(days=days)}
    monkeypatch.setitem(CLIENTS, "vllm", client)
    told = why_old("vllm", today, newest)
    assert told is None if why is None else why in str(told)


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_is_answered(name: str, server: Stack, table: Table) -> None:
    """vllm bench serve takes `root` for the model's name if it is given none."""
    http = server.tenants[0].http
    assert http.get("/v1/models").json()["data"][0]["root"]
    for request in json.loads((HERE / CLIENTS[name]["recorded"]).read_text()):
        with http.stream("POST", request["path"], json=request["body"]) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        *chunks, usage = [json.loads(line) for line in lines if line != "[DONE]"]
        assert chunks
        assert all(chunk["choices"] for chunk in chunks)
        assert usage["usage"]["completion_tokens"] == 16
    table.add(name, ["works: completions of texts and of token ids, chat, `--lora-modules`"])


def test_the_documentation_says_what_was_run(table: Table, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--write-table"):
        DOCUMENT.write_text(table.as_run())
    assert DOCUMENT.read_text() == table.as_run()


@dataclass
class Oracle:
    """The answers of transformers and PEFT."""

    model: Model
    tokenizer: PreTrainedTokenizerBase

    @torch.inference_mode()
    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Return the continuation's log-probability, and whether it is the greedy continuation."""
        ids = self.tokenizer(context + continuation, return_tensors="pt").input_ids
        start = len(self.tokenizer(context).input_ids)
        logprobs = self.model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        told = ids[0, start:]
        is_greedy = bool((logprobs.argmax(1) == told).all())
        return float(logprobs.gather(1, told[:, None]).sum()), is_greedy

    @torch.inference_mode()
    def answer(self, context: str, max_tokens: int) -> str:
        """Return the greedy answer up to its first end of a line."""
        asked = self.tokenizer(context, return_tensors="pt", return_token_type_ids=False)
        ids = self.model.generate(**asked, max_new_tokens=max_tokens, do_sample=False)
        text = self.tokenizer.decode(ids[0, asked.input_ids.shape[1] :], skip_special_tokens=True)
        return text.partition("\n")[0]
