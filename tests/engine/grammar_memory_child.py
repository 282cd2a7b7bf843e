"""Compiles grammars of one tenant as an engine does; prints by how many bytes it has grown."""

import json
import os
import sys
import time
from pathlib import Path

from engine.grammar.constraints import Constraints
from engine.grammar.llguidance_matcher import LlguidanceGrammars


def grammar(number):
    """A schema of few characters that compiles into 5 MB."""
    properties = {f"a{number}": {"type": "integer", "multipleOf": 9973}}
    return json.dumps({"grammars": [{"json_schema": {"type": "object", "properties": properties}}]})


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(tokenizer, most_bytes, num_grammars):
    constraints = Constraints(LlguidanceGrammars(Path(tokenizer), 2048, [1]), (), most_bytes)
    before = 0
    for number in range(num_grammars):
        compilation = constraints.want("acme", grammar(number))
        while compilation.matcher is None:
            assert compilation.error is None, compilation.error
            time.sleep(0.001)
        before = before or resident_bytes()
    sys.stdout.write(str(resident_bytes() - before))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
