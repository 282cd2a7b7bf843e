"""SmolLM2 as `make model` writes it: its tokenizer is the real one, and the engine serves it."""

from server.text.tokenizer import Tokenizer
from tests import needs
from tests.engine.fakes import make_message, tokens_of
from tests.engine.real_core import build_core
from tests.oracle import greedy, merged_model

# These ids are those of llama.cpp's rule "smollm" and of the merges in the GGUF.
TEXTS = {
    "Hello world": [19556, 905],
    "In 2024, 1234 km": [788, 216, 34, 32, 34, 36, 28, 216, 33, 34, 35, 36, 6381],
    "def f(x):\n    return x**12\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 33, 34, 198],
    "é 世 ½ 🎉": [2756, 216, 7906, 240, 216, 16738, 15107, 232, 227],
    "  two  spaces\r\n\n\tend ": [216, 827, 216, 5600, 201, 1116, 197, 486, 216],
    "I'm sure it'LL do<|im_end|>\n": [57, 5248, 2090, 357, 23, 16421, 536, 2, 198],
}


def test_texts_become_the_recorded_ids_and_chats_end_at_im_end():
    tokenizer = Tokenizer(needs.smollm2())
    assert {text: tokenizer.encode(text) for text in TEXTS} == TEXTS
    assert tokenizer.eos_token_ids == (2,)
    chat = tokenizer.chat_template.render([{"role": "user", "content": "Hi"}])
    assert tokenizer.encode(chat)[-4:] == [1, 520, 9531, 198]


def test_greedy_answers_of_the_engine_equal_those_of_transformers(tmp_path):
    folder = needs.smollm2()
    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "def add(a, b):\n")]
    core = build_core(folder, tmp_path / "engine", {})
    for number, prompt in enumerate(prompts):
        core.handle("gw", make_message(f"r{number}", prompt=prompt, max_tokens=12))
    outputs = []
    while core.scheduler.has_work:
        outputs += [output for _, message in core.step() for output in message.outputs]
    answers = [tokens_of([o for o in outputs if o.request_id == f"r{n}"]) for n in (0, 1)]
    assert tokenizer.decode(answers[0]).startswith(" Paris.")
    reference = merged_model(folder, None)
    assert answers == [greedy(reference, prompt, 12) for prompt in prompts]
