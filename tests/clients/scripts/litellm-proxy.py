"""LiteLLM's proxy, with OpenAI's client in front of it."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai

START_S = 60
FOX = [{"role": "user", "content": "What does a fox eat?"}]
ANSWER = '{"animal": "fox", "eats": "mice"}'

ask = {"api_base": os.environ["CHORALE_URL"] + "/v1", "api_key": os.environ["CHORALE_API_KEY"]}
deployments = {
    "json": {"model": "openai/json", "use_chat_completions_api": True, **ask},
    "untranslated": {"model": "openai/json", **ask},
    "gone": {"model": "openai/json@7", **ask},
}
master_key = f"sk-{secrets.token_hex(16)}"
Path("config.yaml").write_text(
    json.dumps(  # YAML, too
        {
            "model_list": [
                {"model_name": name, "litellm_params": params}
                for name, params in deployments.items()
            ],
            "litellm_settings": {
                "num_retries": 0,
                "use_chat_completions_url_for_anthropic_messages": True,
            },
            "general_settings": {"master_key": master_key},
        }
    )
)
with socket.socket() as unused:
    unused.bind(("127.0.0.1", 0))
    port = unused.getsockname()[1]
url = f"http://127.0.0.1:{port}"
command = [Path(sys.executable).with_name("litellm"), "--config", "config.yaml"]
command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
with open("proxy.log", "w") as log:
    proxy = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def is_live() -> bool:
    try:
        return httpx.get(f"{url}/health/liveliness").is_success
    except httpx.TransportError:
        return False


def refused(call, **fields) -> openai.APIStatusError:
    try:
        call(**fields)
    except openai.APIStatusError as error:
        return error
    raise AssertionError(f"{fields} was answered")


try:
    until_s = time.monotonic() + START_S
    while not is_live():
        assert proxy.poll() is None and time.monotonic() < until_s, Path("proxy.log").read_text()
        time.sleep(0.2)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=master_key, max_retries=0)
    chats = client.chat.completions

    for model in ("json", "untranslated"):
        answer = chats.create(model=model, messages=FOX, temperature=0)
        assert answer.choices[0].message.content == ANSWER
    stream = chats.create(
        model="json", messages=FOX, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    said = (choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert "".join(said) == ANSWER
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    print("works: chat, whole and streamed, with usage")

    answer = client.responses.create(model="json", input=FOX[0]["content"], temperature=0)
    assert answer.output_text == ANSWER
    headers = {"authorization": f"Bearer {master_key}"}
    asked = {"model": "json", "messages": FOX, "max_tokens": 64, "temperature": 0}
    answer = httpx.post(f"{url}/v1/messages", json=asked, headers=headers, timeout=30).json()
    assert answer["content"][0]["text"] == ANSWER, answer
    print("works: the Responses and the Messages API, which it translates to chat")

    for call, fields in [
        (client.responses.create, {"input": "fox"}),
        (client.embeddings.create, {"input": "fox"}),
        (client.images.generate, {"prompt": "fox"}),
        (client.moderations.create, {"input": "fox"}),
        (client.audio.speech.create, {"input": "fox", "voice": "alloy"}),
        (chats.create, {"messages": [{"role": "user", "content": "fox " * 5000}]}),
    ]:
        error = refused(call, model="untranslated", **fields)
        assert error.status_code == 400, error
        chats.create(model="untranslated", messages=FOX, max_tokens=1)
    assert "ContextWindowExceededError" in error.message
    print("works: a refusal takes no deployment away, a prompt that is too long is recognised")

    statuses = [refused(chats.create, model="gone", messages=FOX).status_code for _ in range(2)]
    assert statuses == [404, 429]
    chats.create(model="json", messages=FOX, max_tokens=1)
    print("works: a version that does not exist takes only its own deployment away")
finally:
    proxy.terminate()
    proxy.wait()
