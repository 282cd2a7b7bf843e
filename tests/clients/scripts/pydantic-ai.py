"""Pydantic AI: agents with and without tools."""

import asyncio
import os
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
QUESTION, ANSWER = "What does a fox eat?", '{"animal": "fox", "eats": "mice"}'

model = OpenAIChatModel("json", provider=OpenAIProvider(base_url=URL + "/v1", api_key=KEY))
agent = Agent(model, instructions="Answer briefly.", model_settings={"temperature": 0})


class Home(BaseModel):
    place: Literal["den", "web"]


class Animal(BaseModel):
    homes: list[Home] = Field(min_length=1, max_length=2)
    tame: bool | None


async def main() -> None:
    answer = await agent.run(QUESTION)
    assert answer.output == ANSWER
    print("works: `Agent.run`")
    history = answer.all_messages()
    assert "owl" in (await agent.run("And an owl?", message_history=history)).output
    print("works: answers sent back")
    async with agent.run_stream(QUESTION) as stream:
        assert "".join([piece async for piece in stream.stream_text(delta=True)]) == ANSWER
        assert stream.usage.output_tokens == answer.usage.output_tokens
    print("works: `run_stream` with usage")
    fox = (await agent.run(QUESTION, output_type=NativeOutput(Animal))).output
    assert (type(fox), type(fox.homes[0])) == (Animal, Home)
    print("works: `NativeOutput` of a Pydantic model")

    caller = OpenAIChatModel("agent", provider=OpenAIProvider(base_url=URL + "/v1", api_key=KEY))
    finder = Agent(caller, model_settings={"temperature": 0})

    @finder.tool_plain
    def look_up(thing: str, fact: str) -> str:
        """Look a fact up."""
        return {("fox", "eats"): "berries"}[thing, fact]

    assert (await finder.run(QUESTION)).output == "A fox eats berries."
    print("works: tools")
    tame = Agent(model, output_type=ToolOutput(Animal), model_settings={"temperature": 0})
    assert isinstance((await tame.run(QUESTION)).output, Animal)
    print("works: `ToolOutput` of a Pydantic model")


asyncio.run(main())
