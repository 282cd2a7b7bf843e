"""DSPy: its JSON adapter with a server that it is told about, and native calls of tools."""

import asyncio
import json
import os
from typing import Literal

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition
from pydantic import BaseModel, Field

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
QUESTION, ANSWER = "What does a fox eat?", '{"animal": "fox", "eats": "mice"}'

access = AccessPolicy(provider="chorale", env_keys=("CHORALE_API_KEY",), base_url=URL + "/v1")
dspy.lm15.register_provider(
    ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("openai")),
    supports=ModelSupport(function_calling=True, response_schema=True),
)


def make_lm(model: str) -> dspy.LM:
    return dspy.LM(model, temperature=0, max_tokens=256, cache=False, num_retries=0)


class Home(BaseModel):
    place: Literal["den", "web"]


class Animal(BaseModel):
    homes: list[Home] = Field(min_length=1, max_length=2)
    tame: bool | None


class Describe(dspy.Signature):
    """Describe the animal."""

    question: str = dspy.InputField()
    animal: Animal = dspy.OutputField()


generic = dspy.LM("openai/json", api_base=URL + "/v1", api_key=KEY, temperature=0, cache=False)
for lm in (generic, make_lm("chorale/json")):
    assert lm(QUESTION) == [ANSWER]
    assert lm.history[-1]["usage"]["completion_tokens"] > 0
print("works: `LM`")

with dspy.context(lm=make_lm("chorale/json"), adapter=dspy.JSONAdapter()):
    fox = dspy.Predict(Describe)(question=QUESTION).animal
    assert isinstance(fox.homes[0], Home)
print("works: a signature with a Pydantic model, by `JSONAdapter`")


async def stream() -> list[str]:
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    predict = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
    return [piece async for piece in predict(question=QUESTION)]


with dspy.context(lm=make_lm("chorale/json"), adapter=dspy.JSONAdapter()):
    *pieces, last = asyncio.run(stream())
assert len(pieces) > 3
assert json.loads("".join(piece.chunk for piece in pieces)) == last.answer
print("works: `streamify`")


def look_up(thing: str, fact: str) -> str:
    """Look a fact up."""
    return {("fox", "eats"): "berries"}[thing, fact]


tools = [dspy.Tool(look_up).format_as_litellm_function_call()]
(answer,) = make_lm("chorale/agent")(QUESTION, tools=tools)
assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {
    "thing": "fox", "fact": "eats",
}  # fmt: skip
print("works: native calls of tools")
