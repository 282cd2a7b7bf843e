"""`python -m bench.bfcl`: simple cases of the Berkeley Function-Calling Leaderboard, on SmolLM2.

A case is one question and one tool. transformers gets the prompt that Chorale makes, and answers
freely; Chorale's calls are enforced. All answers are greedy. A call is right if its name is, and
each argument is one of those that the leaderboard accepts, but for case and signs. (The
leaderboard's own checker would need the packages of every vendor.)
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.chat_parsing import parse_response

from bench.experiment import replace_rows
from bench.product import serving
from bench.report import describe_machine, json_line, rounded
from server.text.tokenizer import Tokenizer
from server.tools.built_in import DESCRIPTIONS
from server.tools.dialect import Dialect
from server.tools.tool import Tool, ordered

MODEL = Path(__file__).parents[1] / "build" / "smollm2"
PACKAGE = "bfcl-eval==2026.3.23"
_DATA = "bfcl_eval/data/"
_FILE = "BFCL_v4_simple_python.json"
_MAX_TOKENS = 120
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


@dataclass(frozen=True)
class Case:
    """A question, its tool, and by argument the values that are right; "" is a missing one."""

    question: str
    name: str
    description: str
    parameters: dict[str, Any]
    accepted: dict[str, list[Any]]

    def is_right(self, name: str, arguments: Any) -> bool:
        if name != self.name or not isinstance(arguments, dict):
            return False
        if arguments.keys() - self.accepted.keys():
            return False
        return all(
            _plain(arguments.get(key, "")) in map(_plain, values)
            for key, values in self.accepted.items()
        )


def _plain(value: Any) -> Any:
    """A text without case, blanks and signs, as the leaderboard compares texts."""
    if isinstance(value, str):
        return re.sub(r"[ ,./\-_*^']", "", value).lower()
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.bfcl", description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = list(cases())
    chosen = found[:: len(found) // options.cases][: options.cases]
    result = {"transformers": share(free_calls(chosen)), **enforced(chosen)}
    setup = {"model": "SmolLM2-135M-Instruct", "cases": len(chosen), "max_tokens": _MAX_TOKENS}
    line = json_line("bfcl.simple_python", describe_machine(), setup, result) + "\n"
    sys.stdout.write(line)
    if options.out:
        replace_rows(options.out, [line])


def cases() -> Iterator[Case]:
    """The cases, from the package's data."""
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE)
        subprocess.run((*command, f"--dest={folder}"), check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as package:
            asked, answers = (
                [json.loads(line) for line in package.read(_DATA + name).splitlines()]
                for name in (_FILE, f"possible_answer/{_FILE}")
            )
    for case, answer in zip(asked, answers, strict=True):
        ((message,),), (function,) = case["question"], case["function"]
        ((accepted,),) = (truth.values() for truth in answer["ground_truth"])
        name = function["name"].replace(".", "_")
        parameters = ordered(_as_json_schema(function["parameters"]))
        yield Case(message["content"], name, function["description"], parameters, accepted)


def _as_json_schema(schema: Any) -> Any:
    """The leaderboard's schema with JSON Schema's names of types."""
    if isinstance(schema, list):
        return [_as_json_schema(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _as_json_schema(value) for key, value in schema.items()}
    if isinstance(kind := kept.get("type"), str):
        kept["type"] = _TYPES.get(kind, kind)
        if kind == "any":
            del kept["type"]
    return kept


@torch.inference_mode()
def free_calls(chosen: list[Case]) -> Iterator[str]:
    """How transformers' greedy answers to Chorale's prompts end: right, wrong or no call."""
    tokenizer = Tokenizer(MODEL)
    dialect = Dialect.of_base(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for case in chosen:
        tool = Tool(case.name, case.description, case.parameters, False, "tools[0]").declared
        chat = [{"role": "user", "content": case.question}]
        text = dialect.prompt(tokenizer, chat, [tool], begins=True, continues=False)
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=_MAX_TOKENS, do_sample=False)
        answer = tokenizer.decode(out[0, ids.shape[1] :].tolist())
        try:
            calls = parse_response(answer, DESCRIPTIONS["hermes"], prefix="").get("tool_calls", [])
        except ValueError:
            calls = []  # What it wrote between the marks is no JSON.
        functions = [call["function"] for call in calls if isinstance(call["function"], dict)]
        if not functions:
            yield "no_call"
            continue
        first = functions[0]
        is_right = case.is_right(first.get("name", ""), first.get("arguments"))
        yield "right" if is_right else "wrong"


def enforced(chosen: list[Case]) -> dict[str, dict[str, float]]:
    """How Chorale's answers end, with automatic and with required calls."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving({"model": str(MODEL)}, Path(folder)) as product,
    ):
        key = product.create_tenant("bench")
        with openai.OpenAI(base_url=f"{product.url}/v1", api_key=key, timeout=300) as client:
            return {
                choice: share(_ended(client, case, choice) for case in chosen)
                for choice in ("auto", "required")
            }


def _ended(client: openai.OpenAI, case: Case, choice: str) -> str:
    function = {
        "name": case.name, "description": case.description, "parameters": case.parameters,
    }  # fmt: skip
    answer = client.chat.completions.create(
        model=MODEL.name,
        messages=[{"role": "user", "content": case.question}],
        tools=[{"type": "function", "function": function}],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=_MAX_TOKENS,
    )
    calls = answer.choices[0].message.tool_calls
    if not calls:
        return "no_call"
    called = calls[0].function
    return "right" if case.is_right(called.name, json.loads(called.arguments)) else "wrong"


def share(endings: Iterator[str]) -> dict[str, float]:
    """The share of the cases that ended in each way."""
    found = list(endings)
    return {how: rounded(found.count(how) / len(found)) for how in ("right", "wrong", "no_call")}


if __name__ == "__main__":
    main()
