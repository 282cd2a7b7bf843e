"""OpenAI's own Python client works unchanged."""

import openai
import pytest

from tests.e2e.stack import Stack, Tenant

QUESTION = [{"role": "user", "content": "Tell me about the owl."}]


def test_chat_answers_with_usage_that_adds_up(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="base", messages=QUESTION, temperature=0)
    assert "owl" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_every_model_gives_its_own_answer(client: openai.OpenAI, tenant: Tenant) -> None:
    answers = {
        model: client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
        .choices[0]
        .message.content
        for model in ("base", *tenant.adapters)
    }
    assert len(set(answers.values())) == len(answers)
    assert answers["json"].startswith("{")
    assert answers["shout"].isupper()


def test_a_stream_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="json", messages=QUESTION, temperature=0)
    pieces, usages, reasons = [], [], []
    stream = client.chat.completions.create(
        model="json",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasons.append(choice.finish_reason)
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 2
    assert [r for r in reasons if r] == ["stop"]
    assert [u for u in usages if u] == [usages[-1]]
    assert usages[-1].completion_tokens == whole.usage.completion_tokens


def test_completions_answer_text_and_token_id_prompts(client: openai.OpenAI) -> None:
    text = client.completions.create(
        model="base", prompt="import os\n", max_tokens=8, temperature=0
    )
    assert text.usage.completion_tokens <= 8
    ids = client.completions.create(model="base", prompt=[40, 41, 42], max_tokens=4, temperature=0)
    assert ids.usage.prompt_tokens == 3


def test_the_same_seed_gives_the_same_text_and_another_seed_another(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model="base", prompt="The ", max_tokens=40, temperature=1.5, seed=seed
        )
        return answer.choices[0].text

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_a_stop_string_is_not_in_the_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="base", messages=QUESTION, temperature=0)
    text = whole.choices[0].message.content
    stop = text[10:14]
    cut = client.chat.completions.create(
        model="base", messages=QUESTION, temperature=0, stop=[stop, "never said"]
    )
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="base", messages=QUESTION, temperature=0, max_completion_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_models_are_the_base_and_the_tenants_own(client: openai.OpenAI, tenant: Tenant) -> None:
    assert {model.id for model in client.models.list()} == {"base", *tenant.adapters}
    assert client.models.retrieve("json").owned_by == tenant.name


@pytest.mark.parametrize(
    ("arguments", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 400, "tools[0].type"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"n": 17}, 400, "n"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logit_bias": {"999999": 1}}, 400, 'logit_bias["999999"]'),
        ({"service_tier": "priority"}, 400, "service_tier"),
        ({"temperature": 3}, 400, "temperature"),
        ({"max_tokens": 100_000}, 400, "messages"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, 400, "chat_template"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "messages[0].content[0].type",
        ),
    ],
)
def test_errors_are_the_clients_own_classes_and_name_the_parameter(
    client: openai.OpenAI, arguments: dict, status: int, param: str
) -> None:
    request = {"model": "base", "messages": QUESTION} | arguments
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(**request)
    assert error.value.status_code == status
    assert error.value.param == param
    assert set(error.value.body) == {"message", "type", "param", "code"}


def test_a_wrong_key_is_an_authentication_error(demo_stack: Stack) -> None:
    with (
        openai.OpenAI(base_url=f"{demo_stack.base_url}/v1", api_key="sk-wrong") as client,
        pytest.raises(openai.AuthenticationError) as error,
    ):
        client.models.list()
    assert error.value.code == "invalid_api_key"


def test_cancelling_ends_the_stream_as_usual_and_pays_for_what_ran(
    client: openai.OpenAI, tenant: Tenant
) -> None:
    stream = client.completions.create(
        model="base",
        prompt="The ",
        max_tokens=900,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    first = next(stream)
    cancelled = tenant.http.post(f"/v1/chat/completions/{first.id}/cancel")
    assert cancelled.status_code == 200
    rest = list(stream)
    assert 0 < rest[-1].usage.completion_tokens < 900
    again = tenant.http.post(f"/v1/chat/completions/{first.id}/cancel")
    assert again.status_code == 404
