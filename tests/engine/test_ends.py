"""Adapters of the embedding and the head, beside others, on every implementation of kernels."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from registry.formats.peft_format import WEIGHTS_FILE
from tests.engine import real_core
from tests.engine.cpu_kernels import kernels_of
from tests.engine.fakes import make_message, prompt_logprobs_of, run_until_idle, tokens_of
from tests.engine.gpu.backends import fake_backend
from tests.engine.real_core import add_adapter, build_core
from tests.oracle import greedy, merged_model
from tests.tiny_models import ALL_TARGETS, GEMMA2, GRANITE, save_adapter, save_model

INVOCATION = [17, 18, 19]
ENDS = ["embed_tokens", "lm_head"]
SPECS = {
    "both": {"target_modules": [*ALL_TARGETS, *ENDS], "r": 9},
    "head": {"target_modules": ["lm_head", "q_proj"], "r": 20, "use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens"], "r": 3},
    "invoked head": {"target_modules": ["lm_head"], "alora_invocation_tokens": INVOCATION},
    "plain": {"r": 4},
}
RUNNERS = {
    "torch, late": {"make_kernels": kernels_of("torch"), "lag": 1},
    "C": {"make_kernels": kernels_of("native")},
    "two ranks": {"num_ranks": 2, "make_kernels": kernels_of("native")},
}
GEMMA2_MODEL = GEMMA2 | {"family": "gemma2"}
PROMPT = [(7 * i * i + 3) % 288 + 4 for i in range(45)]
PROMPTS = [[*PROMPT[:9], *INVOCATION, 291], [*INVOCATION, *PROMPT]]


class World:
    """A model with adapters, and what PEFT answers for each."""

    def __init__(self, folder, **options):
        self.model_dir = save_model(folder / "model", **options)
        self.folder = folder
        self.dirs = {
            name: save_adapter(self.model_dir, folder / name, seed=seed, **spec)
            for seed, (name, spec) in enumerate(SPECS.items(), 1)
        }
        self.objects: dict[str, bytes] = {}
        self.refs = {name: self.add(path) for name, path in self.dirs.items()} | {"base": None}
        models = {name: merged_model(self.model_dir, self.dirs.get(name)) for name in self.refs}
        self.answers = {
            name: [greedy(model, prompt, 6) for prompt in PROMPTS] for name, model in models.items()
        }
        self.logprobs = {
            name: [logprobs(models[name], prompt) for prompt in PROMPTS]
            for name in ("both", "head", "embedding")
        }

    def add(self, path):
        return add_adapter(self.objects, self.model_dir, path, self.folder)


@torch.inference_mode()
def logprobs(model, prompt):
    return model(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp("ends"), tied=request.param)


@pytest.mark.parametrize("runner", RUNNERS)
def test_each_request_gets_the_tokens_and_logprobs_of_peft(world, tmp_path, runner):
    check(world, tmp_path, RUNNERS[runner])


@pytest.mark.parametrize("options", [GRANITE | {"family": "granite", "tied": False}, GEMMA2_MODEL])
def test_so_it_is_where_embeddings_are_scaled_and_logits_bounded(tmp_path, options):
    world = World(tmp_path, **options)
    check(world, tmp_path, RUNNERS["C"])
    proof = prove(world, tmp_path / "proof", world.refs["both"], world.objects)
    assert (proof.verdict, proof.message) == ("passed", "")


def check(world, folder, runner):
    """Run all requests at once, and compare tokens and logprobs with PEFT's."""
    core = build_core(world.model_dir, folder / "engine", world.objects, **runner)
    for name, ref in world.refs.items():
        for number, prompt in enumerate(PROMPTS):
            message = make_message(
                f"{name}-{number}", prompt=prompt, max_tokens=6, adapter=ref, prompt_logprobs=2
            )
            core.handle("gw", message)
    outputs = run_until_idle(core)
    for name, answers in world.answers.items():
        found = [tokens_of(outputs[f"{name}-{number}"]) for number in range(len(PROMPTS))]
        assert found == answers, name
    for name, expected in world.logprobs.items():
        for number, rows in enumerate(expected):
            told = prompt_logprobs_of(outputs[f"{name}-{number}"])
            found = torch.tensor([logprob for each in told for _, logprob in each.top])
            wanted = torch.stack([rows[i, t] for i, each in enumerate(told) for t, _ in each.top])
            torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["both", "head", "embedding", "invoked head"])
def test_a_proof_covers_the_ends(world, tmp_path, name):
    proof = prove(world, tmp_path, world.refs[name], world.objects)
    assert (proof.verdict, proof.message) == ("passed", "")
    assert proof.max_difference < proof.tolerance < proof.max_effect


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("embedding", "model.embed_tokens.lora_embedding_A"), ("head", "lm_head.lora_B.weight")],
)
def test_an_object_whose_end_is_another_is_a_mismatch(world, tmp_path, name, tensor):
    tensors = load_file(world.dirs[name] / WEIGHTS_FILE)
    tensors[f"base_model.model.{tensor}"] *= -1
    other = tmp_path / "other"
    other.mkdir()
    save_file(tensors, other / WEIGHTS_FILE)
    (other / "adapter_config.json").write_bytes(
        (world.dirs[name] / "adapter_config.json").read_bytes()
    )
    objects = dict(world.objects)
    ref = add_adapter(objects, world.model_dir, other, tmp_path)
    proof = prove(world, tmp_path, world.refs[name], {ref.digest: objects[ref.digest]}, ref)
    assert proof.verdict == "mismatch"


def prove(world, folder, served, objects, proved=None):
    """The proof that serves one adapter and merges another, or the same."""
    folder.mkdir(exist_ok=True)
    path = folder / "object"
    path.write_bytes(objects[(proved or served).digest])
    core = build_core(world.model_dir, folder / "engine", world.objects)
    return real_core.prove(core, served, path)


def test_on_a_device_they_are_refused_in_one_sentence(world, tmp_path):
    from lora.errors import AdapterError

    core = build_core(
        world.model_dir, tmp_path / "engine", world.objects, make_backend=fake_backend
    )
    core.handle("gw", make_message("r", prompt=PROMPTS[0], adapter=world.refs["head"]))
    with pytest.raises(AdapterError, match="LoRA on lm_head is served on CPUs only"):
        run_until_idle(core)
