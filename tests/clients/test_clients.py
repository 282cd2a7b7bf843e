"""Clients of others work with Chorale unchanged, or are refused by design in known words."""

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch

from demo.evaluate import Model, load_adapted, load_base, load_tokenizer
from tests.clients.clients import CLIENTS, HERE, TOTAL_S, Clients, NotGiven
from tests.clients.conftest import DEMO
from tests.clients.table import DOCUMENT, RECORDED, Table
from tests.e2e.stack import Stack

# The limits are the clients' own; this one is for what is wrong with them.
pytestmark = pytest.mark.timeout(TOTAL_S + 60)


def run(name: str, clients: Clients, server: Stack, table: Table, cwd: Path) -> None:
    """Run a client's script against the server; skip if its packages cannot be had."""
    urls = {"CHORALE_URL": server.base_url, "CHORALE_API_KEY": server.tenants[0].api_key}
    try:
        printed = clients.run(name, cwd, **urls, CHORALE_MODEL=str(DEMO / "model"))
    except NotGiven as reason:
        pytest.skip(f"{name} is not to be had: {reason}")
    client = CLIENTS[name]
    table.add(name, client.get("npm") or client["pip"], client["setup"], printed)


@pytest.mark.parametrize("name", [name for name in CLIENTS if name != "lm-eval"])
def test_a_client_works_unchanged(
    name: str, clients: Clients, server: Stack, table: Table, tmp_path: Path
) -> None:
    run(name, clients, server, table, tmp_path)


@pytest.mark.parametrize("name", ["lm-eval"])
def test_lm_eval_measures_what_transformers_and_peft_compute(
    name: str, clients: Clients, server: Stack, table: Table, tmp_path: Path
) -> None:
    """In chunks, without and with what the prefix cache has, for the base and an adapter."""
    run(name, clients, server, table, tmp_path)
    samples = json.loads((tmp_path / "samples.json").read_text())
    models = {
        "chorale-demo": load_base(DEMO / "model"),
        "json": load_adapted(DEMO / "model", DEMO / "adapters" / "json"),
    }
    for sample in samples:
        oracle = models[sample["model"]]
        for (context, asked), [answer] in zip(sample["arguments"], sample["resps"], strict=True):
            if sample["task"] == "tell":
                assert answer == greedy(oracle, context, asked["max_gen_toks"])
            else:
                logprob, is_greedy = loglikelihood(oracle, context, asked)
                assert answer[0] == pytest.approx(logprob, abs=1e-4)
                assert answer[1] == is_greedy
    kinds = [(s["model"], s["cache"], s["task"]) for s in samples]
    assert [len(list(of_kind)) for _, of_kind in groupby(kinds)] == [12] * 8


def test_what_vllm_bench_serve_sends_is_answered(server: Stack, table: Table) -> None:
    """Bodies as its 0.33.0 sends them; `root` is what it names the model by when it is not told."""
    http = server.tenants[0].http
    assert http.get("/v1/models").json()["data"][0]["root"]
    for request in json.loads((HERE / "vllm-bench.json").read_text()):
        with http.stream("POST", request["path"], json=request["body"]) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        *chunks, usage = [json.loads(line) for line in lines if line != "[DONE]"]
        assert chunks
        assert all(chunk["choices"] for chunk in chunks)
        assert usage["usage"]["completion_tokens"] == 16
    table.add(
        RECORDED,
        ["vllm 0.33.0, recorded"],
        "`OPENAI_API_KEY=KEY vllm bench serve --base-url URL --model MODEL --tokenizer FOLDER`",
        ["works: completions of texts and of token ids", "works: chat", "works: `--lora-modules`"],
    )


def test_the_documentation_says_what_was_run(table: Table, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--write-table"):
        DOCUMENT.write_text(table.as_run())
    assert DOCUMENT.read_text() == table.as_run()


def loglikelihood(model: Model, context: str, continuation: str) -> tuple[float, bool]:
    """The sum of the continuation's log-probabilities, and whether it is the greedy one."""
    tokenizer = load_tokenizer(DEMO / "model")
    ids = tokenizer(context + continuation, return_tensors="pt").input_ids
    start = len(tokenizer(context).input_ids)
    with torch.inference_mode():
        logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
    told = ids[0, start:]
    return float(logprobs.gather(1, told[:, None]).sum()), bool((logprobs.argmax(1) == told).all())


def greedy(model: Model, context: str, max_tokens: int) -> str:
    """The answer up to its first end of a line."""
    tokenizer = load_tokenizer(DEMO / "model")
    asked = tokenizer(context, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        ids = model.generate(**asked, max_new_tokens=max_tokens, do_sample=False)
    text = tokenizer.decode(ids[0, asked.input_ids.shape[1] :], skip_special_tokens=True)
    return text.partition("\n")[0]
