"""`sightline migrate scan --advise`: advice per line, in the order in which a migrated script gets better.

First it runs (what is refused), then it is fast, then it is accurate with a larger batch. Reads the source only.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sightline.migrate.reporting import report
from sightline.migrate.reporting.scan import CudaUse, Reader, RuleIndex

RUNS, FAST, ACCURATE = STAGES = ("so that it runs", "so that it is fast", "so that it is accurate")
FUSED = tuple(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "Adagrad"))
SCHEDULES = tuple(
    f"torch.optim.lr_scheduler.{name}"
    for name in ("StepLR", "MultiStepLR", "CosineAnnealingLR", "ExponentialLR", "PolynomialLR", "LambdaLR")
)
LOADER = "torch.utils.data.DataLoader"
PARALLEL = ("torch.nn.parallel.DistributedDataParallel", "torch.distributed.init_process_group")
CONVOLUTIONS = ("torch.nn.Conv2d", "torchvision.models", "timm.create_model")
NORMS = ("torch.nn.BatchNorm2d", "torchvision.models", "timm.create_model")
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
        Advice(str(path), line, stage, what, remedy, lines[line - 1].strip() if lines else "")
        for line, stage, what, remedy in found
    ]
    return sorted(made, key=lambda each: (STAGES.index(each.stage), each.line, each.what))


Found = tuple[int, str, str, str]


class _Advisor:
    """Walks over one syntax tree and knows which calls are in the loop over batches."""

    def __init__(self, text: str, rules: RuleIndex) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.reader = Reader(self.tree, rules)
        self.calls = list(_calls(self.tree, is_in_loop=False))
        self.names = {self.reader.dotted(node) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        self.names |= set(self.reader.aliases.values())

    def advice(self) -> Iterator[Found]:
        for call, is_in_loop in self.calls:
            name = self.reader.dotted(call.func)
            method = call.func.attr if isinstance(call.func, ast.Attribute) and not name else ""
            for check in (self._copies, self._waits, self._layout):
                yield from check(call, name, method, is_in_loop)
            for names, say in OF_CALLS:
                if name in names and not any(keyword.arg is None for keyword in call.keywords):  # **options: unknown
                    yield from say(self, call)

    def uses(self, names: Sequence[str]) -> bool:
        return any(f"{used}.".startswith(name + ".") for used in self.names for name in names)

    def _copies(self, call: ast.Call, name: str, method: str, is_in_loop: bool) -> Iterator[Found]:
        if is_in_loop and self._moves(call, method) and not _has(call, "non_blocking"):
            remedy = "non_blocking=True, with pin_memory=True in the DataLoader"
            yield call.lineno, FAST, f".{method}() waits for the copy in every step", remedy

    def _moves(self, call: ast.Call, method: str) -> bool:
        """Return True for `.cuda()` and `.to(device)`."""
        if method != "to":
            return method == "cuda"
        places = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
        return any(self.reader._may_be_device(place) for place in places)

    def _waits(self, call: ast.Call, name: str, method: str, is_in_loop: bool) -> Iterator[Found]:
        if is_in_loop and (method in WAITS or name in WAITING_CALLS):
            remedy = "sum on the device, and read it every N steps, e.g. under `if step % N == 0`"
            yield call.lineno, FAST, f"{name or f'.{method}()'} waits for the device in every step", remedy

    def _layout(self, call: ast.Call, name: str, method: str, is_in_loop: bool) -> Iterator[Found]:
        if (
            not is_in_loop
            and self._moves(call, method)
            and self.uses(CONVOLUTIONS)
            and "channels_last" not in self.text
        ):
            remedy = "model.to(memory_format=torch.channels_last), and the same for the images"
            yield call.lineno, FAST, "convolutions of images run faster in channels_last", remedy

    def _loader(self, call: ast.Call) -> Iterator[Found]:
        if not _has(call, "num_workers") or _value(call, "num_workers") == 0:
            remedy = "num_workers=4 or about the cores per rank, persistent_workers=True"
            yield call.lineno, FAST, "images are read and decoded by the training process itself", remedy
        if not _has(call, "pin_memory"):
            yield call.lineno, FAST, "batches are in pageable memory", "pin_memory=True"
        if _value(call, "shuffle") is True and not _has(call, "drop_last"):
            remedy = "drop_last=True for training"
            yield (
                call.lineno,
                ACCURATE,
                "the last batch is smaller: a noisier step, and other shapes to compile",
                remedy,
            )

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


def _calls(node: ast.AST, is_in_loop: bool) -> Iterator[tuple[ast.Call, bool]]:
    """Yield (call, True if it is in a loop over batches, and not only in some of its steps)."""
    if isinstance(node, ast.Call):
        yield node, is_in_loop
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        is_in_loop = False
    if isinstance(node, ast.If) and "%" in ast.unparse(node.test):
        is_in_loop = False
    for name, value in ast.iter_fields(node):
        inside = is_in_loop or (
            name == "body" and isinstance(node, ast.For) and "epoch" not in ast.unparse(node.target)
        )
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, ast.AST):
                yield from _calls(each, inside)


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
