"""OpenAI's client for Python: features that Chorale serves, and those it refuses by design."""

import json
import os
from typing import Literal

import openai
from pydantic import BaseModel, Field

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
QUESTION = {"role": "user", "content": "What does a fox eat?"}
ANSWER = '{"animal": "fox", "eats": "mice"}'

client = openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
ask = {"model": "json", "temperature": 0}

assert {"chorale-demo", "json", "shout"} <= {model.id for model in client.models.list()}
assert client.models.retrieve("json").id == "json"
print("works: models")

messages = [QUESTION]
answer = client.chat.completions.create(messages=messages, **ask)
assert answer.choices[0].message.content == ANSWER
print("works: chat")

messages.append(answer.choices[0].message)
messages.append({"role": "user", "content": "And an owl?"})
assert "owl" in client.chat.completions.create(messages=messages, **ask).choices[0].message.content
print("works: answers sent back")

stream = client.chat.completions.create(
    messages=[QUESTION], stream=True, stream_options={"include_usage": True}, **ask
)
chunks = list(stream)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
print("works: streams with usage")

drawn = {"prompt": "The ", "n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 8}
first, again = (client.completions.create(model="chorale-demo", **drawn) for _ in range(2))
assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
assert len({choice.text for choice in first.choices}) == 3
print("works: n and seed")

cut = client.chat.completions.create(messages=[QUESTION], stop='"eats"', **ask).choices[0]
assert (cut.message.content, cut.finish_reason) == ('{"animal": "fox", ', "stop")
print("works: stop")

likely = client.chat.completions.create(messages=[QUESTION], logprobs=True, top_logprobs=5, **ask)
assert all(len(token.top_logprobs) == 5 for token in likely.choices[0].logprobs.content)
print("works: logprobs")

texts = ["A fox eats", "The capital of Norway is"]
both = client.completions.create(model="chorale-demo", prompt=texts, temperature=0, max_tokens=4)
alone = [
    client.completions.create(model="chorale-demo", prompt=text, temperature=0, max_tokens=4)
    for text in texts
]
assert [c.index for c in both.choices] == [0, 1]
assert [c.text for c in both.choices] == [one.choices[0].text for one in alone]
assert both.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
print("works: completions of one prompt and of several")

scored = client.completions.create(
    model="json", prompt=texts[0], echo=True, logprobs=1, max_tokens=0, temperature=0
).choices[0]
assert scored.text == texts[0]
assert scored.logprobs.token_logprobs[0] is None
assert all(logprob < 0 for logprob in scored.logprobs.token_logprobs[1:])
print("works: echo with logprobs")


class Home(BaseModel):
    place: Literal["den", "web"]
    depth: int = Field(ge=0, le=9)


class Animal(BaseModel):
    name: str = Field(max_length=12)
    homes: list[Home] = Field(min_length=1, max_length=2)
    tame: bool | None


shape = {"messages": [QUESTION], "response_format": Animal, **ask}
fox = client.chat.completions.parse(**shape).choices[0].message.parsed
assert (type(fox), type(fox.homes[0])) == (Animal, Home)
with client.chat.completions.stream(**shape) as events:
    assert events.get_final_completion().choices[0].message.parsed == fox
print("works: `parse` and `stream` with a Pydantic model")

loud = {"messages": [QUESTION], "model": "shout", "temperature": 0}
anything = client.chat.completions.create(response_format={"type": "json_object"}, **loud)
assert isinstance(json.loads(anything.choices[0].message.content), dict)
print("works: JSON mode")

yes_or_no = {"structured_outputs": {"choice": ["yes", "no"]}}
chosen = client.chat.completions.create(extra_body=yes_or_no, **loud)
assert chosen.choices[0].message.content in ("yes", "no")
print("works: `structured_outputs` in `extra_body`")

TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {"thing": TEXT, "fact": TEXT},
    "required": ["thing", "fact"],
}
TOOL = {"name": "look_up", "description": "Look a fact up.", "parameters": SCHEMA}
chat = [QUESTION]
agent = {"model": "agent", "temperature": 0, "tools": [{"type": "function", "function": TOOL}]}
called = client.chat.completions.create(messages=chat, **agent).choices[0]
(call,) = called.message.tool_calls
assert (called.finish_reason, called.message.content) == ("tool_calls", None)
assert json.loads(call.function.arguments) == {"thing": "fox", "fact": "eats"}
chat += [called.message, {"role": "tool", "tool_call_id": call.id, "content": "berries"}]
said = client.chat.completions.create(messages=chat, **agent).choices[0]
assert (said.finish_reason, said.message.content) == ("stop", "A fox eats berries.")
print("works: tools with their results")

with client.chat.completions.stream(messages=[QUESTION], **agent) as events:
    pieces = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    final = events.get_final_completion().choices[0]
assert final.message.tool_calls[0].function.arguments == call.function.arguments
assert "".join(piece.arguments_delta for piece in pieces) == call.function.arguments
print("works: streamed calls")


class LookUp(BaseModel):
    thing: str = Field(max_length=20)
    legs: int = Field(ge=0, le=8)


drawn = {"messages": [QUESTION], "model": "shout", "tools": [openai.pydantic_function_tool(LookUp)]}
for choice in ("required", {"type": "function", "function": {"name": "LookUp"}}):
    parsed = client.chat.completions.parse(
        tool_choice=choice, parallel_tool_calls=False, n=3, seed=1, **drawn
    )
    for one in parsed.choices:
        assert isinstance(one.message.tool_calls[0].function.parsed_arguments, LookUp)
print("works: `parse` of required and named tools from a Pydantic model")


def user(*parts: dict) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


CUSTOM = {"type": "custom", "custom": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
PART = "messages[0].content[0].type"
CHAT, COMPLETIONS = client.chat.completions, client.completions
for what, endpoint, fields, param in [
    ("a tool of free text", CHAT, {"tools": [CUSTOM]}, "tools[0].type"),
    ("an image in a message", CHAT, {"messages": user(IMAGE)}, PART),
    ("audio in a message", CHAT, {"messages": user(AUDIO)}, PART),
    ("answers in audio", CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    ("a bias of no token", CHAT, {"logit_bias": {"999999": 1}}, 'logit_bias["999999"]'),
    ("a faster tier", CHAT, {"service_tier": "priority"}, "service_tier"),
    ("`suffix`", COMPLETIONS, {"suffix": "end"}, "suffix"),
    ("`best_of: 2`", COMPLETIONS, {"best_of": 2}, "best_of"),
]:
    needed = {"messages": [QUESTION]} if endpoint is CHAT else {"prompt": "A fox"}
    try:
        endpoint.create(**ask | needed | fields)
    except openai.BadRequestError as error:
        assert error.param == param, (what, error.param)
        assert set(error.body) == {"message", "type", "param", "code"}
        print(f"refused: {what} | {error.status_code} | `{param}` | {error.body['message']}")
    else:
        raise AssertionError(f"{what} was answered")
for what, call in [
    ("embeddings", client.embeddings.create),
    ("the Responses API", client.responses.create),
]:
    try:
        call(model="json", input="fox")
    except openai.BadRequestError as error:
        assert error.code == "endpoint_not_served"
        print(f"refused: {what} | {error.status_code} | | {error.body['message']}")
    else:
        raise AssertionError(f"{what} was answered")
