"""Prose and code that every Python ships, from language topics to the Zen, and a few snippets.

The same interpreter gives the same corpus, another version a slightly different one. The size of
each part of the corpus is bounded.
"""

import ast
import codecs
import pydoc_data.topics
import random
import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_MODULES = """
    argparse ast bisect calendar cmd collections/__init__ colorsys configparser contextlib copy csv
    datetime difflib enum fnmatch fractions functools glob heapq inspect ipaddress json/__init__
    keyword logging/__init__ mimetypes numbers operator os pathlib pickle posixpath pprint queue
    random reprlib sched shlex shutil socket statistics string subprocess tempfile textwrap
    threading tokenize types typing uuid warnings weakref zipfile
"""
# Beginnings that a visitor is likely to type; the standard library has no code that is so plain.
_SNIPPETS = (
    "def add(a, b):\n    return a + b",
    "def square(x):\n    return x * x",
    "def is_even(n):\n    return n % 2 == 0",
    "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
    "def hello(name):\n    print(f'Hello, {name}!')",
    "for i in range(10):\n    print(i)",
    "while True:\n    line = input()\n    print(line)",
    "import os\nprint(os.getcwd())",
    "import json\nprint(json.dumps({'a': 1}))",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y",
    "with open(path) as file:\n    text = file.read()",
    "if __name__ == '__main__':\n    main()",
    "numbers = [1, 2, 3]\nprint(sum(numbers))",
)
# Texts are so few and so short that a small model learns them by heart in the end: half-learned
# prose comes out as word salad.
_MAX_PROSE = 120
_MAX_CODE = 40
_MAX_WORDS = 2500
_PROSE_LEN = range(50, 220)
_CODE_LEN = range(60, 240)


@dataclass(frozen=True)
class Corpus:
    prose: tuple[str, ...]
    code: tuple[str, ...]
    snippets: tuple[str, ...]
    zen: tuple[str, ...]
    words: tuple[str, ...]


@cache
def load() -> Corpus:
    chooser = random.Random(7)
    trees = [ast.parse(source) for source in _sources()]
    prose = sorted({*_topic_paragraphs(), *_docstring_paragraphs(trees)})
    code = sorted(set(_short_functions(trees)))
    words = sorted({word for text in prose for word in re.findall(r"\b[a-z]{3,10}\b", text)})
    return Corpus(
        prose=tuple(chooser.sample(prose, min(_MAX_PROSE, len(prose)))),
        code=tuple(chooser.sample(code, min(_MAX_CODE, len(code)))),
        snippets=_SNIPPETS,
        zen=_zen(),
        words=tuple(chooser.sample(words, min(_MAX_WORDS, len(words)))),
    )


def _sources() -> list[str]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    paths = [stdlib / f"{module}.py" for module in _MODULES.split()]
    # Another Python may have moved a module into a package; the corpus does without that module.
    return [path.read_text(encoding="utf-8") for path in paths if path.exists()]


def _topic_paragraphs() -> list[str]:
    topics = pydoc_data.topics.topics
    return [text for name in sorted(topics) for text in _paragraphs(topics[name])]


def _docstring_paragraphs(trees: list[ast.Module]) -> list[str]:
    documented = (ast.ClassDef, ast.FunctionDef, ast.Module)
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for node in nodes for text in _paragraphs(ast.get_docstring(node) or "")[:1]]


def _paragraphs(text: str) -> list[str]:
    joined = (" ".join(block.split()) for block in text.split("\n\n"))
    return [block for block in joined if _is_prose(block)]


def _is_prose(block: str) -> bool:
    plain = re.fullmatch(r"[A-Z][A-Za-z0-9 ,.()'\-]*\.", block)
    return plain is not None and len(block) in _PROSE_LEN


def _short_functions(trees: list[ast.Module]) -> list[str]:
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    texts = [ast.unparse(node) for node in nodes if ast.get_docstring(node) is None]
    return [text for text in texts if text.isascii() and len(text) in _CODE_LEN]


def _zen() -> tuple[str, ...]:
    # The module is read and not imported, since importing `this` prints the text.
    source = (Path(sysconfig.get_paths()["stdlib"]) / "this.py").read_text(encoding="utf-8")
    first = ast.parse(source).body[0]
    assert isinstance(first, ast.Assign)
    lines = codecs.decode(ast.literal_eval(first.value), "rot13").splitlines()
    return tuple(line for line in lines if line)
