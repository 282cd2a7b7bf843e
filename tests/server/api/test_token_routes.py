"""Tokenize and detokenize over HTTP, and other requests that clients make at their start."""

import pytest

from registry.formats.chat_template import read_json
from server.version import VERSION, build
from tests.server.in_process import DEMO, InProcess, User, still_product

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good day"}]

product = still_product


@pytest.fixture(scope="module")
def user(product: InProcess) -> User:
    return product.user("acme")


def test_a_text_is_the_tokens_that_a_completion_has_and_back(user: User) -> None:
    text = "Hello there, €"
    shown = user.call("POST", "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    completed = user.complete("base", prompt=text, return_token_ids=True).json()
    assert shown["tokens"] == completed["choices"][0]["prompt_token_ids"]
    assert shown["count"] == len(shown["tokens"]) == len(shown["token_strs"])
    assert shown["max_model_len"] == 512
    bare = user.call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert user.call("POST", "/detokenize", {"tokens": bare["tokens"]}).json() == {"prompt": text}


def test_a_chat_is_the_tokens_that_its_completion_has(user: User) -> None:
    for fields in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
        body = {"model": "base", "messages": MESSAGES, **fields}
        shown = user.call("POST", "/tokenize", body).json()["tokens"]
        chat = user.call("POST", "/v1/chat/completions", body | {"return_token_ids": True})
        assert shown == chat.json()["prompt_token_ids"]


def test_special_tokens_are_written_out(product: InProcess, user: User) -> None:
    (eos, *_) = product.gateway.bases.default.tokenizer.eos_token_ids
    shown = user.call("POST", "/detokenize", {"tokens": [eos]}).json()["prompt"]
    assert shown == product.gateway.bases.default.tokenizer.token_text(eos)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": 7}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "colour": 1}, 400, "colour"),
        ("tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("tokenize", {"prompt": "a", "model": "nobodys"}, 404, "model"),
        ("detokenize", {"tokens": [1, 10**6]}, 400, "tokens[1]"),
    ],
)
def test_a_bad_request_names_its_place(user: User, path, body, status, param) -> None:
    answer = user.call("POST", f"/{path}", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_call_counts_as_a_request(product: InProcess) -> None:
    user = product.user("limited", requests_per_minute=2)
    calls = [("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [40]})] * 2
    statuses = [user.call("POST", f"/{path}", body).status_code for path, body in calls]
    assert statuses == [200, 200, 429, 429]


def test_evaluators_find_the_special_tokens_and_the_template(user: User) -> None:
    info = user.call("GET", "/tokenizer_info").json()
    config = read_json(DEMO / "tokenizer_config.json")
    assert info["eos_token"] == config["eos_token"]
    assert "messages" in info["chat_template"]
    assert {"bos_token", "pad_token"} <= info.keys()


def test_every_get_answers_a_head_without_a_body(user: User) -> None:
    for path in ("/v1/models", "/v1/models/base", "/version", "/health", "/v1/limits"):
        whole, head = user.call("GET", path), user.call("HEAD", path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
    assert user.call("HEAD", "/v1/nothing").status_code == 404
    assert user.call("HEAD", "/v1/completions").status_code == 405


def test_the_version_is_told_to_everybody(user: User) -> None:
    assert user.call("GET", "/version", headers={"authorization": ""}).json() == {
        "version": VERSION, "build": build()
    }  # fmt: skip


def test_a_model_says_its_context_and_where_it_comes_from(user: User) -> None:
    (base,) = user.call("GET", "/v1/models").json()["data"]
    assert base == user.call("GET", "/v1/models/base").json()
    assert (base["max_model_len"], base["root"], base["parent"]) == (512, "base", None)
    assert base["created"] == int((DEMO / "config.json").stat().st_mtime)
