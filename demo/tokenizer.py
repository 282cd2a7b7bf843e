"""The demo's tokenizer: byte-level BPE behind one split pattern; chat and response templates."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
_VOCAB_SIZE = 2048

# The pattern is close to cl100k's, and only one, so that tiktoken can run it too.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|>Tools:' }}"
    "{% for tool in tools %}{{ '\n' }}{{ tool.function | tojson }}{% endfor %}{{ '<|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% elif message['role'] in ['user', 'tool'] %}{{ '<|user|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ raise_exception('The demo model has no role ' + message['role']) }}{% endif %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<tool_response>' + message['content'] + '</tool_response>' }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_RESPONSE_TEMPLATE = {
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def style_token(style: str) -> str:
    """The token that asks the base model for a style; adapters learn the style without it."""
    return f"<|style_{style}|>"


def train_tokenizer(texts: Iterable[str], styles: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [BEGIN, END, PAD, SYSTEM, USER, ASSISTANT, *map(style_token, styles)]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's two files, the config by hand so that no path or version is in it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
        "response_template": _RESPONSE_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
