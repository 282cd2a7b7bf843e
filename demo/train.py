"""Trains the base model and its adapters on rows cut from endless documents."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from demo.documents import Document
from demo.styles import PLAIN, STYLES, Style
from demo.tokenizer import BEGIN, END, PAD

# Called after each step with its number, the number of steps and the smoothed loss.
OnStep = Callable[[int, int, float], None]

_ROW_LEN = 128
_BATCH_ROWS = 16
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Schedule:
    steps: int
    learning_rate: float
    warmup_steps: int = 40

    def rate(self, step: int) -> float:
        """Learning rate of a step: it warms up, stays flat up to half of the steps, and then falls
        linearly to one fiftieth.
        """
        left = 1 - step / self.steps
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps, max(0.02, 2 * left))


@dataclass(frozen=True)
class AdapterRecipe:
    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    use_rslora: bool = False
    row_len: int = _ROW_LEN
    steps: int = 300

    def config(self) -> LoraConfig:
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(self.target_modules),
            use_rslora=self.use_rslora,
            task_type="CAUSAL_LM",
        )

    @property
    def schedule(self) -> Schedule:
        return Schedule(steps=self.steps, learning_rate=5e-3, warmup_steps=20)


@dataclass(frozen=True)
class BaseRecipe:
    """A base and its adapters.

    folder, adapters_folder: names of the folders that get their files.
    adapters: names of `ADAPTERS`.   min_exact: the least share of exact answers that is kept.
    """

    name: str
    folder: str
    adapters_folder: str
    adapters: tuple[str, ...]
    hidden_size: int
    num_layers: int
    num_heads: int
    steps: int
    min_exact: float

    def config(self, tokenizer: Tokenizer) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=3 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads // 2,
            head_dim=32,
            vocab_size=tokenizer.get_vocab_size(),
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.token_to_id(BEGIN),
            eos_token_id=tokenizer.token_to_id(END),
            pad_token_id=tokenizer.token_to_id(PAD),
        )

    @property
    def schedule(self) -> Schedule:
        return Schedule(steps=self.steps, learning_rate=3e-3)

    @property
    def styles(self) -> list[Style]:
        """The base's plain style and those of its adapters; the one with a tool has none."""
        return [PLAIN, *(STYLES[name] for name in self.adapters if name in STYLES)]


ADAPTERS = {
    "json": AdapterRecipe(8, 16, (*_ATTENTION, *_MLP)),
    # Words in capitals are other tokens, so this style changes most. rsLoRA divides by sqrt(16), so
    # alpha 8 gives the same factor 2 that an alpha of twice the rank gives the others.
    "shout": AdapterRecipe(16, 8, (*_ATTENTION, *_MLP), use_rslora=True),
    "python": AdapterRecipe(4, 8, ("q_proj", "v_proj", *_MLP)),
    "pirate": AdapterRecipe(8, 16, _ATTENTION),
    # Its conversations have a tool and two answers, so they are longer.
    "agent": AdapterRecipe(16, 32, (*_ATTENTION, *_MLP), row_len=256, steps=700),
}
LARGE = BaseRecipe(
    "chorale-demo", "model", "adapters", tuple(ADAPTERS),
    hidden_size=128, num_layers=5, num_heads=4, steps=2800, min_exact=0.95,
)  # fmt: skip
# It knows a part of what the large one knows, so that a cascade of the two has something to do.
SMALL = BaseRecipe(
    "chorale-demo-small", "small", "adapters-small", ("json",),
    hidden_size=64, num_layers=2, num_heads=2, steps=1600, min_exact=0.75,
)  # fmt: skip
BASES = (LARGE, SMALL)


def train_base(
    recipe: BaseRecipe, documents: Iterator[Document], tokenizer: Tokenizer, on_step: OnStep
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(recipe.config(tokenizer))
    _train(model, _rows(documents, tokenizer, _ROW_LEN), recipe.schedule, on_step)
    return model


def train_adapter(
    model: LlamaForCausalLM,
    recipe: AdapterRecipe,
    documents: Iterator[Document],
    tokenizer: Tokenizer,
    on_step: OnStep,
) -> PeftModel:
    """Train a new adapter on `model`, whose own weights stay as they are."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, recipe.config())
    _train(adapted, _rows(documents, tokenizer, recipe.row_len), recipe.schedule, on_step)
    return adapted


def _train(
    model: torch.nn.Module, rows: Iterator["_Row"], schedule: Schedule, on_step: OnStep
) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    smooth_loss = None
    model.train()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        loss = _loss(model, [next(rows) for _ in range(_BATCH_ROWS)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        now = loss.item()
        smooth_loss = now if smooth_loss is None else 0.95 * smooth_loss + 0.05 * now
        on_step(step + 1, schedule.steps, smooth_loss)
    model.eval()


def _loss(model: torch.nn.Module, rows: list["_Row"]) -> torch.Tensor:
    ids = torch.tensor([row.ids for row in rows])
    weights = torch.tensor([row.weights for row in rows])[:, 1:].reshape(-1)
    logits = model(input_ids=ids[:, :-1]).logits
    losses = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="none"
    )
    return (losses * weights).sum() / weights.sum()


@dataclass
class _Row:
    ids: list[int]
    weights: list[float]


def _rows(documents: Iterator[Document], tokenizer: Tokenizer, row_len: int) -> Iterator[_Row]:
    """Rows of one length; each begins with a document, as a prompt does, and is cut at its end."""
    wanted = row_len + 1
    while True:
        row = _Row([], [])
        while len(row.ids) < wanted:
            # Parts are encoded separately, so that a token ends where a prompt ends.
            for part in next(documents):
                ids = tokenizer.encode(part.text).ids
                row.ids += ids
                row.weights += [part.weight] * len(ids)
        yield _Row(row.ids[:wanted], row.weights[:wanted])
