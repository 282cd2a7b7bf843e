"""Shapes over HTTP: compiled once and charged before, refused by path, paid for if too slow."""

import pytest

from server.tools.grammar import AnswerForm
from tests.server.fake_engines import FakeEngines, answer_at_once

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}}


def chat(user, **fields):
    messages = [{"role": "user", "content": "hi"}]
    return user.call(
        "POST", "/v1/chat/completions", {"model": "base", "messages": messages} | fields
    )


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def test_a_schema_reaches_the_engine_and_is_compiled_once_for_each_tenant(product, monkeypatch):
    compiled, real = [], AnswerForm.compiled
    monkeypatch.setattr(AnswerForm, "compiled", lambda form: compiled.append(1) or real(form))
    users = [product.user(name) for name in ("a", "b")]
    for user in (*users, *users):
        assert chat(user, response_format=form(SCHEMA)).status_code == 200
        assert user.complete("base", structured_outputs={"json": SCHEMA}).status_code == 200
    assert len(compiled) == 2
    [grammar] = {message.grammar for message in product.engines.asked}
    assert '"minimum": 0' in grammar
    assert chat(users[0]).status_code == 200
    assert product.engines.asked[-1].grammar == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": form(SCHEMA | {"not": {}})}, "response_format.json_schema.schema.not"),
        ({"response_format": form(None)}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": {"enum": []}}}, "structured_outputs.json.enum"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"response_format": form({"enum": ["x" * 65_536]})}, "response_format.json_schema.schema"),
    ],
)
def test_what_cannot_be_enforced_is_a_400_that_names_its_path(product, fields, param):
    answer = chat(product.user("a"), **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert product.engines.asked == []


def test_a_shape_that_is_compiled_and_then_refused_has_used_a_request(product):
    user = product.user("greedy", requests_per_minute=2, max_concurrency=1)
    bad = {"structured_outputs": {"regex": "["}}
    assert [chat(user, **bad).status_code for _ in range(3)] == [400, 400, 429]


def test_a_grammar_that_is_too_slow_in_the_engine_is_a_400_that_names_the_field(product):
    def slow(message):
        cause = {"finish_reason": "error", "stop_cause": "constraint_too_slow"}
        return [output._replace(**cause) for output in answer_at_once(message)]

    product.use(FakeEngines(slow))
    error = chat(product.user("a"), structured_outputs={"regex": "a+"}).json()["error"]
    assert (error["code"], error["param"]) == ("constraint_too_slow", "structured_outputs")
