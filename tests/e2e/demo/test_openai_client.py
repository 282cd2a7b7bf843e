"""OpenAI's own Python client works unchanged: models, chats, and its own errors."""

import openai
import pytest

from tests.e2e.stack import Stack, Tenant

QUESTION = [{"role": "user", "content": "Tell me about the owl."}]


def test_every_model_gives_its_own_answer(client: openai.OpenAI, tenant: Tenant) -> None:
    assert {model.id for model in client.models.list()} == {"base", *tenant.adapters}
    assert client.models.retrieve("json").owned_by == tenant.name
    answers = {
        model: client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
        for model in ("base", *tenant.adapters)
    }
    texts = {model: answer.choices[0].message.content for model, answer in answers.items()}
    assert len(set(texts.values())) == len(texts)
    assert "owl" in texts["base"]
    assert texts["json"].startswith("{")
    assert texts["shout"].isupper()
    for answer in answers.values():
        assert answer.choices[0].finish_reason == "stop"
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_errors_are_the_clients_own_classes_and_name_the_parameter(
    client: openai.OpenAI, demo_stack: Stack
) -> None:
    for asked, param in (({"n": 17}, "n"), ({"max_tokens": 100_000}, "messages")):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="base", messages=QUESTION, **asked)
        assert error.value.param == param
        assert set(error.value.body) == {"message", "type", "param", "code"}
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=QUESTION)
    with (
        openai.OpenAI(base_url=f"{demo_stack.base_url}/v1", api_key="sk-wrong") as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"
