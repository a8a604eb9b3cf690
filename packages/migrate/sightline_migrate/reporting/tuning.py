"""`sightline migrate scan --advise`: advice per line, in the order in which a migrated script gets better.

First it runs (what is refused), then it is fast, then it is accurate with a larger batch. Reads the source only.
"""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sightline_migrate.reporting import report
from sightline_migrate.reporting.scan import CudaUse, Reader, RuleIndex

RUNS, FAST, ACCURATE = STAGES = ("so that it runs", "so that it is fast", "so that it is accurate")
FUSED = tuple(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "Adagrad"))
SCHEDULES = tuple(
    f"torch.optim.lr_scheduler.{name}"
    for name in ("StepLR", "MultiStepLR", "CosineAnnealingLR", "ExponentialLR", "PolynomialLR", "LambdaLR")
)
LOADER = "torch.utils.data.DataLoader"
IN_MEMORY = "torch.utils.data.TensorDataset"
MADE_BY_SIZE = tuple(f"torch.{name}" for name in ("arange", "empty", "ones", "rand", "randn", "randperm", "zeros"))
MADE_FROM_BOUNDS = ("torch.randint",)
PARALLEL = ("torch.nn.parallel.DistributedDataParallel", "torch.distributed.init_process_group")
CONVOLUTIONS = ("torch.nn.Conv2d", "torchvision.models", "timm.create_model")
NORMS = ("torch.nn.BatchNorm2d", "torchvision.models", "timm.create_model")
EVERY_STEP, SOME_STEPS = "in every step", "in each step where its `if` holds"
WAITS = ("item", "cpu", "tolist", "numpy")
WAITING_CALLS = ("torch.cuda.synchronize", "torch.cuda.empty_cache")


@dataclass(frozen=True)
class Advice:
    """One line of a script that could be better, and how."""

    file: str
    line: int
    stage: str
    what: str
    remedy: str
    source: str


