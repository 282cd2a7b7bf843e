"""`chorale adapters convert`: make an ordinary LoRA of an adapter of another type."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from registry.extras import require
from server.cli.connection import Json
from server.cli.terminal import CommandFailed, say, show_facts, show_json
from server.text.json_object import JsonObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.cli.conversion import Effect

_MAX_ERROR = 0.05

# Initializations that take a part out of the base weights, which only the initial adapter knows.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "lora_ga")

_LORA = re.compile(r"\.lora_(?:embedding_)?[AB](?:\.|$)")


def convert(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of an adapter, as a trainer wrote it.")
    ],
    model: Annotated[
        Path, typer.Option(help="Folder of the base model that the adapter was trained on.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR2", help="Folder to write the LoRA to.")],
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Rank of the LoRA.  [dim]default: the smallest within --max-error[/dim]",
        ),
    ] = None,
    max_error: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Relative error of a module that is tolerated."),
    ] = _MAX_ERROR,
    initial: Annotated[
        Path | None,
        typer.Option(help="Folder of the adapter before training; PiSSA and its like need it."),
    ] = None,
    json: Json = False,
) -> None:
    """Make an ordinary LoRA of an adapter of another type (LoHa, OFT, DoRA, PiSSA) with PEFT."""
    with _opened(folder) as plain:
        config = _read_config(folder, plain)
        _check_out(out)
        require("Converting", "peft")  # which brings transformers
        from server.cli.conversion import NotConvertible
        from server.client.files import TOKENIZER_FILES

        try:
            if initialization := _changed_base(config):
                report = _subtract(initialization, model, plain, initial, rank, out)
            else:
                report = _factorize(model, plain, rank, max_error, out)
        except NotConvertible as error:
            raise CommandFailed(f"{folder}: {error}") from error
        for name in TOKENIZER_FILES:
            if (plain / name).is_file():
                copyfile(plain / name, out / name)
    if json:
        show_json(report)
        return
    say(f"[bold]{out}[/bold] is a LoRA: chorale adapters push {out} --name NAME")
    show_facts("conversion", _facts(report))


def _factorize(
    model: Path, folder: Path, rank: int | None, max_error: float, out: Path
) -> JsonObject:
    """Write the LoRA nearest to the adapter. Raises CommandFailed, NotConvertible."""
    from server.cli import conversion

    effects = conversion.read_effects(model, folder)
    rank = rank or conversion.choose_rank(effects, max_error)
    report = _report(effects, rank)
    if report["worst_error"] > max_error:
        raise CommandFailed(
            f"At rank {rank} the error of {report['worst_module']} is "
            f"{report['worst_error']:.3g}, and {max_error:g} is tolerated; give a larger --rank or "
            "--max-error. Nothing was written."
        )
    conversion.write_lora(effects, rank, folder, out)
    return report


def _report(effects: "Sequence[Effect]", rank: int) -> JsonObject:
    """The error of a LoRA of this rank. share_kept: share of the squared norm over all modules."""
    errors = {effect.module: effect.error(rank) for effect in effects}
    worst = max(errors, key=lambda module: errors[module])
    lost = sum(effect.lost(rank) for effect in effects)
    return {
        "rank": rank,
        "num_modules": len(errors),
        "worst_error": errors[worst],
        "worst_module": worst,
        "mean_error": sum(errors.values()) / len(errors),
        "share_kept": 1 - lost / sum(effect.lost(0) for effect in effects),
        "errors": errors,
    }


def _subtract(
    initialization: str,
    model: Path,
    folder: Path,
    initial: Path | None,
    rank: int | None,
    out: Path,
) -> JsonObject:
    """Write the difference to the initial adapter. Raises CommandFailed, NotConvertible."""
    from server.cli import conversion
    from server.client.files import CONFIG_FILE

    if initial is None or not (initial / CONFIG_FILE).is_file():
        raise CommandFailed(
            f"It was initialised with init_lora_weights={initialization!r}, which changed the "
            "base weights: give the folder of the adapter before training, --initial DIR. In "
            "the training script, model.save_pretrained(DIR) writes it before the first step, and "
            "model.save_pretrained(OUT, path_initial_model_for_weight_conversion=DIR) converts "
            "after the last one.",
            exit_code=2,
        )
    if rank is not None:
        raise CommandFailed("--rank is not for --initial: the rank doubles, without error.", 2)
    return {"rank": conversion.subtract_initial(model, folder, initial, out), "worst_error": 0.0}


def _facts(report: JsonObject) -> list[tuple[str, Any]]:
    if "errors" not in report:
        return [("rank", report["rank"]), ("error", "none")]
    return [
        ("rank", report["rank"]),
        ("modules", report["num_modules"]),
        ("worst error", f"{report['worst_error']:.3%} in {report['worst_module']}"),
        ("mean error", f"{report['mean_error']:.3%}"),
        ("share of the effect that is kept", f"{report['share_kept']:.4%}"),
    ]


def _changed_base(config: JsonObject) -> str | None:
    """The initialization, if it changed the base weights."""
    value = config.get("init_lora_weights")
    is_one = isinstance(value, str) and value.lower().startswith(_CHANGE_THE_BASE)
    return value if is_one else None


@contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """A folder with the adapter's files in PEFT's form. Raises CommandFailed."""
    from server.cli.adapter_folder import AdapterFolder
    from server.client.http import ClientError

    try:
        with AdapterFolder.find(folder).as_sent() as plain:
            yield plain
    except ClientError as error:
        raise CommandFailed(f"{folder} is no adapter: {error}", exit_code=2) from error


def _read_config(folder: Path, plain: Path) -> JsonObject:
    """The adapter's config. Raises CommandFailed if it needs no conversion, or is not readable.

    plain: the files of the folder in PEFT's form.
    """
    from registry.errors import InvalidAdapter, TooLarge
    from registry.formats.peft_config import PeftConfig
    from registry.strict_json import parse_object
    from server.client.files import CONFIG_FILE, WEIGHTS_FILE

    try:
        raw = (plain / CONFIG_FILE).read_bytes()
        config = parse_object(raw, param=CONFIG_FILE)
        is_plain = _has_only_lora(plain / WEIGHTS_FILE)
    except (InvalidAdapter, OSError) as error:
        raise CommandFailed(f"{folder} is no adapter: {error}", exit_code=2) from error
    try:
        PeftConfig.parse(raw)
    except (InvalidAdapter, TooLarge):
        return config
    if is_plain:
        raise CommandFailed(f"{folder} is a LoRA that is served as it is: push it.", exit_code=2)
    return config


def _has_only_lora(weights: Path) -> bool:
    """Whether no tensor is a trained head, embedding or token. Raises OSError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, "numpy") as file:
            return all(_LORA.search(name) for name in file.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise OSError(f"{weights.name} is damaged: {error}") from error


def _check_out(out: Path) -> None:
    """Check that nothing would be overwritten. Raises CommandFailed."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CommandFailed(f"{out} is there already; give a new folder.", exit_code=2)
