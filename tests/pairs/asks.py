"""Ways to ask. Each checks its own claim, and every answer is judged by transformers and PEFT."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
from jinja2 import Template
from tokenizers import Tokenizer

from tests.pairs.models import INVOCATION, OWN_TEMPLATE, TRAINED_TOKENS
from tests.pairs.world import World

NUM_TOKENS = 12
PROMPT = [50, 61, 77, 90, 101, 60, 72]
PREFIX = [4 + (7 * i) % 280 for i in range(40)]
"""Two whole blocks and a half."""
SCHEMA = {
    "type": "object",
    "properties": {
        "fur": {"enum": ["red", "grey", "white"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["fur", "legs"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA, "strict": True}}
QUESTION = {"role": "user", "content": "Which fox?"}


class Asked:
    """An adapter on a base model of the table, which is asked in one way."""

    def __init__(self, world: World, model: str, folder: Path) -> None:
        self.world = world
        self.model = model
        self.folder = folder

    def complete(self, prompt: list[Any], **options: Any) -> dict[str, Any]:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0,
            "return_token_ids": True, "ignore_eos": True, **options,
        }  # fmt: skip
        found: dict[str, Any] = self.world.post("/v1/completions", body)
        return found

    def chat(self, **options: Any) -> dict[str, Any]:
        body = {
            "model": self.model, "messages": [QUESTION], "temperature": 0, "max_tokens": 250,
            "return_token_ids": True, "logprobs": True, **options,
        }  # fmt: skip
        found: dict[str, Any] = self.world.post("/v1/chat/completions", body)
        return found

    def judge(self, prompt: list[int], choice: dict[str, Any], *, is_free: bool = True) -> None:
        """Compare an answer's tokens, and its logprobs if it has any, with the oracle's.

        is_free: whether each token had to be the likeliest.
        """
        self.judge_tokens(prompt, choice["token_ids"], _logprobs(choice), is_free=is_free)

    def judge_tokens(
        self,
        prompt: list[int],
        tokens: list[int],
        logprobs: list[float] | None = None,
        *,
        is_free: bool = True,
    ) -> None:
        assert tokens
        bound = self.world.base.bound
        scores = self.world.models.score(self.world.base, self.folder, [*prompt, *tokens])
        off = []
        for place, token in enumerate(tokens, start=len(prompt) - 1):
            lost = (scores[place].max() - scores[place, token]).item()
            assert lost <= 2 * bound or not is_free, (self.world.case, self.model, place, lost)
            if logprobs is not None:
                off.append(abs(logprobs[place - len(prompt) + 1] - scores[place, token].item()))
        if off:
            # A token that is forced may be far from likely, and then rounding moves it further.
            assert sum(off) / len(off) <= bound, (self.world.case, self.model, off)
            assert max(off) <= 4 * bound, (self.world.case, self.model, off)


def _logprobs(choice: dict[str, Any]) -> list[float] | None:
    named = choice.get("logprobs")
    if not named:
        return None
    if "token_logprobs" in named:
        return list(named["token_logprobs"])
    return [each["logprob"] for each in named["content"]]


# ---- the ways ----


def plain(asked: Asked) -> None:
    (choice,) = asked.complete(PROMPT)["choices"]
    asked.judge(PROMPT, choice)


def stream(asked: Asked) -> None:
    body = {
        "model": asked.model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
        "return_token_ids": True, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    with asked.world.tenant.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    tokens += choice["token_ids"]
    asked.world.note(answer, usage)
    assert len(tokens) == NUM_TOKENS
    asked.judge_tokens(PROMPT, tokens)


def several(asked: Asked) -> None:
    choices = asked.complete(PROMPT, n=3, temperature=1.0, seed=5, logprobs=0)["choices"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    for choice in choices:
        asked.judge(PROMPT, choice, is_free=False)


def grammar(asked: Asked) -> None:
    """The second time it is drafted, so that masks lie behind drafts."""
    form = {"type": "json_schema", "json_schema": {"name": "fox", "schema": SCHEMA, "strict": True}}
    for _ in range(2):
        answer = asked.chat(response_format=form, speculation="shared")
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop", choice
        jsonschema_rs.validate(SCHEMA, json.loads(choice["message"]["content"]))
        asked.judge(_prompt(answer), choice, is_free=False)


def tool(asked: Asked) -> None:
    answer = asked.chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    (call,) = choice["message"]["tool_calls"]
    jsonschema_rs.validate(SCHEMA, json.loads(call["function"]["arguments"]))
    asked.judge(_prompt(answer), choice, is_free=False)


def _prompt(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0].get("prompt_token_ids") or answer["prompt_token_ids"])


def drafts(asked: Asked) -> None:
    """The second time it is drafted from the first answer, and from a text that goes wrong."""
    first = asked.complete(PROMPT, speculation="shared", max_tokens=24)["choices"][0]
    second = asked.complete(PROMPT, speculation="shared", max_tokens=24)
    asked.judge(PROMPT, second["choices"][0])
    assert len(first["token_ids"]) == 24
    asked.judge(PROMPT, first)


def logprobs(asked: Asked) -> None:
    (choice,) = asked.complete(PROMPT, logprobs=5)["choices"]
    assert all(len(top) >= 5 for top in choice["logprobs"]["top_logprobs"])
    asked.judge(PROMPT, choice)


def prompt_logprobs(asked: Asked) -> None:
    (choice,) = asked.complete(PREFIX, prompt_logprobs=0)["choices"]
    asked.judge(PREFIX, choice)
    named = [
        next(each["logprob"] for key, each in place.items() if int(key) == token)
        for place, token in zip(choice["prompt_logprobs"][1:], PREFIX[1:], strict=True)
    ]
    asked.judge_tokens(PREFIX[:1], PREFIX[1:], named, is_free=False)


def prefix(asked: Asked) -> None:
    for answer in (asked.complete(PREFIX), asked.complete(PREFIX)):
        asked.judge(PREFIX, answer["choices"][0])
    # With two engines, the second may go to the other one.
    if asked.world.case["place"] != "two engines":
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def preemption(asked: Asked) -> None:
    """More answers at once than the arena has room for."""
    chance, before = random.Random(3), _preemptions(asked.world)
    times = 1 + (asked.world.case["place"] == "two ranks") + (asked.world.case["form"] == "bf16")
    prompts = [[chance.randrange(4, 280) for _ in range(160)] for _ in range(14 * times)]
    choices = asked.complete(prompts, max_tokens=40 * times)["choices"]
    asked.world.wait(lambda: _preemptions(asked.world) > before)
    for prompt, choice in list(zip(prompts, choices, strict=True))[::3]:
        asked.judge(prompt, choice)


def _preemptions(world: World) -> float:
    lines = world.stack.operator.get("/metrics").text.splitlines()
    name = f'chorale_preemptions_total{{base="{world.name}"'
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def activated(asked: Asked) -> None:
    prompt = [*PREFIX[:20], *INVOCATION, 70, 71]
    (choice,) = asked.complete(prompt, logprobs=0)["choices"]
    asked.judge(prompt, choice)


def token_rows(asked: Asked) -> None:
    prompt = [70, *TRAINED_TOKENS, 71]
    (choice,) = asked.complete(prompt, logprobs=0)["choices"]
    asked.judge(prompt, choice)


def own_template(asked: Asked) -> None:
    tokenizer = Tokenizer.from_file(str(asked.world.base.folder / "tokenizer.json"))
    for kwargs in ({}, {"mood": "Gladly"}):
        answer = asked.chat(max_tokens=NUM_TOKENS, chat_template_kwargs=kwargs)
        text = Template(OWN_TEMPLATE).render(messages=[QUESTION], **kwargs)
        assert _prompt(answer) == tokenizer.encode(text, add_special_tokens=False).ids
        asked.judge(_prompt(answer), answer["choices"][0])


def stop(asked: Asked) -> None:
    """A stop string of two characters; some prompts' answers are bytes that are no text."""
    for prompt in (PROMPT, PREFIX, PROMPT[::-1], PREFIX[::-1]):
        (whole,) = asked.complete(prompt, max_tokens=24)["choices"]
        text = whole["text"]
        firsts = [i for i in range(4, len(text) - 1) if text.find(text[i : i + 2]) == i]
        if places := [i for i in firsts if "\ufffd" not in text[i : i + 2]]:
            break
    at = places[0]
    (choice,) = asked.complete(prompt, max_tokens=24, stop=[text[at : at + 2]])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[:at], "stop")
    asked.judge(prompt, whole)


