"""Outlines, with its model for a vLLM server."""

import os
from typing import Literal

import outlines
from openai import OpenAI
from outlines.inputs import Chat
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
QUESTION, ANSWER = "What does a fox eat?", '{"animal": "fox", "eats": "mice"}'


class Home(BaseModel):
    place: Literal["den", "web"]


class Animal(BaseModel):
    homes: list[Home] = Field(min_length=1, max_length=2)
    tame: bool | None


client = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
model = outlines.from_vllm(client, "json")
ask = {"temperature": 0}
assert model(QUESTION, **ask) == ANSWER
print("works: a call")

chat = Chat([{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}])
chat.add_user_message("And an owl?")
assert "owl" in model(chat, **ask)
print("works: answers sent back")

assert "".join(model.stream(QUESTION, **ask)) == ANSWER
print("works: `stream`")

loud = outlines.from_vllm(client, "shout")
assert isinstance(Animal.model_validate_json(loud(QUESTION, Animal, **ask)).homes[0], Home)
assert "".join(loud.stream(QUESTION, Animal, **ask)) == loud(QUESTION, Animal, **ask)
print("works: a Pydantic model, also streamed")

assert loud(QUESTION, Literal["yes", "no"], **ask) in ("yes", "no")
assert 0 <= int(loud(QUESTION, Regex("[0-9]{2}"), **ask)) <= 99
assert int(loud(QUESTION, int, **ask, max_tokens=9)) is not None
assert loud(QUESTION, CFG('?start: "yes" | "no"'), **ask) in ("yes", "no")
print("works: `Literal`, `int`, `Regex` and `CFG`")
