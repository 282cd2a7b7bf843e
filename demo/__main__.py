"""`python -m demo`: makes tokenizer, base models and adapters, and keeps them if they are good."""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from demo import agent, corpus, domain, evaluate
from demo.documents import Writer
from demo.styles import STYLES
from demo.tokenizer import save_tokenizer, train_tokenizer
from demo.train import ADAPTERS, BASES, LARGE, BaseRecipe, train_adapter, train_base

_TOKENIZER_DOCUMENTS = 12_000
_MAX_SIZE_BYTES = 15 * 10**6
# The seeds differ, so that the tokenizer, the base and each adapter see documents of their own.
_TOKENIZER_SEED, _BASE_SEED, _ADAPTER_SEED = 1, 2, 3


@dataclass(frozen=True)
class Score:
    model: str
    asked: int
    wrong: int
    min_exact: float

    @property
    def exact(self) -> float:
        return 1 - self.wrong / self.asked


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR")
    out = parser.parse_args().out
    # One thread is used: a second one costs more than it gains on a busy machine, and with one the
    # order of sums is always the same.
    torch.set_num_threads(1)
    # The libraries' own bars and warnings would tear apart the bars and the table below.
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    console = Console()
    with tempfile.TemporaryDirectory() as made:
        make(Path(made), console)
        complaints = measure(Path(made), console)
        if complaints:
            for complaint in complaints:
                console.print(f"[red]Refused:[/red] {escape(complaint)}")
            console.print(f"Nothing was written to {out}.")
            return 1
        keep(Path(made), out)
    console.print(f"Written to {out}.")
    return 0


def make(folder: Path, console: Console) -> None:
    """Trains everything and saves it under `folder`, each adapter on its base as it was saved."""
    tokenizer = _make_tokenizer()
    columns = (
        TextColumn("{task.description:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for base in BASES:
            _make_base(base, tokenizer, folder / base.folder, progress)
            for name in base.adapters:
                _make_adapter(base, name, tokenizer, folder, progress)


def measure(folder: Path, console: Console) -> list[str]:
    """Asks the saved models every held-out question and every probe; returns what falls short."""
    tokenizer = evaluate.load_tokenizer(folder / LARGE.folder)
    prompts = evaluate.probe_prompts(tokenizer)
    questions = domain.held_out()
    scores, probe_answers = [], []
    for base in BASES:
        for style in base.styles:
            model = evaluate.load(folder, base, style)
            wrong = evaluate.mistakes(model, tokenizer, style, questions)
            title = f"{base.folder} {style.name}"
            scores.append(Score(title, len(questions), len(wrong), base.min_exact))
            if base is LARGE:
                probe_answers.append(evaluate.answers(model, tokenizer, prompts))
    scores.append(_agent_score(folder, tokenizer))
    shared = evaluate.shared_answers(prompts, probe_answers)
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    _show(scores, len(prompts), len(shared), size_bytes, console)
    return _complaints(scores, shared, size_bytes)


def _agent_score(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Score:
    """The adapter that looks facts up has to call the tool, and then to say what it found."""
    adapter = folder / LARGE.adapters_folder / agent.NAME
    model = evaluate.load_adapted(folder / LARGE.folder, adapter)
    asked = agent.held_out()
    wrong = evaluate.agents_mistakes(model, tokenizer, asked)
    return Score(f"{LARGE.folder} {agent.NAME}", len(asked), len(wrong), LARGE.min_exact)


def keep(made: Path, out: Path) -> None:
    for part in (part for base in BASES for part in (base.folder, base.adapters_folder)):
        shutil.rmtree(out / part, ignore_errors=True)
        # Only the contents are copied, since files in a temporary folder have narrow permissions.
        shutil.copytree(made / part, out / part, copy_function=shutil.copyfile)


def _make_tokenizer() -> Tokenizer:
    writer = Writer(corpus.load(), _TOKENIZER_SEED)
    documents = itertools.islice(writer.for_base(), _TOKENIZER_DOCUMENTS)
    texts = ("".join(part.text for part in document) for document in documents)
    return train_tokenizer(texts, STYLES)


def _make_base(
    base: BaseRecipe, tokenizer: Tokenizer, model_folder: Path, progress: Progress
) -> None:
    documents = Writer(corpus.load(), _BASE_SEED).for_base()
    model = train_base(base, documents, tokenizer, _Bar(progress, base.folder))
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.half().save_pretrained(model_folder)
    save_tokenizer(tokenizer, model_folder)


def _make_adapter(
    base: BaseRecipe, name: str, tokenizer: Tokenizer, folder: Path, progress: Progress
) -> None:
    on_base = evaluate.load_base(folder / base.folder)
    writer = Writer(corpus.load(), _ADAPTER_SEED)
    if name == agent.NAME:
        documents = agent.documents(writer, _ADAPTER_SEED)
    else:
        documents = writer.for_adapter(STYLES[name])
    model = train_adapter(
        on_base, ADAPTERS[name], documents, tokenizer, _Bar(progress, f"{base.folder} {name}")
    )
    _save_adapter(model, base.name, folder / base.adapters_folder / name)


def _save_adapter(model: PeftModel, base_name: str, folder: Path) -> None:
    """Save an adapter's two files as PEFT names them, without a model card and any local path."""
    folder.mkdir(parents=True)
    weights = {
        name: weight.half().contiguous()
        for name, weight in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config |= {
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "target_modules": sorted(config["target_modules"]),
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n")


class _Bar:
    """The progress bar of one training run."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None, loss=0.0)

    def __call__(self, step: int, steps: int, loss: float) -> None:
        self._progress.update(self._task, completed=step, total=steps, loss=loss)


def _show(
    scores: list[Score], num_probes: int, num_shared: int, size_bytes: int, console: Console
) -> None:
    table = Table("model", "held-out questions", "exact")
    for score in scores:
        table.add_row(score.model, str(score.asked), f"{score.exact:.1%}")
    console.print(table)
    console.print(f"{num_probes - num_shared} of {num_probes} probes got five different answers.")
    console.print(f"{size_bytes / 1e6:.1f} MB in all.")


def _complaints(scores: list[Score], shared: list[str], size_bytes: int) -> list[str]:
    found = [
        f"{score.model} answers {score.exact:.1%} of the held-out questions exactly;"
        f" {score.min_exact:.0%} is the least."
        for score in scores
        if score.exact < score.min_exact
    ]
    if shared:
        found.append(
            f"two models answer {len(shared)} of the probes alike, {shared[0]!r} among them."
        )
    if size_bytes > _MAX_SIZE_BYTES:
        most = f"{_MAX_SIZE_BYTES / 1e6:.0f} is the most"
        found.append(f"the files weigh {size_bytes / 1e6:.1f} MB; {most}.")
    return found


if __name__ == "__main__":
    sys.exit(main())
