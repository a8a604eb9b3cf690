"""The data of segmentation: where prepared volumes lie, and how they become the network's input."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from sightline.data.augment import with_fields_of
from sightline.data.augment.fields import SegmentationFields
from sightline.data.volumes.plan import OWN, PLAN, VolumePlan, read_plan, spec_of
from sightline.errors import BadData, UsageError
from sightline.parts import DataConfig, DataFacts, Dataset, DataSpec, ServedInput, Split
from sightline.recipe.part import AtLeast, AtMost, not_compared

if TYPE_CHECKING:
    from sightline.data.augment.segmentation import Augmentation
    from sightline.data.check.images import Report
    from sightline.data.segmentation.dataset import SegmentationDataset
    from sightline.data.sources import VolumeSource
    from sightline.data.volumes.inputs import Files
    from sightline.terminal.progress import Progress

# Number of labelled volumes of each task of the Decathlon.
LABELLED = {
    "01": 484, "02": 20, "03": 131, "04": 260, "05": 32, "06": 63, "07": 281, "08": 303, "09": 41, "10": 126,
}  # fmt: skip


@dataclass(frozen=True)
class SegmentationData(SegmentationFields, DataConfig):
    """Location of the volumes, and how they become the network's input."""

    path: str = not_compared("")
    """A folder written by `sightline prepare decathlon`, or synthetic:samples=64; see
    docs/reference/data_volumes.md."""
    task: Literal["01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "own"] = "01"
    """The Decathlon's task that the data belong to; own: any other data, prepared in the same way."""
    dim: Annotated[int, AtLeast(2), AtMost(3, "2 is slices, 3 is volumes")] = 2
    """2: the network sees slices; 3: it sees volumes."""
    fold: int = 0
    """The fold that is held out for validation; training uses the others; with `train` also all: a run per fold."""
    folds: int = 5
    """Number of folds that the volumes are split into. 1: all volumes validate, only for `evaluate`."""
    nvol: Annotated[int, AtLeast(0, "0 is one per device")] = 0
    """dim 2: number of volumes that the slices of a batch come from, over all devices; a multiple of the number of
    devices. 0: one per device at the first start. It rises by itself if volumes are shallower than their share."""
    cache: Literal["auto", "off", "ram", "gpu"] = not_compared("auto")
    """ram: keep volumes in memory once read, shared by the ranks of a host; auto: if they take at most half of the
    available memory, and says so; off: rely on the system's file cache; gpu: in the memory of the device, where crops
    are cut and augmented."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """If a volume cannot be read: end the run with exit 3, or skip the volume, count and list it."""
    max_bad_samples: int = not_compared(1000)
    """skip: end the run if there are more bad volumes than this."""
    fingerprint: Literal["names", "sampled", "full"] = not_compared("sampled")
    """How a resumed run knows its data again, besides names and sizes. sampled: the bytes of at most 256 files, 64 MiB
    in all, of each split; full: every byte; names: no bytes."""

    file_suffixes = (".nii.gz", ".nii", *DataConfig.file_suffixes)

    worker_modules = ("sightline.data.segmentation.dataset",)

    def check(self) -> None:
        super().check()
        if self.cache == "gpu" and self.augment_on == "host":
            raise UsageError(
                "data.augment_on=host cannot be combined with data.cache=gpu, which cuts crops on the device; use ram"
            )
        if not 0 <= self.fold < self.folds:
            raise UsageError(
                f"data.fold={self.fold} of data.folds={self.folds}: use 2 folds or more, and fold 0 to folds - 1"
            )
        if self.nvol > 1 and self.dim == 3:
            raise UsageError(
                f"data.nvol={self.nvol} belongs to data.dim=2; dim=3 takes a patch per volume; use --data.nvol 1"
            )

    @property
    def augmentation(self) -> Augmentation:
        """The operations that these fields choose."""
        from sightline.data.augment.segmentation import Augmentation

        return with_fields_of(self, Augmentation)

    def open(self, split: Split, seed: int) -> SegmentationDataset:
        """Open the volumes of a split of the fold."""
        from sightline.data.segmentation.dataset import SegmentationDataset

        if not self.path:
            drawn = "" if self.task == OWN else " or --data.path synthetic:samples=64"
            raise UsageError(f"no data: give --data.path DIR (written by `sightline prepare decathlon`){drawn}")
        return SegmentationDataset(self, self.source(split), split, seed)

    def look(self, run: Path, typed: Collection[str]) -> DataFacts:
        """Read the plan of a prepared folder for its task, unless one was typed."""
        from sightline.data import facts

        return facts.of_volumes(self, typed)

    def for_ranks(self, ranks: int) -> Self:
        """Take the slices of a batch from one volume per rank, where nvol is left open."""
        return self if self.nvol else replace(self, nvol=ranks if self.dim == 2 else 1)

    def whole(self, typed: Collection[str]) -> Self:
        """Hold out all volumes, unless a fold was typed."""
        return self if not {"fold", "folds"}.isdisjoint(typed) else replace(self, fold=0, folds=1)

    def open_test(self, seed: int) -> Dataset:
        """Refuse: the test volumes of these layouts have no labels."""
        raise UsageError(
            f"{self.path}: volumes have no test split, because imagesTs of the Decathlon and of nnU-Net has no "
            "labels. `sightline predict RUN DIR/imagesTs` predicts it; labelled volumes of your own: "
            "`sightline evaluate MASKS --labels DIR`, or prepare them and give that folder as --data.path"
        )

    def open_files(self, files: Files, spec: DataSpec) -> Dataset:
        """Open any volumes or images, whole; the task's windows cover them."""
        from sightline.data.volumes.inputs import VolumeFiles

        return VolumeFiles(files, spec)

    def served(self, spec: DataSpec) -> ServedInput:
        """Take patches of prepared volumes, which are normalised as a whole."""
        steps = {name: list(getattr(spec, name)) for name in ("spacing", "clip", "mean", "std")}
        axes = "NCDHW" if self.dim == 3 else "NCHW"
        return ServedInput(axes, (spec.channels, *spec.size), "float32", steps, lambda image: image)

    def first_files(self, files: dict[str, Path], spec: DataSpec) -> dict[str, Path]:
        """Leave out further channels of a case, which are read with its first."""
        from sightline.data.volumes.files import channel_files

        further = {other for path in files.values() for other in channel_files(path, spec.channels)[1:]}
        return {name: path for name, path in files.items() if path not in further}

    def labelled_files(self, folder: Path) -> dict[str, tuple[Path, Path]]:
        """Find the volumes of the val split in the folder that they were prepared from."""
        from sightline.data.volumes.layouts import labelled_files

        source = self.source("val")
        return labelled_files([source.name(index) for index in range(len(source))], folder)

    def source(self, split: Split) -> VolumeSource:
        """Open the volumes on disk; they must belong to the declared task."""
        from sightline.data.sources import open_volumes
        from sightline.data.volumes.layouts import are_images, describe_raw, find_raw, remedy

        if (Path(self.path) / PLAN).is_file():
            self._check_plan(read_plan(Path(self.path)))
        elif not self.path.startswith("synthetic:") and (raw := find_raw(Path(self.path))):
            as_they_are = f". `sightline train segmentation --data.path {shlex.quote(str(raw))}` needs no preparation"
            raise UsageError(
                f"{raw} is not prepared; found {describe_raw(raw)}. Prepare it with {remedy(raw, self.dim)}"
                + (as_they_are if are_images(raw) else "")
            )
        return open_volumes("auto", self.path, split, self.fold, self.folds, self._expected_spec())

    def _check_plan(self, plan: VolumePlan) -> None:
        if plan.dim != self.dim:
            raise BadData(
                f"{self.path} was prepared with dim {plan.dim}, the recipe is made for dim {self.dim}; give --data.dim "
                f"{plan.dim} --data.task {plan.task}, or prepare another folder with `sightline prepare decathlon "
                f"--source DIR --out DIR --dim {self.dim}` and give that as --data.path"
            )
        if plan.task != self.task:
            raise BadData(
                f"{self.path} was prepared for task {plan.task} ({plan.name}), the recipe is made for task "
                f"{self.task}; give --data.task {plan.task}, or the right --data.path"
            )

    def declared(self) -> tuple[DataSpec, int] | None:
        """Declare the spec of the task and the training volumes of the fold if no path is given."""
        if self.path:
            return None
        count = LABELLED.get(self.task, 0)
        held_out = count // self.folds + (self.fold < count % self.folds)
        return self._expected_spec(), count - held_out

    def declared_per_item(self, global_batch: int) -> int:
        """Return the slices per volume, as if all volumes were deep enough."""
        return 1 if self.dim == 3 else global_batch // self.volumes_of(global_batch, global_batch)

    def synthetic(self, spec: DataSpec, samples: int) -> SegmentationData:
        """Use synthetic volumes."""
        return replace(self, path=f"synthetic:samples={samples}")

    def check_samples(self, decode: bool, processes: int, progress: Progress) -> Report:
        """Check every volume of both splits under `path`, with `decode` every voxel."""
        from sightline.data.check.volumes import check_volumes

        if not self.path:
            raise UsageError("no data: give --data.path DIR")
        return check_volumes(self.source, decode, processes, progress)

    def volumes_of(self, global_batch: int, depth: int) -> int:
        """Return how many volumes share a batch of slices (dim 2) if the shallowest volume has `depth` of them."""
        from sightline.data.sources.decathlon import volumes_of

        return volumes_of(global_batch, self.nvol, depth)

    def _expected_spec(self) -> DataSpec:
        if self.task != OWN:
            return spec_of(self.task, self.dim)
        if self.path and not self.path.startswith("synthetic:"):
            return read_plan(Path(self.path)).spec
        raise UsageError(
            f"task=own is known from its prepared folder alone, and there is none with --data.path={self.path!r}; give "
            "--data.path DIR (`benchmark` also needs --data real, or it times drawn volumes), or one of --data.task 01 "
            "to 10"
        )
