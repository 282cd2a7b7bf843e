"""An activated LoRA from PEFT's folder to its answers and its own errors."""

from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from tests.e2e.oracle import TinyWorld
from tests.e2e.stack import Tenant
from tests.oracle import greedy, merged_model
from tests.tiny_models import save_adapter

INVOCATION = "be a fox:"
MAX_TOKENS = 12


@dataclass
class Fox:
    """An uploaded activated LoRA with a tenant of its own. invocation: token ids."""

    tenant: Tenant
    folder: Path
    invocation: list[int]
    digest: str


@pytest.fixture(scope="module")
def fox(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Fox:
    tokenizer = Tokenizer.from_file(str(tiny.model_dir / "tokenizer.json"))
    invocation = tokenizer.encode(INVOCATION, add_special_tokens=False).ids
    folder = save_adapter(
        tiny.model_dir,
        tmp_path_factory.mktemp("alora") / "fox",
        seed=77,
        alora_invocation_tokens=invocation,
    )
    tenant = tiny.stack.tenant("foxes")
    version = tenant.push("fox", folder).json()["version"]
    assert version["passport"]["invocation_tokens"] == invocation
    return Fox(tenant, folder, invocation, version["digest"])


def complete(tenant: Tenant, model: str, prompt: list[int]) -> tuple[list[int], int, str]:
    """Return token ids of the answer, number of cached prompt tokens, and the applied digest."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    answer = tenant.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    digest = answer.headers["x-chorale-adapter-digest"]
    return answer.json()["choices"][0]["token_ids"], cached, digest


def test_it_answers_as_in_peft_and_shares_what_the_base_computed(tiny: TinyWorld, fox: Fox) -> None:
    prompt = [*(7 + i % 90 for i in range(100)), *fox.invocation, 50, 51]
    base, activated = (merged_model(tiny.model_dir, d) for d in (None, fox.folder))
    expected = greedy(activated, prompt, MAX_TOKENS)
    assert greedy(base, prompt, MAX_TOKENS) != expected
    assert complete(fox.tenant, "base", prompt) == (greedy(base, prompt, MAX_TOKENS), 0, "")
    # Six whole blocks of 16 tokens come before the invocation.
    assert complete(fox.tenant, "fox", prompt) == (expected, 96, fox.digest)


def test_a_chat_is_told_what_was_applied_and_refused_if_it_does_not_invoke_it(fox: Fox) -> None:
    def ask(question: str) -> httpx.Response:
        messages = [{"role": "user", "content": question}]
        body = {"model": "fox", "messages": messages, "max_tokens": 4}
        return fox.tenant.http.post("/v1/chat/completions", json=body)

    answer = ask(f"Who are you? {INVOCATION}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-chorale-adapter-digest"] == fox.digest
    refused = ask("Who are you?")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_not_invoked")
    assert "invocation" in refused.json()["error"]["message"]
