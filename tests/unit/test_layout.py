"""The rules of docs/why/architecture.md that a machine can check: who imports whom, docstrings, unsafe calls.

Every rule reads one module's syntax tree and yields (line, message); a failing test lists file:line: message.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "sightline"
GUEST = REPO / "packages" / "migrate" / "sightline_migrate"

MAX_DOCSTRING_LINES = 5

# What a recipe chooses. Inside its own folder a part may use its siblings.
CONCRETE_PARTS = (
    "sightline.models",
    "sightline.tasks.classification",
    "sightline.tasks.detection",
    "sightline.tasks.masks",
    "sightline.tasks.segmentation",
    "sightline.data.sources",
    "sightline.data.augment",
    "sightline.data.classification",
    "sightline.data.detection",
    "sightline.data.masks",
    "sightline.data.segmentation",
)
# The commands run behind the guard of sightline.terminal. What runs inside `import torch` prints what repr() made safe.
MAY_PRINT = (
    "sightline/cli.py",
    "sightline/commands/",
    "sightline/terminal/__init__.py",
    "sightline/hardware/launch/",
    "sightline_migrate/hook.py",
    "sightline_migrate/terminal.py",
    "sightline_migrate/autoload/",
)
VENDORS = "habana_frameworks"  # asked for only where the device is one of theirs
SERVERS = ("http.server", "socketserver", "xmlrpc.server", "wsgiref", "asyncio", "multiprocessing.managers")
KNOWS_YAML = "sightline/files/plain_yaml.py"
UNPICKLERS = ("pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")

LEVELS = REPO / "docs" / "why" / "architecture.md"
# Fields and rules of what a recipe is made of, without torch: they stand below the rooms that do the work.
LIGHT = re.compile(
    r"data\.(classification|detection|masks|segmentation)(\.config)?|models\.(config|pretrained)|tasks\.config"
    r"|train\.(config|optimizers|schedules)"
)

Offences = Iterator[tuple[int, str]]


@dataclass(frozen=True)
class Module:
    """One source file; `path` is relative to the folder that holds its package, with forward slashes."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree."""
        return list(ast.walk(self.tree))

    @property
    def folder(self) -> str:
        """The folder below the package, or '' for the files directly in it."""
        parts = self.path.split("/")
        return parts[1] if len(parts) > 2 else ""

    @property
    def package(self) -> list[str]:
        return self.path.split("/")[:-1]

    @property
    def is_guest(self) -> bool:
        return self.package[0] == GUEST.name


@cache  # every rule reads all of them
def modules() -> list[Module]:
    found = [
        Module(path.relative_to(package.parent).as_posix(), path.read_text("utf-8"))
        for package in (PACKAGE, GUEST)
        for path in sorted(package.rglob("*.py"))
    ]
    gc.disable()  # collections would look at 700,000 nodes again and again, for two seconds
    try:
        for module in found:
            assert module.nodes
        gc.freeze()
    finally:
        gc.enable()
    return found


@cache
def imports(module: Module) -> list[tuple[int, str]]:
    """(line, most specific dotted name) of every import, also lazy, relative, type-only or by literal name."""
    return list(_imports(module))


def _imports(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.package[: len(module.package) - node.level + 1] if node.level else []
            base = [*above, node.module] if node.module else above
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and called(node).split(".")[-1] in ("import_module", "__import__"):
            names = (argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant))
            yield from ((node.lineno, str(name)) for name in names)


