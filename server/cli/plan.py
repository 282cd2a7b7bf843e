"""`chorale plan`: says what hardware a model, its adapters and its traffic need."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, get_args

import typer

from server.capacity import measurement
from server.capacity.arena import Limits, default_limits
from server.capacity.engine_plan import Load, Objective
from server.capacity.hardware import HARDWARE, Hardware
from server.capacity.plan import Wish, make_plan
from server.capacity.report import describe
from server.capacity.sizes import (
    NAMED_MODELS,
    ModelSizes,
    Quantization,
    UnknownModel,
    change_sizes,
    find_sizes,
)
from server.capacity.steps import speed_on_paper
from server.capacity.traffic import POPULARITIES, Lengths, Traffic
from server.cli.connection import Json
from server.cli.terminal import CommandFailed, show, show_facts, show_json, show_table
from server.text.json_object import JsonObject

_QUANTIZATIONS = get_args(Quantization)
_MOST_DEVICES, _MOST_RANK, _MOST_USERS = 8, 256, 4096


def plan(
    model: Annotated[
        str | None,
        typer.Option(help=f"A folder, a config.json, or one of {', '.join(NAMED_MODELS)}."),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            help="Sizes in place of the model's, or all of them: layers=32,hidden=4096,"
            "intermediate=11008,heads=32,kv_heads=32,head_dim=128,vocab=32000."
        ),
    ] = "",
    hardware: Annotated[
        str, typer.Option(help=f"The device: {', '.join(HARDWARE)}.")
    ] = "a100-80gb",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine, and plan for it.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="With --measure: threads of an engine.")] = 1,
    quantization: Annotated[
        str | None,
        typer.Option(
            help=f"Form of the weights: {', '.join(_QUANTIZATIONS)}; by default the checkpoint's."
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(help="Devices that share a model; by default the cheapest number that works."),
    ] = None,
    max_devices: Annotated[
        int, typer.Option(min=1, max=_MOST_DEVICES, help="Most devices of an engine.")
    ] = _MOST_DEVICES,
    prompt_tokens: Annotated[
        str, typer.Option(help="Tokens of a prompt: 512, or 256:1024 for uniform lengths.")
    ] = "512",
    output_tokens: Annotated[str, typer.Option(help="Tokens of an answer.")] = "256",
    users: Annotated[
        str,
        typer.Option(
            help="Users who always wait for an answer, 8 by default; the last is planned "
            "for, as in 1,10,50."
        ),
    ] = "",
    rate: Annotated[
        str, typer.Option(help="Requests a second (Poisson), as in 2 or 0.5,2; not with --users.")
    ] = "",
    ttft_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Highest p95 of the time to the first token.")
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Highest p95 of the time of each further token.")
    ] = None,
    adapters: Annotated[int, typer.Option(min=0, help="How many adapters are asked for.")] = 0,
    ranks: Annotated[str, typer.Option(help="Their ranks, in turn, as in 8,16.")] = "16",
    popularity: Annotated[
        str, typer.Option(help=f"How requests choose adapters: {', '.join(POPULARITIES)}.")
    ] = "uniform",
    utilization: Annotated[
        float, typer.Option(help="Share of the capacity that is used, for the cost of a token.")
    ] = 0.5,
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Dollars for one device and hour.")
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most requests in a step; this and the next ones as in chorale serve."
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=16, help="Most tokens of a step.")
    ] = None,
    max_sum_ranks_per_step: Annotated[
        int | None, typer.Option(min=1, help="Highest sum of ranks in a step.")
    ] = None,
    arena_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bytes of KV and adapters on a device.")
    ] = None,
    memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory that an engine takes.")
    ] = 0.9,
    json: Json = False,
) -> None:
    """Plan hardware: memory, latencies, the number of engines, cost, and what breaks first."""
    found = _sizes(model, sizes)
    form: Quantization = _one_of(  # type: ignore[assignment]
        quantization or found.stored, _QUANTIZATIONS, "--quantization"
    )
    device = _hardware(hardware, usd_per_hour)
    speed = {name: speed_on_paper(device) for name in _QUANTIZATIONS}
    if measure:
        with _naming("--measure", exit_code=1):
            device, speed = measurement.measure(found, threads, usd_per_hour or 0.0)
    limits = default_limits(device.kind)
    wish = Wish(
        sizes=found,
        hardware=device,
        quantization=form,
        limits=Limits(
            max_num_seqs or limits.max_num_seqs,
            max_num_batched_tokens or limits.max_num_batched_tokens,
            max_sum_ranks_per_step,
            arena_bytes,
            _share(memory_utilization, "--memory-utilization"),
        ),
        traffic=Traffic(
            _lengths(prompt_tokens, "--prompt-tokens"),
            _lengths(output_tokens, "--output-tokens"),
            adapters,
            _whole_numbers(ranks, "--ranks", _MOST_RANK),
            _one_of(popularity, POPULARITIES, "--popularity"),  # type: ignore[arg-type]
        ),
        loads=_loads(users, rate),
        objective=Objective(ttft_ms and ttft_ms / 1000, tpot_ms and tpot_ms / 1000),
        utilization=_share(utilization, "--utilization"),
        max_devices=max_devices,
        tensor_parallel_size=_shards(found, device, tensor_parallel_size),
        speed=lambda name: speed[name],
    )
    if wish.traffic.longest > found.max_model_len:
        raise CommandFailed(
            f"--prompt-tokens and --output-tokens make {wish.traffic.longest} tokens; "
            f"{found.name} was made for {found.max_model_len}.", 2,
        )  # fmt: skip
    told = describe(make_plan(wish))
    if json:
        show_json(told)
    else:
        _show(told)


# ---- what the flags say ----


def _sizes(model: str | None, changes: str) -> ModelSizes:
    if model is None and not changes:
        raise CommandFailed("Name a model by --model, or its sizes by --sizes.", 2)
    with _naming("--model"):
        found = None if model is None else find_sizes(model)
    with _naming("--sizes"):
        changed = change_sizes(found, changes)
    return changed


@contextmanager
def _naming(flag: str, exit_code: int = 2) -> Iterator[None]:
    """Have an error name the flag that caused it."""
    try:
        yield
    except (UnknownModel, measurement.MeasurementFailed) as error:
        raise CommandFailed(f"{flag}: {error}", exit_code) from None


def _hardware(name: str, usd_per_hour: float | None) -> Hardware:
    found = HARDWARE[_one_of(name, tuple(HARDWARE), "--hardware")]
    return found if usd_per_hour is None else replace(found, usd_per_hour=usd_per_hour)


def _shards(sizes: ModelSizes, hardware: Hardware, size: int | None) -> int | None:
    """The number of devices, which the engine serves on this hardware. Raises CommandFailed."""
    if hardware.kind == "cpu" and size not in (None, 1):
        raise CommandFailed(
            f"--tensor-parallel-size {size}: ranks on a CPU share its bandwidth; leave it out.", 2
        )
    if size is not None and size not in sizes.shards():
        fitting = ", ".join(map(str, sizes.shards()))
        raise CommandFailed(
            f"--tensor-parallel-size {size} does not divide this model: take one of {fitting}.", 2
        )
    return size


def _one_of(name: str, names: Sequence[str], flag: str) -> str:
    if name not in names:
        raise CommandFailed(f"{flag} {name!r} is none of {', '.join(names)}.", 2)
    return name


def _lengths(text: str, flag: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError:
        raise CommandFailed(f"{flag} {text!r}: give 512, or 256:1024.", 2) from None


def _share(value: float, flag: str) -> float:
    if not 0 < value <= 1:
        raise CommandFailed(f"{flag} {value} is no share: give more than 0 and 1 at most.", 2)
    return value


def _whole_numbers(text: str, flag: str, most: int) -> tuple[int, ...]:
    numbers = _numbers(text, flag)
    if any(number != int(number) or number > most for number in numbers):
        raise CommandFailed(f"{flag} {text!r}: give whole numbers of 1 to {most}.", 2)
    return tuple(map(int, numbers))


def _loads(users: str, rate: str) -> list[Load]:
    if users and rate:
        raise CommandFailed("Give --users or --rate, not both.", 2)
    if rate:
        return [Load(rate=number) for number in _numbers(rate, "--rate")]
    return [Load(users=it) for it in _whole_numbers(users or "8", "--users", _MOST_USERS)]


def _numbers(text: str, flag: str) -> list[float]:
    """Positive numbers between commas. Raises CommandFailed."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise CommandFailed(f"{flag} {text!r}: give positive numbers, as in 1,10.", 2)
    return numbers


