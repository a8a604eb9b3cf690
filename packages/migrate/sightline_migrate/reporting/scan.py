"""`sightline migrate scan`: list the uses of CUDA in a script and the effect of each, before it runs.

Reads the source only; the script is neither executed nor imported. Effects come from the table of rules.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.machinery
import inspect
import itertools
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from sightline_migrate import targets, terminal
from sightline_migrate.options import MigrateError, command
from sightline_migrate.reporting import report, syncs
from sightline_migrate.reporting.advice import ACTIVE_DEVICE, NO_DRIVER_FOR_DEVICE, NO_NVIDIA_SMI, OPTIONS
from sightline_migrate.rules.table import Rule, families
from sightline_migrate.stand_ins import finder, libcudart, missing
from sightline_migrate.virtual import places

FORMAT = 1
SYNC = "sync"
EXIT_REFUSED = 3
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "node_modules", "__pycache__", "build", "dist")
STAND_INS = ("apex", "pynvml")
ROOTS = ("torch", "triton", "ctypes", *STAND_INS)
CALLS_OF_CLASSES = ("__init__", "__new__", "__call__")
# Rules that matter only if one of these keyword arguments is given.
NEEDS_OF_FAMILY = {"factories": ("device",), "convolution": ("stride",)}
NEEDS_OF_NAME = {
    "torch.utils.data": ("pin_memory", "pin_memory_device"),
    "torch.distributed.barrier": ("device_ids",),
    "torch.distributed.distributed_c10d.barrier": ("device_ids",),
}
CAPTURABLE = "torch.optim.Optimizer.add_param_group"
# Rules that change something only with --fp16-to-bf16 or --float32.
CONVERTING = (
    "torch.Tensor.half", "torch.nn.Module.half", "torch.set_default_dtype", "torch.Tensor.bfloat16",
    "torch.nn.Module.bfloat16",
)  # fmt: skip
SHOWN_AS = ("torch.Tensor.is_cuda", "torch.Tensor.is_cpu", "torch.Tensor.get_device")
UNREADABLE = ("device", "dtype", "type", "new", "share_memory_")  # too common as names of other things
LOADS_LIBRARY = ("ctypes.PyDLL", "ctypes.cdll.LoadLibrary", "ctypes.pydll.LoadLibrary")
CUDART_FUNCTION = re.compile("cuda[A-Z][A-Za-z0-9]+")
RUN_COMMANDS = ("Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "popen", "run", "system")
KERNEL_OF_TRITON = ("triton.jit", "triton.autotune", "triton.heuristics")
TOO_DEEP = ": an expression is nested too deeply to read, e.g. a sum of 1000 terms; split it"
IMPORTED = ("torch.amp", "torch.cuda", "torch.distributed", "torch.nn", "torch.profiler", "torch.utils.data")
LOUD = "torch.utils.cpp_extension"  # importing it warns about missing CUDA; its rules are found by name
STATIC_SYNCS = {name: label for name, label in syncs.METHODS.items() if not name.startswith("__")}


@dataclass(frozen=True)
class CudaUse:
    """One use of CUDA at one line."""

    file: str
    line: int
    kind: str
    """exact, adapted, ignored, refused, or sync"""
    api: str
    what: str
    source: str


def main(argv: Sequence[str]) -> int:
    """Run the command `scan`; return 0, or 3 with --strict if a use would be refused."""
    what = "list each use of CUDA and its effect, without running anything"
    parser = argparse.ArgumentParser(f"{command()} scan", description=what, allow_abbrev=False)
    parser.add_argument("paths", metavar="FILE_OR_FOLDER", nargs="+", help="scripts, or folders with .py files")
    parser.add_argument("--target", default="auto", help=f"as in `{command()}`")
    parser.add_argument("--fp16-to-bf16", action="store_true", help="also list conversions by that option")
    parser.add_argument("--float32", action="store_true", help="also list conversions by that option")
    parser.add_argument("--syncs", action="store_true", help="also list lines that wait for the device")
    parser.add_argument("--advise", action="store_true", help="also say how each line gets faster and more accurate")
    parser.add_argument("--strict", action="store_true", help=f"exit code {EXIT_REFUSED} if a use would be refused")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    target = targets.choose(arguments.target)
    name = target.name if target is not None else "cpu"
    rules = RuleIndex(name, CONVERTING if arguments.float32 else CONVERTING[:3] if arguments.fp16_to_bf16 else ())
    files = sources(arguments.paths)
    rules.extensions = extensions_near(files)
    found: list[CudaUse] = []
    advice: list[Any] = []
    unread: dict[Path, str] = {}
    for file in files:
        try:
            uses = scan_file(file, rules)
            advice += _advice(file, rules, uses) if arguments.advise else []
        except MigrateError as error:
            unread[file] = str(error)
            continue
        found += [use for use in uses if arguments.syncs or use.kind != SYNC]
    files = [file for file in files if file not in unread]
    if not files:
        raise MigrateError("\n".join(unread.values()))
    for text in unread.values():
        terminal.say(f"{command()} scan: skipped {text}", to="stderr")
    if arguments.json:
        document: dict[str, Any] = {"format": FORMAT, "target": name, "files": [str(f) for f in files]}
        document |= {"findings": [asdict(use) for use in found]}
        document |= {"advice": [asdict(each) for each in advice]} if arguments.advise else {}
        terminal.say(json.dumps(document, indent=1))
    else:
        terminal.say(as_text(found, files, name))
    if arguments.advise and not arguments.json:
        from sightline_migrate.reporting import tuning

        terminal.say(f"\n{tuning.as_text(advice)}")
    return EXIT_REFUSED if arguments.strict and any(use.kind == "refused" for use in found) else 0


def _advice(file: Path, rules: RuleIndex, found: Sequence[CudaUse]) -> list[Any]:
    from sightline_migrate.reporting import tuning  # it reads files with the Reader below

    try:
        return tuning.advise_file(file, rules, found)
    except RecursionError as error:
        raise MigrateError(f"{file}{TOO_DEEP}") from error


def sources(paths: Sequence[str]) -> list[Path]:
    """Return the Python files among and below `paths`."""
    found: list[Path] = []
    for text in paths:
        path = Path(text)
        if path.is_dir():
            below = sorted(path.rglob("*.py"))
            found += [p for p in below if not _is_skipped(p.relative_to(path).parts[:-1])]
        elif path.is_file():
            found.append(path)
        else:
            raise MigrateError(f"{text} is neither a file nor a folder; give a script or a folder of scripts")
    if not found:
        raise MigrateError(f"no .py file below {', '.join(paths)}; give a script or a folder of scripts")
    return list(dict.fromkeys(found))


def _is_skipped(folders: tuple[str, ...]) -> bool:
    return any(folder.startswith(".") or folder in SKIPPED_FOLDERS for folder in folders)


def extensions_near(files: Sequence[Path]) -> dict[str, Path]:
    """Return the CUDA extensions that setup.py files build, up to two folders below the scripts: git's submodules."""
    setups = [file for file in files if file.name == "setup.py"]
    for folder in dict.fromkeys(file.parent for file in files):
        setups += [found for pattern in ("setup.py", "*/setup.py", "*/*/setup.py") for found in folder.glob(pattern)]
    found: dict[str, Path] = {}
    for setup in dict.fromkeys(setups):
        try:
            tree = ast.parse(setup.read_bytes())
        except (OSError, RecursionError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("CUDAExtension"):
                names = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "name")]
                found |= {_text(name): setup for name in names if _text(name)}
    return found