def is_in(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@cache
def called(node: ast.Call) -> str:
    """`a.b.c` for a call of a.b.c; what cannot be named is left out."""
    names, target = [], node.func
    while isinstance(target, ast.Attribute):
        names.append(target.attr)
        target = target.value
    if isinstance(target, ast.Name):
        names.append(target.id)
    return ".".join(reversed(names))


@cache
def calls(module: Module) -> list[ast.Call]:
    return [node for node in module.nodes if isinstance(node, ast.Call)]


def keyword(call: ast.Call, name: str) -> object:
    """The literal value of a keyword argument; None when absent, `...` when it is not a literal."""
    for argument in call.keywords:
        if argument.arg == name:
            return argument.value.value if isinstance(argument.value, ast.Constant) else ...
    return None


@cache
def levels() -> dict[str, int]:
    """The level of every room, as docs/why/architecture.md lists them from the ground up."""
    block = re.search(r"^```levels\n(.*?)^```", LEVELS.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert block, f"{LEVELS} lists no levels"
    return {room: number for number, line in enumerate(block[1].splitlines()) for room in line.split()}


def room_of(name: str) -> tuple[str, str]:
    """(the room that decides the level, the folder) of a dotted name below sightline; a file at the top is a room."""
    below = name.removeprefix("sightline").removeprefix(".")
    folder = "recipe" if below.split(".")[0] == "parts" else below.split(".")[0]
    place = PACKAGE.joinpath(*below.split("."))
    module = below if place.is_dir() or place.with_suffix(".py").is_file() else below.rpartition(".")[0]
    return "light" if LIGHT.fullmatch(module) else folder, folder


@cache
def blocks_for_types(module: Module) -> list[tuple[int, int]]:
    """(first line, last line) below every `if TYPE_CHECKING`, which never run."""
    return [
        (node.body[0].lineno, node.body[-1].end_lineno or 0)
        for node in module.nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    ]


def is_for_types(module: Module, line: int) -> bool:
    return any(first <= line <= last for first, last in blocks_for_types(module))


def imports_point_down(module: Module) -> Offences:
    if module.is_guest:  # it has a rule of its own
        return
    own, folder = room_of(module.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    if folder in ("", "__main__"):  # the package itself holds its version, and the start of a process imports the door
        return
    for line, name in imports(module):
        if not is_in(name, "sightline"):
            continue
        other, its_folder = room_of(name)
        if its_folder in ("", folder, "__version__") or is_for_types(module, line):
            continue
        if {own, other} - levels().keys():
            yield line, f"{own} or {other} has no level; add it to the list of {LEVELS.relative_to(REPO)}"
        elif levels()[other] >= levels()[own]:
            yield line, f"{own} imports {name}; {other} does not stand below it, see {LEVELS.relative_to(REPO)}"


def train_knows_no_concrete_part(module: Module) -> Offences:
    if module.folder in ("train", "engine"):
        for line, name in imports(module):
            # norm.py is no model but what the engine does to any, and needs torch only.
            is_concrete = is_in(name, *CONCRETE_PARTS, "sightline.recipes") or name == "sightline.tasks"
            if is_concrete and not is_in(name, "sightline.models.norm"):
                yield (
                    line,
                    f"{module.folder} imports {name}; the engine knows only sightline.parts, a recipe brings the rest",
                )


def only_recipes_choose(module: Module) -> Offences:
    if module.folder in ("recipes", "train", "engine") or module.is_guest:  # have rules of their own
        return
    own = f"sightline.{module.folder}" if module.folder else "-"
    for line, name in imports(module):
        if is_in(name, *CONCRETE_PARTS) and not is_in(name, own):
            yield line, f"{module.path} imports {name}; only recipes import concrete parts"


def one_file_reads_yaml(module: Module) -> Offences:
    for line, name in imports(module):
        if is_in(name, "yaml") and module.path != KNOWS_YAML:
            yield line, f"imports {name}; only {KNOWS_YAML} may"


def the_guest_needs_torch_alone(module: Module) -> Offences:
    if not module.is_guest:
        return
    for line, name in imports(module):
        if name.split(".")[0] not in (*sys.stdlib_module_names, "torch", VENDORS, GUEST.name):
            yield line, f"{module.path} imports {name}; {GUEST.name} needs torch alone, so copy what it must have"


def the_guest_is_asked_at_one_door(module: Module) -> Offences:
    if module.is_guest or module.folder == "migrate":
        return
    for line, name in imports(module):
        if is_in(name, GUEST.name):
            yield line, f"{module.path} imports {name}; it may be missing, and sightline/migrate says so"


def private_files_stay_in_their_folder(module: Module) -> Offences:
    for line, name in imports(module):
        parts = name.split(".")
        private = next((at for at, part in enumerate(parts) if re.match("_(?!_)", part)), None)
        if parts[0] not in (PACKAGE.name, GUEST.name) or private is None:
            continue
        owner = parts[:private]
        if not any(root.joinpath(*owner).is_dir() for root in (REPO, GUEST.parent)):  # a private name of a file
            owner = owner[:-1]
        if module.package != owner:
            yield line, f"{module.path} imports {name}; _names belong to their folder, give it a public name"


def names_say_the_thing(module: Module) -> Offences:
    for part in module.path.removesuffix(".py").split("/"):
        if part in ("utils", "util", "helpers", "helper", "common", "misc"):
            yield 1, f"a file or folder called {part!r} says nothing about what it holds"


def docstrings_are_short(module: Module) -> Offences:
    tree = module.tree
    if not tree.body:  # an empty __init__.py
        return
    docstring = ast.get_docstring(tree)
    if not docstring:
        yield 1, "no module docstring; say in 1-5 lines what the file holds and where it sits in the flow"
    elif module.folder != "recipes" and len(docstring.splitlines()) > MAX_DOCSTRING_LINES:
        yield 1, f"module docstring of {len(docstring.splitlines())} lines; {MAX_DOCSTRING_LINES} is the limit"


def errors_are_not_swallowed(module: Module) -> Offences:
    for node in module.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield node.lineno, "bare except; name the error that is expected"
        caught = ast.unparse(node.type) if node.type else ""
        is_silent = all(
            isinstance(s, ast.Pass | ast.Continue) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
            for s in node.body
        )
        if is_silent and re.search(r"\b(Base)?Exception\b", caught):
            yield node.lineno, f"except {caught} goes on silently; name the error that is expected"


def nothing_runs_in_a_shell(module: Module) -> Offences:
    for call in calls(module):
        if keyword(call, "shell") not in (None, False):
            yield call.lineno, f"{called(call)}(shell=...); pass a list of arguments"
        if called(call) in ("os.system", "os.popen"):
            yield call.lineno, f"{called(call)}() runs a shell; use subprocess.run with a list of arguments"


def nothing_is_unpickled(module: Module) -> Offences:
    for line, name in imports(module):
        if is_in(name, *UNPICKLERS):
            yield line, f"imports {name}; what is unpickled can run code, use safetensors or JSON"
    for call in calls(module):
        if called(call) == "torch.load" and keyword(call, "weights_only") is not True:
            yield call.lineno, "torch.load() without weights_only=True"
        if called(call) in ("np.load", "numpy.load") and keyword(call, "allow_pickle") not in (None, False):
            yield call.lineno, f"{called(call)}() with allow_pickle"
        if called(call) in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            yield call.lineno, f"{called(call)}(); use yaml.safe_load"


def torchvision_decodes_nothing(module: Module) -> Offences:
    for line, name in imports(module):
        if is_in(name, "torchvision.io"):
            yield line, f"imports {name}, which torchvision is going to drop; use sightline/data/decode.py"
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "image" and ast.unparse(node) == "torch.ops.image":
            yield node.lineno, "torch.ops.image are torchvision's, which is going to drop them"


def the_terminal_is_guarded(module: Module) -> Offences:
    if module.path.startswith(MAY_PRINT):
        return
    for call in calls(module):
        if called(call) in ("print", "sys.stdout.write", "sys.stderr.write"):
            yield call.lineno, f"{called(call)}() lets control characters through; use sightline.terminal.say"
        if called(call) in ("Console", "rich.print") or called(call).startswith("rich.console."):
            yield call.lineno, f"{called(call)}() obeys markup in names; use sightline.terminal.console.Terminal"


def only_ranks_listen(module: Module) -> Offences:
    for line, name in imports(module):
        if is_in(name, *SERVERS):
            yield line, f"imports {name}; nothing of ours listens but ranks, see docs/reference/ranks.md"
    for call in calls(module):
        listens = called(call).split(".")[-1] in ("create_server", "TCPStore")
        if listens and module.path != "sightline/hardware/world.py":
            yield call.lineno, f"{called(call)}() listens; only hardware/world.py does, on the loopback if it can"


def archives_are_checked(module: Module) -> Offences:
    for call in calls(module):
        if called(call).split(".")[-1] in ("extractall", "unpack_archive"):
            yield call.lineno, f"{called(call)}() trusts the archive's names; use sightline/files/archive.py"


Rule = Callable[[Module], Offences]

# Each rule with sources it must refuse: a rule that cannot fail checks nothing.
RULES: dict[Rule, list[tuple[str, str]]] = {
    imports_point_down: [
        ("sightline/parts.py", "from sightline.data.check.images import Report"),
        ("sightline/parts.py", "def f():\n    from sightline.report.page import write_report"),
        ("sightline/recipe/store.py", "def f():\n    from sightline import recipes"),
        ("sightline/recipe/part.py", "from sightline.train.config import TrainConfig"),
        ("sightline/models/unet.py", "import sightline.train.step"),
        ("sightline/models/unet.py", "from sightline.data import decode"),
        ("sightline/data/sources/tar.py", "from ...tasks import classification"),
        ("sightline/data/detection/config.py", "def f():\n    from sightline.models import ssd"),
        ("sightline/tasks/detection.py", "from sightline.report import tiles"),
        ("sightline/train/loop.py", "from sightline.report.worst import draw_worst"),
        ("sightline/train/loop.py", "from sightline.inference import predict"),
        ("sightline/train/loop.py", "if TYPE_CHECKING:\n    pass\nelse:\n    from sightline.report import worst"),
        ("sightline/train/loop.py", "if not TYPE_CHECKING:\n    from sightline.report import worst"),
        ("sightline/attic/x.py", "from sightline import errors"),
    ],
    train_knows_no_concrete_part: [
        ("sightline/train/step.py", "from sightline.models.resnet import ResNet"),
        ("sightline/train/step.py", "def f():\n    from ..data import sources"),
        ("sightline/train/step.py", "import importlib\nimportlib.import_module('sightline.recipes.resnet50')"),
        ("sightline/train/step.py", "from sightline.tasks import masks"),
        ("sightline/train/step.py", "from sightline import tasks"),
        ("sightline/engine/model.py", "from sightline.models import ssd"),
    ],
    only_recipes_choose: [
        ("sightline/cli.py", "from sightline.tasks.classification import Classification"),
        ("sightline/api.py", "def f():\n    from sightline.data import classification"),
        ("sightline/tasks/detection.py", "import sightline.models.ssd"),
    ],
    torchvision_decodes_nothing: [
        ("sightline/data/decode.py", "def f():\n    import torchvision.io"),
        ("sightline/measure/peers.py", "from torchvision.io import decode_image"),
        ("sightline/data/decode.py", "import torch\ntorch.ops.image.decode_png(data, 0, False)"),
    ],
    one_file_reads_yaml: [
        ("sightline/config.py", "import yaml"),
        ("sightline/runs/log.py", "from yaml import safe_load"),
    ],
    the_guest_needs_torch_alone: [
        ("sightline_migrate/run.py", "from sightline.errors import UsageError"),
        ("sightline_migrate/rules/run.py", "def f():\n    import numpy"),
        ("sightline_migrate/run.py", "import sightline.migrate"),
    ],
    the_guest_is_asked_at_one_door: [
        ("sightline/commands/migrate.py", "def f():\n    from sightline_migrate import cli"),
        ("sightline/models/norm.py", "import sightline_migrate.norm"),
    ],
    the_terminal_is_guarded: [
        ("sightline/data/inputs.py", "print(name)"),
        ("sightline/runs/log.py", "import sys\nsys.stderr.write(name)"),
        ("sightline/runs/log.py", "from rich.console import Console\nConsole().print(name)"),
    ],
    private_files_stay_in_their_folder: [
        ("sightline/data/detection/dataset.py", "from sightline.data.sources._files import FilesSource"),
        ("sightline/data/check/boxes.py", "from sightline.data.sources import _index"),
        ("sightline/data/prepare/coco/files.py", "from .. import _pieces"),
        ("sightline/measure/links.py", "from sightline.data.decode import _turned"),
    ],
    names_say_the_thing: [("sightline/utils.py", ""), ("sightline/train/helpers/x.py", "")],
    docstrings_are_short: [("sightline/runs/log.py", "x = 1"), ("sightline/runs/log.py", '"""' + "a\n" * 6 + '"""')],
    errors_are_not_swallowed: [
        ("sightline/runs/log.py", "try:\n    f()\nexcept:\n    raise"),
        ("sightline/runs/log.py", "try:\n    f()\nexcept Exception:\n    pass"),
        (
            "sightline/runs/log.py",
            "for x in y:\n    try:\n        f()\n    except (OSError, Exception):\n        continue",
        ),
    ],
    nothing_runs_in_a_shell: [
        ("sightline/cli.py", "import subprocess\nsubprocess.run('ls', shell=True)"),
        ("sightline/cli.py", "import os\nos.system('ls')"),
    ],
    nothing_is_unpickled: [
        ("sightline/engine/checkpoint.py", "import pickle"),
        ("sightline/engine/checkpoint.py", "import torch\ntorch.load(path)"),
        ("sightline/engine/checkpoint.py", "import torch\ntorch.load(path, weights_only=flag)"),
        ("sightline/engine/checkpoint.py", "import numpy as np\nnp.load(path, allow_pickle=True)"),
        ("sightline/config.py", "import yaml\nyaml.load(text)"),
    ],
    only_ranks_listen: [
        ("sightline/report/page.py", "from http.server import HTTPServer"),
        ("sightline/commands/launch_check.py", "import socket\nsocket.create_server(('', 0))"),
        ("sightline/train/loop.py", "import torch.distributed as dist\ndist.TCPStore('a', 1)"),
    ],
    archives_are_checked: [
        ("sightline/files/archive.py", "import tarfile\nwith tarfile.open(p) as t:\n    t.extractall(out)"),
        ("sightline/files/archive.py", "import shutil\nshutil.unpack_archive(p)"),
    ],
}
ALLOWED = [
    ("sightline/tasks/nms.py", '"""A."""\nfrom sightline.tasks.config import DetectionConfig\n'),
    ("sightline/recipes/r.py", '"""A."""\nfrom sightline.models.config import ArchConfig\n'),
    ("sightline/models/config.py", '"""A."""\ndef f():\n    from sightline.models import ssd\n'),
    (
        "sightline/parts.py",
        '"""A."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sightline.hardware import world\n',
    ),
    (
        "sightline_migrate/run.py",
        '"""A."""\nimport torch\nfrom sightline_migrate import terminal\nfrom . import launcher\n',
    ),
    ("sightline/migrate/cli.py", '"""A."""\nfrom sightline_migrate.cli import main\n'),
    ("sightline/cli.py", '"""A."""\nprint()\n'),
    ("sightline/train/state.py", '"""A."""\nfrom sightline.models import norm\n'),
    ("sightline/recipes/r.py", '"""' + "a\n" * 9 + '"""\nfrom sightline.models import resnet\n'),
    ("sightline/data/classification/dataset.py", '"""A."""\nfrom sightline.data import sources\n'),
    ("sightline/train/loop.py", '"""A."""\ndef train():\n' + "    x = 1\n" * 119),
    (
        "sightline/runs/log.py",
        '"""A."""\nimport torch\ntry:\n    torch.load(p, weights_only=True)\nexcept OSError:\n    pass\n',
    ),
    ("sightline/data/__init__.py", ""),
    (
        "sightline/data/sources/tar.py",
        '"""A."""\nfrom . import _shards\n',
    ),
    ("sightline/data/inputs.py", '"""A."""\nfrom __future__ import annotations\nfrom .decode import _turned\n'),
]


def by_name(value: object) -> str | None:
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_rule_holds(rule: Rule):
    found = modules()
    assert {module.package[0] for module in found} == {PACKAGE.name, GUEST.name}
    offences = [f"{module.path}:{line}: {message}" for module in found for line, message in rule(module)]
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize(("rule", "path", "source"), [(rule, *case) for rule, cases in RULES.items() for case in cases])
def test_rule_refuses(rule: Rule, path: str, source: str):
    assert list(rule(Module(path, source)))


@pytest.mark.parametrize(("path", "source"), ALLOWED, ids=[path for path, _ in ALLOWED])
def test_rules_allow(path: str, source: str):
    assert [found for rule in RULES for found in rule(Module(path, source))] == []


def test_every_folder_is_a_package():
    folders = {path.parent for package in (PACKAGE, GUEST) for path in package.rglob("*.py")}
    missing = {folder.relative_to(REPO) for folder in folders if not (folder / "__init__.py").is_file()}
    assert not missing, f"without __init__.py these stay out of the wheel: {sorted(map(str, missing))}"


def test_a_recipe_is_data():
    """Every light file and every recipe is imported without torch."""
    names = [".".join(Path(module.path).with_suffix("").parts).removesuffix(".__init__") for module in modules()]
    light = [name for name in names if room_of(name)[0] in ("light", "recipe", "recipes", "config")]
    assert "sightline.tasks.config" in light and "sightline.recipes.unet3d" in light
    code = f"import importlib, sys\nfor name in {light}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["runs", "docs"]], ids=" ".join)
def test_command_answers_without_torch(arguments: list[str]):
    command = [sys.executable, "-X", "importtime", "-m", "sightline", *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    messages = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 0, "\n".join(messages)
    assert done.stdout.strip()
    assert "sightline.cli" in imported
    heavy = sorted(imported & {"torch", "torchvision", "triton", "scipy"})
    assert not heavy, f"sightline {' '.join(arguments)} imports {heavy}; import these where they are used"
