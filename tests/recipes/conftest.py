"""Recipes at tiny size, in this process: 24 pixels, a few channels, six steps, a tenth of a second or two."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sightline import api, config, recipes
from sightline.data.volumes.plan import Case, VolumePlan, write_plan
from sightline.errors import SightlineError
from sightline.parts import DataSpec, Scores
from sightline.recipe import store

# By the class of the part, so that recipes made of the same parts need nothing new here.
TINY = {
    "ResNetConfig": ["--model.depth=18", "--model.width=4"],
    "ArchConfig": ["--model.arch=shufflenet_v2_x0_5"],
    "ClassificationData": [
        "--data.path=synthetic:classes=10,samples=24,size=28",
        "--data.classes=10",
        "--data.size=24",
        "--data.eval-resize=24",
        "--data.eval-size=24",
    ],
    "SsdConfig": ["--model.depth=18", "--model.width=4"],
    "DetectionData": [
        "--data.path=synthetic:classes=10,samples=24,size=60",
        "--data.classes=10",
        "--data.size=48",
        "--data.max-boxes=8",
    ],
    "UnetConfig": ["--model.width=4"],
    "SegmentationData": ["--data.path=VOLUMES", "--data.task=own", "--data.nvol=2"],  # 4 slices of each of 2
    "SegmentationData 3D": ["--data.path=PATCHES", "--data.task=own"],
    "EncoderUnetConfig": ["--model.arch=resnet18", "--model.width=4"],
    "MaskData": ["--data.path=synthetic:classes=6,samples=24,size=40", "--data.size=32"],
    "TrainConfig": [
        "--train.epochs=2",
        "--train.global-batch=8",
        "--train.precision=fp32",
        "--train.accumulation=1",
        "--train.min-epoch-steps=0",
        "--train.eval-from-epoch=0",
        "--train.eval-every-epochs=1",
        "--train.target-score=0",  # nor stop early, nor be called diverged
        "--train.diverged-score=0",
    ],
    "Run": ["--run.workers=0", "--run.device=cpu", "--run.log-every-steps=1", "--run.report=off"],
}


@cache
def tiny_flags(name: str, volumes: Path, patches: Path) -> list[str]:
    """Return flags that make a recipe small."""
    recipe = recipes.find(name).recipe()
    parts = [getattr(recipe, part.name) for part in fields(recipe)[1:]]
    kinds = [type(part).__name__ + (" 3D" if getattr(part, "dim", 2) == 3 else "") for part in [*parts, config.Run()]]
    flags = [flag for kind in kinds for flag in TINY.get(kind, [])]
    return [flag.replace("VOLUMES", str(volumes)).replace("PATCHES", str(patches)) for flag in flags]


@cache
def stored(name: str, flags: tuple[str, ...]) -> dict[str, Any]:
    """Return a recipe with these flags as a checkpoint holds it."""
    return store.to_json(config.load(name, flags)[0])


@cache
def loaded(name: str, tiny: tuple[str, ...], *flags: str) -> tuple[config.Recipe, config.Run]:
    """Load a recipe, once for all runs with the same flags. A parser of fewer flags is faster: those that make the
    recipe tiny are parsed once."""
    run = [flag for flag in tiny if flag.startswith("--run.")]
    return config.of_stored(stored(name, tiny), name, [*run, *flags]).build()


def write_blobs(folder: Path, numbers: Sequence[int], patch: tuple[int, ...] = (32, 32)) -> Path:
    """Write volumes as `sightline prepare decathlon` does: noise with a bright and a dark ball; equal numbers give
    equal ones. 32 pixels are the fewest that deep supervision has levels for."""
    folder.mkdir()
    shape = (6, 32, 32) if len(patch) == 2 else (10, 32, 32)
    grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)  # (depth, height, width, 3)
    cases = []
    for place, number in enumerate(numbers):
        random = np.random.default_rng(number)
        image, label = random.normal(0, 0.4, (1, *shape)).astype(np.float32), np.zeros(shape, np.uint8)
        for kind, brightness in ((1, 1.0), (2, -1.0)):
            middle = random.uniform((1, 16 * kind - 11, 6), (5, 16 * kind - 6, 26))
            ball = ((grid - middle) ** 2 * (3, 1, 1)).sum(-1) < 25
            image[0, ball] += brightness
            label[ball] = kind
        files = f"case{place}_x.npy", f"case{place}_y.npy"
        np.save(folder / files[0], image)
        np.save(folder / files[1], label)
        cases.append(Case(f"case{place}", shape, shape, (0, 0, 0), shape, shape, (1.0, 1.0, 1.0), *files))
    dim = len(patch)
    spec = DataSpec(("background", "bright", "dark"), 1, patch, (), (), spacing=(1.0,) * dim)
    write_plan(folder, VolumePlan("own", "Blobs", dim, "training", spec, tuple(cases), "raw"))
    return folder


@pytest.fixture(scope="session")
def blobs() -> Callable[..., Path]:
    """blobs(folder, numbers, patch=(32, 32)): prepared volumes."""
    return write_blobs


@pytest.fixture(scope="session")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight, of which fold 0 of 5 holds out two; for reading only."""
    return write_blobs(tmp_path_factory.mktemp("prepared") / "volumes", range(8))


