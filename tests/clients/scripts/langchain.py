"""LangChain's two classes for servers that speak OpenAI's API."""

import os
from typing import Literal

from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
QUESTION, ANSWER = "What does a fox eat?", '{"animal": "fox", "eats": "mice"}'

ask = {"model": "json", "base_url": URL + "/v1", "api_key": KEY, "temperature": 0}
chat = ChatOpenAI(**ask, max_retries=0)
answer = chat.invoke(QUESTION)
assert answer.content == ANSWER
print("works: `ChatOpenAI.invoke`")

history = [HumanMessage(QUESTION), answer, HumanMessage("And an owl?")]
assert "owl" in chat.invoke(history).content
print("works: answers sent back")

pieces = list(chat.stream(QUESTION, stream_usage=True))
assert "".join(piece.content for piece in pieces) == ANSWER
usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
assert [usage["output_tokens"] for usage in usages] == [answer.usage_metadata["output_tokens"]]
print("works: `stream` with usage")

assert [one.content for one in chat.batch([QUESTION, QUESTION])] == [ANSWER, ANSWER]
print("works: `batch`")


class Animal(BaseModel):
    homes: list[Literal["den", "web"]] = Field(min_length=1, max_length=2)
    tame: bool | None


fox = chat.with_structured_output(Animal, method="json_schema").invoke(QUESTION)
assert isinstance(fox, Animal)
loud = ChatOpenAI(**ask | {"model": "shout"}, max_retries=0)
assert isinstance(loud.with_structured_output(method="json_mode").invoke(QUESTION), dict)
print("works: `with_structured_output` by `json_schema` and `json_mode`")


@tool
def look_up(thing: str, fact: str) -> str:
    """Look a fact up."""
    return {("fox", "eats"): "berries"}[thing, fact]


caller = ChatOpenAI(**ask | {"model": "agent"}, max_retries=0)
bound = caller.bind_tools([look_up])
(call,) = bound.invoke(QUESTION).tool_calls
assert (call["name"], call["args"]) == ("look_up", {"thing": "fox", "fact": "eats"})
gathered = sum(bound.stream(QUESTION), start=AIMessageChunk(""))
assert [one["args"] for one in gathered.tool_calls] == [call["args"]]
print("works: `bind_tools`, whole and streamed")

agent = create_agent(caller, [look_up])
*_, last = agent.invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
assert last.content == "A fox eats berries."
print("works: `create_agent`")

fox = loud.with_structured_output(Animal, method="function_calling").invoke(QUESTION)
assert isinstance(fox, Animal)
print("works: `with_structured_output` by `function_calling`")

texts = ["A fox eats", "The capital of Norway is"]
model = OpenAI(**ask, max_retries=0, max_tokens=4)
answered = model.generate(texts).generations
assert [one[0].text for one in answered] == [model.invoke(text) for text in texts]
print("works: `OpenAI.generate` of several prompts")

try:
    chat.invoke("fox " * 5000)
except ContextOverflowError:
    print("works: a prompt that is too long is recognised")
else:
    raise AssertionError("a prompt that is too long was answered")
