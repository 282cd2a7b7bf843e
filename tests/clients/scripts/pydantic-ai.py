"""Pydantic AI: an agent without tools."""

import asyncio
import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
QUESTION, ANSWER = "What does a fox eat?", '{"animal": "fox", "eats": "mice"}'

model = OpenAIChatModel("json", provider=OpenAIProvider(base_url=URL + "/v1", api_key=KEY))
agent = Agent(model, instructions="Answer briefly.", model_settings={"temperature": 0})


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


asyncio.run(main())
