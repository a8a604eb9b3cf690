"""The Medical Segmentation Decathlon: facts about its ten tasks, and the plan in a prepared folder.

`prepare decathlon` writes the plan last, `sources/decathlon.py` reads it. It is JSON, so reading one runs no code.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from sightline.errors import BadData, UsageError
from sightline.files.typed_json import NO_NAME, read_json, short
from sightline.files.whole import write_text
from sightline.parts import DataSpec

Mode = Literal["training", "val", "test"]
PLAN = "plan.json"
OWN = "own"  # data outside the ten tasks, with statistics measured on its own training set
_FORMAT = 1
_MAX_PLAN_BYTES = 16 * 2**20  # a case takes 300 bytes
_MAX_SIDE = 2**16

Triple = tuple[int, int, int]


class Patch(NamedTuple):
    """Size of the network's input, and mm from voxel to voxel along the same axes."""

    size: tuple[int, ...]
    spacing: tuple[float, ...]


class Ct(NamedTuple):
    """Scaling of CT: the same for every volume, because Hounsfield units mean the same in every scan."""

    low: float
    high: float
    mean: float
    std: float


@dataclass(frozen=True)
class DecathlonTask:
    """One of the ten tasks."""

    folder: str
    modalities: tuple[str, ...]
    classes: tuple[str, ...]  # background first
    flat: Patch  # (height, width)
    deep: Patch  # (depth, height, width)
    ct: Ct | None = None  # None: MRI, each channel of each volume is scaled by its own mean and deviation

    @property
    def name(self) -> str:
        """Name of the task without its number, e.g. Hippocampus."""
        return self.folder.partition("_")[2]


def _square(side: int, mm: float) -> Patch:
    return Patch((side, side), (mm, mm))


# Patches, spacings and CT numbers are those of NVIDIA's nnU-Net (DeepLearningExamples, configs.py); modalities and
# classes those of the ten dataset.json.
TASKS: dict[str, DecathlonTask] = {
    "01": DecathlonTask(
        "Task01_BrainTumour",
        ("FLAIR", "T1w", "T1gd", "T2w"),
        ("background", "edema", "non-enhancing tumor", "enhancing tumour"),
        Patch((192, 160), (1.0, 1.0)),
        Patch((128, 128, 128), (1.0, 1.0, 1.0)),
    ),
    "02": DecathlonTask(
        "Task02_Heart",
        ("MRI",),
        ("background", "left atrium"),
        Patch((320, 256), (1.25, 1.25)),
        Patch((80, 192, 160), (1.37, 1.25, 1.25)),
    ),
    "03": DecathlonTask(
        "Task03_Liver",
        ("CT",),
        ("background", "liver", "cancer"),
        _square(512, 0.7676),
        Patch((128, 128, 128), (1.0, 0.7676, 0.7676)),
        Ct(-17.0, 201.0, 99.4, 39.36),
    ),
    "04": DecathlonTask(
        "Task04_Hippocampus",
        ("MRI",),
        ("background", "Anterior", "Posterior"),
        Patch((56, 40), (1.0, 1.0)),
        Patch((40, 56, 40), (1.0, 1.0, 1.0)),
    ),
    "05": DecathlonTask(
        "Task05_Prostate",
        ("T2", "ADC"),
        ("background", "PZ", "TZ"),
        _square(320, 0.62),
        Patch((20, 320, 256), (3.6, 0.62, 0.62)),
    ),
    "06": DecathlonTask(
        "Task06_Lung",
        ("CT",),
        ("background", "cancer"),
        _square(512, 0.79),
        Patch((80, 192, 160), (1.24, 0.79, 0.79)),
        Ct(-1024.0, 325.0, -158.58, 324.7),
    ),
    "07": DecathlonTask(
        "Task07_Pancreas",
        ("CT",),
        ("background", "pancreas", "cancer"),
        _square(512, 0.8),
        Patch((40, 224, 224), (2.5, 0.8, 0.8)),
        Ct(-96.0, 215.0, 77.9, 75.4),
    ),
    "08": DecathlonTask(
        "Task08_HepaticVessel",
        ("CT",),
        ("background", "Vessel", "Tumour"),
        _square(512, 0.8),
        Patch((64, 192, 192), (1.5, 0.8, 0.8)),
        Ct(-3.0, 243.0, 104.37, 52.62),
    ),
    "09": DecathlonTask(
        "Task09_Spleen",
        ("CT",),
        ("background", "spleen"),
        _square(512, 0.79),
        Patch((64, 192, 160), (1.6, 0.79, 0.79)),
        Ct(-41.0, 176.0, 99.29, 39.47),
    ),
    "10": DecathlonTask(
        "Task10_Colon",
        ("CT",),
        ("background", "colon cancer primaries"),
        _square(512, 0.78),
        Patch((56, 192, 160), (3.0, 0.78, 0.78)),
        Ct(-30.0, 165.82, 62.18, 32.65),
    ),
}


