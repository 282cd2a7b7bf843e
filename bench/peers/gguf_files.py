"""Converts the checkpoint to llama.cpp's format with llama.cpp's own scripts."""

import json
import string
import subprocess
import sys
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer, models

from bench.peers.peer import PeerFailed, log_tail

_WRAPPER = Path(__file__).with_name("gguf_convert.py")
_TIMEOUT_S = 900


def convert_model(scripts: Path, model_dir: Path, form: str, folder: Path) -> Path:
    """Return the converted model's path. Raises PeerFailed.   form: f32 or q8_0."""
    path = folder / f"model-{form}.gguf"
    if not path.exists():
        plain = _with_plain_tokens(model_dir, folder)
        _convert((str(_WRAPPER), str(scripts), str(plain)), form, path)
    return path


def convert_adapter(scripts: Path, model_dir: Path, adapter: Path, folder: Path) -> Path:
    """Return the converted adapter's path. Raises PeerFailed."""
    path = folder / f"{adapter.name}.gguf"
    if not path.exists():
        script = str(scripts / "convert_lora_to_gguf.py")
        _convert((script, "--base", str(model_dir), str(adapter)), "f32", path)
    return path


def _convert(script: tuple[str, ...], outtype: str, path: Path) -> None:
    unfinished = path.with_suffix(".unfinished")
    options = ("--outtype", outtype, "--outfile", str(unfinished))
    _run((sys.executable, *script, *options), path.with_suffix(".log"))
    unfinished.rename(path)


def _run(command: tuple[str, ...], log: Path) -> None:
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, timeout=_TIMEOUT_S)
    if done.returncode:
        raise PeerFailed(f"the conversion failed: {log_tail(log)}")


def _with_plain_tokens(model_dir: Path, folder: Path) -> Path:
    """Return the folder of the same model with a word of ASCII letters for every token.

    llama.cpp's server sends a token when its text is whole UTF-8. It would hold back, and lose,
    most tokens that are pairs of bytes.
    """
    plain = folder / "plain-tokens"
    plain.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (plain / name).unlink(missing_ok=True)  # an earlier run's link to a folder that is gone
        (plain / name).symlink_to((model_dir / name).resolve())
    config = json.loads((model_dir / "config.json").read_text())
    words = _words(config["vocab_size"] - 1)
    vocab = {token: index for index, token in enumerate(["<|end|>", *words])}
    merges = [(word[:-1], word[-1]) for word in words if len(word) > 1]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(plain / "tokenizer.json"))
    (plain / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return plain


def _words(count: int) -> list[str]:
    """Return the first `count` words from a to zzzz, shorter words first."""
    letters = string.ascii_lowercase
    words = ("".join(word) for length in range(1, 5) for word in product(letters, repeat=length))
    return [word for word, _ in zip(words, range(count), strict=False)]
