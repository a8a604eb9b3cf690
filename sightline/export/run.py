"""`sightline export`: write a run's network into a file, load it again, and keep it only if it computes the same."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sightline import terminal
from sightline.data.loading.cache import read_once
from sightline.errors import DISK_FAULTS, BadCheckpoint, BadSample, DiskError, SightlineError, UsageError, first_of
from sightline.export import formats
from sightline.export.by_task import outputs_of
from sightline.export.compare import Matched, match_boxes, relative_difference
from sightline.export.served import Runs, Served, as_text, describe
from sightline.files.checkpoint_folder import run_of
from sightline.files.whole import write_whole
from sightline.inference.checkpoints import Trained
from sightline.inference.predict import open_trained
from sightline.parts import ServedInput
from sightline.recipe.flags import Given
from sightline.recipe.resolve import run_fields

LIMIT = 1e-4  # largest relative difference, in fp32
LEAST_MATCHED = 0.99  # share of detections that must be found on both sides
RANDOM_ITEMS = 3  # not the batch that was traced
REAL_ITEMS = 2
# Errors of torch's exporters: torch._dynamo's and torch.onnx's are RuntimeErrors.
EXPORT_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError)
Inputs = dict[str, Tensor]  # words for people -> batch


@dataclass(frozen=True)
class ExportOptions:
    """What to write, and where."""

    format: str = "onnx"
    out: str = ""  # "": RUN/model.SUFFIX
    raw: bool = False  # detectors: outputs of the network itself


def export(
    run_folder: str,
    options: ExportOptions,
    flags: Given = (),
    which: str = "best",
    recipe_file: str = "",
    say: Callable[[str], None] = terminal.say,
) -> Path:
    """Write the network of a checkpoint, and compare what the file computes; return the path of the file."""
    chosen, raw = formats.find(options.format), options.raw
    chosen.check_installed()
    trained = open_trained(Path(run_folder), which, recipe_file, "export", *on_cpu("export", flags))
    task = trained.recipe.task
    if raw and not (outputs_of(task).decodes and chosen.RUNS):
        why = (
            f"--format {options.format} holds weights"
            if outputs_of(task).decodes
            else "its outputs are those of the network"
        )
        raise UsageError(f"--raw changes nothing for {trained.recipe.name}: {why}; leave it out")
    path = Path(options.out) if options.out else run_of(trained.path) / f"model{'-raw' * raw}{chosen.SUFFIX}"
    if path.suffix != chosen.SUFFIX:
        raise UsageError(f"--out {path} must end in {chosen.SUFFIX} with --format {options.format}")
    if os.path.lexists(path):
        raise UsageError(f"{path} exists; choose another --out, or delete it")
    served = _serve(trained, raw)
    inputs = _inputs(trained, served, say)
    about = as_text(describe(trained, served))

    def write(beside: Path) -> None:
        for line in _write_and_compare(chosen, served, about, beside, inputs):
            say(line)

    write_whole(path, write)
    checkpoint = f"{'averaged ' * ('ema' in trained.tensors)}weights of {trained.path.name}"
    say(f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB, {chosen.ABOUT}, {checkpoint}")
    return path


def on_cpu(command: str, *given: Given) -> tuple[Given, ...]:
    """Return the flags for a command whose network runs on the CPU."""
    if (device := run_fields(*given).get("run.device", "auto")) not in ("auto", "cpu"):
        raise UsageError(f"--run.device {device}: {command} runs the network on the CPU; leave it out")
    return (*given, {"run.device": "cpu"})


def _serve(trained: Trained, raw: bool) -> Served:
    # All of it runs in fp32, so nothing has to be kept out of autocast, whose regions exporters do not know.
    train = dataclasses.replace(trained.recipe.train, fp32_ops=())
    recipe = dataclasses.replace(trained.recipe, train=train)
    model = dataclasses.replace(trained, recipe=recipe).build().eval().requires_grad_(False)
    state = model.state_dict()
    if bad := [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]:
        raise BadCheckpoint(
            f"{trained.path} holds weights that are not finite: {first_of(bad)}; its training had "
            f"diverged, choose an earlier checkpoint with --checkpoint"
        )
    return Served(model, recipe.task.build(), recipe.data.served(trained.spec), raw).eval()


def _inputs(trained: Trained, served: Served, say: Callable[[str], None]) -> Inputs:
    inputs = {f"{RANDOM_ITEMS} random inputs": served.random_input(RANDOM_ITEMS)}
    try:
        real = _real_inputs(trained, served.entry)
    except (SightlineError, OSError) as error:
        say(f"compared on random input only: the val split cannot be read ({error}); add --data.path DIR")
        return inputs
    return {**inputs, f"{len(real)} inputs of the val split": real}


def _real_inputs(trained: Trained, entry: ServedInput) -> Tensor:
    """Load the first items of the val split that can be read; a volume is cut to a patch."""
    data = dataclasses.replace(trained.recipe.data, **entry.fields)  # type: ignore[type-var]  # all are dataclasses
    dataset = read_once(data).open("val", trained.recipe.train.seed)
    bound = dataset.bind(trained.device, trained.recipe.train.global_batch)
    bound = bound.on_host or bound
    found: list[np.ndarray] = []
    for index in range(len(dataset)):
        with contextlib.suppress(BadSample):
            loaded = bound.load(0, index)
            image = loaded["image"]
            if image.ndim == 1:  # of any size: the loader's half does not make an image of it
                batch = {key: torch.from_numpy(np.array(value)[None]) for key, value in loaded.items()}
                image = bound.finish(batch, torch.float32)["image"][0].numpy()
            found.append(_cut(image, entry.shape))
        if len(found) == REAL_ITEMS:
            break
    if not found:
        raise BadSample(str(trained.path), "none of its images can be read")
    return torch.from_numpy(np.stack(found).astype(entry.dtype, copy=False))


def _cut(item: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return the middle of an item, with zeros around it if it is smaller."""
    for axis, side in enumerate(shape):
        missing = max(side - item.shape[axis], 0)
        around = [(missing // 2, missing - missing // 2) if each == axis else (0, 0) for each in range(item.ndim)]
        first = max(item.shape[axis] - side, 0) // 2
        item = np.pad(item, around).take(range(first, first + side), axis)
    return item


def _write_and_compare(chosen: Any, served: Served, about: str, path: Path, inputs: Inputs) -> Iterator[str]:
    """Write the file, load it and compare; yield lines for the user. Raises SightlineError if it computes otherwise."""
    if not served.outputs.decodes:
        yield from _compare_raw(_written(chosen, served, about, path), served, inputs, path)
        return
    raw = Served(served.model, served.task, served.entry, raw=True).eval()
    beside = path if not chosen.RUNS else path.with_name(f"raw-{path.name}")  # its outputs are not among the file's
    yield from _compare_raw(_written(chosen, raw, about, beside), raw, inputs, path)
    if chosen.RUNS:
        yield _compare_boxes(_written(chosen, served, about, path), served, inputs, path)


def _written(chosen: Any, served: Served, about: str, path: Path) -> Runs:
    try:
        with torch.no_grad():
            chosen.write(served, about, path)
    except (OSError, *EXPORT_ERRORS) as error:
        _raise_of_disk(error)
        first = (str(error).strip().splitlines() or [""])[0][:300]
        raise UsageError(
            f"torch cannot export {type(served.model).__name__} as {chosen.ABOUT} ({type(error).__name__}: {first}); "
            f"export its weights with --format safetensors"
        ) from error
    return chosen.load(path, served)


def _raise_of_disk(error: BaseException) -> None:
    """Raise the error of the disk that an exporter has met, however deep it has hidden it."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in DISK_FAULTS:
            raise found
        if isinstance(found, FileNotFoundError) and "temporary directory" in str(found):  # of tempfile: all are full
            raise DiskError(
                f"torch needs room for temporary files while it exports: {found.strerror}; free some space there, or "
                f"name another folder in the variable TMPDIR"
            ) from error
        found = found.__cause__ or found.__context__
    if isinstance(error, OSError):
        raise error


@torch.no_grad()
def _compare_raw(run: Runs, served: Served, inputs: Inputs, path: Path) -> Iterator[str]:
    for what, image in inputs.items():
        difference = relative_difference(served(image), run(image))
        if not difference <= LIMIT:
            raise SightlineError(
                f"{path.name} computes otherwise than the network: largest relative difference {difference:.1e} on "
                f"{what}, at most {LIMIT:.0e} is allowed; nothing was written. Try another --format, and report it"
            )
        yield f"{what}: largest relative difference of {', '.join(served.names)} {difference:.1e}"


@torch.no_grad()
def _compare_boxes(run: Runs, served: Served, inputs: Inputs, path: Path) -> str:
    found = Matched(0, 0, 0.0)
    for image in inputs.values():
        found += match_boxes(served(image), run(image))
    words = f"{found.pairs} of {found.total} boxes match, scores and corners to {found.difference:.1e}"
    if found.pairs < LEAST_MATCHED * found.total or not found.difference <= LIMIT:
        raise SightlineError(
            f"{path.name} finds other boxes than the network: {words}; nothing was written. Try --raw, and report it"
        )
    return f"after NMS: {words}"
