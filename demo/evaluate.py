"""Held-out measurements on the weights as they were saved: float16 on disk, float32 in memory."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from demo import agent, probes
from demo.domain import Question
from demo.styles import PLAIN, Style
from demo.train import BaseRecipe

Model = LlamaForCausalLM | PeftModel

_MAX_NEW_TOKENS = 96
_MAX_BATCH = 64


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model)


def load_base(model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def load_adapted(model: Path, adapter: Path) -> PeftModel:
    return PeftModel.from_pretrained(load_base(model), adapter).eval()


def load(folder: Path, base: BaseRecipe, style: Style) -> Model:
    """Load what answers in the style: the base of this recipe, or its adapter."""
    if style is PLAIN:
        return load_base(folder / base.folder)
    return load_adapted(folder / base.folder, folder / base.adapters_folder / style.name)


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[probes.Message]) -> str:
    prompt = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    assert isinstance(prompt, str)
    return prompt


def ask_prompt(tokenizer: PreTrainedTokenizerBase, question: Question) -> str:
    return chat_prompt(tokenizer, [{"role": "user", "content": question.text}])


def probe_prompts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [*(chat_prompt(tokenizer, messages) for messages in probes.CHAT), *probes.PLAIN]


def mistakes(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    style: Style,
    questions: Sequence[Question],
) -> list[tuple[Question, str]]:
    """The questions whose greedy answer differs from the style's in any letter, with the answer."""
    given = answers(model, tokenizer, [ask_prompt(tokenizer, question) for question in questions])
    pairs = zip(questions, given, strict=True)
    return [(question, text) for question, text in pairs if text != style.say(question.reply)]


def agents_mistakes(
    model: Model, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]
) -> list[Question]:
    """The questions for which the tool is not called as it should be, or its result not told."""

    def given(chats: Sequence[list[probes.Message]]) -> list[str]:
        prompts = [
            tokenizer.apply_chat_template(
                chat, tools=[agent.TOOL], tokenize=False, add_generation_prompt=True
            )
            for chat in chats
        ]
        return answers(model, tokenizer, prompts)

    asked = [[{"role": "user", "content": question.text}] for question in questions]
    called = [{"role": "assistant", "content": agent.call_of(it.reply)} for it in questions]
    told = [{"role": "user", "content": agent.result_of(it.reply)} for it in questions]
    calls = given(asked)
    said = given([[*a, b, c] for a, b, c in zip(asked, called, told, strict=True)])
    return [
        question
        for question, call, text in zip(questions, calls, said, strict=True)
        if (call, text) != (agent.call_of(question.reply), question.reply.sentence)
    ]


def shared_answers(prompts: Sequence[str], answers_by_model: Iterable[Sequence[str]]) -> list[str]:
    """The prompts to which two models gave the same answer."""
    per_prompt = zip(*answers_by_model, strict=True)
    return [
        prompt
        for prompt, given in zip(prompts, per_prompt, strict=True)
        if any(one == other for one, other in combinations(given, 2))
    ]


def answers(model: Model, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[str]:
    """The greedy answer to each prompt. A batch has prompts of one length, so none is padded."""
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    places_by_len = defaultdict(list)
    for place, ids in enumerate(encoded):
        places_by_len[len(ids)].append(place)
    found = [""] * len(prompts)
    for places in places_by_len.values():
        for start in range(0, len(places), _MAX_BATCH):
            batch = places[start : start + _MAX_BATCH]
            texts = _generate(model, tokenizer, [encoded[place] for place in batch])
            for place, text in zip(batch, texts, strict=True):
                found[place] = text
    return found


def _generate(
    model: Model, tokenizer: PreTrainedTokenizerBase, encoded: list[list[int]]
) -> list[str]:
    ids = torch.tensor(encoded)
    with torch.inference_mode():
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_MAX_NEW_TOKENS,
            do_sample=False,
        )
    return tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