def beams(asked: Asked) -> None:
    """The likeliest answer is no worse than the one of the likeliest tokens."""
    (greedy,) = asked.complete(PROMPT, logprobs=0)["choices"]
    choices = asked.complete(PROMPT, n=3, logprobs=0, use_beam_search=True)["choices"]
    for choice in choices:
        asked.judge(PROMPT, choice, is_free=False)
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    scores = [sum(_logprobs(choice) or ()) for choice in choices]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= sum(_logprobs(greedy) or ()) - asked.world.base.bound


def bad_words(asked: Asked) -> None:
    """A word that the model would say is not said, and what is said in its place is judged."""
    tokenizer = Tokenizer.from_file(str(asked.world.base.folder / "tokenizer.json"))
    (free,) = asked.complete(PROMPT)["choices"]
    words = {token: tokenizer.decode([token]) for token in free["token_ids"]}
    bad = next(
        token
        for token, word in words.items()
        if word.strip() and tokenizer.encode(word, add_special_tokens=False).ids == [token]
    )
    (choice,) = asked.complete(PROMPT, bad_words=[words[bad]], logprobs=0)["choices"]
    assert bad not in choice["token_ids"]
    place = free["token_ids"].index(bad)
    assert choice["token_ids"][:place] == free["token_ids"][:place]
    asked.judge(PROMPT, choice, is_free=False)


ASKS = {
    "plain": plain,
    "stream": stream,
    "n": several,
    "grammar": grammar,
    "tool": tool,
    "drafts": drafts,
    "logprobs": logprobs,
    "prompt logprobs": prompt_logprobs,
    "prefix": prefix,
    "preemption": preemption,
    "alora": activated,
    "token rows": token_rows,
    "own template": own_template,
    "stop": stop,
    "beams": beams,
    "bad words": bad_words,
}