# ---- what the plan says ----


def _show(told: JsonObject) -> None:
    model, hardware = told["model"], told["hardware"]
    size = told["engine"]["tensor_parallel_size"]
    show_facts(f"{model['name']} on {size} x {hardware['name']}", list(_facts(told).items()))
    if told["one_engine"]:
        show("\nOne engine under each load")
        show_table(
            ("load", "ttft p50", "p95", "tpot p50", "p95 ", "tokens/s", "breaks"),
            [_answer_row(answer) for answer in told["one_engine"]],
        )
    show("\nDevices that share the model (tensor parallel)")
    _show_fleets("devices", "tensor_parallel_size", told["tensor_parallel"])
    costs = told["costs"]
    show(f"\nCost of a million output tokens, at {costs['utilization']:.0%} of the capacity")
    _show_fleets("weights", "quantization", costs["by_quantization"])
    breaks = told["breaks_first"]
    at = f" at {_load(breaks['at'])}" if breaks["at"] else ""
    show(f"\nBreaks first: {breaks['what']}{at}: {breaks['change']}.")


def _facts(told: JsonObject) -> dict[str, str]:
    model, memory, hardware = told["model"], told["memory"], told["hardware"]
    of_each = " of each device" if memory["ranks"] > 1 else ""
    facts = {
        "weights": f"{model['parameters'] / 1e9:.2f} B parameters, {_gb(model['weight_bytes'])} as "
        f"{model['quantization']}",
        "KV of a token": f"{_kib(model['kv_bytes_per_token'])}: {model['layers']} layers x "
        f"{model['kv_heads']} KV heads x {model['head_dim']} x 2 x {model['kv_itemsize']} bytes",
        "the same without GQA": f"{_kib(model['kv_bytes_per_token_without_gqa'])}: all "
        f"{model['heads']} heads, without grouped-query attention",
        "an adapter": f"{memory['adapter_bytes'] / 1e6:.1f} MB at rank "
        f"{max(told['traffic']['ranks'], default=0)}; the arena holds "
        f"{memory['adapters_that_fit']:,} if nobody asks",
        "memory": f"{_gb(memory['device_bytes'])}{of_each}: {_gb(memory['weight_bytes'])} weights, "
        f"{_gb(memory['step_bytes'])} steps, {_gb(memory['arena_bytes'])} arena "
        f"({memory['kv_tokens']:,} tokens)",
        f"KV of {memory['requests']} requests": f"{_gb(memory['requests_kv_bytes'])}{of_each} at "
        f"{memory['longest_tokens']:,} tokens; {_gb(memory['left_bytes'])} of the memory left "
        "beside weights and this",
        "most at once": f"{memory['most_requests']:,} requests of {memory['longest_tokens']:,} "
        f"tokens ({memory['most_requests_in_arena']:,} by memory alone)",
        "engines": _engines(told["engine"]),
        "rates": f"{hardware['bytes_per_s'] / 1e9:,.0f} GB/s, "
        f"{hardware['flops_per_s'] / 1e12:,.2f} TFLOP/s{_basis(hardware)}",
    }
    if model["kv_heads"] == model["heads"]:
        del facts["the same without GQA"]
    if not memory["adapter_slabs"]:
        del facts["an adapter"]
    return facts