def scan_file(path: Path, rules: RuleIndex) -> list[CudaUse]:
    """Return the uses of CUDA in one file, in line order."""
    text = path.read_bytes()
    lines = text.decode("utf-8", "replace").splitlines()
    try:
        uses = list(Reader(ast.parse(text, str(path)), rules, path).uses())
    except SyntaxError as error:
        raise MigrateError(f"{path}:{error.lineno}: {error.msg}; this Python version cannot parse it") from error
    except ValueError as error:  # a null byte, until Python 3.12
        raise MigrateError(f"{path}: {error}; this Python version cannot parse it") from error
    except RecursionError as error:
        raise MigrateError(f"{path}{TOO_DEEP}") from error
    found = {
        (line, kind, api): CudaUse(str(path), line, kind, api, what, lines[line - 1].strip())
        for line, kind, api, what in uses
    }
    return sorted(found.values(), key=lambda use: (use.line, (*report.KINDS, SYNC).index(use.kind)))


class RuleIndex:
    """The rules of one target, by name, by identity (a class has many names) or by method name."""

    def __init__(self, target: str, converting: Sequence[str] = ()) -> None:
        self.target = target
        self._by_name: dict[str, Rule] = {}
        self._by_object: dict[int, Rule] = {}
        self.methods: dict[str, Rule] = {}
        self.needs: dict[Rule, tuple[str, ...]] = {}
        self.silent = set(_without_rules())
        self.extensions: dict[str, Path] = {}
        """modules of CUDA kernels that a setup.py near the scripts builds -> that file"""
        for family in families():
            for rule in family.rules():
                if rule.fits(target) and (rule.name not in CONVERTING or rule.name in converting):
                    self._enter(rule, family.__name__.rpartition(".")[2])

    def _enter(self, rule: Rule, family: str) -> None:
        owner, _, last = rule.name.rpartition(".")
        name = owner if last in CALLS_OF_CLASSES else rule.name
        self._by_name.setdefault(name, rule)
        value = resolve(name) if not rule.module else None
        if value is not None and not isinstance(value, bool | int | str):
            self._by_object.setdefault(id(value), rule)
        if owner in ("torch.Tensor", "torch.nn.Module") and last not in UNREADABLE:
            self.methods.setdefault(last, rule)
        by_name = next((needs for start, needs in NEEDS_OF_NAME.items() if f"{rule.name}.".startswith(start + ".")), ())
        self.needs[rule] = NEEDS_OF_FAMILY.get(family, ()) or by_name

    def has_below(self, name: str) -> bool:
        """Return True if a rule's name starts with this name and a dot."""
        return any(known.startswith(name + ".") for known in self._by_name)

    def find(self, dotted: str) -> tuple[str, Rule] | None:
        """Return (name, rule) for the longest prefix that has a rule, or None."""
        parts = dotted.split(".")
        for end in range(len(parts), 1, -1):
            name = ".".join(parts[:end])
            rule = self._by_name.get(name)
            value = resolve(name) if rule is None else None
            if rule is None and value is not None:
                kin = value.__mro__ if isinstance(value, type) else (value,)
                rule = next((self._by_object[id(each)] for each in kin if id(each) in self._by_object), None)
            if rule is not None:
                return name, rule
        return None