@pytest.fixture(scope="session")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty volumes for a 3D network, of which fold 0 of 5 holds out six; for reading only."""
    return write_blobs(tmp_path_factory.mktemp("prepared") / "patches", range(30), patch=(8, 32, 32))


@dataclass
class Result:
    """The results of a run."""

    folder: Path
    scores: Scores | None = None
    error: SightlineError | None = None
    shown: str = ""

    @property
    def checkpoints(self) -> list[Path]:
        """From the oldest to the newest."""
        return sorted((self.folder / "checkpoints").glob("ckpt-????????"))

    def events(self, kind: str) -> list[dict]:
        """The lines of log.jsonl of one kind, without their times."""
        found = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if k != "time"} for line in found if line["event"] == kind]

    def bits(self) -> dict[str, str]:
        """sha256 of every tensor file of the newest checkpoint."""
        files = sorted(self.checkpoints[-1].glob("*.safetensors"))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


Train = Callable[..., Result]


@pytest.fixture
def tiny(volumes: Path, patches: Path) -> Callable[[str], list[str]]:
    """tiny(name): the flags that make a recipe small."""
    return lambda name: tiny_flags(name, volumes, patches)


@pytest.fixture
def load(tiny) -> Callable[..., tuple[config.Recipe, config.Run]]:
    """load(name, *flags): a recipe at tiny size and its run, loaded once for all that ask for the same."""
    return lambda name, *flags: loaded(name, tuple(tiny(name)), *flags)


@pytest.fixture
def train_made(capsys: pytest.CaptureFixture[str]) -> Iterator[Train]:
    """train_made(recipe, run): one run; errors of ours are part of the result."""
    threads = torch.get_num_threads()

    def run(recipe: config.Recipe, how: config.Run) -> Result:
        result = Result(Path(how.out or f"runs/{recipe.name}"))
        capsys.readouterr()
        try:
            result.scores = api.train(recipe, how)
        except SightlineError as error:
            result.error = error
        result.shown = capsys.readouterr().out
        return result

    yield run
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def train(load, train_made: Train) -> Train:
    """train(name, folder, *flags): one run at tiny size."""

    def run(name: str, folder: Path, *flags: str) -> Result:
        recipe, how = load(name, *flags)
        return train_made(recipe, replace(how, out=str(folder)))

    return run


@pytest.fixture(scope="session")
def finished_runs() -> dict[tuple[str, ...], Result]:
    """By the name of their recipe and their flags; see `finished`."""
    return {}


@pytest.fixture
def finished(train: Train, finished_runs: dict[tuple[str, ...], Result], tmp_path_factory) -> Train:
    """finished(name, *flags): a run at tiny size and otherwise as the recipe is, made once; for reading only."""

    def run(*name_and_flags: str) -> Result:
        if name_and_flags not in finished_runs:
            name, *flags = name_and_flags
            finished_runs[name_and_flags] = train(name, tmp_path_factory.mktemp("finished") / "run", *flags)
        return finished_runs[name_and_flags]

    return run
