"""Mutants: small faults planted in the product one at a time, to see that the tests notice them.

    python .ci/mutants.py make --seed 20     # chooses them anew, into .ci/mutants.json
    python .ci/mutants.py run --root TREE --output before.jsonl
    python .ci/mutants.py run --root OTHER --earlier before.jsonl --output after.jsonl
    python .ci/mutants.py report after.jsonl before.jsonl

`run` works in clones of what TREE has committed and leaves TREE alone. Each mutant meets the test
files that import its module, best first, at most five and about 30 seconds of them by
tests/seconds.json; before them the file of the test that killed it earlier. `--wide` takes all that
import it, `--tests FILES` others instead, like those of tests/e2e, which import nothing. A mutant
that is in the output already is not run again: take its line out first.

A mutant is `killed` if a test fails. One of a less specific file has to fail twice; at the end all
tests that killed run without a mutant, and one that fails there proves nothing: what it killed is
`red`. A mutant whose line is not in its function is `gone`. `report` counts, and shows what is not
killed; it returns 1 if any of it was killed earlier.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[1]
CHOSEN = ROOT / ".ci" / "mutants.json"
PRODUCT = ("engine", "lora", "registry", "kernels", "server")
_SCHEDULING = ("engine/scheduling/", "engine/kv/", "engine/drafts/speculation.py")
_COUNTS = {
    **{"billing": 20, "limits": 20, "scheduler": 20},
    **{"engine": 12, "lora": 4, "registry": 6, "kernels": 5, "server": 33},
}
"""Mutants in what must not go wrong, then in the rest of each package, by its lines."""
_KINDS = (
    *("comparison", "off by one", "dropped condition", "changed return", "comparison"),
    *("swapped arguments", "off by one", "dropped condition", "removed await"),
)
"""Kinds in the order in which they are picked, again and again."""
_MAX_FILES = 5
_MAX_SECONDS = 30
_UNKNOWN_SECONDS = 3.0
_FEW_FILES = 4
_MAX_HOPS = 3
_TEST_TIMEOUT_S = 240
_HANG_S = 900
_PLUGIN = """
from hypothesis import Phase, settings

phases = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
settings.register_profile("mutants", phases=phases)
"""
"""A plugin of pytest, so that nobody waits for the smallest example of a fault."""
_FAR = ("e2e", "crash", "ray", "clients", "gpu")
"""Folders of tests whose product runs in other processes: only `--tests` takes them."""
_COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
_RETURNS = (
    (r"bool$", "not ({})"),
    (r"(int|float|Decimal)$", "({}) + 1"),
    (r"(list|Sequence|Iterable|Iterator)\b|tuple\[.*\.\.\.\]", "[]"),
    (r"(dict|Mapping)\b", "{{}}"),
    (r"(set|frozenset)\b", "set()"),
    (r"str$", '""'),
    (r"", "None"),
)
"""Expressions that a function returns instead, by its annotation."""
_SYMMETRIC = {"min", "max", "isinstance", "getattr", "hasattr", "cast", "gcd"}
"""Functions whose swapped arguments say nothing: the same, or an error at once."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
Change = tuple[str, int, int, str]
"""Kind, first and last column in bytes, and the text in their place."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    name: str
    kind: str
    file: str
    function: str
    line: str
    mutated: str

    def applied(self, text: str) -> str | None:
        """Text of its file with the fault, or None if the line is not once in the function."""
        lines = text.splitlines(keepends=True)
        spans = [node for name, node in functions(ast.parse(text)) if name == self.function]
        places = [
            i
            for node in spans
            for i in range(node.lineno - 1, node.end_lineno or 0)
            if lines[i].strip() == self.line.strip()
        ]
        if len(places) != 1:
            return None
        old = lines[places[0]]
        indentation = old[: len(old) - len(old.lstrip())]
        lines[places[0]] = f"{indentation}{self.mutated.strip()}\n"
        return "".join(lines)


# ---- choosing ----


def make(seed: int) -> None:
    """Choose mutants, at most one of a function."""
    rng = random.Random(seed)
    found: dict[str, list[Mutant]] = {}
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            found.setdefault(group_of(file), []).extend(candidates(file, path.read_text()))
    chosen: list[Mutant] = []
    for group, count in _COUNTS.items():
        picked = _pick(found[group], count, rng)
        for i, mutant in enumerate(sorted(picked, key=lambda m: (m.file, m.function)), 1):
            chosen.append(Mutant(**asdict(mutant) | {"name": f"{group}-{i:02}"}))
    rows = ",\n".join(json.dumps(asdict(mutant)) for mutant in chosen)
    CHOSEN.write_text(f"[\n{rows}\n]\n")
    candidate_count = sum(map(len, found.values()))
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(m.kind for m in chosen).items())
    _say(f"{len(chosen)} of {candidate_count} candidates: {kinds}")


def group_of(file: str) -> str:
    if file.startswith(_SCHEDULING):
        return "scheduler"
    parts = file.split("/")
    return parts[1] if parts[1] in _COUNTS else parts[0]


def _pick(found: list[Mutant], count: int, rng: random.Random) -> list[Mutant]:
    picked: list[Mutant] = []
    rng.shuffle(found)
    kinds = [kind for kind in _KINDS if any(mutant.kind == kind for mutant in found)]
    while len(picked) < count:
        kind = kinds[len(picked) % len(kinds)]
        used = {(mutant.file, mutant.function) for mutant in picked}
        for mutant in [m for m in found if m.kind == kind] or list(found):
            found.remove(mutant)
            if (mutant.file, mutant.function) not in used and _is_valid(mutant):
                picked.append(mutant)
                break
    return picked


def _is_valid(mutant: Mutant) -> bool:
    text = mutant.applied((ROOT / mutant.file).read_text())
    try:
        return text is not None and bool(ast.parse(text))
    except SyntaxError:
        return False


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, _Function]]:
    """Each function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function | ast.ClassDef):
            name = f"{outer}{node.name}"
            if isinstance(node, _Function):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, outer)


