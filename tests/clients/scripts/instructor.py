"""Instructor: answers of a Pydantic model, whole and in parts."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]


class Home(BaseModel):
    place: Literal["den", "web"]


class Animal(BaseModel):
    homes: list[Home] = Field(min_length=1, max_length=2)
    tame: bool | None


openai = OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
client = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
messages = [{"role": "user", "content": "What does a fox eat?"}]
ask = {"model": "json", "messages": messages, "temperature": 0, "max_retries": 0}
fox = client.create(response_model=Animal, **ask)
assert isinstance(fox.homes[0], Home)
print("works: `create`")

*_, last = client.create_partial(response_model=Animal, **ask)
assert last.model_dump() == fox.model_dump()
print("works: `create_partial`")

caller = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
assert isinstance(caller.create(response_model=Animal, **ask), Animal)
print("works: `create` by a tool")
