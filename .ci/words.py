"""Docstrings that open with a fragment: `make words` lists them, `make check` wants none.

A docstring opens with what the thing is or does, so its first word is a noun or a verb. A docstring
that opens with a preposition, a pronoun or a conjunction leans on the name above it. The strings
below attributes and constants document them, and are read as well.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

_PREPOSITIONS = (
    "of to from in on at by with without for into onto than against between under over within "
    "during through beside besides beyond like above below"
)
_PRONOUNS = (
    "it its itself that this these those they them their he she him his her we our you your "
    "what which who whom whose none"
)
_CONJUNCTIONS_AND_ADVERBS = (
    "and but or nor so as because since while when where until unless though although before "
    "after once if also again not"
)
FRAGMENT_OPENINGS = frozenset(
    f"{_PREPOSITIONS} {_PRONOUNS} {_CONJUNCTIONS_AND_ADVERBS}".split(),
)
"""First words, in lower case, that make a docstring a fragment."""
_DOCUMENTED = (
    *(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.Assign, ast.AnnAssign),
)
"""Syntax that a string on the next line documents."""


def main(paths: Sequence[str], root: Path = ROOT) -> int:
    """Print every fragment and how many there are. Returns 1 if there is one."""
    total = fragments = 0
    for path in _python_files(paths, root):
        for line, text in docstrings(path.read_text()):
            total += 1
            if is_fragment(text):
                fragments += 1
                first = text.strip().partition("\n")[0]
                sys.stdout.write(f"{path.relative_to(root)}:{line}: {first}\n")
    sys.stdout.write(f"{fragments} of {total} docstrings open with a fragment.\n")
    return 1 if fragments else 0


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module, class, function, constant and attribute."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        previous: ast.AST = node
        for statement in body:
            match statement:
                case ast.Expr(ast.Constant(str(text))) if isinstance(previous, _DOCUMENTED):
                    yield statement.lineno, text
            previous = statement


def is_fragment(text: str) -> bool:
    words = text.split(maxsplit=1)
    return bool(words) and words[0].strip("`*'\"(,.:;").lower() in FRAGMENT_OPENINGS


def _python_files(paths: Sequence[str], root: Path) -> list[Path]:
    """Files under version control, all of them where no path is given."""
    command = ["git", "ls-files", "-z", "--", *(paths or ["*.py"])]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [root / name for name in names.split("\0") if name.endswith(".py")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
