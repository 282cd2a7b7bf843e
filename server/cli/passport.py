"""A version's passport as a table: what its files hold, and how an engine's proof went."""

from collections.abc import Iterator
from typing import Any

from server.cli.terminal import show_facts
from server.cli.units import dollars, megabytes, milliseconds
from server.text.json_object import JsonObject

Row = tuple[str, Any]


def show_passport(passport: JsonObject, version: JsonObject | None = None) -> None:
    """Print a passport.   version: None for a dry run, which makes no version."""
    rows: list[Row] = [
        *_identity(version or {}),
        *_static(passport),
        *_proof(passport.get("canary")),
    ]
    price = passport.get("storage_nanousd_per_month")
    if price is not None:
        rows.append(("storage", f"{dollars(price)} a month"))
    proof = passport.get("canary") or {}
    warnings = (*passport.get("warnings", ()), *proof.get("warnings", ()))
    rows += [("warning", warning) for warning in warnings]
    show_facts("passport", rows)


def _identity(version: JsonObject) -> Iterator[Row]:
    names = ("version", "state", "tier", "is_servable", "digest", "base_model", "base_revision")
    for name in names:
        if name in version:
            yield name, version[name]


def _static(passport: JsonObject) -> Iterator[Row]:
    yield "format", passport.get("lora_format")
    yield "rank", _shares(passport.get("rank"), passport.get("ranks"))
    yield "scale", _shares(None, passport.get("scales"))
    yield "modules", f"{passport.get('num_modules')}: {', '.join(passport.get('targets', ()))}"
    yield "numbers", f"{passport.get('num_parameters', 0):,} of {passport.get('dtype')}"
    if passport.get("trained_on"):
        yield "trained on", passport["trained_on"]
    yield "size", megabytes(passport.get("size_bytes", 0))
    if own := passport.get("tokenizer"):
        parts = [f"{own['added_tokens']} added tokens"]
        parts += ["a chat template"] if own["has_chat_template"] else []
        yield "its own", ", ".join([*parts, *(f"ends at {i}" for i in own["eos_token_ids"])])
    if passport.get("invocation_tokens"):
        yield "invocation_tokens", passport["invocation_tokens"]


def _shares(largest: int | None, counts: dict[str, int] | None) -> str | int | None:
    """The value that all modules have, or the number of modules for each value."""
    counts = counts or {}
    if len(counts) < 2:
        return next(iter(counts), largest)
    return ", ".join(f"{value} in {count} modules" for value, count in counts.items())


def _proof(proof: JsonObject | None) -> Iterator[Row]:
    """The figures of a proof: differences of logprobs, in nats."""
    if proof is None:
        return
    yield "proof", "passed" if proof.get("passed") else "failed"
    yield "compared", f"{proof['num_tokens']} tokens of {proof['num_prompts']} prompts"
    yield (
        "from merged",
        f"logprobs differ by {proof['max_difference']:.2g} nats at most; "
        f"{proof['tolerance']:.2g} allowed",
    )
    yield "from base", f"logprobs differ by {proof['max_effect']:.2g} nats at most"
    if proof.get("base_shift") is not None:
        yield (
            "rounded base",
            f"logprobs differ by {proof['base_shift']:.2g} nats at most from those on the base as "
            f"it was trained; {proof['base_agreement']:.0%} of the likeliest tokens stay the same",
        )
    yield "on the device", megabytes(proof["device_bytes"])
    if proof.get("cold_load_s") is not None:
        yield "cold load", milliseconds(proof["cold_load_s"])