def advise_file(path: Path, rules: RuleIndex, uses: Sequence[CudaUse]) -> list[Advice]:
    """Return the advice for one file: by stage, then by line."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    found = {(use.line, RUNS, use.api, use.what) for use in uses if use.kind == "refused"}
    found |= {(line, stage, what, remedy) for line, stage, what, remedy in _Advisor(text, rules).advice()}
    made = [
        Advice(str(path), line, stage, what, remedy, lines[line - 1].strip()) for line, stage, what, remedy in found
    ]
    return sorted(made, key=lambda each: (STAGES.index(each.stage), each.line, each.what))


Found = tuple[int, str, str, str]


class _Advisor:
    """Walks over one syntax tree and knows which calls are in the loop over batches."""

    def __init__(self, text: str, rules: RuleIndex) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.reader = Reader(self.tree, rules)
        self.calls = list(_calls(self.tree))
        self.names = {self.reader.dotted(node) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        self.names |= set(self.reader.aliases.values())
        self.assigned = _assigned_once(self.tree)

    def advice(self) -> Iterator[Found]:
        for call, when in self.calls:
            name = self.reader.dotted(call.func)
            method = call.func.attr if isinstance(call.func, ast.Attribute) and not name else ""
            for check in (self._copies, self._waits, self._layout):
                yield from check(call, name, method, when)
            for names, say in OF_CALLS:
                if name in names and not any(keyword.arg is None for keyword in call.keywords):  # **options: unknown
                    yield from say(self, call)

    def uses(self, names: Sequence[str]) -> bool:
        return any(f"{used}.".startswith(name + ".") for used in self.names for name in names)

    def _copies(self, call: ast.Call, name: str, method: str, when: str) -> Iterator[Found]:
        if when and self._moves(call, method) and not _has(call, "non_blocking"):
            remedy = "non_blocking=True, with pin_memory=True in the DataLoader"
            yield call.lineno, FAST, f".{method}() waits for the copy {when}", remedy

    def _moves(self, call: ast.Call, method: str) -> bool:
        """Return True for `.cuda()` and `.to(device)`."""
        if method != "to":
            return method == "cuda"
        places = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
        return any(self.reader._may_be_device(place) for place in places)

    def _waits(self, call: ast.Call, name: str, method: str, when: str) -> Iterator[Found]:
        if when and (method in WAITS or name in WAITING_CALLS):
            remedy = "sum on the device, and read it every N steps, e.g. under `if step % N == 0`"
            yield call.lineno, FAST, f"{name or f'.{method}()'} waits for the device {when}", remedy

    def _layout(self, call: ast.Call, name: str, method: str, when: str) -> Iterator[Found]:
        if when or not self._moves(call, method) or _is_of_a_loss(call):
            return
        if self.uses(CONVOLUTIONS) and "channels_last" not in self.text:
            remedy = "model.to(memory_format=torch.channels_last), and the same for the images"
            yield call.lineno, FAST, "convolutions of images run faster in channels_last", remedy

    def _loader(self, call: ast.Call) -> Iterator[Found]:
        data = self._data_of(call)
        is_in_memory = data is not None and self.reader.dotted(data.func) == IN_MEMORY
        if not is_in_memory and (not _has(call, "num_workers") or _value(call, "num_workers") == 0):
            remedy = "num_workers=4 or about the cores per rank, persistent_workers=True"
            yield call.lineno, FAST, "the training process itself reads the samples, between its steps", remedy
        if not _has(call, "pin_memory"):
            yield call.lineno, FAST, "batches are in pageable memory", "pin_memory=True"
        if _value(call, "shuffle") is True and not _has(call, "drop_last"):
            yield from self._last_batch(call, data if is_in_memory else None)

    def _last_batch(self, call: ast.Call, data: ast.Call | None) -> Iterator[Found]:
        """Advise on the last batch, unless the source shows that the batch size divides the samples."""
        samples, batch = self._samples(data), self._batch_size(call)
        if samples and batch and samples % batch == 0:
            return
        size = f"is {samples % batch} of {batch}" if samples and batch else "may be smaller"
        what = f"the last batch {size}: a noisier step, and other shapes to compile"
        yield call.lineno, ACCURATE, what, "drop_last=True for training"

    def _data_of(self, call: ast.Call) -> ast.Call | None:
        """Return the call that made a loader's dataset, if the source shows it."""
        given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "dataset")]
        made = self._value_of(given[0]) if given else None
        return made if isinstance(made, ast.Call) else None

    def _samples(self, data: ast.Call | None) -> int | None:
        """Return the length of a TensorDataset whose first tensor is made by its size: `torch.randn(512, 3)`."""
        first = self._value_of(data.args[0]) if data is not None and data.args else None
        if not isinstance(first, ast.Call):
            return None
        sizes = [keyword.value for keyword in first.keywords if keyword.arg == "size"]
        name = self.reader.dotted(first.func)
        if name in MADE_BY_SIZE and (name != "torch.arange" or len(first.args) == 1):
            sizes += first.args[:1]
        elif name in MADE_FROM_BOUNDS:
            sizes += [each for each in first.args if isinstance(each, ast.Tuple | ast.List)]
        size = self._value_of(sizes[0]) if sizes else None
        if isinstance(size, ast.Tuple | ast.List) and size.elts:
            size = self._value_of(size.elts[0])
        return size.value if isinstance(size, ast.Constant) and isinstance(size.value, int) else None

    def _batch_size(self, call: ast.Call) -> int | None:
        given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "batch_size")]
        size = self._value_of(given[0]) if given else ast.Constant(1)
        return size.value if isinstance(size, ast.Constant) and isinstance(size.value, int) else None

    def _value_of(self, node: ast.expr) -> ast.expr:
        """Follow a name that is assigned once to what it is assigned."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id in self.assigned and node.id not in seen:
            seen.add(node.id)
            node = self.assigned[node.id]
        return node

    def _optimizer(self, call: ast.Call) -> Iterator[Found]:
        if not (_has(call, "fused") or _has(call, "foreach")):
            yield call.lineno, FAST, "the optimizer's step is many small kernels", "fused=True"
        if "warmup" not in self.text.lower().replace("-", "").replace("_", ""):
            what = "the learning rate belongs to one batch size"
            remedy = "for a batch k times as large: lr * k (SGD) or lr * sqrt(k) (Adam), after 5 epochs of warm-up"
            yield call.lineno, ACCURATE, what, remedy

    def _schedule(self, call: ast.Call) -> Iterator[Found]:
        if self.uses(PARALLEL) and "LinearLR" not in self.text and "warmup" not in self.text.lower():
            what = "the schedule has no warm-up, which the larger batch of several devices needs"
            yield call.lineno, ACCURATE, what, "SequentialLR with LinearLR for the first epochs"

    def _sampler(self, call: ast.Call) -> Iterator[Found]:
        if ".set_epoch(" not in self.text:
            yield call.lineno, ACCURATE, "every epoch has the same order", "sampler.set_epoch(epoch) before each epoch"

    def _parallel(self, call: ast.Call) -> Iterator[Found]:
        if self.uses(NORMS) and "SyncBatchNorm" not in self.text:
            what = "batch norm sees the images of one device only"
            remedy = "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) if that is fewer than about 16"
            yield call.lineno, ACCURATE, what, remedy

    def _clip(self, call: ast.Call) -> Iterator[Found]:
        if "GradScaler" in self.text and ".unscale_(" not in self.text:
            yield call.lineno, ACCURATE, "clips gradients that are still scaled", "scaler.unscale_(optimizer) before it"


OF_CALLS: tuple[tuple[tuple[str, ...], Callable[[_Advisor, ast.Call], Iterator[Found]]], ...] = (
    ((LOADER,), _Advisor._loader),
    (FUSED, _Advisor._optimizer),
    (SCHEDULES, _Advisor._schedule),
    (("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler"), _Advisor._sampler),
    (PARALLEL[:1], _Advisor._parallel),
    (("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"), _Advisor._clip),
)


def _calls(node: ast.AST, when: str = "", is_rare: bool = False) -> Iterator[tuple[ast.Call, str]]:
    """Yield (call, when a loop over batches makes it); "" outside, and where it is made in some steps only."""
    if isinstance(node, ast.Call):
        yield node, "" if is_rare else when
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        when, is_rare = "", False
    if isinstance(node, ast.If) and when:
        is_rare = is_rare or "%" in ast.unparse(node.test)
    for name, value in ast.iter_fields(node):
        inside = when
        if name == "body" and isinstance(node, ast.For) and "epoch" not in ast.unparse(node.target):
            inside = when or EVERY_STEP
        elif name in ("body", "orelse") and isinstance(node, ast.If) and when:
            inside = SOME_STEPS
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, ast.AST):
                yield from _calls(each, inside, is_rare)


def _assigned_once(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the values of names that are bound at one place only, by `name = value` or `a, b = value, value`."""
    bound = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    bound.update(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            left, right = node.targets[0], node.value
            if isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple) and len(left.elts) == len(right.elts):
                pairs += zip(left.elts, right.elts, strict=True)
            else:
                pairs.append((left, right))
    return {name.id: value for name, value in pairs if isinstance(name, ast.Name) and bound[name.id] == 1}


def _is_of_a_loss(call: ast.Call) -> bool:
    """Return True for `nn.CrossEntropyLoss().cuda()` and `self.criterion.to(device)`, which hold no convolutions."""
    moved = call.func.value if isinstance(call.func, ast.Attribute) else call
    name = ast.unparse(moved.func if isinstance(moved, ast.Call) else moved).rpartition(".")[2].lower()
    return name.endswith(("loss", "criterion"))


def _has(call: ast.Call, name: str) -> bool:
    return any(keyword.arg == name for keyword in call.keywords)


def _value(call: ast.Call, name: str) -> object:
    """Return the literal value of a keyword argument, else None."""
    values = [keyword.value for keyword in call.keywords if keyword.arg == name]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def as_text(found: Sequence[Advice]) -> str:
    """Format the advice by stage; the first stage says so if nothing stands in the way."""
    lines = []
    for stage in STAGES:
        of_stage = [each for each in found if each.stage == stage]
        lines.append(f"{stage}:" if of_stage else f"{stage}: nothing to change")
        for each in of_stage:
            lines.append(f"  {report.short(os.path.abspath(each.file))}:{each.line}  {each.what} --> {each.remedy}")
    return "\n".join(lines)
