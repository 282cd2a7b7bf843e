"""Answers of the device's runner with drafts, against those without."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.batch import BAD_LOGITS, Batch, ScheduledRow
from engine.messages import SamplingParams
from engine.meter import TokenMeter
from engine.models.config import DecoderConfig
from engine.request import PENDING_TOKEN
from engine.weights import StoredWeights, load_config
from lora.layout import Layout
from lora.packed import PackedForm
from tests.engine.fakes import FakeMatcher
from tests.engine.gpu.backends import fake_backend
from tests.engine.gpu.fake_device import FakeDevice
from tests.tiny_models import save_model

NUM_ANSWERS, LENGTH, LONGEST = 10, 17, 64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("drafts") / "model")


class Runner:
    """A runner on a fake device, whose steps are one after the other."""

    def __init__(self, model_dir, folder, max_num_drafts=40):
        config = DecoderConfig.parse(load_config(model_dir))
        self.vocab_size = config.vocab_size
        self.layout = Layout.of(config.shape, itemsize=4)
        form = PackedForm(self.layout, "float32", "base-1")
        weights = dict(StoredWeights(model_dir, torch.float32))
        limits = {"max_num_seqs": NUM_ANSWERS, "max_num_batched_tokens": 128, "max_model_len": 256}
        arena_bytes = 64 * self.layout.slab_bytes
        device, limits = FakeDevice(eagerness=1.0), {**limits, "arena_bytes": arena_bytes}
        backend = fake_backend(config, form, weights, device, max_num_drafts, **limits)
        self.folder = folder
        self.meter = TokenMeter(folder)
        self.runner = backend.make_runner(lambda _: None, self.meter, 0)
        self.ints = np.zeros(self.runner.builder.most_ints, dtype=np.int32)
        self.steps = 0

    def run(self, rows, masks):
        self.steps += 1
        batch = Batch(self.steps, tuple(rows))
        assert self.runner.graphs.find(self.runner.builder.build(batch, self.ints, {}).shape)
        self.runner.launch(batch)
        if batch.is_constrained:
            self.runner.choose(masks)
        return self.runner.collect()


@dataclass
class Answer:
    """An answer that a runner gives, and what it was asked with.   logprobs: one for each token."""

    number: int
    params: SamplingParams
    grammar: str
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)

    def row(self, layout, drafts=()):
        """The row that computes what is known and not computed yet, and verifies drafts."""
        known = (*self.prompt, *self.tokens)
        start = len(known) - 1 if self.tokens else 0
        first = self.number * layout.num_blocks(LONGEST)
        return ScheduledRow(
            request_id=f"r{self.number}",
            token_ids=(*known[start:], *drafts),
            start=start,
            block_ids=tuple(range(first, first + layout.num_blocks(LONGEST))),
            adapter_key=None,
            adapter_digest=None,
            adapter_generation=0,
            sampling=self.params,
            seed=self.number,
            num_output_tokens=len(self.tokens),
            prompt_token_ids=tuple(sorted(set(self.prompt))) if self.params.has_penalties else (),
            output_token_ids=tuple(self.tokens) if self.params.has_penalties else (),
            is_constrained=bool(self.grammar),
            num_drafts=len(drafts),
        )

    def masks(self, vocab_size, drafts, most):
        """Masks of the next token and of those behind drafts, but `most` at most."""
        matcher = FakeMatcher(self.grammar, vocab_size)
        matcher.consume(self.tokens)
        masks = [matcher.mask()]
        for draft in drafts[: most - 1]:
            matcher.consume([draft])
            masks.append(matcher.mask())
        return masks


def make_answers(chance):
    """Answers of every kind: greedy or drawn, with penalties, logprobs and masks, or without."""
    answers = []
    for number in range(NUM_ANSWERS):
        options = {
            "temperature": [0.0, 0.9][number % 2],
            "top_k": [0, 40][number // 2 % 2],
            "repetition_penalty": [1.0, 1.6][number // 3 % 2],
            "presence_penalty": [0.0, 0.7, 0.0][number % 3],
            "logprobs": [None, 0, 3][number % 3],
        }
        params = SamplingParams(max_tokens=LENGTH, **options)
        prompt = tuple(chance.randrange(100) for _ in range(1 + 2 * number))
        answers.append(Answer(number, params, ["", "", "quick"][number % 3], prompt))
    return answers


def give(runner, make_drafts, answers):
    """Have a runner give all answers.

    make_drafts: by an answer, returns drafts, and how many masks there are at most.
    """
    while unfinished := [answer for answer in answers if len(answer.tokens) < LENGTH]:
        asked = [make_drafts(answer) for answer in unfinished]
        rows = [
            a.row(runner.layout, drafts) for a, (drafts, _) in zip(unfinished, asked, strict=True)
        ]
        masks = {
            number: answer.masks(runner.vocab_size, *own)
            for number, (answer, own) in enumerate(zip(unfinished, asked, strict=True))
            if answer.grammar
        }
        found = runner.run(rows, masks)
        for number, (answer, row) in enumerate(zip(unfinished, rows, strict=True)):
            accepted = row.draft_token_ids[: found.num_accepted.get(number, 0)]
            answer.tokens += (*accepted, found.token_ids[number])
            answer.logprobs += found.logprobs.get(number, ())
    return answers


def test_answers_with_drafts_are_those_without(model_dir, tmp_path):
    plain = Runner(model_dir, tmp_path / "plain", max_num_drafts=0)
    expected = give(plain, lambda answer: ((), 1), make_answers(random.Random(1)))
    runner, chance = Runner(model_dir, tmp_path / "drafts"), random.Random(2)
    num_drafts = []

    def make_drafts(answer):
        done = len(answer.tokens)
        drafts = expected[answer.number].tokens[done:][
            : min(chance.randint(0, 7), LENGTH - 1 - done)
        ]
        if not done or num_drafts and chance.random() < 0.1:
            drafts = []
        if drafts and chance.random() < 0.4:
            wrong = chance.randrange(len(drafts))
            drafts[wrong] = (drafts[wrong] + 1) % 100
        num_drafts.append(len(drafts))
        return tuple(drafts[:4]), chance.choice([8, 8, 2])

    found = give(runner, make_drafts, make_answers(random.Random(1)))
    assert runner.steps < plain.steps / 1.5
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert len(mine.logprobs) == len(theirs.logprobs)
        assert (len(mine.logprobs) > 0) == (mine.params.logprobs is not None)
        for ours, wanted in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert ours.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in wanted.top]
    counts = [TokenMeter.read(own.folder)[:2] for own in (runner, plain)]
    assert counts[0] == counts[1]
    assert counts[0][1] == NUM_ANSWERS * LENGTH


def make_row(layout, drafts=(), name="r", **values):
    answer = Answer(0, SamplingParams(max_tokens=9, temperature=0.0), "", (3,), [5, 7])
    return answer.row(layout, drafts)._replace(request_id=name, **values)


def test_a_constrained_row_without_a_mask_chooses_nothing_though_it_has_drafts(model_dir, tmp_path):
    runner = Runner(model_dir, tmp_path / "meter")
    found = runner.run([make_row(runner.layout, (8, 9), is_constrained=True)], {})
    assert (found.token_ids, found.num_accepted) == ([None], {})


def test_what_is_not_finite_behind_a_rejected_draft_fails_nobody(tmp_path):
    runner = Runner(save_model(tmp_path / "model", tied=False), tmp_path / "meter")
    chosen = runner.run([make_row(runner.layout)], {}).token_ids[0]
    other = (chosen + 1) % 100
    for broken, expected in ((other, chosen), (chosen, BAD_LOGITS)):
        runner.runner.model.embedding[broken] = torch.nan
        found = runner.run([make_row(runner.layout, (broken, 8))], {})
        assert (found.token_ids, found.num_accepted) == ([expected], {})


def test_a_row_whose_drafts_are_in_flight_is_in_no_other_step(model_dir, tmp_path):
    runner = Runner(model_dir, tmp_path / "meter")
    runner.runner.launch(Batch(1, (make_row(runner.layout, (8,)),)))
    with pytest.raises(AssertionError, match="nobody knows yet"):
        runner.runner.launch(Batch(2, (make_row(runner.layout),)))
    runner.runner.launch(Batch(2, (make_row(runner.layout, name="another"),)))


def test_a_row_whose_mask_was_late_may_be_in_the_next_step_though_it_had_drafts(
    model_dir, tmp_path
):
    runner = Runner(model_dir, tmp_path / "meter")
    (expected,) = runner.run([make_row(runner.layout)], {}).token_ids
    late = make_row(runner.layout, (8, 9), is_constrained=True)
    runner.runner.launch(Batch(2, (late,)))
    runner.runner.choose({})
    runner.runner.launch(Batch(3, (make_row(runner.layout),)))
    assert list(runner.runner.collect().token_ids) == [None]
    assert list(runner.runner.collect().token_ids) == [expected]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_behind_a_pending_token_are_verified_as_behind_a_known_one(
    model_dir, tmp_path, temperature
):
    """Penalties count the pending token, and once more where a draft is the same one."""
    runner = Runner(model_dir, tmp_path / "meter")
    params = SamplingParams(
        max_tokens=9, temperature=temperature, frequency_penalty=0.9, repetition_penalty=1.6
    )

    def run(*rows):
        """Return what the last row chooses, how many drafts it accepts, and its logits."""
        for row in rows:
            runner.runner.launch(Batch(1, (row,)))
        found = [runner.runner.collect() for _ in rows][-1]
        logits = runner.runner.out.logits[: 1 + rows[-1].num_drafts].clone()
        return found.token_ids[0], found.num_accepted.get(0, 0), logits

    def row(said, drafts=()):
        return Answer(0, params, "", (3, 4), list(said)).row(runner.layout, drafts)

    said = []
    for _ in range(5):
        said.append(run(row(said))[0])
    begin, pending, *right = said
    for drafts, num_accepted in ((right, 3), ((right[0], pending), 1), ((pending, pending), 0)):
        known = run(row([begin, pending], drafts))
        late = run(row([begin]), row([begin, PENDING_TOKEN], drafts))
        assert known[1] == late[1] == num_accepted
        assert known[0] == late[0]
        assert torch.equal(known[2], late[2])


@pytest.mark.parametrize("num_rows", [1, NUM_ANSWERS - 1, NUM_ANSWERS])
def test_a_step_has_no_more_drafts_than_there_is_memory_for(model_dir, tmp_path, num_rows):
    runner = Runner(model_dir, tmp_path / "meter", max_num_drafts=1)
    others = [make_row(runner.layout, name=f"r{i}") for i in range(1, num_rows)]
    drafts = (8,) * (1 + NUM_ANSWERS - num_rows)
    runner.run([make_row(runner.layout, drafts), *others], {})
    with pytest.raises(AssertionError):
        runner.run([make_row(runner.layout, (*drafts, 9)), *others], {})