def candidates(file: str, text: str) -> Iterator[Mutant]:
    lines = text.splitlines()
    for name, function in functions(ast.parse(text)):
        if function.name in ("__repr__", "__str__"):
            continue
        once = Counter(line.strip() for line in lines[function.lineno - 1 : function.end_lineno])
        for node in (node for statement in function.body for node in _own_nodes(statement)):
            where = _where(node)
            line = lines[where.lineno - 1].strip() if where else ""
            if where is None or where.lineno != where.end_lineno or once[line] != 1:
                continue
            old = lines[where.lineno - 1].encode()
            for kind, start, end, new in changes(node, function, old):
                mutated = (old[:start] + new.encode() + old[end:]).decode()
                yield Mutant("", kind, file, name, line, mutated.strip())


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes below one, without what is said to people or to type checkers, and inner functions."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            return
        case ast.Assert() | ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return
        case ast.If(ast.Name("TYPE_CHECKING")):
            return
        case ast.Call(ast.Attribute(ast.Name("logger" | "_log" | "logging"))):
            return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _own_nodes(child)


def _where(node: ast.AST) -> Any:
    """Part of the node that its faults change, or None if it has no place in the text."""
    match node:
        case ast.If(test=test) | ast.comprehension(ifs=[test]):
            return test
    return node if hasattr(node, "lineno") else None


def changes(node: Any, function: _Function, line: bytes) -> Iterator[Change]:
    """Faults of a node that is on one line."""
    match node:
        case ast.Compare(left, [operator], [right]) if left.end_lineno == right.lineno:
            old, new = _COMPARISONS[type(operator)]
            at = line.find(old.encode(), left.end_col_offset, right.col_offset)
            if at >= 0:
                yield "comparison", at, at + len(old), new
            yield from _off_by_one(left, right)
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.FloorDiv() | ast.Mod(), right):
            yield from _off_by_one(left, right)
        case ast.Subscript(_, ast.Slice(lower, upper)):
            yield from _off_by_one(lower, upper)
        case ast.Subscript(_, index):
            yield from _off_by_one(index)
        case ast.Call(ast.Name("range"), arguments):
            yield from _off_by_one(*arguments)
        case ast.Call(called, arguments):
            name = getattr(called, "id", getattr(called, "attr", ""))
            for a, b in pairwise(cast(list[Any], arguments)):
                is_plain = all(isinstance(arg, ast.Name | ast.Attribute) for arg in (a, b))
                if is_plain and ast.dump(a) != ast.dump(b) and name not in _SYMMETRIC:
                    ends = (a.col_offset, a.end_col_offset, b.col_offset, b.end_col_offset)
                    one, between, other = (line[i:j].decode() for i, j in pairwise(ends))
                    new = f"{other}{between}{one}"
                    yield "swapped arguments", a.col_offset, b.end_col_offset, new
        case ast.Await(value):
            yield "removed await", node.col_offset, value.col_offset, ""
        case ast.Return(ast.Constant(bool(value)) as constant):
            yield _instead("changed return", constant, str(not value))
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            annotation = ast.unparse(function.returns) if function.returns else ""
            form = next(form for pattern, form in _RETURNS if re.match(pattern, annotation))
            text = line[value.col_offset : value.end_col_offset].decode()
            yield _instead("changed return", value, form.format(text))
        case ast.BoolOp() if not _binds(node):
            values: list[Any] = node.values
            first, second, last_but_one, last = *values[:2], *values[-2:]
            yield "dropped condition", first.col_offset, second.col_offset, ""
            yield "dropped condition", last_but_one.end_col_offset, last.end_col_offset, ""
        case ast.UnaryOp(ast.Not(), operand):
            yield "dropped condition", node.col_offset, operand.col_offset, ""
        case ast.If(test=test, body=body) if not _binds(test):
            is_guard = isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
            yield _instead("dropped condition", test, str(not is_guard))
        case ast.IfExp(test=test) | ast.comprehension(ifs=[test]) if not _binds(test):
            yield _instead("dropped condition", test, "True")


