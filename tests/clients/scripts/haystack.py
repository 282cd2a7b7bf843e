"""Haystack: its generator for servers that speak OpenAI's API, and an agent."""

import os
from typing import Literal

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel, Field

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
QUESTION, ANSWER = "What does a fox eat?", '{"animal": "fox", "eats": "mice"}'


class Animal(BaseModel):
    homes: list[Literal["den", "web"]] = Field(min_length=1, max_length=2)
    tame: bool | None


def make_generator(model: str, **options) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        Secret.from_token(KEY), model, api_base_url=URL + "/v1", max_retries=0,
        generation_kwargs={"temperature": 0, **options},
    )  # fmt: skip


generator = make_generator("json")
question = ChatMessage.from_user(QUESTION)
(answer,) = generator.run([question])["replies"]
assert answer.text == ANSWER
print("works: `run`")

history = [question, answer, ChatMessage.from_user("And an owl?")]
assert "owl" in generator.run(history)["replies"][0].text
print("works: answers sent back")

pieces = []
usage = {"stream_options": {"include_usage": True}}
(streamed,) = generator.run([question], pieces.append, generation_kwargs=usage)["replies"]
assert "".join(piece.content for piece in pieces) == streamed.text == ANSWER
assert streamed.meta["usage"]["completion_tokens"] == answer.meta["usage"]["completion_tokens"]
print("works: `streaming_callback` with usage")

shaped = make_generator("shout", response_format=Animal)
Animal.model_validate_json(shaped.run([question])["replies"][0].text)
print("works: `response_format` of a Pydantic model")


@tool
def look_up(thing: str, fact: str) -> str:
    """Look a fact up."""
    return {("fox", "eats"): "berries"}[thing, fact]


caller = make_generator("agent")
for stream in (None, pieces.append):
    (called,) = caller.run([question], stream, tools=[look_up])["replies"]
    (call,) = called.tool_calls
    assert (call.tool_name, call.arguments) == ("look_up", {"thing": "fox", "fact": "eats"})
print("works: tools, whole and streamed")

agent = Agent(chat_generator=caller, tools=[look_up])
assert agent.run([question])["last_message"].text == "A fox eats berries."
print("works: `Agent`")
