"""smolagents: its model for servers that speak OpenAI's API, and a step of an agent."""

import json
import os

from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
QUESTION, ANSWER = "What does a fox eat?", '{"animal": "fox", "eats": "mice"}'


def make_model(name: str, **options) -> OpenAIModel:
    return OpenAIModel(name, api_base=URL + "/v1", api_key=KEY, temperature=0, **options)


def user(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])


model = make_model("json")
messages = [user(QUESTION)]
answer = model.generate(messages)
assert answer.content == ANSWER
print("works: `generate`")

said = ChatMessage(role=MessageRole.ASSISTANT, content=[{"type": "text", "text": answer.content}])
assert "owl" in model.generate([*messages, said, user("And an owl?")]).content
print("works: answers sent back")

pieces = list(model.generate_stream(messages))
assert "".join(piece.content or "" for piece in pieces) == ANSWER
assert pieces[-1].token_usage.output_tokens == answer.token_usage.output_tokens
print("works: `generate_stream` with usage")

assert model.generate(messages, stop_sequences=['"eats"']).content == '{"animal": "fox", '
print("works: `stop_sequences`")

TEXT = {"type": "string", "maxLength": 9}
SCHEMA = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
SCHEMA["additionalProperties"] = False
shape = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
assert set(json.loads(model.generate(messages, response_format=shape).content)) == {"name"}
print("works: `response_format` of a schema")


@tool
def look_up(thing: str, fact: str) -> str:
    """Look a fact up.

    Args:
        thing: what it is about
        fact: what to know
    """
    return {("fox", "eats"): "berries"}.get((thing, fact), "unknown")


called = make_model("agent").generate(messages, tools_to_call_from=[look_up], tool_choice="auto")
(call,) = called.tool_calls
assert (call.function.name, json.loads(call.function.arguments)) == (
    "look_up", {"thing": "fox", "fact": "eats"},
)  # fmt: skip
print("works: tools")

agent = ToolCallingAgent([look_up], make_model("agent", max_tokens=64), max_steps=1)
# The demo's model has no room for the usual one, and was not taught `final_answer`.
agent.prompt_templates["system_prompt"] = "Answer briefly."
agent.run(QUESTION)
(step,) = (step for step in agent.memory.steps if getattr(step, "tool_calls", None))
assert step.tool_calls[0].arguments == {"thing": "fox", "fact": "eats"}
assert "berries" in step.observations
print("works: a step of `ToolCallingAgent`")