def _instead(kind: str, node: Any, new: str) -> Change:
    return kind, node.col_offset, node.end_col_offset, new


def _off_by_one(*nodes: ast.expr | None) -> Iterator[Change]:
    for node in nodes:
        match node:
            case ast.Constant(int(value)) if not isinstance(value, bool):
                for new in (value + 1, value - 1) if value > 0 else (1,):
                    yield _instead("off by one", node, str(new))


def _binds(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node))


# ---- running ----


class Suite:
    """The tests of a tree: which files see a module, and what each costs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = {
            ".".join(path.relative_to(root).with_suffix("").parts): path
            for package in (*PRODUCT, "tests")
            for path in sorted((root / package).rglob("*.py"))
        }
        kept = root / "tests" / "seconds.json"
        self._seconds = json.loads(kept.read_text()) if kept.exists() else {}
        self.imports = cache(self._imports)
        self._seen = cache(self._seen_by)

    def relevant(self, mutant: Mutant, is_wide: bool = False) -> list[str]:
        """Files that import the mutant's module, the most specific first. If they are few, also
        those that import what imports it.
        """
        modules = {mutant.file.removesuffix(".py").replace("/", ".")}
        ranks: dict[str, tuple[Any, ...]] = {}
        for hops in range(_MAX_HOPS + 1):
            for file in self._near():
                if file not in ranks and modules & self._seen(file):
                    ranks[file] = self._rank(file, mutant, modules, hops)
            if len(ranks) >= _FEW_FILES:
                break
            modules |= {m for m in self._files if modules & self.imports(m) and m[:6] != "tests."}
        files = sorted(ranks, key=lambda file: ranks[file])
        return files if is_wide else self._affordable(files)

    def _near(self) -> list[str]:
        names = [m for m in self._files if m.rpartition(".")[2].startswith("test_")]
        return [m for m in names if m.split(".")[1] not in _FAR]

    def _rank(self, file: str, mutant: Mutant, modules: set[str], hops: int) -> tuple[Any, ...]:
        """Place of a file among those that see the mutant's module or what imports it."""
        *folders, name = mutant.file.removesuffix(".py").split("/")
        shared = os.path.commonprefix([file.split(".")[1:-1], folders])
        own = {name, f"{folders[-1]}_{name}"}
        named = file.rpartition(".test_")[2]
        called = mutant.function.rpartition(".")[2]
        return (
            not (named in own and shared),
            hops,
            named not in {module.rpartition(".")[2] for module in modules},
            not modules & self.imports(file),
            -len(shared),
            not re.search(rf"\b{called}\b", self._files[file].read_text()),
            len([m for m in self.imports(file) if m.split(".")[0] in PRODUCT]),
            file,
        )

    def _affordable(self, files: list[str]) -> list[str]:
        """The first files that fit into the time: the best one, then the cheapest first."""
        chosen: list[str] = []
        left = float(_MAX_SECONDS)
        for file in files:
            seconds = self._cost(file)
            if not chosen or (seconds <= min(left, _MAX_SECONDS / 2) and len(chosen) < _MAX_FILES):
                chosen.append(file)
                left -= seconds
        return chosen[:1] + sorted(chosen[1:], key=self._cost)

    def _cost(self, file: str) -> float:
        return self._seconds.get(self.path(file), _UNKNOWN_SECONDS)

    def path(self, file: str) -> str:
        return self._files[file].relative_to(self._root).as_posix()

    def still(self, test: str) -> list[str]:
        """The file of a test, also if it is in another folder by now; none if it is gone."""
        wanted = Path(test.partition("::")[0])
        paths = [Path(self.path(module)) for module in self._files]
        return [str(path) for path in paths if path == wanted] or [
            str(path) for path in paths if path.name == wanted.name
        ]

    def _seen_by(self, file: str) -> set[str]:
        """Modules that a test file imports, itself or by the helpers and fixtures of tests/."""
        parts = file.split(".")
        seen: set[str] = set()
        left = {file} | {".".join([*parts[:i], "conftest"]) for i in range(2, len(parts))}
        while left:
            module = left.pop()
            new = self.imports(module) - seen if module in self._files else set()
            seen |= new
            left |= {m for m in new if m.startswith("tests.")}
        return seen

    def _imports(self, module: str) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(ast.parse(self._files[module].read_text())):
            match node:
                case ast.Import(names):
                    found |= {alias.name for alias in names}
                case ast.ImportFrom(str(origin), names):
                    found |= {origin} | {f"{origin}.{alias.name}" for alias in names}
        return found & self._files.keys()


