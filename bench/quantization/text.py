"""Rows of tokens from Python's own documentation, which every interpreter ships, in two parts."""

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer

_PARTS = 4
"""Every fourth topic is held out; the others are for calibration."""


def held_out_rows(model_dir: Path, num_rows: int, row_tokens: int) -> torch.Tensor:
    """Token ids [rows, tokens] of text that calibration never sees."""
    return _rows(model_dir, True, num_rows, row_tokens)


def calibration_rows(model_dir: Path, num_rows: int, row_tokens: int) -> torch.Tensor:
    """Token ids [rows, tokens] of the other text."""
    return _rows(model_dir, False, num_rows, row_tokens)


def paragraphs(is_held_out: bool) -> Iterator[str]:
    """Paragraphs of one part. One that several topics share is only in the first of them."""
    seen: set[str] = set()
    for number, name in enumerate(sorted(topics)):
        for paragraph in topics[name].split("\n\n"):
            if paragraph not in seen and (number % _PARTS == 0) == is_held_out:
                yield paragraph
            seen.add(paragraph)


def _rows(model_dir: Path, is_held_out: bool, num_rows: int, row_tokens: int) -> torch.Tensor:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "\n\n".join(paragraphs(is_held_out))
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    wanted = num_rows * row_tokens
    if len(token_ids) < wanted:
        raise ValueError(f"the text has {len(token_ids)} tokens, {wanted} are wanted")
    # Rows from all over the text: neighbouring topics are alike.
    starts = torch.linspace(0, len(token_ids) - row_tokens, num_rows).long()
    return torch.tensor(token_ids)[starts.unsqueeze(1) + torch.arange(row_tokens)]
