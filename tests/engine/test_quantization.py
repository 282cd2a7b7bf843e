"""The demo model's loss of precision with 8 and 4 bits, on unseen documents and next to float32."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

import demo
from demo import corpus
from demo.documents import Writer
from engine.cpu.inputs import InputBuilder
from engine.models.config import DecoderConfig
from engine.models.weights import StoredWeights, load_config
from engine.steps.batch import Batch, ScheduledRow
from lora.layout import Layout
from lora.packed import PackedForm
from tests.cpu_decoder import make_decoder
from tests.engine.cpu_kernels import kernels_of

MODEL = Path(demo.__file__).parent / "model"
CONFIG = DecoderConfig.parse(load_config(MODEL))
FORM = PackedForm(Layout.of(CONFIG.shape, itemsize=4), "float32", "base-1")
UNSEEN_SEED = 4242
NUM_ROWS, ROW_LEN = 40, 128
LOSS = {"int8": 0.01, "int4": 0.01}
AGREEMENT = {"int8": 0.99, "int4": 0.96}


@pytest.fixture(scope="module")
def rows():
    """Token ids [rows, tokens + 1] of concatenated documents; each row begins with a document."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    documents = Writer(corpus.load(), UNSEEN_SEED).for_base()

    def row():
        ids = []
        while len(ids) <= ROW_LEN:
            for part in next(documents):
                ids += tokenizer.encode(part.text, add_special_tokens=False).ids
        return ids[: ROW_LEN + 1]

    return torch.tensor([row() for _ in range(NUM_ROWS)])


@torch.inference_mode()
def logits_of(rows, make_kernels, quantization=None):
    """Logits [rows, tokens, vocab] of every position but the last, computed ten rows at a time."""
    weights = dict(StoredWeights(MODEL, torch.float32))
    model = make_decoder(CONFIG, weights, FORM, 256, make_kernels, quantization=quantization)
    depth = FORM.layout.num_blocks(ROW_LEN)
    arena = torch.zeros(10 * depth, FORM.layout.slab_bytes, dtype=torch.uint8)
    builder = InputBuilder(arena, FORM, lambda key: None)
    found = []
    for part in rows[:, :-1].split(10):
        scheduled = tuple(
            ScheduledRow(
                request_id=str(number),
                token_ids=tuple(ids),
                start=0,
                block_ids=tuple(range(number * depth, (number + 1) * depth)),
            )
            for number, ids in enumerate(part.tolist())
        )
        inputs = builder.build(Batch(1, scheduled))
        inputs = replace(inputs, logits_indices=torch.arange(part.numel()))
        found.append(model.forward(inputs)[0].view(*part.shape, -1))
    return torch.cat(found)


@pytest.fixture(scope="module")
def exact(rows):
    return logits_of(rows, kernels_of("torch"))


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_held_out_loss_and_greedy_tokens_stay_what_they_are(rows, exact, quantization, kind):
    found = logits_of(rows, kernels_of(kind), quantization)
    told = rows[:, 1:].flatten()
    losses = [cross_entropy(logits.flatten(0, 1), told).item() for logits in (exact, found)]
    agreement = (found.argmax(-1) == exact.argmax(-1)).float().mean().item()
    assert not torch.equal(found, exact), "fewer bits must differ from float32"
    assert abs(losses[1] / losses[0] - 1) <= LOSS[quantization]
    assert agreement >= AGREEMENT[quantization]