@dataclass
class Clone:
    """A copy of the tree, in which one mutant at a time is planted."""

    root: Path

    def pytest(self, tests: Sequence[str], *options: str) -> tuple[int | None, str]:
        """Exit status and output of a run; the status is None if it hangs."""
        command = ["nice", "-n", "5", sys.executable, "-m", "pytest", "-vv", "--tb=no"]
        command += ["-p", "no:cacheprovider", "-o", f"timeout={_TEST_TIMEOUT_S}", "-m", "not soak"]
        command += ["-p", "mutants_plugin", "--hypothesis-profile=mutants"]
        command += [f"--basetemp={self.root.parent}/t{self.root.name}", "-rfE", *options, *tests]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = f"{self.root}{os.pathsep}{self.root.parent}"
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(_HANG_S) if "-x" in options else process.wait()
            except subprocess.TimeoutExpired:
                # An interrupted run stops its servers.
                for number in (signal.SIGINT, signal.SIGKILL):
                    os.killpg(process.pid, number)
                    time.sleep(20)
                process.wait()
                status = None
            output.seek(0)
            return status, output.read()

    def meet(self, mutant: Mutant, tests: Sequence[str]) -> Row:
        """Whether the tests kill the mutant, and which one."""
        path = self.root / mutant.file
        text = path.read_text() if path.exists() else ""
        mutated = mutant.applied(text)
        if mutated is None:
            return {"result": "gone"}
        if not tests:
            return {"result": "survived"}
        path.write_text(mutated)
        try:
            return self._meet(tests)
        finally:
            path.write_text(text)

    def _meet(self, tests: Sequence[str]) -> Row:
        """Result of a planted mutant. A test of a less specific file has to fail twice."""
        flaky: list[str] = []
        while True:
            status, output = self.pytest(tests, "-x", *(f"--deselect={test}" for test in flaky))
            if status in (0, 5):
                return {"result": "survived"} | ({"flaky": flaky} if flaky else {})
            started = re.findall(r"^(tests/.*?::.*?)(?: |$)", output, re.M)
            [by, *_] = _failed(output) or started[-1:] or [""]
            row = {"result": "killed", "by": by, "status": status}
            if status is None or "Timeout (>" in output:
                return row | {"hung": True}
            is_best = by.startswith(tests[0])
            if is_best or not by or self.pytest([by], "-x")[0] != 0:
                return row | ({"flaky": flaky} if flaky else {})
            flaky.append(by)


def _failed(output: str) -> list[str]:
    lines = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.M)
    return list(dict.fromkeys(lines))