def _without_rules() -> Iterator[str]:
    """Yield all names that the stand-ins offer."""
    for package in finder.PACKAGES.values():
        for module, names in package.MODULES.items():
            yield from (f"{module}.{name}" for name in names)


def resolve(dotted: str) -> Any:
    """Return the object of a torch name, or None; imports some modules of torch, never other packages."""
    parts = dotted.split(".")
    # torch.ops and torch.classes create attributes on access.
    if parts[0] != "torch" or parts[1:2] in (["ops"], ["classes"]) or dotted.startswith(LOUD):
        return None
    here: Any = torch
    for at, part in enumerate(parts[1:], start=2):
        there = inspect.getattr_static(here, part, None) if isinstance(here, type) else _attribute(here, part)
        if there is None:
            there = _imported(here, ".".join(parts[:at]))
        if there is None:
            return None
        here = there
    return here


def _attribute(owner: Any, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names: the script uses them, not we
        return getattr(owner, name, None)


def _imported(package: Any, name: str) -> ModuleType | None:
    """Import a module that `import torch` does not load, if rules refer to it."""
    path = vars(package).get("__path__") if isinstance(package, ModuleType) else None
    is_wanted = path is not None and any(f"{name}.".startswith(known + ".") for known in IMPORTED)
    if not is_wanted or importlib.machinery.PathFinder.find_spec(name, path) is None:
        return None
    return importlib.import_module(name)


UseInFile = tuple[int, str, str, str]  # line, kind, api, what


class Reader:
    """Finds the uses of CUDA in one syntax tree."""

    def __init__(self, tree: ast.Module, rules: RuleIndex, path: Path | None = None) -> None:
        self.tree = tree
        self.path = path
        self.rules = rules
        self.aliases = dict(_aliases(tree))
        self.guarded = set(_guarded(tree))
        self.opens_cudart = any(isinstance(node, ast.Call) and _opens_cudart(node) for node in ast.walk(tree))
        # An alias (`sync = torch.cuda.synchronize`) counts like an import.
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                dotted = self.dotted(node.value)
                if dotted.startswith(("torch.cuda", "torch.amp")) and callable(resolve(dotted) or torch.cuda):
                    self.aliases.setdefault(node.targets[0].id, dotted)

    def dotted(self, node: ast.AST) -> str:
        """Return the full name of `tc.amp.autocast`, resolved through the imports; '' if it is not imported."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.aliases:
            return ""
        plain = itertools.takewhile(lambda part: not part.startswith("__"), parts)  # `amp.__dict__` counts as amp
        return ".".join([self.aliases[node.id], *plain])

    def uses(self) -> Iterator[UseInFile]:
        inner: set[int] = set()
        called: dict[int, ast.Call] = {}
        for node in ast.walk(self.tree):  # breadth first: a call before its function, a.b.c before a.b
            if isinstance(node, ast.Call):
                called[id(node.func)] = node
                yield from self._literals(node)
                if _runs_nvidia_smi(node):
                    yield node.lineno, "refused", "nvidia-smi", NO_NVIDIA_SMI
            if isinstance(node, ast.Attribute):
                inner.add(id(node.value))
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from self._import(node)
            elif isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
                yield from self._use(node, called.get(id(node)))

    def _use(self, node: ast.Attribute | ast.Name, call: ast.Call | None) -> Iterator[UseInFile]:
        line = node.end_lineno or node.lineno
        dotted = self.dotted(node)
        if dotted:
            yield from self._name(line, dotted, call)
        elif isinstance(node, ast.Attribute):
            yield from self._method(line, node.attr, call)

    def _name(self, line: int, dotted: str, call: ast.Call | None) -> Iterator[UseInFile]:
        """Yield uses by full name."""
        if dotted.split(".")[0] not in ROOTS:
            return
        if dotted == "torch.cuda.synchronize" and call is not None:
            yield line, SYNC, dotted, "waits for the device"
        if dotted.startswith("triton."):
            yield from self._triton(line, dotted)
            return
        if dotted == "torch.device":
            yield from _device_number(line, call)
            return
        if dotted.split(".")[0] in STAND_INS:
            yield from self._stand_in(line, dotted)
            return
        if dotted in LOADS_LIBRARY:
            dotted = "ctypes.CDLL"
        if dotted.startswith("torch.optim.") and call is not None and _given(call, "capturable"):
            dotted = CAPTURABLE
        found = self.rules.find(dotted)
        if found is None:
            if dotted.startswith("torch.cuda.") and _is_unknown(dotted):
                yield line, "refused", dotted, f"torch {torch.__version__} has no such name, or no rule covers it"
            return
        name, rule = found
        if self._matters(rule, call):
            yield line, rule.kind, name, self._what(rule)

    def _method(self, line: int, attribute: str, call: ast.Call | None) -> Iterator[UseInFile]:
        """Yield uses such as `.cuda()` of an unknown object; few things besides tensors and modules have it."""
        if call is not None and attribute in STATIC_SYNCS:
            yield line, SYNC, STATIC_SYNCS[attribute], "waits for the device"
        if call is not None and self.opens_cudart and CUDART_FUNCTION.fullmatch(attribute):
            runtime = libcudart.FUNCTIONS.get(attribute)
            kind, what = ("refused", libcudart.REFUSED) if runtime is None else (runtime.kind, runtime.what)
            yield line, kind, f"libcudart.{attribute}", what
            return
        rule = self.rules.methods.get(attribute)
        is_asked = attribute in ("is_cuda", "is_cpu")
        if rule is None or (call is None) != is_asked:
            return
        if attribute == "to" and call is not None:
            values = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "device")]
            if not any(self._may_be_device(value) for value in values):
                if any(_text(value) == "cpu" for value in values):
                    yield line, SYNC, '.to("cpu")', "waits for the device"
                return
        if self._matters(rule, call):
            doubt = self._doubt(attribute, call) if call is not None and self.rules.target == "cpu" else ""
            kind = "adapted" if doubt else rule.kind
            yield line, kind, f".{attribute}" + ("" if is_asked else "()"), doubt or self._what(rule)

    def _doubt(self, attribute: str, call: ast.Call) -> str:
        """Return what a move does with results of operations, of which nobody knows where they were computed."""
        destinations = [*call.args[:1], *(k.value for k in call.keywords if k.arg in ("device", "tensor", "other"))]
        if attribute == "type_as" or (attribute == "to" and any(_is_device_of_a_tensor(each) for each in destinations)):
            return f"copied if it is known to be on the other side, else {places.SHARED_IN_DOUBT}"
        moved = call.func.value if isinstance(call.func, ast.Attribute) else None
        if attribute in ("to", "cuda", "cpu") and _is_computed(moved):
            return places.COPIED_IN_DOUBT
        return ""

    def _may_be_device(self, node: ast.expr) -> bool:
        """Return True for a literal that names CUDA or a device index, and for names of unknown value."""
        if isinstance(node, ast.Constant):
            return str(node.value).startswith("cuda") or isinstance(node.value, int)
        return not isinstance(resolve(self.dotted(node)) if self.dotted(node) else None, torch.dtype)

    def _matters(self, rule: Rule, call: ast.Call | None) -> bool:
        needs = self.rules.needs.get(rule, ())
        if rule.name == "ctypes.CDLL.__init__":
            return call is not None and _opens_cudart(call)
        if rule.name.startswith("torch.utils.cpp_extension.load"):
            return call is not None and _has_cuda_sources(call)
        if not needs:
            return True
        if call is None:
            return False
        return any(_given(call, name) for name in needs)

    def _what(self, rule: Rule) -> str:
        """Return the rule's text, or another one if an option decides."""
        if rule.name in SHOWN_AS and self.rules.target == "cpu":
            return "reports cpu; cuda with --claim"
        if rule.name.endswith(".autocast.__init__") and self.rules.target == "cpu":
            return f"{rule.what}; in float32 where a CPU only emulates its type"
        if rule.name == "torch.version.cuda":
            return f"unchanged ({torch.version.cuda}); 12.4 with --cuda-version 12.4"
        return rule.what

    def _triton(self, line: int, dotted: str) -> Iterator[UseInFile]:
        if dotted in KERNEL_OF_TRITON and self.rules.has_below("triton"):
            what = f"a kernel cannot run on {self.rules.target}; TRITON_INTERPRET=1 emulates it, slowly"
            yield line, "refused", dotted, what
        elif dotted.endswith(ACTIVE_DEVICE) and self.rules.has_below("triton"):
            yield line, "refused", dotted, NO_DRIVER_FOR_DEVICE.format(target=self.rules.target)

    def _stand_in(self, line: int, dotted: str) -> Iterator[UseInFile]:
        """Yield uses of apex and pynvml; there are no rules for them if they are installed."""
        package = dotted.split(".")[0]
        found = self.rules.find(dotted)
        if found is not None:
            yield line, found[1].kind, found[0], found[1].what
        elif any(f"{dotted}.".startswith(name + ".") for name in self.guarded):
            return
        elif dotted not in self.rules.silent and self.rules.has_below(package) and not self.rules.has_below(dotted):
            yield line, "refused", dotted, f"{package} is not installed, and its stand-in has no such name"

    def _import(self, node: ast.Import | ast.ImportFrom) -> Iterator[UseInFile]:
        for name in _imported_names(node):
            library = missing.find(name)
            built, setup = self._extension(name)
            if built and name not in self.guarded:
                yield node.lineno, "refused", built, missing.PACKAGES.get(library, f"CUDA kernels, built by {setup}")
            elif library and name not in self.guarded and not self._is_beside(name):
                yield node.lineno, "refused", library, missing.PACKAGES[library]
            if name.split(".")[0] in STAND_INS:
                yield from self._stand_in(node.lineno, name)

    def _extension(self, name: str) -> tuple[str, str]:
        """Return (module of CUDA kernels that a setup.py builds, that file), of another folder or by its full name."""
        for built, setup in self.rules.extensions.items():
            package = built.partition(".")[0]
            is_elsewhere = self.path is None or setup.parent not in self.path.parents
            for known in (built, package) if is_elsewhere else (built,):
                if f"{name}.".startswith(known + "."):
                    return known, report.short(os.path.abspath(setup))
        return "", ""

    def _is_beside(self, name: str) -> bool:
        """Return True if a module of that name is next to the script."""
        first = name.partition(".")[0]
        folder = self.path.parent if self.path is not None else None
        return folder is not None and ((folder / first).is_dir() or (folder / f"{first}.py").is_file())

    def _literals(self, call: ast.Call) -> Iterator[UseInFile]:
        """Yield `device="cuda"` arguments of calls without a rule: mapped where they reach torch."""
        for keyword in call.keywords:
            text = _text(keyword.value)
            if keyword.arg in ("device", "device_type") and text.startswith("cuda"):
                found = self.rules.find(self.dotted(call.func)) if self.dotted(call.func) else None
                is_method = isinstance(call.func, ast.Attribute) and call.func.attr in self.rules.methods
                if found is None and not is_method:
                    yield keyword.value.lineno, "exact", f'{keyword.arg}="{text}"', "mapped where it reaches torch"


def _aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (name in this file, full name) of every import, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if alias.name != "*":
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"
                elif node.module.split(".")[0] == "torch":
                    yield from (
                        (name, f"{node.module}.{name}") for name in getattr(resolve(node.module), "__all__", ())
                    )


def _imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{name}" for name in names] if node.module and not node.level else []
    return names


def _guarded(tree: ast.Module) -> Iterator[str]:
    """Yield names whose import may fail: `try: import cupy`, `except ImportError`; the script handles that itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(_catches_import_error(handler) for handler in node.handlers):
            for inner in (each for statement in node.body for each in ast.walk(statement)):
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    yield from _imported_names(inner)


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type is not None else "Exception"
    return any(name in caught for name in ("ImportError", "ModuleNotFoundError", "Exception"))


def _is_unknown(dotted: str) -> bool:
    """Return True if a name below torch.cuda is missing here, or is a function that no rule covers."""
    value = resolve(dotted)
    return value is None or (callable(value) and not isinstance(value, type | ModuleType) and "._" not in dotted)


def _device_number(line: int, call: ast.Call | None) -> Iterator[UseInFile]:
    """Yield torch.device(0) if this build has no accelerator: it raises, and torch.device is not replaced."""
    first = call.args[0] if call is not None and call.args else None
    if isinstance(first, ast.Constant) and type(first.value) is int:
        try:
            torch.device(first.value)
        except RuntimeError:
            what = f'this build of torch has no device {first.value}; use torch.device("cuda:{first.value}")'
            yield line, "refused", f"torch.device({first.value})", what


def _is_device_of_a_tensor(node: ast.expr) -> bool:
    """Return True for `x.device`; `self.device` and that of options are names, as a rule."""
    if not (isinstance(node, ast.Attribute) and node.attr == "device"):
        return False
    words = ast.unparse(node.value).lower().split(".")
    return words != ["self"] and not any(word in OPTIONS for word in words)


def _is_computed(node: ast.expr | None) -> bool:
    """Return True for `(x * 2)` and `Variable(x * 2)`."""
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith(("Variable", "Parameter")):
        node = node.args[0]
    return isinstance(node, ast.BinOp | ast.UnaryOp)


def _given(call: ast.Call, name: str) -> bool:
    """Return True if a keyword argument is given and does not switch off; `**options` may hold it."""
    return any(
        k.arg is None or (k.arg == name and _text(k.value) not in ("cpu", "False", "None")) for k in call.keywords
    )


def _opens_cudart(call: ast.Call) -> bool:
    """Return True for `ctypes.CDLL("libcudart.so")` under any name."""
    names = [_text(each) for each in (*call.args[:1], *(k.value for k in call.keywords if k.arg == "name"))]
    return ast.unparse(call.func).endswith(("CDLL", "LoadLibrary")) and any(map(libcudart.is_cudart, names))


def _runs_nvidia_smi(call: ast.Call) -> bool:
    if ast.unparse(call.func).rpartition(".")[2] not in RUN_COMMANDS:
        return False
    texts = [_text(each) for argument in call.args[:1] for each in ast.walk(argument) if isinstance(each, ast.Constant)]
    return any(re.match(r"(\S*/)?nvidia-smi\b", text.strip()) for text in texts)


def _has_cuda_sources(call: ast.Call) -> bool:
    if _given(call, "cuda_sources") or _given(call, "with_cuda"):
        return True
    texts = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return any(text.endswith((".cu", ".cuh")) for text in texts)


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def as_text(found: Sequence[CudaUse], files: Sequence[Path], target: str) -> str:
    """Format all uses, refused first, each with its effect."""
    lines = []
    for kind in (*report.KINDS, SYNC):
        of_kind = [use for use in found if use.kind == kind]
        if of_kind:
            lines.append(f"{kind}: {report.MEANING.get(kind, 'the host waits for the device here')}")
        for use in of_kind:
            at = f"{report.short(os.path.abspath(use.file))}:{use.line}"
            lines.append(f"  {at}  {use.api} --> {use.what}")
    counts = ", ".join(f"{kind} {sum(f.kind == kind for f in found)}" for kind in report.KINDS if kind != "converted")
    return "\n".join([*lines, f"{len(files)} file{'s' * (len(files) != 1)} on {target}: {counts}"])