def spec_of(task: str, dim: int) -> DataSpec:
    """Return the spec of a task for networks of slices (`dim` 2) or volumes (3)."""
    if task not in TASKS:
        raise UsageError(f"task {task!r} is not one of the Decathlon's; known: {', '.join(TASKS)}")
    if dim not in (2, 3):
        raise UsageError(f"dim={dim}: use 2 (slices) or 3 (volumes)")
    known = TASKS[task]
    return make_spec(known.classes, len(known.modalities), known.flat if dim == 2 else known.deep, known.ct)


def make_spec(classes: tuple[str, ...], channels: int, patch: Patch, ct: Ct | None) -> DataSpec:
    """Return the spec of volumes; without `ct` each channel of each volume is scaled by itself."""
    if ct is None:
        return DataSpec(classes, channels, patch.size, mean=(), std=(), spacing=patch.spacing)
    return DataSpec(classes, channels, patch.size, (ct.mean,), (ct.std,), spacing=patch.spacing, clip=(ct.low, ct.high))


@dataclass(frozen=True)
class Case:
    """One volume of a prepared folder; all shapes are (depth, height, width)."""

    name: str
    shape: Triple  # as stored
    original: Triple  # of the file it was made from
    start: Triple  # the box that was cut out of the original: from here
    end: Triple  # to here, exclusively
    resampled: Triple  # of the box at the plan's spacing, before it is padded or cut to the patch
    spacing: tuple[float, float, float]  # of the original, mm
    image: str  # file below the folder
    label: str | None


@dataclass(frozen=True)
class VolumePlan:
    """Contents of a prepared folder."""

    task: str  # 01 to 10, or own
    name: str
    dim: int
    mode: Mode
    spec: DataSpec
    cases: tuple[Case, ...]
    raw: str  # name of the folder that it was made from

    def to_json(self) -> dict[str, Any]:
        """Return the content of plan.json."""
        plain = {name: getattr(self, name) for name in ("task", "name", "dim", "mode")}
        cases = [{key: list(v) if isinstance(v, tuple) else v for key, v in asdict(c).items()} for c in self.cases]
        return {"format": _FORMAT, **plain, "spec": self.spec.to_json(), "cases": cases, "raw": self.raw}


def write_plan(folder: Path, plan: VolumePlan) -> None:
    """Write plan.json, whole or not at all; without it the folder counts as unfinished."""
    text = json.dumps(plan.to_json(), indent=1) + "\n"
    write_text(folder, PLAN, text, durable=True)


def read_plan(folder: Path) -> VolumePlan:
    """Read the plan of a prepared folder; raise BadData if it is missing or invalid."""
    path = folder / PLAN
    try:
        content = read_json(path, _MAX_PLAN_BYTES)
    except FileNotFoundError as error:
        from sightline.data.sources import foreign  # which needs NumPy

        if known := foreign.said(folder):
            raise BadData(f"{folder} holds {known}") from None
        raise BadData(
            f"{folder} holds no {PLAN}, so it is not a prepared folder, or an unfinished one; "
            f"run `sightline prepare decathlon --source DIR --out {folder}`"
        ) from error
    except (OSError, ValueError) as error:
        raise BadData(f"{path} cannot be read: {error}; prepare it again") from error
    try:
        return _plan(content)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise BadData(f"{path} is not a plan of format {_FORMAT}: {reason}; prepare it again") from error


