"""Captured graphs give the same bits as the same kernels launched one by one, while rows and
adapters come and go between replays.
"""

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from engine.gpu.inputs import StepShape
from engine.gpu.runner import GpuRunner
from engine.requests.request import PENDING_TOKEN
from engine.steps.batch import Batch, ScheduledRow, StepTokens
from engine.wire.messages import SamplingParams
from kernels.gpu import ops
from lora.host import PackedAdapter
from tests.gpu.models import make_adapters, make_config, make_form, make_weights, pack_adapter
from tests.gpu.setting import Check, Setting
from tests.gpu.stage import GREEDY, Stage, eager_stage
from tests.gpu.trials.trial import describe_difference, is_same

_MOST_DRAFTS = 7
_KEYS = ("a", "b", "c", "d")
_KINDS = (
    GREEDY,
    SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9),
    SamplingParams(max_tokens=1, top_k=5, repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(max_tokens=1, min_p=0.02, logit_bias=((3, 1.5),)),
)


def replay_checks() -> dict[str, Check]:
    return {
        "graphs.replays": partial(_check, "llama"),
        "graphs.replays_of_experts": partial(_check, "qwen3_moe"),
    }


def _check(family: str, setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as folder:
        play = _Play(family, setting, Path(folder))
        captured, eager = play.stages
        replayed = _note_graphs(captured.runner)
        step = 0
        enough = setting.models.replays
        while len(replayed["decodes"]) < enough or len(replayed["mixed"]) < enough // 3:
            step += 1
            play.change()
            batches = [play.batch(step, stage) for stage in play.stages]
            tokens, logits = captured.run(batches[0])
            expected, expected_logits = eager.run(batches[1])
            where = f"step {step} of {len(batches[0].rows)} rows, {batches[0].num_tokens} tokens"
            assert is_same(logits, expected_logits), (
                f"{where}: {describe_difference(logits, expected_logits)}"
            )
            assert tokens == expected, f"{where}: other tokens of the same logits"
            play.take(tokens)
        assert is_same(captured.arena.cpu(), eager.arena.cpu()), "they leave other KV"
        assert play.num_moves > step / 8, "adapters hardly moved"
        assert play.num_guessed > 0, "no drafts behind pending tokens"
        sizes = captured.runner.graphs.mixed_sizes
        num_sizes = len({shape.num_tokens for shape in replayed["mixed"]})
        assert num_sizes >= min(2, len(sizes)), "all mixed steps took graphs of one size"


def _note_graphs(runner: GpuRunner) -> dict[str, list[StepShape]]:
    """Shapes of the graphs that the runner replays, in two lists that grow with every step."""
    replayed: dict[str, list[StepShape]] = {"decodes": [], "mixed": []}
    find = runner.graphs.find

    def note(shape: StepShape) -> Callable[[], None] | None:
        assert (graph := find(shape)) is not None, f"{shape} has no graph"
        replayed["mixed" if shape.num_prefill_items else "decodes"].append(shape)
        return graph

    runner.graphs.find = note
    return replayed


@dataclass
class _Sequence:
    """A running sequence.

    prompt: how many of the tokens are the prompt's.   is_pending: the last token is passed as
    pending, for the device to fill in.   drafts: guesses that the next step verifies.
    """

    name: str
    key: str | None
    blocks: list[int]
    tokens: list[int]
    prompt: int
    sampling: SamplingParams
    is_pending: bool = False
    drafts: tuple[int, ...] = ()
    done: int = 0


@dataclass
class _Play:
    """Two engines without a scheduler that are given the same steps."""

    family: str
    setting: Setting
    folder: Path
    running: list[_Sequence] = field(default_factory=list)
    slabs: dict[str, list[int]] = field(default_factory=dict)
    num_moves: int = 0
    num_guessed: int = 0
    num_names: int = 0

    def __post_init__(self) -> None:
        setting, sizes = self.setting, self.setting.models
        rng = setting.rng("replays")
        self.chance = random.Random(setting.seed)
        config = make_config(self.family, sizes)
        form = make_form(config, setting.dtype)
        weights = make_weights(config, setting.dtype, rng)
        self.packed: list[PackedAdapter] = [
            pack_adapter(data, form, self.folder)
            for data in make_adapters(sizes, config, setting.dtype, rng)
        ]
        self.num_blocks = form.layout.num_blocks(sizes.max_model_len)
        most = max(packed.num_slabs for packed in self.packed)
        self.longest_prompt = sizes.max_model_len // 2
        num_slabs = sizes.max_num_seqs * self.num_blocks + (len(_KEYS) + 1) * most
        self.free = list(range(num_slabs))
        limits = {
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": sizes.max_num_seqs,
            "max_num_batched_tokens": sizes.max_num_seqs * self.longest_prompt,
        }
        self.most_drafts = 2 * sizes.max_num_seqs
        self.stages: list[Stage] = []
        for name in ("captured", "eager"):
            (self.folder / name).mkdir()
            self.stages.append(
                eager_stage(
                    self.folder / name,
                    config,
                    form,
                    weights,
                    setting.device,
                    ops,
                    num_slabs,
                    max_num_drafts=self.most_drafts,
                    **limits,
                )  # fmt: skip
            )
        self.stages[0].runner.capture_graphs()

    # ---- between two steps ----

    def change(self) -> None:
        """Place, remove and move adapters, also with other ranks; let rows leave and join."""
        chance = self.chance
        if not self.slabs or chance.random() < 0.4:
            self._place(chance.choice(_KEYS), chance.choice(self.packed))
        if chance.random() < 0.1:
            self._remove(chance.choice(_KEYS))
        for sequence in list(self.running):
            is_full = len(sequence.tokens) >= self.setting.models.max_model_len
            if is_full or chance.random() < 0.04:
                self._leave(sequence)
        while not self.running or chance.random() < 0.25:
            if len(self.running) == self.setting.models.max_num_seqs:
                break
            self._join()
        # The scheduler's order: an adapter's rows are adjacent, the base model's come first.
        self.running.sort(key=lambda sequence: sequence.key or "")

    def _place(self, key: str, packed: PackedAdapter) -> None:
        self.num_moves += 1
        taken = self._take(packed.num_slabs)
        for stage in self.stages:
            stage.place(key, packed, taken)
        self.free += self.slabs.pop(key, [])
        self.slabs[key] = taken

    def _remove(self, key: str) -> None:
        for sequence in [s for s in self.running if s.key == key]:
            self._leave(sequence)
        self.free += self.slabs.pop(key, [])
        for stage in self.stages:
            stage.adapters.pop(key, None)

    def _join(self) -> None:
        chance = self.chance
        length = chance.choice([1, 1, 2, self.longest_prompt])
        tokens = [chance.randrange(self.setting.models.vocab) for _ in range(length)]
        key = chance.choice([None, *self.slabs])
        blocks = self._take(self.num_blocks)
        self.num_names += 1
        kind = _KINDS[self.num_names % len(_KINDS)]
        self.running.append(
            _Sequence(f"r{self.num_names}", key, blocks, tokens, length, sampling=kind)
        )

    def _leave(self, sequence: _Sequence) -> None:
        self.running.remove(sequence)
        self.free += sequence.blocks

    def _take(self, count: int) -> list[int]:
        """Take random free slabs, so that nothing lies where it did before."""
        self.chance.shuffle(self.free)
        return [self.free.pop() for _ in range(count)]

    # ---- a step ----

    def batch(self, step: int, stage: Stage) -> Batch:
        return Batch(step, tuple(self._row(sequence, stage) for sequence in self.running))

    def _row(self, sequence: _Sequence, stage: Stage) -> ScheduledRow:
        tokens = list(sequence.tokens)
        if sequence.is_pending:
            tokens[-1] = PENDING_TOKEN
        fields = {}
        if sequence.sampling.has_penalties:
            fields["prompt_token_ids"] = tuple(dict.fromkeys(tokens[: sequence.prompt]))
            fields["output_token_ids"] = tuple(tokens[sequence.prompt :])
        return stage.row(
            sequence.name, (*tokens[sequence.done :], *sequence.drafts), sequence.done,
            sequence.blocks, sequence.key, sequence.sampling, num_drafts=len(sequence.drafts),
            **fields,
        )  # fmt: skip

    def take(self, tokens: StepTokens) -> None:
        for number, sequence in enumerate(self.running):
            token = tokens.token_ids[number]
            assert token is not None
            assert token >= 0, "logits are not finite"
            sequence.tokens += sequence.drafts[: tokens.num_accepted.get(number, 0)]
            sequence.done = len(sequence.tokens)
            sequence.tokens.append(token)
            sequence.is_pending = not sequence.drafts and self.chance.random() < 0.5
            sequence.drafts = self._draft(sequence)
            self.num_guessed += sequence.is_pending and bool(sequence.drafts)

    def _draft(self, sequence: _Sequence) -> tuple[int, ...]:
        """Draft tokens for half of the answers, also behind pending tokens."""
        left = self.setting.models.max_model_len - len(sequence.tokens)
        left = min(left, self.most_drafts - sum(len(other.drafts) for other in self.running))
        count = self.chance.choice([0, self.chance.randint(1, _MOST_DRAFTS)])
        return tuple(
            self.chance.randrange(self.setting.models.vocab) for _ in range(min(count, left))
        )
