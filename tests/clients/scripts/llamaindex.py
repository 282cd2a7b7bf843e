"""LlamaIndex's class for servers that speak OpenAI's API, over both endpoints."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
QUESTION, ANSWER = "What does a fox eat?", '{"animal": "fox", "eats": "mice"}'

ask = {"model": "json", "api_base": URL + "/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}
chat = OpenAILike(**ask, is_chat_model=True)
messages = [ChatMessage(role="user", content=QUESTION)]
answer = chat.chat(messages)
assert answer.message.content == ANSWER
print("works: `chat`")

messages += [answer.message, ChatMessage(role="user", content="And an owl?")]
assert "owl" in chat.chat(messages).message.content
print("works: answers sent back")

assert "".join(piece.delta for piece in chat.stream_chat(messages[:1])) == ANSWER
print("works: `stream_chat`")

model = OpenAILike(**ask, is_chat_model=False, max_tokens=4)
text = model.complete("A fox eats").text
assert text
assert "".join(piece.delta for piece in model.stream_complete("A fox eats")) == text
print("works: `complete` and `stream_complete`")


def look_up(thing: str, fact: str) -> str:
    """Look a fact up."""
    return {("fox", "eats"): "berries"}[thing, fact]


caller = OpenAILike(**ask | {"model": "agent"}, is_chat_model=True, is_function_calling_model=True)
tool = FunctionTool.from_defaults(look_up, description="Look a fact up.")
called = caller.chat_with_tools([tool], user_msg=QUESTION)
(call,) = caller.get_tool_calls_from_response(called)
assert (call.tool_name, call.tool_kwargs) == ("look_up", {"thing": "fox", "fact": "eats"})
print("works: `chat_with_tools`")
