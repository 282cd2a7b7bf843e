"""Trains the base model and its adapters on rows cut from endless documents."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from demo.documents import Document
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


BASE_SCHEDULE = Schedule(steps=2800, learning_rate=3e-3)
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


def new_base(tokenizer: Tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    return LlamaForCausalLM(config)


def train_base(
    model: LlamaForCausalLM, documents: Iterator[Document], tokenizer: Tokenizer, on_step: OnStep
) -> None:
    _train(model, _rows(documents, tokenizer, _ROW_LEN), BASE_SCHEDULE, on_step)


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
