"""Draw small bugs at random over both packages and count how many the default tests notice.

    make mutants N=200 SEED=1        # draw 200, try them, print the kill rate by folder and every survivor
    .venv/bin/python tests/random_mutants.py --seed 1 --only 17 42 -v     # two of that draw again
    .venv/bin/python tests/random_mutants.py --below report --number 20   # one folder

The first call traces the default tests once (coverage.py; about ten minutes) to learn which tests run which line. The
map is kept in .mutants/: changed test files are traced again, of a changed file of the package all tests that ran it
count; delete the folder to begin anew. Then each bug is written into a copy of the tree and the tests
that run its line, also in a process that they fork, are run, the most specific first, until one fails or `--limit`
seconds of tests are used up. What runs only in a process that a test starts anew, or kills, counts for no test.
Bugs of tests/equivalent_mutants.txt, which nobody could notice, are listed apart.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]
GUEST = REPO / "packages" / "migrate"
PACKAGES = (REPO / "sightline", GUEST / "sightline_migrate")
TESTS = (REPO / "tests", GUEST / "tests")
KEPT = REPO / ".mutants"
EQUIVALENT = REPO / "tests" / "equivalent_mutants.txt"
# What runs only on a GPU, so that no default test can notice a bug in it; tests/device are its tests.
ON_DEVICE = re.compile(r"kernels/.*_triton\.py|kernels/cudnn/|kernels/bottleneck_cudnn\.py|data/gpu/|early_cuda\.py")
# Runs tests/unit/kernels/interpreted_*.py in processes of their own.
INTERPRETED = "tests/unit/kernels/test_instance_norm.py::test_all_kernels_compute_it_in_tritons_interpreter[not slow]"

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
CAUGHT = ("caught", "hung")
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Bug(NamedTuple):
    """A small edit: `text` at byte `start` of `file` becomes `instead`; `before` and `after` complete its lines."""

    file: str
    line: int
    start: int
    text: str
    instead: str
    before: str
    after: str

    @property
    def edit(self) -> str:
        """The edit in one line, as it stands in tests/equivalent_mutants.txt: whole lines, since a number alone names
        no place."""
        old, new = (f"{self.before}{text}{self.after}" for text in (self.text, self.instead))
        return " ".join(f"{self.file}: {old} -> {new}".split())


# Bugs


def bugs_of(file: str, source: str) -> list[Bug]:
    """Return every bug that can be drawn in a file."""
    encoded = source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, instead in _edits(ast.parse(source), False):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = encoded[start:end].decode()
        before, after = encoded[starts[node.lineno - 1] : start], encoded[end : starts[node.end_lineno]]
        if instead != text:
            found.append(Bug(file, node.lineno, start, text, instead, before.decode(), after.decode()))
    return found


def _edits(node: ast.AST, in_error: bool) -> Iterator[tuple[ast.AST, str]]:
    """Yield (node, what is written instead) for a node and all below it; texts of errors and types are left alone."""
    if isinstance(node, ast.JoinedStr):  # its nodes have no true positions before Python 3.12
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: it changes nothing while lengths are equal
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if not in_error:
        yield from ((node, text) for text in _instead_of(node))
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        children = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        for child in children:
            yield from _edits(child, in_error or isinstance(node, ast.Raise))


def _instead_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op, *_]):
            yield _changed(node, ops=[COMPARISONS[type(op)](), *node.ops[1:]])
        case ast.BoolOp():
            yield _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield f"({ast.unparse(node.operand)})"
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            yield _changed(node, op=ARITHMETIC[type(node.op)]())
        case ast.Constant(value=bool()):
            yield str(not node.value)
        case ast.Constant(value=int()):
            yield str(node.value + 1)
        case ast.Constant(value=float()):
            yield str(node.value * 2 or 1.0)
        case ast.Name(id=name, ctx=ast.Load()) if name in OPPOSITES:
            yield OPPOSITES[name]
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield "pass"
        case ast.Break():
            yield "continue"
        case ast.Continue():
            yield "break"
        case ast.Return(value=ast.AST() as value) if not _is_none(value) and ast.unparse(value) != "False":
            yield "return None"
        case ast.IfExp():
            yield f"({_changed(node, body=node.orelse, orelse=node.body)})"
    if isinstance(node, ast.Call) and node.keywords and not _is_error(node):
        for drop in (each for each in node.keywords if each.arg != "strict"):
            yield _changed(node, keywords=[each for each in node.keywords if each is not drop])
    if isinstance(node, ast.Dict) and len(node.keys) > 1:
        for i in range(len(node.keys)):
            yield _changed(node, keys=node.keys[:i] + node.keys[i + 1 :], values=node.values[:i] + node.values[i + 1 :])


def _changed(node: ast.AST, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    text = ast.unparse(changed)
    return f"({text})" if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp) else text


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_error(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id.endswith(("Error", "BadData"))


def found_in(folders: Sequence[Path], pattern: str) -> list[Path]:
    """Return the files of these folders and all below them, sorted."""
    return sorted(path for folder in folders for path in folder.rglob(pattern))


def drawn(number: int, seed: int, below: str = "") -> list[Bug]:
    """Draw bugs: a line of a package (or below a folder) that can hold one, then one of its bugs."""
    lines: dict[tuple[str, int], list[Bug]] = defaultdict(list)
    for path in found_in(PACKAGES, "*.py"):
        file = path.relative_to(REPO).as_posix()
        if file.startswith((f"sightline/{below}", below)) and not ON_DEVICE.search(file):
            for bug in bugs_of(file, path.read_text("utf-8")):
                lines[file, bug.line].append(bug)
    rng = random.Random(seed)
    return [rng.choice(lines[place]) for place in rng.sample(sorted(lines), min(number, len(lines)))]


# Which tests run which lines


class Map(NamedTuple):
    """What the default tests run: {file: {line: tests}}, the seconds of each test, and how many lines each runs.

    `changed` are files that were edited since, so that their lines have other numbers.
    """

    tests: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]
    lines: Counter[str]
    changed: set[str]


def traced(jobs: int) -> Map:
    """Return the map of .mutants/, after tracing the test files that it lacks or that changed."""
    KEPT.mkdir(exist_ok=True)
    package = {path.relative_to(REPO).as_posix(): _hash([path]) for path in found_in(PACKAGES, "*.py")}
    files = {path.relative_to(REPO).as_posix(): _hash([path]) for path in found_in(TESTS, "test_*.py")}
    stored = KEPT / "map.json"
    empty = {"package": package, "files": {}, "runs": {}, "seconds": {}}
    known = json.loads(stored.read_text()) if stored.exists() else empty
    changed = {file for file, digest in package.items() if known["package"].get(file) != digest}
    stale = [file for file, digest in files.items() if known["files"].get(file) != digest]
    stale = [file for file in stale if not file.startswith("tests/device/")]
    if stale:
        print(f"tracing {len(stale)} test files, to learn which tests run which lines", flush=True)
        for name in ("runs", "seconds"):
            known[name] = {
                test: value
                for test, value in known[name].items()
                if test.partition("::")[0] in files and test.partition("::")[0] not in stale
            }
        runs, seconds = _trace(stale, jobs)
        known["runs"] |= runs
        known["seconds"] |= seconds
        known["files"] |= {file: files[file] for file in stale}
        stored.write_text(json.dumps(known))
    by_line: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    lines: Counter[str] = Counter()
    for test, ran in known["runs"].items():
        for file, numbers in ran.items():
            lines[test] += len(numbers)
            for number in numbers:
                by_line[file][number].append(test)
    return Map(by_line, known["seconds"], lines, changed)


def _hash(paths: list[Path]) -> str:
    return hashlib.sha256(b"\0".join(str(p.relative_to(REPO)).encode() + p.read_bytes() for p in paths)).hexdigest()


def _trace(files: list[str], jobs: int) -> tuple[dict[str, dict[str, list[int]]], dict[str, float]]:
    """Run test files under coverage.py. What a fixture runs counts for its whole file, under the name of the file."""
    import coverage

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        environ = _environ(REPO) | {"MUTANTS_TRACE": folder}
        words = ["-q", "-n", str(jobs), "--dist", "worksteal", "-p", "random_mutants", "--no-header", "--durations=0"]
        words += ["-p", "no:cacheprovider", "-vv", *files]
        environ["PYTHONPATH"] = os.pathsep.join([str(REPO / "tests"), environ["PYTHONPATH"]])
        with (KEPT / "trace.log").open("w") as log:
            subprocess.run([sys.executable, "-m", "pytest", *words], cwd=REPO, env=environ, stdout=log, stderr=log)
        said = (KEPT / "trace.log").read_text()
        seconds: Counter[str] = Counter()
        for taken, test in re.findall(r"^([0-9.]+)s (?:call|setup|teardown) +(\S.*)$", said, flags=re.MULTILINE):
            seconds[test] += float(taken)
        runs: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for path in Path(folder).glob("data.*"):
            data = coverage.CoverageData(str(path))
            try:
                data.read()
            except coverage.exceptions.DataError:  # of a process that was killed while it wrote
                continue
            for measured in data.measured_files():
                if not any(Path(measured).is_relative_to(package) for package in PACKAGES):  # the script of a test
                    continue
                file = Path(measured).relative_to(REPO).as_posix()
                for line, contexts in data.contexts_by_lineno(measured).items():
                    for context in filter(None, contexts):
                        runs[context][file].add(line)
    return {test: {file: sorted(v) for file, v in ran.items()} for test, ran in runs.items()}, dict(seconds)


def pytest_configure(config: object) -> None:
    """As a plugin of the tracing run: trace every test process, and what it asks tests/warm.py to fork."""
    global _tracer
    if "MUTANTS_TRACE" in os.environ:
        import traced  # type: ignore[import-not-found]
        import warm  # type: ignore[import-not-found]

        os.environ["MUTANTS_TEST"] = str(Path(os.environ["MUTANTS_TRACE"], f"test-{os.getpid()}"))
        _tracer = traced.trace()
        warm.start = functools.partial(_start_traced, warm.start)


def _start_traced(
    start: Callable[..., object], *words: object, environ: dict[str, str] | None = None, **how: object
) -> object:
    return start(*words, environ={**(environ or {}), "MUTANTS_TEST": os.environ["MUTANTS_TEST"]}, **how)


_tracer = None


def pytest_runtest_setup(item: object) -> None:
    """What runs from here on was run by a fixture."""
    _name_test(item.nodeid.partition("::")[0])  # type: ignore[attr-defined]


def pytest_runtest_call(item: object) -> None:
    """What runs from here on was run by the test."""
    _name_test(item.nodeid)  # type: ignore[attr-defined]


def _name_test(test: str) -> None:
    if _tracer:
        Path(os.environ["MUTANTS_TEST"]).write_text(test, "utf-8")
        _tracer.switch_context(test)


def chosen_tests(bug: Bug, known: Map, limit_s: float) -> list[str]:
    """Return tests that run the line, within a limit of seconds; else those of the file.

    In turn the test that runs the fewest lines of all, and the one that runs most of what few others run of the file.
    """
    of_file = known.tests.get(bug.file, {})
    running = [test for line in _lines(bug) for test in of_file.get(line, [])]
    if not running or bug.file in known.changed:  # run in other processes only, or its lines have other numbers
        running = [test for tests in of_file.values() for test in tests] + _naming(bug.file)
    rare: Counter[str] = Counter()
    for tests in of_file.values():
        rare.update(dict.fromkeys(tests, 1 / len(tests)))  # type: ignore[arg-type]
    few = sorted(set(running), key=lambda test: (known.lines[test], test))
    own = sorted(set(running), key=lambda test: (-rare[test], test))
    stem = Path(bug.file).stem
    in_turn = dict.fromkeys(test for pair in zip(few, own, strict=True) for test in pair)
    # Whole files last: one of them alone may take longer than the limit.
    ranked = sorted(in_turn, key=lambda test: ("::" not in test, stem not in test.partition("::")[0]))
    if "/kernels/" in bug.file:
        ranked.sort(key=lambda test: test != INTERPRETED)  # no other runs what needs Triton
    chosen, left = [], limit_s
    for test in ranked:
        whole = [each for each in known.seconds if each.startswith(f"{test}::")] if "::" not in test else [test]
        taken = sum(known.seconds.get(each, 0.01) for each in whole)
        kept = limit_s / 2 if stem in test.partition("::")[0] else 0  # for tests of other files, as the golden ones
        if not chosen or taken <= left - kept:
            chosen.append(test)
            left -= taken
    return chosen


def _lines(bug: Bug) -> range:
    """Return the lines of a bug; if they run at import, in whichever test that is, those of its function or class."""
    tree = ast.parse((REPO / bug.file).read_text("utf-8"))
    first, last = 0, 0  # at the top level all tests of the file count
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.lineno <= bug.line <= (node.end_lineno or 0):
            if not isinstance(node, ast.ClassDef) and node.body[0].lineno <= bug.line:
                return range(bug.line, bug.line + bug.text.count("\n") + 1)
            first, last = node.lineno, node.end_lineno or 0  # the innermost comes last
    return range(first, last + 1)


def _naming(file: str) -> list[str]:
    """Return the test files that name a module, and the test of those that Triton's interpreter runs."""
    module = file.removeprefix("packages/migrate/").removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    pattern = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    paths = found_in(TESTS, "test_*.py")
    naming = [p.relative_to(REPO).as_posix() for p in paths if pattern.search(p.read_text("utf-8"))]
    texts = [path.read_text("utf-8") for path in (REPO / "tests").rglob("interpreted_*.py")]
    is_interpreted = package == "sightline.kernels" and any(re.search(rf"\b{name}\b", text) for text in texts)
    return [*naming, *[INTERPRETED] * is_interpreted]


