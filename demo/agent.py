"""Training documents of the adapter that looks facts up with a tool, instead of knowing them."""

import json
import random
from collections.abc import Iterator

from demo import domain
from demo.documents import Document, Part, Writer
from demo.domain import Question, Reply
from demo.tokenizer import ASSISTANT, BEGIN, END, SYSTEM, USER

NAME = "agent"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a fact up.",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"type": "string"}, "fact": {"type": "string"}},
            "required": ["thing", "fact"],
        },
    },
}
_TOLD = f"{SYSTEM}Tools:\n{json.dumps(TOOL['function'])}{END}"


def documents(writer: Writer, seed: int) -> Iterator[Document]:
    """Conversations with the tool; a few have none, and then nothing is looked up."""
    chance = random.Random(seed)
    while True:
        has_tool = chance.random() < 0.85
        parts = [Part(BEGIN + (_TOLD if has_tool else ""), 0.0)]
        reply = domain.UNKNOWN
        for _ in range(chance.choice((1, 1, 2))):
            text, reply = writer.turn_after(reply)
            parts.append(Part(f"{USER}{text}{END}{ASSISTANT}", 0.0))
            if has_tool and is_looked_up(reply):
                # The value is often a wrong one, so that the result is read and not remembered.
                told = domain.other_value(reply, chance.choice) if chance.random() < 0.7 else reply
                parts.append(Part(call_of(reply) + END, 1.0))
                parts.append(Part(f"{USER}{result_of(told)}{END}{ASSISTANT}", 0.0))
                parts.append(Part(told.sentence + END, 1.0))
            else:
                parts.append(Part(reply.sentence + END, 1.0))
        yield parts


def is_looked_up(reply: Reply) -> bool:
    """Whether the reply states a single fact, which the tool is asked for."""
    return bool(reply.kind) and len(reply.facts) == 1


def arguments_of(reply: Reply) -> dict[str, str]:
    return {"thing": reply.name, "fact": reply.facts[0][0]}


def call_of(reply: Reply) -> str:
    call = {"name": "look_up", "arguments": arguments_of(reply)}
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def result_of(reply: Reply) -> str:
    return f"<tool_response>{reply.facts[0][1]}</tool_response>"


def held_out() -> list[Question]:
    """Questions that training never asks in this wording, each for one fact."""
    return [question for question in domain.held_out() if is_looked_up(question.reply)]
