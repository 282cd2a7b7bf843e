"""Names that configs of adapters give for the base models that they were trained on.

A name is that of a repository or of a folder on the trainer's machine. It is a hint, never a proof.
"""

import re

# Words at the end of a name that say in which format the weights were stored.
_FORMAT = re.compile(
    r"[1-8]bit|bnb|gptq|awq|hqq|eetq|exl[23]|(?:nv|mx)?fp[48]|int[1-8]|nf4|w\d+a\d+|q\d|gguf"
)
_BESIDE_FORMAT = frozenset({"unsloth", "mlx", "quantized", "dynamic", "128g"})
_CACHED = re.compile(r".*/models--(?:[^/]+--)?([^/]+)/snapshots/[^/]+")


def last_name(trained_on: str) -> str:
    """The name in lower case, without the organization or the folders before it."""
    path = trained_on.replace("\\", "/").rstrip("/").lower()
    cached = _CACHED.fullmatch(f"/{path}")
    return cached[1] if cached else path.rpartition("/")[2]


def plain_name(trained_on: str) -> str:
    """The last name without the words for quantised weights: llama-3-8b for x/llama-3-8b-bnb-4bit.

    Names of weights that are not quantised stay whole.
    """
    plain, _ = _split(last_name(trained_on))
    return plain


def trained_on_quantised(trained_on: str) -> bool:
    """Whether the name says that the weights were quantised while the adapter was trained."""
    _, words = _split(last_name(trained_on))
    return bool(words)


def _split(name: str) -> tuple[str, list[str]]:
    """The name without the words of its format at its end, and these words; all or none."""
    pieces = re.split("(?=[-_.])", name)
    end = len(pieces)
    while end > 1 and (
        _FORMAT.fullmatch(pieces[end - 1][1:]) or pieces[end - 1][1:] in _BESIDE_FORMAT
    ):
        end -= 1
    words = [piece[1:] for piece in pieces[end:]]
    if any(map(_FORMAT.fullmatch, words)):
        return "".join(pieces[:end]), words
    return name, []