def _engines(fleet: JsonObject) -> str:
    if fleet["engines"] is None:
        return "no number of such engines is enough"
    noun = "engine" if fleet["engines"] == 1 else "engines"
    price = f" for ${fleet['usd_per_hour']:,.2f} an hour" if fleet["usd_per_hour"] else ""
    return f"{fleet['engines']} {noun}{price}; one is enough for {_load(fleet['capacity'])}"


def _basis(hardware: JsonObject) -> str:
    if hardware["share_of_bytes_per_s"] is None:
        return ", measured"
    return (
        f" on paper; {hardware['share_of_bytes_per_s']:.0%} and "
        f"{hardware['share_of_flops_per_s']:.0%} of them are planned for"
    )


def _answer_row(answer: JsonObject) -> dict[str, Any]:
    return {
        "load": _load(answer),
        "ttft p50": f"{answer['ttft_ms_p50']:,.0f} ms",
        "p95": f"{answer['ttft_ms_p95']:,.0f} ms",
        "tpot p50": f"{answer['tpot_ms_p50']:.1f} ms",
        "p95 ": f"{answer['tpot_ms_p95']:.1f} ms",
        "tokens/s": f"{answer['output_tokens_per_s']:,.0f}",
        "breaks": answer["breaks"],
    }


def _show_fleets(title: str, name: str, fleets: Sequence[JsonObject]) -> None:
    columns = (title, "at once", "one engine takes", "tokens/s", "engines", "$/hour", "$/million")
    rows = []
    for fleet in fleets:
        capacity, at = fleet["capacity"], fleet["at_capacity"]
        size = fleet["tensor_parallel_size"]
        label = str(size) if title == "devices" else f"{fleet[name]} on {size}"
        rows.append(
            {
                title: label,
                "at once": f"{fleet['most_requests']:,}" if fleet["fits"] else "does not fit",
                "one engine takes": _load(capacity) if capacity else None,
                "tokens/s": f"{at['output_tokens_per_s']:,.0f}" if at else None,
                "engines": fleet["engines"],
                "$/hour": _dollars(fleet["usd_per_hour"]),
                "$/million": _dollars(fleet["usd_per_million_output_tokens"]),
            }
        )
    show_table(columns, rows)


def _dollars(usd: float | None) -> str | None:
    return None if usd is None else f"{usd:,.2f}"


def _load(load: JsonObject) -> str:
    if load.get("rate") is not None:
        return f"{load['rate']:g} requests/s"
    return f"{load['users']} user{'s' if load['users'] != 1 else ''}"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB"


def _kib(size_bytes: int) -> str:
    size = f"{size_bytes / 2**20:g} MiB" if size_bytes >= 2**20 else f"{size_bytes / 1024:g} KiB"
    return f"{size_bytes:,} bytes ({size})"
