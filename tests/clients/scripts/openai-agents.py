"""OpenAI's Agents SDK, with its model for Chat Completions."""

import asyncio
import os
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
QUESTION, ANSWER = "What does a fox eat?", '{"animal": "fox", "eats": "mice"}'

set_tracing_disabled(True)  # it would send traces to OpenAI
client = AsyncOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)


class Home(BaseModel):
    place: Literal["den", "web"]


class Animal(BaseModel):
    homes: list[Home] = Field(min_length=1, max_length=2)
    tame: bool | None


@function_tool
def look_up(thing: str, fact: str) -> str:
    """Look a fact up."""
    return {("fox", "eats"): "berries"}[thing, fact]


def make_agent(model: str, **options) -> Agent:
    chat = OpenAIChatCompletionsModel(model=model, openai_client=client)
    settings = ModelSettings(temperature=0, include_usage=True)
    return Agent(name=model, model=chat, model_settings=settings, **options)


async def main() -> None:
    agent = make_agent("json")
    answer = await Runner.run(agent, QUESTION)
    assert answer.final_output == ANSWER
    print("works: `Runner.run`")

    history = [*answer.to_input_list(), {"role": "user", "content": "And an owl?"}]
    assert "owl" in (await Runner.run(agent, history)).final_output
    print("works: answers sent back")

    stream = Runner.run_streamed(agent, QUESTION)
    pieces = [
        event.data.delta
        async for event in stream.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(pieces) == ANSWER
    assert stream.context_wrapper.usage.output_tokens == answer.context_wrapper.usage.output_tokens
    print("works: `Runner.run_streamed` with usage")

    fox = (await Runner.run(make_agent("json", output_type=Animal), QUESTION)).final_output
    assert (type(fox), type(fox.homes[0])) == (Animal, Home)
    print("works: `output_type` of a Pydantic model")

    finder = make_agent("agent", tools=[look_up])
    assert (await Runner.run(finder, QUESTION)).final_output == "A fox eats berries."
    stream = Runner.run_streamed(finder, QUESTION)
    called = [event.item.type async for event in stream.stream_events() if hasattr(event, "item")]
    assert called == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert stream.final_output == "A fox eats berries."
    print("works: tools, whole and streamed")


asyncio.run(main())
