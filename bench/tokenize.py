"""`python -m bench.tokenize`: prints JSON lines with the time to tokenize a prompt, per family.

Times are processor times, which a busy machine changes least, of our `encode` and Hugging Face's.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from bench.report import describe_machine, json_line, percentiles_ms
from bench.tokenizer_families import FAMILIES, corpus, make_tokenizer
from server.text.tokenizer import Tokenizer

_WARM_UP = 3


def main() -> None:
    options = parse_options(sys.argv[1:])
    for family in options.family:
        for size in options.characters:
            line = row(family, size, options.repeats) + "\n"
            sys.stdout.write(line)
            if options.append:
                with options.append.open("a") as file:
                    file.write(line)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.tokenize", description=__doc__)
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--characters", nargs="+", type=int, default=(1_000, 100_000))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--append", type=Path, help="also write the rows to this file")
    return parser.parse_args(arguments)


def row(family: str, num_characters: int, repeats: int) -> str:
    """Tokenize one text with both and return the row; both must agree before they are timed."""
    hf, text = make_tokenizer(family), prose(num_characters)
    ours = saved(hf)
    token_ids = hf.encode(text).ids
    assert ours.encode(text) == token_ids
    measured = {
        "hugging_face_ms": percentiles_ms(timed(lambda: hf.encode(text).ids, repeats)),
        "ours_ms": percentiles_ms(timed(lambda: ours.encode(text), repeats)),
    }
    setup = {
        "family": family,
        "characters": num_characters,
        "vocabulary": len(ours.vocabulary),
        "repeats": repeats,
        "tokenizers": version("tokenizers"),
        "tiktoken": version("tiktoken"),
    }
    return json_line("tokenize", describe_machine(), setup, {"tokens": len(token_ids), **measured})


def prose(num_characters: int) -> str:
    pages = corpus()
    return (pages * (num_characters // len(pages) + 1))[:num_characters]


def saved(hf: HFTokenizer) -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        hf.save(str(Path(name) / "tokenizer.json"))
        return Tokenizer(Path(name))


def timed(encode: Callable[[], Any], repeats: int) -> list[float]:
    """Return the processor seconds of each call."""
    seconds = []
    for _ in range(_WARM_UP + repeats):
        start = time.process_time()
        encode()
        seconds.append(time.process_time() - start)
    return seconds[_WARM_UP:]


if __name__ == "__main__":
    main()
