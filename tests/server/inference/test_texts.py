"""Requests for a version with a tokenizer of its own, up to the engine and back to the client."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.wire.messages import SamplingParams
from registry.ref import AdapterRef
from server.adapters.names import NamedAdapter
from server.inference import prompts
from server.inference.encoders import LARGE_BYTES, Encoders
from server.inference.generation_request import Chat, GenerationRequest
from server.inference.texts import Text
from server.text.template_process import TemplateProcess
from server.text.tokenizer import Tokenizer
from server.tools.built_in import BUILT_IN
from server.tools.dialect import Dialect
from tests.registry.publishing import publish
from tests.server.fake_engines import answer_at_once
from tests.server.in_process import InProcess, User
from tests.tokenizer_families import make_tokenizer

TEMPLATES = Path(__file__).parents[1] / "text" / "chat_templates"
FLAGS = dict.fromkeys(("special", "lstrip", "rstrip", "single_word", "normalized"), False)
TOKENS = [
    FLAGS | {"id": 2048, "content": "<new>"},
    FLAGS | {"id": 2049, "content": "<end>", "special": True},
]
OWN = {"added_tokens": TOKENS, "eos_token_ids": [2049]}


def version(own=None, owner_id="t", response_template=None) -> NamedAdapter:
    ref = AdapterRef("ad", 1, "d", "key", 4, 100)
    tokenizer = json.dumps(own) if own else None
    return NamedAdapter(owner_id, "acme", "a", ref, "rev", response_template, tokenizer)


@pytest.fixture
def base(tmp_path) -> Text:
    """A model whose template knows no tools."""
    make_tokenizer("llama3").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text((TEMPLATES / "llama2.jinja").read_text())
    tokenizer = Tokenizer(tmp_path)
    return Text(tokenizer, Dialect.of_base(tokenizer), len(tokenizer.vocabulary))


# ---- a version's text ----


def test_the_way_with_tools_is_that_of_the_versions_template(base):
    assert not base.dialect.is_native
    own = {"chat_template": (TEMPLATES / "llama3.jinja").read_text()}
    text = base.of_version(version(own), TemplateProcess())
    assert (text.dialect.is_native, text.dialect.template.calls) == (
        True, BUILT_IN["llama3_json"].calls,
    )  # fmt: skip
    named = base.of_version(version(own, response_template='"mistral"'), TemplateProcess())
    assert (named.dialect.is_native, named.dialect.template.calls) == (
        False, BUILT_IN["mistral"].calls,
    )  # fmt: skip


def test_marks_of_tools_may_be_added_tokens(base):
    first = base.vocabulary_size
    marks = {"<tool_call>": first, "</tool_call>": first + 1}
    tokens = [FLAGS | {"id": i, "content": mark} for mark, i in marks.items()]
    text = base.of_version(version({"added_tokens": tokens}), TemplateProcess())
    assert dict(text.dialect.token_ids) == marks
    assert text.vocabulary_size == first + 2
    assert text.words == {first: b"<tool_call>", first + 1: b"</tool_call>"}


# ---- requests for it ----


@pytest.fixture
def user(product: InProcess) -> User:
    user = product.user("acme")

    def write(conn):
        catalog = product.gateway.catalog
        publish(catalog, conn, user.tenant_id, "own", tokenizer=json.dumps(OWN))
        publish(catalog, conn, user.tenant_id, "plain")

    product.gateway.database.write_sync(write)
    return user


def test_the_engine_gets_its_tokens_its_ends_and_their_bytes(product, user):
    user.complete("own", prompt="a<new>b", stop=["<new>!"])
    message = product.engines.asked[-1]
    base = product.gateway.bases.default.tokenizer
    assert message.prompts == ((*base.encode("a"), 2048, *base.encode("b")),)
    shown = user.call("POST", "/tokenize", {"model": "own", "prompt": "a<new>b"}).json()
    assert tuple(shown["tokens"]) == message.prompts[0]
    assert message.sampling_params.eos_token_ids == (2049,)
    assert message.sampling_params.words == ((2048, b"<new>"), (2049, b""))
    user.complete("own", prompt=[2048, 2049])
    assert product.engines.asked[-1].prompts == ((2048, 2049),)
    assert product.engines.asked[-1].sampling_params.words == (), "only for stop strings"
    for model in ("plain", "base"):
        assert user.complete(model, prompt=[2048]).status_code == 400
        user.complete(model, prompt="a<new>b", stop=["!"])
        message = product.engines.asked[-1]
        assert message.prompts == (tuple(base.encode("a<new>b")),)
        assert (message.sampling_params.eos_token_ids, message.sampling_params.words) == ((), ())


def test_answers_show_its_tokens_in_text_logprobs_and_echo(product, user):
    def script(message):
        (output,) = answer_at_once(message)
        return [output._replace(new_token_ids=(40, 2048, 2049))]

    product.use(replace(product.engines, script=script))
    word = product.gateway.bases.default.tokenizer.vocabulary[40].decode()
    choice = user.complete("own", prompt=[2048], echo=True).json()["choices"][0]
    assert choice["text"] == f"<new>{word}<new>"
    assert user.complete("plain", prompt="a").json()["choices"][0]["text"] == word
    decoded = user.call("POST", "/detokenize", {"model": "own", "tokens": [40, 2048, 2049]})
    assert decoded.json() == {"prompt": f"{word}<new><end>"}
    for model in ("plain", "base"):
        refused = user.call("POST", "/detokenize", {"model": model, "tokens": [2048]})
        assert refused.json()["error"]["param"] == "tokens[0]"


def test_a_request_over_its_limits_has_no_text_made(product):
    user = product.user("limited", requests_per_minute=1)
    product.gateway.database.write_sync(
        lambda conn: publish(
            product.gateway.catalog, conn, user.tenant_id, "own", tokenizer=json.dumps(OWN)
        )
    )
    texts = product.gateway.bases.default.texts
    assert user.complete("base", prompt="a").status_code == 200
    assert user.complete("own", prompt="a").status_code == 429
    assert not texts._kept


def test_a_chat_in_which_a_template_hangs_is_refused_and_no_other(product, user):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if messages[0].content == 'hang' %}" + loop + "{% endif %}Hi"
    tokenizer = json.dumps({"chat_template": source})
    product.gateway.database.write_sync(
        lambda conn: publish(
            product.gateway.catalog, conn, user.tenant_id, "slow", tokenizer=tokenizer
        )
    )
    for text, refused in (("hang", True), ("quick", False)):
        body = {"model": "slow", "messages": [{"role": "user", "content": text}]}
        error = user.call("POST", "/v1/chat/completions", body).json().get("error", {})
        assert ("too much time" in error.get("message", "")) == refused
        assert error.get("param") == ("messages" if refused else None)
    assert user.complete("slow", prompt="a").status_code == 200
    assert user.call("GET", "/tokenizer_info?model=slow").json()["chat_template"] == source


def test_a_versions_template_is_rendered_on_a_thread_as_a_large_job(product):
    base, jobs = product.gateway.bases.default, []

    class Threads(Encoders):
        async def run(self, tenant_id, size_bytes, work):
            jobs.append(size_bytes)
            return work()

    chat = Chat([{"role": "user", "content": "a"}])
    request = GenerationRequest(
        model="m", prompts=chat, sampling=SamplingParams(max_tokens=1), max_tokens=1
    )
    own = base.text.of_version(version({"chat_template": "Hi"}), TemplateProcess())
    for text in (base.text, own):
        asyncio.run(prompts.tokenize(base, text, Threads(), "t", request))
    assert len(jobs) == 1
    assert jobs[0] > LARGE_BYTES