# Trials


def _environ(tree: Path) -> dict[str, str]:
    path = os.pathsep.join([str(tree), str(tree / "packages" / "migrate")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def tried(bug: Bug, tests: list[str], tree: Path, limit_s: float) -> str:
    """Write the bug into a copy, run the tests, undo it; return "not run by any test", "survived", or one of CAUGHT."""
    if not tests:
        return "not run by any test"
    path = tree / bug.file
    source = path.read_bytes()
    end = bug.start + len(bug.text.encode())
    path.write_bytes(source[: bug.start] + bug.instead.encode() + source[end:])
    words = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    group = subprocess.Popen(
        words, cwd=tree, env=_environ(tree), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    try:
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        code = group.wait((60 + 4 * limit_s) * busy)
    except subprocess.TimeoutExpired:  # it hangs, which a person would notice
        return "hung"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group.pid, signal.SIGKILL)
        group.wait()
        path.write_bytes(source)
    return "survived" if code in (0, 5) else "caught"


def main() -> int:
    """Draw, try, and report; return 1 where fewer than nine in ten are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--below", default="", help="draw in this folder or file only, e.g. data/sources or packages")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of tests for one bug")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of this draw")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the bugs that are caught, too")
    arguments = parser.parse_args()
    bugs = list(enumerate(drawn(arguments.number, arguments.seed, arguments.below)))
    if arguments.only:
        bugs = [(i, bug) for i, bug in bugs if i in arguments.only]
    known = traced(arguments.jobs)
    equivalent = set(EQUIVALENT.read_text("utf-8").splitlines()) if EQUIVALENT.exists() else set()
    began = time.monotonic()
    results: dict[int, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(arguments.jobs):
            tree = Path(folder, str(job), "sightline")
            for name in ("sightline", "packages", "tests", "docs", "benchmarks", ".ci"):
                shutil.copytree(REPO / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            for path in [*REPO.glob("*.*"), REPO / "Makefile", REPO / "Dockerfile"]:
                if path.is_file():
                    shutil.copy(path, tree)
            with contextlib.suppress(FileExistsError):
                (tree.parent / "shared").symlink_to(REPO.parent / "shared")
            trees.put(tree)

        def one(numbered: tuple[int, Bug]) -> None:
            i, bug = numbered
            if bug.edit in equivalent:
                results[i] = "equivalent"
                return
            tree = trees.get()
            try:
                results[i] = tried(bug, chosen_tests(bug, known, arguments.limit), tree, arguments.limit)
            finally:
                trees.put(tree)
            if results[i] != "caught" or arguments.verbose:
                print(f"{len(results):4} {results[i]}: #{i}, line {bug.line}: {bug.edit}", flush=True)

        list(pool.map(one, bugs))
    print(_table([(bug, results[i]) for i, bug in bugs], time.monotonic() - began))
    missed = sum(result not in (*CAUGHT, "equivalent") for result in results.values())
    return int(missed > len(results) / 10)


def _table(results: list[tuple[Bug, str]], seconds: float) -> str:
    folders = sorted({_folder(bug) for bug, _ in results})
    lines = [f"{'folder':16} {'bugs':>5} {'caught':>7} {'equivalent':>11} {'missed':>7}"]
    for folder in [*folders, "all"]:
        of = Counter(result for bug, result in results if folder in ("all", _folder(bug)))
        caught = sum(of[result] for result in CAUGHT)
        missed = sum(of.values()) - caught - of["equivalent"]
        lines.append(f"{folder:16} {sum(of.values()):5} {caught:7} {of['equivalent']:11} {missed:7}")
    noticeable = sum(result != "equivalent" for _, result in results)
    caught = sum(result in CAUGHT for _, result in results)
    return "\n".join(
        [*lines, f"caught {caught} of {noticeable} ({caught / max(noticeable, 1):.1%}) in {seconds:.0f} s"]
    )


def _folder(bug: Bug) -> str:
    parts = bug.file.split("/")
    return parts[1] if len(parts) > 2 else "sightline"


if __name__ == "__main__":
    sys.exit(main())
