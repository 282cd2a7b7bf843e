"""The peer we are compared with is right: it gives the tokens of each adapter merged and alone."""

import pytest
from tokenizers import Tokenizer

from bench.checkpoint import Checkpoint, make_checkpoint
from bench.peft_generate import PeftPeer
from bench.workload import BenchRequest, Lengths, Workload, make_requests
from registry.base_model import BaseModel
from registry.validate import AdapterLimits, check_adapter
from tests.oracle import greedy, merged_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("tiny", tmp_path_factory.mktemp("bench"), num_adapters=3)


def requests_for(checkpoint: Checkpoint) -> list[BenchRequest]:
    """Make requests for the base and for adapters, with prompts of random lengths."""
    workload = Workload(
        base_model=checkpoint.base_model,
        models=(checkpoint.base_model, *checkpoint.adapters),
        popularity="distinct",
        rate=float("inf"),
        num_requests=8,
        prompt_tokens=Lengths(1, 33),
        output_tokens=Lengths(3, 9),
        vocab_size=checkpoint.vocab_size,
    )
    return make_requests(workload)


def test_the_peer_gives_each_request_its_own_adapters_answer(checkpoint: Checkpoint) -> None:
    requests = requests_for(checkpoint)
    outcomes = PeftPeer(checkpoint, threads=1).run(requests, max_batch=5)
    for request, outcome in zip(requests, outcomes, strict=True):
        alone = merged_model(checkpoint.model_dir, checkpoint.adapters.get(request.model))
        expected = greedy(alone, list(request.prompt_token_ids), request.max_tokens)
        # The oracle stops at the end token, a benchmark goes on.
        assert list(outcome.token_ids)[: len(expected)] == expected
        assert len(outcome.chunk_s) == len(outcome.token_ids) == request.max_tokens


def test_a_request_of_the_peer_waits_for_the_batch_before_it(checkpoint: Checkpoint) -> None:
    outcomes = PeftPeer(checkpoint, threads=1).run(requests_for(checkpoint), max_batch=4)
    assert max(o.end_s for o in outcomes[:4]) <= min(o.chunk_s[0] for o in outcomes[4:])


def test_the_adapters_that_are_measured_can_be_uploaded(checkpoint: Checkpoint) -> None:
    base = BaseModel.load(checkpoint.model_dir, "tiny", checkpoint.model_dir.parent / "cache")
    for folder in checkpoint.adapters.values():
        config = (folder / "adapter_config.json").read_bytes()
        check_adapter(config, folder / "adapter_model.safetensors", base, AdapterLimits())


def test_the_tokenizer_has_an_id_for_every_row_of_the_embedding(checkpoint: Checkpoint) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint.model_dir / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == checkpoint.vocab_size
    assert tokenizer.decode(tokenizer.encode("Hörst du?").ids) == "Hörst du?"
