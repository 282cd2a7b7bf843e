"""The axes: which base, what is done with the adapter, how it is asked, and where it runs.

A new feature adds its value here; then every pair with it is tried.
"""

from collections.abc import Sequence
from itertools import product

from tests.pairs.covering import Case, cover

WORLD = {
    "form": (
        "float32", "bf16", "int8", "int4", "gptq", "gptq act-order", "awq", "W4A16", "W8A8",
        "fp8 tensor", "fp8 block",
    ),
    "layers": ("dense", "experts", "towers"),
    "head": ("tied", "untied"),
    "kernels": ("C", "no C"),
    "place": ("one engine", "two ranks", "two engines"),
}  # fmt: skip
"""Axes of a base model. layers: towers has dense ones, in a checkpoint that also takes images.
kernels: head sizes for which there are kernels in C, or none.
"""
DEED = ("push", "convert", "wake", "prove again", "restart", "roll back")
"""How the adapter that is asked came to its base."""
ASK = (
    "plain", "stream", "n", "grammar", "tool", "drafts", "logprobs", "prompt logprobs", "prefix",
    "preemption", "alora", "token rows", "own template", "stop", "beams", "bad words",
)  # fmt: skip
KINDS = {"alora": "alora", "token rows": "rows", "own template": "templated"}
"""Kinds of LoRA that some ways to ask need; all others ask a plain one."""
AXES = {**WORLD, "deed": DEED, "ask": ASK}


def is_possible(case: Case) -> bool:
    """Whether a case makes sense.

    What is converted becomes an ordinary LoRA. Trained tokens are new rows of one embedding: on
    another base model they are other ones, and PEFT changes a tied head with them. A template was
    compared with that of its base model.
    """
    ask, deed = case.get("ask"), case.get("deed")
    if ask == "token rows":
        return deed not in ("convert", "prove again") and case.get("head") != "tied"
    if ask == "own template":
        return deed not in ("convert", "prove again")
    return (ask, deed) != ("alora", "convert")


def number_of(world: Case) -> int:
    """Return a number for the world among all that there could be; it seeds its weights."""
    values = tuple(world[axis] for axis in WORLD)
    # Worlds with the newest layers come last, so that the others keep their weights.
    return sorted(product(*WORLD.values()), key=lambda it: "towers" in it).index(values)


def worlds(strength: int = 2) -> list[Case]:
    """The base models."""
    cases = [dict(zip(WORLD, values, strict=True)) for values in product(*WORLD.values())]
    return cover(cases, strength)


def kind_of(ask: str) -> str:
    """Return the kind of LoRA that is asked in this way."""
    return KINDS.get(ask, "plain")


def adapter_of(case: Case) -> tuple[str, ...]:
    """Return base model, deed and kind of LoRA: runs that agree in these share an adapter."""
    return (*(case[axis] for axis in WORLD), case["deed"], kind_of(case["ask"]))


def runs(worlds: list[Case]) -> list[Case]:
    """Choose what is done and asked on the base models, so that every pair of values occurs.

    To ask an adapter that is there in one more way costs nothing, so that is preferred.
    """
    cases = [
        {**world, "deed": deed, "ask": ask} for world in worlds for deed in DEED for ask in ASK
    ]

    def cost(case: Case, chosen: Sequence[Case]) -> float:
        return float(adapter_of(case) not in map(adapter_of, chosen))

    return cover(filter(is_possible, cases), cost=cost)