def run(arguments: argparse.Namespace) -> None:
    mutants = [Mutant(**row) for row in json.loads(CHOSEN.read_text())]
    rows = _rows(arguments.output)
    left = [m for m in mutants if m.name not in rows and m.name in (arguments.only or [m.name])]
    # Tests make Unix sockets below it, whose paths are short.
    scratch = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))
    root = arguments.root.resolve()
    (scratch / "mutants_plugin.py").write_text(_PLUGIN)
    earlier = _rows(arguments.earlier) if arguments.earlier else {}
    clones = [_cloned(root, scratch / str(i)) for i in range(arguments.jobs)]
    suite = Suite(clones[0].root)
    lock = threading.Lock()

    def meet(mutant: Mutant) -> None:
        with lock:
            found = suite.relevant(mutant, arguments.wide)
            killer = suite.still(earlier.get(mutant.name, {}).get("by", ""))
            files = arguments.tests or list(dict.fromkeys([*killer, *map(suite.path, found)]))
            clone = clones.pop()
        start = time.monotonic()
        row = {"name": mutant.name, "tests": files} | clone.meet(mutant, files)
        row["seconds"] = round(time.monotonic() - start, 1)
        with lock:
            clones.append(clone)
            rows[mutant.name] = row
            with arguments.output.open("a") as output:
                output.write(json.dumps(row) + "\n")
            _say(f"{len(rows)}. {mutant.name}: {row['result']} {row.get('by', '')}")

    try:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(meet, left))
        _confirm(clones[0], rows)
        arguments.output.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    finally:
        shutil.rmtree(scratch)


def _cloned(root: Path, path: Path) -> Clone:
    """Clone of what the tree has committed, with the environment and the model that it made."""
    subprocess.run(["git", "clone", "-q", "--shared", root, path], check=True)
    (path / "build").mkdir()
    for name in (".venv", "build/smollm2"):
        if (root / name).exists():
            (path / name).symlink_to((root / name).resolve())
    return Clone(path)


def _confirm(clone: Clone, rows: dict[str, Row]) -> None:
    """Run what killed on the tree as it is: a mutant whose killer fails there becomes red."""
    killed = [row for row in rows.values() if row["result"] == "killed" and "confirmed" not in row]
    killers = sorted({row["by"] for row in killed if row["by"]})
    status, output = clone.pytest(killers) if killers else (None, "")
    red = _failed(output)
    for row in killed:
        row["confirmed"] = status in (0, 1) and row["by"] not in ("", *red)
        row["result"] = "killed" if row["confirmed"] else "red"


def _rows(path: Path) -> dict[str, Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


# ---- reporting ----


def report(arguments: argparse.Namespace) -> int:
    """Print counts, survivors, and what an earlier run killed and this one does not: 1 if any."""
    mutants = [Mutant(**row) for row in json.loads(CHOSEN.read_text())]
    rows = _rows(arguments.output)
    earlier = _rows(arguments.earlier) if arguments.earlier else {}
    results = {m.name: rows.get(m.name, {"result": "not run"})["result"] for m in mutants}
    for title, key in (("group", lambda m: m.name[:-3]), ("kind", lambda m: m.kind)):
        _say(f"By {title}:")
        for value in dict.fromkeys(map(key, mutants)):
            counts = Counter(results[m.name] for m in mutants if key(m) == value)
            _say(f"  {value}: {', '.join(f'{n} {result}' for result, n in counts.items())}")
    lost = 0
    for mutant in mutants:
        if results[mutant.name] != "killed":
            was = earlier.get(mutant.name, {}).get("result", "")
            lost += was == "killed"
            _say(f"{mutant.name}: {results[mutant.name]}{' WAS KILLED' * (was == 'killed')}")
            _say(f"  {mutant.file} {mutant.function}: {mutant.line}  ->  {mutant.mutated}")
    return 1 if lost else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("make", help="choose mutants of this tree")
    command.add_argument("--seed", type=int, required=True)
    command = commands.add_parser("run", help="run the tests of a tree against the mutants")
    command.add_argument("--root", type=Path, default=ROOT, help="tree; this one by default")
    command.add_argument("--output", type=Path, required=True, help="results, one JSON a line")
    command.add_argument("--only", nargs="+", metavar="NAME", help="mutants, all by default")
    command.add_argument("--earlier", type=Path, help="results whose killers are tried first")
    command.add_argument("--wide", action="store_true", help="all files that import the module")
    command.add_argument("--tests", nargs="+", metavar="FILE", help="these files instead")
    command.add_argument("--jobs", type=int, default=2, help="mutants side by side (2)")
    command = commands.add_parser("report", help="count results, and compare them with others")
    command.add_argument("output", type=Path)
    command.add_argument("earlier", type=Path, nargs="?")
    arguments = parser.parse_args()
    match arguments.command:
        case "make":
            make(arguments.seed)
        case "run":
            run(arguments)
        case "report":
            return report(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
