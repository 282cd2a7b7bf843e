"""LiteLLM's SDK."""

import os

import litellm

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
ANSWER = '{"animal": "fox", "eats": "mice"}'

ask = {"api_base": URL + "/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}
messages = [{"role": "user", "content": "What does a fox eat?"}]
answer = litellm.completion(model="openai/json", messages=messages, **ask)
assert answer.choices[0].message.content == ANSWER
print("works: `completion`")

usage = {"stream": True, "stream_options": {"include_usage": True}}
stream = litellm.completion(model="openai/json", messages=messages, **usage, **ask)
chunks = list(stream)
said = (choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
assert "".join(said) == ANSWER
assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
print("works: streams with usage")

messages += [answer.choices[0].message, {"role": "user", "content": "And an owl?"}]
answer = litellm.completion(model="openai/json", messages=messages, **ask)
assert "owl" in answer.choices[0].message.content
print("works: answers sent back")

texts = ["A fox eats", "The capital of Norway is"]
model = "text-completion-openai/json"
both = litellm.text_completion(model=model, prompt=texts, max_tokens=4, **ask)
assert [choice.index for choice in both.choices] == [0, 1]
print("works: `text_completion` of several prompts")