def _plan(content: Any) -> VolumePlan:
    _demand(isinstance(content, dict), "it is not an object")
    _demand(content["format"] == _FORMAT, f"its format is {short(content['format'])}")
    _demand(content["mode"] in get_args(Mode), f"its mode is {short(content['mode'])}")
    _demand(content["dim"] in (2, 3), f"dim is {short(content['dim'])}")
    _demand(content["task"] in (*TASKS, OWN), f"its task is {short(content['task'])}")
    for key in ("name", "raw"):
        _demand(isinstance(content[key], str), f"{key} is not a text")
    spec = _spec(content["spec"], content["dim"])
    _demand(isinstance(content["cases"], list) and len(content["cases"]) > 0, "it lists no cases")
    cases = tuple(read_case(each, content["mode"]) for each in content["cases"])
    names = {case.name for case in cases}
    _demand(len(names) == len(cases), "two cases have the same name")
    return VolumePlan(content["task"], content["name"], content["dim"], content["mode"], spec, cases, content["raw"])


def _spec(content: Any, dim: int) -> DataSpec:
    try:
        spec = DataSpec.from_json(content)
    except ValueError as error:
        raise ValueError(f"its spec: {error}") from None
    _demand(len(spec.classes) >= 2, "its spec has fewer than two classes")
    _demand(len(spec.size) == len(spec.spacing) == dim, f"its spec does not have {dim} axes")
    lengths = (len(spec.clip), len(spec.mean), len(spec.std))
    _demand(lengths in ((0, 0, 0), (2, 1, 1)), f"its spec has clip, mean and std of {lengths} numbers")
    _demand(all(v > 0 for v in (*spec.spacing, *spec.std)), "its spec has a spacing or deviation that is not positive")
    return spec


def read_case(content: Any, mode: str) -> Case:
    """Read a case from JSON; raise ValueError, KeyError or TypeError if it is invalid."""
    _demand(isinstance(content, dict), "a case is not an object")
    name = content["name"]
    _demand(is_plain_name(name), f"a case is called {short(name)}")
    shapes = {}
    for key in ("shape", "original", "start", "end", "resampled"):
        values = content[key]
        _demand(
            isinstance(values, list) and len(values) == 3 and all(_is_count(v) for v in values),
            f"{key} of {name} is {short(values)}",
        )
        shapes[key] = (values[0], values[1], values[2])
    boxes = zip(shapes["start"], shapes["end"], shapes["original"], strict=True)
    _demand(all(a < b <= n for a, b, n in boxes), f"the box of {name} does not lie in its volume")
    _demand(all(n > 0 for key in ("shape", "resampled") for n in shapes[key]), f"{name} has a side of 0")
    spacing = content["spacing"]
    _demand(
        isinstance(spacing, list) and len(spacing) == 3 and all(_is_number(v) and v > 0 for v in spacing),
        f"the spacing of {name} is {short(spacing)}",
    )
    files = content["image"], content["label"]
    _demand(is_plain_name(files[0]), f"the image of {name} is {short(files[0])}, a file beside the plan was expected")
    _demand(files[1] is None or is_plain_name(files[1]), f"the label of {name} is {short(files[1])}")
    _demand((files[1] is not None) == (mode == "training"), f"{name} has {'a' if files[1] else 'no'} label in {mode}")
    return Case(name, **shapes, spacing=(spacing[0], spacing[1], spacing[2]), image=files[0], label=files[1])


def is_plain_name(name: Any) -> bool:
    """Return whether this is a plain file name: it cannot lead out of its folder."""
    if not isinstance(name, str) or not 0 < len(name) <= 200 or name.startswith(".") or NO_NAME.search(name):
        return False
    return not any(letter in '/\\"' or ord(letter) < 32 for letter in name)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIDE


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
