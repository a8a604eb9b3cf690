"""Draw small bugs at random over both packages and count how many the default tests notice.

    make mutants N=200 SEED=1        # draw 200, try them, print the kill rate by folder and every survivor
    .venv/bin/python tests/random_mutants.py --seed 1 --only 17 42 -v     # two of that draw again
    .venv/bin/python tests/random_mutants.py --below report --number 20   # one folder

The first call traces the default tests once (coverage.py; about ten minutes) to learn which tests run which line. The
map is kept in .mutants/: changed tests are traced again, lines of the package that moved are found again; delete the
folder to begin anew. Each bug is then written into a copy of the tree, and the tests that run its line, also in a
process that they fork or start, are run, the most specific first and slow ones last, until one fails or `--limit`
seconds of tests are used up, as they take on free cores. What none of these notices is shown to the part of `make lint`
that finds bugs: mypy, and ruff's rules F, B and PLE; no rule of style, which the spelling of the bug may break. The
rest counts as missed. Of a constant or
a field the tests of what reads it, and those that name its module, are run. What runs only in a process that a test
kills counts for no test. The tests that caught a bug are run once more without one: those that fail then have caught
nothing, and their bugs are tried again.

Left out of the rate, with their numbers: bugs of tests/equivalent_mutants.txt, which nobody could notice, and by rule
what only a GPU shows (a dropped `device=` of a new tensor, `non_blocking=` or `pin_memory=`, a dropped wait for the
device) or only a clock or a meter of memory (how long `time.sleep` sleeps, a dropped `time.sleep` or `gc.collect`, the
value of a constant of seconds, such as POLL_S).
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import copy
import difflib
import functools
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import py_compile
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[1]
GUEST = REPO / "packages" / "migrate"
PACKAGES = (REPO / "sightline", GUEST / "sightline_migrate")
TESTS = (REPO / "tests", GUEST / "tests")
KEPT = REPO / ".mutants"
EQUIVALENT = "equivalent, of tests/equivalent_mutants.txt"
# What runs only on a GPU, so that no default test can notice a bug in it; tests/device are its tests.
ON_DEVICE = re.compile(r"kernels/.*_triton\.py|kernels/cudnn/|kernels/bottleneck_cudnn\.py|data/gpu/|early_cuda\.py")
# Runs tests/unit/kernels/interpreted_*.py in processes of their own.
INTERPRETED = "tests/unit/kernels/test_instance_norm.py::test_all_kernels_compute_it_in_tritons_interpreter[not slow]"

# Compares the sources of copies with those of what they were copied from: it runs no line of either.
COPIES = "tests/migrate/test_copies.py"

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
# Bugs left out by a rule, since no test without a GPU, or without a clock, could notice them: they do not count, and
# their number is printed. DEVICE: without the place of a tensor (the tests run where all tensors are on the CPU, so
# that all results stay), of an asynchronous copy, or without the wait for it. TIME: waits, and when memory is freed.
DEVICE, TIME = "shows on a GPU only", "changes time or memory alone"
ASYNCHRONOUS = ("non_blocking", "pin_memory")
WAITS = ("synchronize", "wait_stream", "wait_event", "record_stream", "compile_ahead")  # the last does nothing on a CPU
SLEEP, FREE = "time.sleep", re.compile(r"gc\.collect|.*\.(free_cached_memory|empty_cache)")
# Constants of seconds, but those that a model of time computes with or that a page holds.
TIMES = re.compile(r"(?!.*(HOP|START|PER|COLD|WARM|GRACE|RELOAD|LEAST))_?[A-Z_]+_(S|TIMEOUT)")
FEW_READERS = 40  # of a name in other files; one that more read, as `path`, is not the same there
SLOW_S = 4.0  # a test that takes longer comes after all others
SHARES = 16  # of the tests that caught bugs, run at once without one
STARTED = 'import os\nif "MUTANTS_TEST" in os.environ:\n    import traced\n    traced.trace()\n'
STAGES_S = (2.0, 10.0, float("inf"))  # each a process of its own, which reads only the files of its tests
WARM = ("pytest", "numpy.ma", "torch._dynamo", "torch.distributed.run", "torchvision.transforms.v2", "PIL.Image")
BY_LINT = "caught by lint"
CAUGHT, LATE = ("caught", "hung", BY_LINT), "not tried in time"
TYPES = KEPT / "mypy"  # mypy's cache
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
    left_out: str = ""  # by which rule

    @property
    def edit(self) -> str:
        """The edit in one line, as it stands in tests/equivalent_mutants.txt: whole lines, since a number alone names
        no place."""
        old, new = (f"{self.before}{text}{self.after}" for text in (self.text, self.instead))
        return " ".join(f"{self.file}: {old} -> {new}".split())

    def is_in(self, edits: set[str]) -> bool:
        """Return whether it is one of these edits, whose quotes depend on the version of Python."""
        return self.edit.replace("'", '"') in edits


# Bugs


def bugs_of(file: str, source: str) -> list[Bug]:
    """Return every bug that can be drawn in a file."""
    encoded = source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    tree = ast.parse(source)
    within = {  # numbers that stand in a call
        id(part): name
        for call in ast.walk(tree)
        if (name := _name(call))
        for part in ast.walk(call)
        if part is not call
    }
    for each in tree.body:  # and in constants of seconds
        names = {target.id for target in _targets(each) if TIMES.fullmatch(target.id)}
        within |= {id(part): name for name in names for part in ast.walk(each)}
    for node, instead in _edits(tree, False):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = encoded[start:end].decode()
        before, after = encoded[starts[node.lineno - 1] : start], encoded[end : starts[node.end_lineno]]
        if instead != text:
            rule = _rule(node, instead, within.get(id(node), ""))
            found.append(Bug(file, node.lineno, start, text, instead, before.decode(), after.decode(), rule))
    return found


def _rule(node: ast.AST, instead: str, call: str) -> str:
    """Return the rule by which an edit is left out, "" of most; `call` is what the node is an argument of."""
    name = _name(node.value if isinstance(node, ast.Expr) else node)
    if isinstance(node, ast.Expr):
        return DEVICE if name.rpartition(".")[2] in WAITS else TIME if name == SLEEP or FREE.fullmatch(name) else ""
    if isinstance(node, ast.Call) and instead != "return None":
        kept = {each.arg for each in ast.parse(instead, mode="eval").body.keywords}  # type: ignore[attr-defined]
        dropped = next((each for each in node.keywords if each.arg not in kept), None)
        makes_tensor = re.match(r"torch\.[a-z]", name) and not isinstance(dropped and dropped.value, ast.Constant)
        if dropped and (dropped.arg in ASYNCHRONOUS or (dropped.arg == "device" and makes_tensor)):
            return DEVICE
    return TIME if isinstance(node, ast.Constant) and (call == SLEEP or TIMES.fullmatch(call)) else ""


def _targets(node: ast.AST) -> list[ast.Name]:
    """Return the names that an assignment gives a value."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def _name(node: ast.AST) -> str:
    """Return what is called, "" of what is no call."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


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
    """What the default tests run: {file: {line: tests}}, the seconds of each test, and how many lines each runs."""

    tests: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]
    lines: Counter[str]


def traced(jobs: int) -> Map:
    """Return the map of .mutants/, after tracing the test files that it lacks or that changed."""
    KEPT.mkdir(exist_ok=True)
    package = {path.relative_to(REPO).as_posix(): path.read_text("utf-8") for path in found_in(PACKAGES, "*.py")}
    digests = {test: digest for path in found_in(TESTS, "test_*.py") for test, digest in _digests(path).items()}
    collected = _collected()
    by_default = {_function(test) for test in collected if not test.startswith("tests/device/")}
    digests = {test: digest for test, digest in digests.items() if test in by_default}
    stored = KEPT / "map.json"
    empty: dict[str, Any] = {"package": package, "tests": {}, "runs": {}, "seconds": {}}
    known = json.loads(stored.read_text()) if stored.exists() else empty
    known["runs"] = _moved(known["runs"], known["package"], package)
    known["package"] = package
    gone = {test for test in known["runs"] if "::" in test and test not in collected}  # its parameters are others now
    others = {_function(test) for test in gone}
    stale = [test for test, digest in digests.items() if known["tests"].get(test) != digest or test in others]
    lasting = {file for test in digests for file in (test.partition("::")[0], test)} - set(stale)
    for name in ("runs", "seconds"):
        known[name] = {test: value for test, value in known[name].items() if _function(test) in lasting}
    if stale:
        print(f"tracing {len(stale)} tests, to learn which lines they run", flush=True)
        runs, seconds, ended = _trace(stale, jobs)
        known["runs"] = runs | known["runs"]
        known["seconds"] |= seconds
        known["tests"] = {test: digest for test, digest in digests.items() if test in ended or test not in stale}
        stored.write_text(json.dumps(known))
        if lacking := [test for test in stale if test not in ended]:
            sys.exit(f"{len(lacking)} tests were not traced, e.g. {lacking[0]}: see {KEPT}/trace.log, then call again")
    by_line: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    lines: Counter[str] = Counter()
    for test, ran in known["runs"].items():
        for file, numbers in ran.items():
            lines[test] += len(numbers)
            for number in numbers:
                by_line[file][number].append(test)
    return Map(by_line, known["seconds"], lines)


def _collected() -> set[str]:
    """Return the names of all tests: pytest would run none of a list in which it does not know one."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *map(str, TESTS)]
    done = subprocess.run(command, cwd=REPO, env=_environ(REPO), capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def _moved(
    runs: dict[str, dict[str, list[int]]], before: dict[str, str], after: dict[str, str]
) -> dict[str, dict[str, list[int]]]:
    """Return what tests run with the numbers that its lines have after an edit; a line in place of others is run by
    the tests of all of them, one between two by those of the one before."""
    numbers = {
        file: _numbers_after(text.splitlines(), after[file].splitlines())
        for file, text in before.items()
        if file in after and after[file] != text
    }
    return {
        test: {
            file: sorted({new for old in ran for new in numbers[file].get(old, ())}) if file in numbers else ran
            for file, ran in of_test.items()
        }
        for test, of_test in runs.items()
    }


def _numbers_after(before: list[str], after: list[str]) -> dict[int, list[int]]:
    """Return {number of a line before an edit: its numbers after it}, from 1."""
    found: dict[int, list[int]] = defaultdict(list)
    for what, first, last, new_first, new_last in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
        new = list(range(new_first + 1, new_last + 1))
        if what == "equal":
            for i, number in enumerate(new):
                found[first + 1 + i].append(number)
        elif what == "insert":
            found[first] += new
        else:
            for old in range(first + 1, last + 1):
                found[old] += new
    return found


def _digests(path: Path) -> dict[str, str]:
    """Return a digest of each function and class of a test file that holds tests."""
    file, source = path.relative_to(REPO).as_posix(), path.read_text("utf-8")
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[:4].lower() == "test":
            first = min(each.lineno for each in (node, *node.decorator_list))
            text = "\n".join(lines[first - 1 : node.end_lineno])
            found[f"{file}::{node.name}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _function(test: str) -> str:
    """Return the file and the function, or class, of a test."""
    return "::".join(test.partition("[")[0].split("::")[:2])


def _trace(tests: list[str], jobs: int) -> tuple[dict[str, dict[str, list[int]]], dict[str, float], set[str]]:
    """Run tests under coverage.py; return what they run, their seconds, and the functions that were run to an end. What
    a fixture runs counts for its whole file, under the name of the file."""
    import coverage

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        environ = _environ(REPO) | {"MUTANTS_TRACE": folder}
        words = ["-q", "-n", str(jobs), "--dist", "worksteal", "-p", "random_mutants", "--no-header", "--durations=0"]
        words += ["-p", "no:cacheprovider", "-vv", *tests]
        environ["PYTHONPATH"] = os.pathsep.join([folder, str(REPO / "tests"), environ["PYTHONPATH"]])
        Path(folder, "sitecustomize.py").write_text(STARTED)  # Python runs it where a process starts
        with (KEPT / "trace.log").open("w") as log:
            command, loads = [sys.executable, "-m", "pytest", *words], []
            tracing = subprocess.Popen(command, cwd=REPO, env=environ, stdout=log, stderr=log)
            while tracing.poll() is None:
                loads.append(os.getloadavg()[0])
                time.sleep(5)
        said = (KEPT / "trace.log").read_text()
        seconds: Counter[str] = Counter()
        for taken, test in re.findall(r"^([0-9.]+)s (?:call|setup|teardown) +(\S.*)$", said, flags=re.MULTILINE):
            seconds[test] += float(taken)
        share = max(1.0, sum(loads) / len(loads) / (os.cpu_count() or 1))  # of processes that waited for each core
        seconds = Counter({test: taken / share for test, taken in seconds.items()})
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
    ended = {_function(test) for test in re.findall(r"(?:PASSED|FAILED|SKIPPED|ERROR) (\S+)", said)}
    found = {test: {file: sorted(v) for file, v in ran.items()} for test, ran in runs.items()}
    return found, dict(seconds), ended


def pytest_configure(config: object) -> None:
    """As a plugin of the tracing run: trace every test process, and what it asks tests/warm.py to fork."""
    global _tracer
    if "MUTANTS_TRACE" in os.environ and hasattr(config, "workerinput"):
        import traced  # type: ignore[import-not-found]
        import warm  # type: ignore[import-not-found]

        os.environ["MUTANTS_TEST"] = str(Path(os.environ["MUTANTS_TRACE"], f"test-{os.getpid()}"))
        _tracer = traced.trace()
        warm.start = functools.partial(_start_traced, warm.start)
        warm.once = functools.partial(_once_traced, warm.once)


def _start_traced(
    start: Callable[..., object], *words: object, environ: dict[str, str] | None = None, **how: object
) -> object:
    return start(*words, environ={**(environ or {}), "MUTANTS_TEST": os.environ["MUTANTS_TEST"]}, **how)


def _once_traced(once: Callable[..., object], factory: object, name: str, make: Callable[[Path], object]) -> object:
    """What a test makes for others, too, is run by its whole file."""

    def made(folder: Path) -> None:
        test = Path(os.environ["MUTANTS_TEST"]).read_text("utf-8")
        _name_test(test.partition("::")[0])
        try:
            make(folder)
        finally:
            _name_test(test)

    return once(factory, name, made)


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
    running = [test for file, line in _places(bug) for test in known.tests.get(file, {}).get(line, [])]
    if not running:  # run in other processes only
        running = [test for tests in of_file.values() for test in tests] + _naming(bug.file)
    rare: Counter[str] = Counter()
    for tests in of_file.values():
        rare.update(dict.fromkeys(tests, 1 / len(tests)))  # type: ignore[arg-type]
    few = sorted(set(running), key=lambda test: (known.lines[test], test))
    own = sorted(set(running), key=lambda test: (-rare[test], test))
    stem = Path(bug.file).stem
    elsewhere = [*_naming_constant(bug), *([COPIES] if COPIES in _naming(bug.file) else [])]
    in_turn = dict.fromkeys([*elsewhere, *(test for pair in zip(few, own, strict=True) for test in pair)])
    if not _is_in_function(bug):  # it ran at import, in whichever test: those that name the module, too
        files = {file for file in _naming(bug.file) if "::" not in file}
        tests = [test for test in known.lines if test.partition("::")[0] in files]
        running_none = {test for file in files for test in _digests(REPO / file)} - set(map(_function, tests))
        in_turn |= dict.fromkeys(sorted({*tests, *running_none}))
    # Whole files last: one of them alone may take longer than the limit.
    ranked = sorted(
        in_turn,
        key=lambda test: ("::" not in test, known.seconds.get(test, 0) > SLOW_S, stem not in test.partition("::")[0]),
    )
    chosen, left = [], limit_s
    for test in (each for each in ranked if "/kernels/" not in bug.file or each != INTERPRETED):
        whole = [each for each in known.seconds if each.startswith(f"{test}::")] if "::" not in test else [test]
        taken = sum(known.seconds.get(each, 0.01) for each in whole)
        kept = limit_s / 2 if stem in test.partition("::")[0] else 0  # for tests of other files, as the golden ones
        if not chosen or taken <= left - kept:
            chosen.append(test)
            left -= taken
    if "/kernels/" in bug.file and INTERPRETED in in_turn:  # whatever it takes: no other runs what needs Triton
        chosen = [*(test for test in chosen if test != INTERPRETED), INTERPRETED]
    return chosen


def _is_in_function(bug: Bug) -> bool:
    tree = ast.parse((REPO / bug.file).read_text("utf-8"))
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(each.body[0].lineno <= bug.line <= (each.end_lineno or 0) for each in functions)


def _places(bug: Bug) -> list[tuple[str, int]]:
    """Return (file, line) of a bug; if it runs at import, in whichever test that is, of what reads the name that it
    gives a value; else of its function or class, [] of the top level."""
    tree = ast.parse((REPO / bug.file).read_text("utf-8"))
    first, last = 0, -1
    blocks = [
        each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    for node in blocks:
        if node.lineno <= bug.line <= (node.end_lineno or 0):
            if not isinstance(node, ast.ClassDef) and node.body[0].lineno <= bug.line:
                return [(bug.file, bug.line + i) for i in range(bug.text.count("\n") + 1)]
            first, last = node.lineno, node.end_lineno or 0  # the innermost comes last
    inside = [(bug.file, line) for line in range(first, last + 1)]
    return [each for name in _given_a_value(tree, bug.line) for each in _readers(name, bug.file)] or inside


def _given_a_value(tree: ast.AST, line: int) -> list[str]:
    """Return the names that an assignment on a line gives a value."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign) and _is_on(node, line)]
    return [target.id for node in nodes for target in _targets(node)]


def _is_on(node: ast.Assign | ast.AnnAssign, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _readers(name: str, file: str) -> list[tuple[str, int]]:
    """Return (file, line) of what reads a name, in its own file, and in others unless it is one of many; also of what
    reads a name that is made of it at import, as a table of flags becomes part of a script."""
    found, left, seen = [], [(name, file)], {(name, file)}
    while left:
        name, file = left.pop()
        places, made = _read_names()[name], _made_of()[name]
        is_few = sum(place != file for place, _ in places) <= FEW_READERS
        found += [(place, line) for place, line in places if is_few or place == file]
        new = {(each, place) for each, place in made if is_few or place == file} - seen
        left += sorted(new)
        seen |= new
    return found


@functools.cache
def _made_of() -> dict[str, list[tuple[str, str]]]:
    """Return {name: [(another name, file) whose value is made of it where its file is imported]}."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in found_in(PACKAGES, "*.py"):
        file = path.relative_to(REPO).as_posix()
        for each in ast.parse(path.read_text("utf-8")).body:
            read = (
                {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(each)} if _targets(each) else set()
            )
            for target in _targets(each):
                for name in read - {target.id, ""}:
                    found[name].append((target.id, file))
    return found


@functools.cache
def _read_names() -> dict[str, list[tuple[str, int]]]:
    """Return {name or attribute: [(file, line) that reads it in a function]}."""
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path in found_in(PACKAGES, "*.py"):
        file = path.relative_to(REPO).as_posix()
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            for part in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                name = getattr(part, "id", getattr(part, "attr", ""))
                if name and isinstance(part.ctx, ast.Load):  # type: ignore[attr-defined]
                    found[name].append((file, part.lineno))
    return found


def _naming_constant(bug: Bug) -> list[str]:
    """Return the tests that name the constant of a module in which a bug is, or whose page does: they run no line of
    it."""
    tree = ast.parse((REPO / bug.file).read_text("utf-8"))
    names = _given_a_value(ast.Module([each for each in tree.body if isinstance(each, ast.Assign)], []), bug.line)
    found = []
    for file in (each for each in _naming(bug.file) if names and "::" not in each):
        lines = (REPO / file).read_text("utf-8").splitlines()
        for node in ast.parse("\n".join(lines)).body:
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                found += [f"{file}::{node.name}"] * any(re.search(rf"\b{name}\b", text) for name in names)
    return found


def _module(file: str) -> str:
    return file.removeprefix("packages/migrate/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def _naming(file: str) -> list[str]:
    """Return the test files that name a module, and the test of those that Triton's interpreter runs."""
    module = _module(file)
    package, _, name = module.rpartition(".")
    pattern = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    paths = found_in(TESTS, "test_*.py")
    naming = [p.relative_to(REPO).as_posix() for p in paths if pattern.search(p.read_text("utf-8"))]
    texts = [path.read_text("utf-8") for path in (REPO / "tests").rglob("interpreted_*.py")]
    is_interpreted = package == "sightline.kernels" and any(re.search(rf"\b{name}\b", text) for text in texts)
    return [*naming, *[INTERPRETED] * is_interpreted]


# Trials


def _environ(tree: Path) -> dict[str, str]:
    given = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    places = [str(tree), str(tree / "packages" / "migrate"), *(p for p in given if not Path(p).is_relative_to(REPO))]
    path = os.pathsep.join(places)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class Result(NamedTuple):
    """What became of a bug, and the test that noticed it, "" where none did or it hung."""

    what: str
    test: str = ""


def copied(tree: Path) -> None:
    """Copy what the tests need into a folder, compiled: of a file that a bug changes the digest tells."""
    for name in ("sightline", "packages", "tests", "docs", "benchmarks", "notebooks", ".ci"):
        shutil.copytree(REPO / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*REPO.glob("*.*"), REPO / "Makefile", REPO / "Dockerfile"]:
        if path.is_file():
            shutil.copy(path, tree)
    shutil.copytree(TYPES, tree / TYPES.name)
    with contextlib.suppress(FileExistsError):
        (tree.parent / "shared").symlink_to(REPO.parent / "shared")
    for package in PACKAGES:
        by_digest = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(tree / package.relative_to(REPO), quiet=2, invalidation_mode=by_digest)


def begin(tree: Path) -> None:
    """Give this process a copy of the tree, and import what most tests need; its forks have it, too."""
    global _tree
    _tree = tree
    gc.disable()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in WARM:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    # What pytest compiles of the tests stays.
    _pytest(["--collect-only", *(str(each.relative_to(REPO)) for each in TESTS)], 600, compiles=True)


_tree: Path


def tried(bug: Bug, stages: list[tuple[list[str], float]], until: float) -> Result:
    """Write the bug into the copy of this process, run the tests with the seconds that they may take, undo it; return
    "not run by any test", "survived", or one of CAUGHT; LATE if it is too late to begin."""
    if time.monotonic() > until:
        return Result(LATE)
    path = _tree / bug.file
    source = path.read_bytes()
    end = bug.start + len(bug.text.encode())
    code: int | None = 0
    for tests, seconds in stages:
        path.write_bytes(source[: bug.start] + bug.instead.encode() + source[end:])
        try:
            code, test = _pytest(["-x", *tests], seconds)
        finally:
            path.write_bytes(source)
        if code is None:  # it hangs, which a person would notice
            if _pytest(["-x", *tests], seconds)[0] is not None:
                return Result("hung")
        elif test or code not in (0, 1, 4, 5):  # or it crashed
            return Result("caught", test)
        elif code == 4 and _pytest(["--collect-only", *tests], seconds)[0] != 4:  # the tests cannot be read any more
            return Result("caught")
    path.write_bytes(source[: bug.start] + bug.instead.encode() + source[end:])
    try:
        if linted(_tree, _tree / TYPES.name, bug.file):
            return Result(BY_LINT)
        return Result("survived" if stages else "not run by any test")
    finally:
        path.write_bytes(source)


def linted(tree: Path, cache: Path, file: str = "") -> str:
    """Return what mypy says of a tree, and ruff of a file of it."""
    types = ["mypy", "--no-warn-unused-ignores", "--cache-dir", str(cache)]
    rules = ["ruff", "check", "--no-cache", "--quiet", "--select", "F,B,PLE", file]
    for words in [types, *[rules] * bool(file)]:
        done = subprocess.run([sys.executable, "-m", *words], cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stdout + done.stderr
    return ""


def failing(tests: list[str], seconds: float) -> set[str]:
    """Return those of some tests that fail without a bug; of a file, whether it can be read."""
    code, failed = _pytest([*(["--collect-only"] if "::" not in tests[0] else []), *tests], seconds)
    if code in (0, 1, 2, 5):
        return set(failed.splitlines())
    if len(tests) == 1:
        return set(tests)
    half = len(tests) // 2
    return failing(tests[:half], seconds) | failing(tests[half:], seconds)


@contextlib.contextmanager
def _new_folder(parent: str | None = None) -> Iterator[str]:
    """Yield a new folder, deleted at the end: by this process alone, which tempfile.TemporaryDirectory cannot say."""
    folder = tempfile.mkdtemp(prefix="mutants-", dir=parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pytest(words: list[str], seconds: float, compiles: bool = False) -> tuple[int | None, str]:
    """Run tests in a fork; return the exit code, None where they hung, and all that failed."""
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2**33 else None
    with _new_folder(memory) as folder:
        said = Path(folder, "failed")
        child = os.fork()
        if not child:
            os.environ.update(TMPDIR=folder, PYTEST_DEBUG_TEMPROOT=folder)
            tempfile.tempdir = None
            _run_pytest(words, said, compiles)
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        until, code = time.monotonic() + seconds * busy, None
        while code is None and time.monotonic() < until:
            ended, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        if code is None:
            os.waitpid(child, 0)
        return code, said.read_text("utf-8") if said.exists() else ""


def _run_pytest(words: list[str], failed: Path, compiles: bool) -> None:
    """As `python -m pytest WORDS` in the copy, in a process group of its own; write down what failed."""
    code = 3
    try:
        os.setpgid(0, 0)
        os.chdir(_tree)
        os.environ.update(_environ(_tree))
        sys.dont_write_bytecode = not compiles
        libraries = sysconfig.get_paths()["purelib"]
        others = [place for place in sys.path if not Path(place or ".").resolve().is_relative_to(REPO)]
        sys.path[:] = [str(_tree / "tests"), str(_tree), *others, libraries]
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        sys.stdout, sys.stderr = (open(stream, "w", encoding="utf-8", closefd=False) for stream in (1, 2))  # noqa: SIM115
        import pytest
        import warm  # type: ignore[import-not-found]

        warm._start_listening = functools.partial(_listen, _spare(), warm._start_listening)
        words = ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", *words]
        code = pytest.main(words, plugins=[_Failures(failed)])
    finally:
        os._exit(code)


def _spare() -> socket.socket:
    """Fork a process that becomes tests/forker.py when it is asked: it has imported torch, which takes seconds."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    said, descriptors, *_ = socket.recv_fds(theirs, 1 << 20, 2)
    if said:
        script, environ = json.loads(said)
        os.environ.clear()
        os.environ.update(environ)
        stdin, listener = descriptors
        os.dup2(stdin, 0)
        os.close(stdin)
        os.set_inheritable(listener, True)
        sys.path[0] = str(Path(script).parent)
        sys.path.insert(2, str(_tree / "packages" / "migrate"))
        sys.argv = [script, str(listener)]
        sys.modules.pop("warm", None)  # of this environment
        runpy.run_path(script, run_name="__main__")
    os._exit(0)


def _listen(
    spare: socket.socket, cold: Callable[..., None], script: Path, environ: Mapping[str, str], place: Path
) -> None:
    """As warm._start_listening, in the spare process if it is the script that this one is for."""
    if script.parent.name != "tests":
        cold(script, environ, place)
        return
    listener = socket.socket(socket.AF_UNIX)
    place.unlink(missing_ok=True)
    listener.bind(str(place))
    listener.listen()
    stdin, _ = os.pipe()  # the other end stays open until this process ends
    socket.send_fds(spare, [json.dumps([str(script), dict(environ)]).encode()], [stdin, listener.fileno()])
    os.close(stdin)
    listener.close()


class _Failures:
    """A plugin that writes down which tests fail, or which files cannot be collected."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logreport(self, report: object) -> None:
        self._note(report)

    def pytest_collectreport(self, report: object) -> None:
        self._note(report)

    def _note(self, report: object) -> None:
        if report.failed:  # type: ignore[attr-defined]
            with self.path.open("a", encoding="utf-8") as out:
                out.write(f"{report.nodeid}\n")  # type: ignore[attr-defined]


def in_stages(tests: list[str], known: Map) -> list[tuple[list[str], float]]:
    """Return (tests, seconds after which they hang), to be run one after the other."""
    stages, used, left = [], 0.0, list(STAGES_S)
    for test in tests:
        taken = known.seconds.get(test, 0.01)
        if not stages or (used + taken > left[0] and stages[-1][0]):
            left = left[bool(stages) :]
            stages.append(([], 60.0))
        used += taken
        stages[-1] = ([*stages[-1][0], test], stages[-1][1] + 10 * taken)
    return stages


def main() -> int:
    """Draw, try, and report; return 1 where fewer than nine in ten are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--below", default="", help="draw in this folder or file only, e.g. data/sources or packages")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds of tests for one bug, as they take when traced on free cores"
    )
    parser.add_argument("--within", type=float, default=1e9, help="seconds after which no more bugs are tried")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of this draw")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the bugs that are caught, too")
    arguments = parser.parse_args()
    bugs = list(enumerate(drawn(arguments.number, arguments.seed, arguments.below)))
    if arguments.only:
        bugs = [(i, bug) for i, bug in bugs if i in arguments.only]
    known = traced(arguments.jobs)
    if said := linted(REPO, TYPES):
        sys.exit(said)
    equivalent = set((REPO / EQUIVALENT.split()[-1]).read_text("utf-8").replace("'", '"').splitlines())
    began = time.monotonic()
    results = {i: Result(bug.left_out or EQUIVALENT) for i, bug in bugs if bug.left_out or bug.is_in(equivalent)}
    with _new_folder() as folder, _pool(Path(folder), arguments.jobs) as pool:
        broken: set[str] = set()  # fail without a bug, too
        left, until = [(i, bug) for i, bug in bugs if i not in results], began + arguments.within
        while left:
            trials = {}
            for i, bug in left:
                tests = [test for test in chosen_tests(bug, known, arguments.limit) if test not in broken]
                trials[pool.submit(tried, bug, in_stages(tests, known), until)] = i, bug
            for trial in as_completed(trials):
                i, bug = trials[trial]
                results[i] = trial.result()
                if results[i].what not in (*CAUGHT, LATE) or arguments.verbose:
                    told = f"{results[i].what}: #{i}, line {bug.line}: {bug.edit} {results[i].test.strip()}"
                    print(f"{len(results):4} {time.monotonic() - began:5.0f} s  {told}", flush=True)
            if not broken:  # those that come too late are the last of the draw; later ones that do are missed
                bugs = [(i, bug) for i, bug in bugs if results[i].what != LATE]
            shares = _shares({test for each in results.values() for test in each.test.splitlines()} - broken, known)
            new = set().union(*pool.map(failing, [tests for tests, _ in shares], [seconds for _, seconds in shares]))
            broken |= new
            left = [(i, bug) for i, bug in left if new & set(results[i].test.splitlines())]
            until += arguments.within / 2
            if new:
                print(f"tried again without tests that fail without a bug: {', '.join(sorted(new))}", flush=True)
    print(_table([(bug, results[i].what) for i, bug in bugs], time.monotonic() - began))
    print(f"{sum(os.times()[2:4]):.0f} s of cores")
    counted = [results[i].what for i, _ in bugs if not _is_left_out(results[i].what)]
    return int(sum(what not in CAUGHT for what in counted) > len(counted) / 10)


def _pool(folder: Path, jobs: int) -> ProcessPoolExecutor:
    """Return processes with a copy of the tree each."""
    context = multiprocessing.get_context("fork")
    trees = context.SimpleQueue()
    for job in range(jobs):
        copied(folder / str(job) / "sightline")
        trees.put(folder / str(job) / "sightline")
    return ProcessPoolExecutor(jobs, context, lambda: begin(trees.get()))


def _shares(tests: set[str], known: Map) -> list[tuple[list[str], float]]:
    """Return (tests, seconds after which they hang): files that could not be read, and shares of others."""
    files = sorted(test for test in tests if "::" not in test)
    others = sorted(tests - set(files))
    parts = [part for part in (files, *(others[i::SHARES] for i in range(SHARES))) if part]
    return [(part, 120 + 10 * sum(known.seconds.get(test, 1) for test in part)) for part in parts]


def _is_left_out(what: str) -> bool:
    return what == EQUIVALENT or what in (DEVICE, TIME)


def _table(results: list[tuple[Bug, str]], seconds: float) -> str:
    """Return the rate by folder. `left out` are equivalent bugs and those of the rules, which do not count."""
    folders = sorted({_folder(bug) for bug, _ in results})
    lines = [f"{'folder':16} {'bugs':>5} {'caught':>7} {'left out':>9} {'missed':>7}"]
    for folder in [*folders, "all"]:
        of = [what for bug, what in results if folder in ("all", _folder(bug))]
        caught, out = sum(what in CAUGHT for what in of), sum(map(_is_left_out, of))
        lines.append(f"{folder:16} {len(of):5} {caught:7} {out:9} {len(of) - caught - out:7}")
    reasons = Counter(what for _, what in results if _is_left_out(what))
    lines += [f"left out: {number} {reason}" for reason, number in sorted(reasons.items())]
    counted = [what for _, what in results if not _is_left_out(what)]
    caught = sum(what in CAUGHT for what in counted)
    share = caught / max(len(counted), 1)
    lines.append(f"of those caught, {counted.count(BY_LINT)} by lint alone")
    return "\n".join([*lines, f"caught {caught} of {len(counted)} ({share:.1%}) in {seconds:.0f} s"])


def _folder(bug: Bug) -> str:
    parts = bug.file.split("/")
    return parts[1] if len(parts) > 2 else "sightline"


if __name__ == "__main__":
    sys.exit(main())
