"""Adapters with a tokenizer and a template of their own, against transformers on their folders."""

import re
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.e2e.conftest import DEMO
from tests.e2e.stack import Tenant

CHAT = [{"role": "user", "content": "What does the other fox eat there?"}]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TENANT = "tokenizers"
ADAPTER = DEMO / "adapters" / "json"


@pytest.fixture(scope="module")
def tenant(tenant: Tenant) -> Tenant:
    tenant.push("json", ADAPTER)
    return tenant


def push(tenant: Tenant, name: str, folder: Path):
    """Upload the adapter with the tokenizer in the folder; its latest version."""
    sent = {path.name: path.read_bytes() for path in (*ADAPTER.iterdir(), *folder.iterdir())}
    answer = tenant.upload(name, sent)
    assert answer.status_code == 200, answer.text
    return tenant.http.get(f"/v1/adapters/{name}").json()["latest"]


def ask(client, model, **fields):
    extra = {"return_token_ids": True, **fields}
    answer = client.chat.completions.create(
        model=model, messages=CHAT, temperature=0, max_tokens=12, extra_body=extra
    )
    return answer.choices[0].model_dump() | {"prompt_token_ids": answer.prompt_token_ids}


def test_a_chat_is_rendered_tokenized_ended_and_shown_as_by_its_own_tokenizer(
    tenant, client, tmp_path
):
    plain = ask(client, "json")
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    end = tokenizer.convert_ids_to_tokens(plain["token_ids"][2])
    tokenizer.eos_token = end
    tokenizer.chat_template += "{{ '' }}"  # the same prompts by another template
    tokenizer.save_pretrained(tmp_path / "ends")
    version = push(tenant, "ends", tmp_path / "ends")
    assert version["passport"]["tokenizer"] == {
        "added_tokens": 1, "has_chat_template": True, "eos_token_ids": [plain["token_ids"][2]],
    }  # fmt: skip
    ended = ask(client, "ends")
    assert ended["token_ids"] == plain["token_ids"][:3]
    assert ended["prompt_token_ids"] == plain["prompt_token_ids"]
    assert ended["finish_reason"] == "stop"
    assert ended["x_chorale"]["stop_cause"] == "eos"
    assert ended["message"]["content"] == tokenizer.decode(ended["token_ids"][:2])
    goes_on = ask(client, "ends", ignore_eos=True)
    assert goes_on["token_ids"] == plain["token_ids"]
    assert ask(client, "json") == plain, "the other adapter has no part in it"


def test_prompts_are_those_of_transformers_on_the_adapters_folder(tenant, client, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    tokenizer.add_tokens([AddedToken("the", normalized=False)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "own")
    own = AutoTokenizer.from_pretrained(tmp_path / "own")
    push(tenant, "own", tmp_path / "own")
    expected = own.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ask(client, "own")["prompt_token_ids"] == expected
    calls = {"model": "own", "messages": CHAT}
    assert tenant.http.post("/tokenize", json=calls).json()["tokens"] == expected
    text = {"model": "own", "prompt": "there, other"}
    ids = tenant.http.post("/tokenize", json=text).json()["tokens"]
    assert ids == own(text["prompt"]).input_ids
    assert ids != tenant.http.post("/tokenize", json=text | {"model": "json"}).json()["tokens"]
    back = tenant.http.post("/detokenize", json={"model": "own", "tokens": ids}).json()
    assert back == {"prompt": own.decode(ids)}
    shown = tenant.http.get("/tokenizer_info", params={"model": "own"}).json()
    assert shown["chat_template"] == TEMPLATE


def test_a_grammar_lets_an_answer_end_as_the_adapter_ends_it(tenant, client, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    tokenizer.eos_token = "<|style_json|>"
    tokenizer.save_pretrained(tmp_path / "special")
    push(tenant, "special", tmp_path / "special")
    end = tokenizer.eos_token_id
    wanted = {"structured_outputs": {"regex": "ab[a-z]*"}, "logit_bias": {str(end): 100}}
    answer = ask(client, "special", **wanted)
    assert answer["x_chorale"]["stop_cause"] == "eos"
    assert answer["token_ids"][-1] == end
    assert re.fullmatch("ab[a-z]*", answer["message"]["content"])
    assert end not in ask(client, "json", **wanted)["token_ids"]
