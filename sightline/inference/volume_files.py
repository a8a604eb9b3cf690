"""Results of `sightline predict` for segmentation: masks in the geometry of their files, drawings, and how much of each
class was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from sightline.data.decode import decode_rgb
from sightline.data.formats.nifti import Header, write_volume
from sightline.data.volumes.components import keep_largest
from sightline.data.volumes.files import (
    FIRST_CHANNEL,
    MASK,
    case_name,
    channel_files,
    is_image,
    read_header,
    read_label,
    read_scan,
)
from sightline.data.volumes.geometry import Geometry, Triple, to_original
from sightline.data.volumes.inputs import AT_ONCE_BYTES, is_flat, scan_of
from sightline.drawing.slices import Look, contact_sheet, grey_tile, millilitres, outline_colour, outlined_image
from sightline.errors import BadSample, UsageError
from sightline.files.image_bytes import read_bytes, write_image
from sightline.inference.predictions import THREADS, ResultFolder, TableRow
from sightline.inference.reporter import PredictJob
from sightline.parts import Batch, DataSpec

if TYPE_CHECKING:
    from torch import Tensor


class VolumePredictions(ResultFolder):
    """CASE.nii.gz (of a 2D image CASE_mask.png), the drawing CASE.png and, where they are wanted, probabilities as
    CASE.npy."""

    columns = ("file", "mask")

    def __init__(self, job: PredictJob):
        options = job.options
        for flag, value in (("--top", options.top), ("--score-threshold", options.threshold)):
            if value is not None:
                raise UsageError(f"{flag} {value}: every voxel gets its most probable class; leave {flag} out")
        self._cases = _cases_of(job.files, job.spec.channels)
        endings = [*[".npy"] * options.probabilities, *[".png"] * options.draws]
        results = [f"{case}{ending}" for case in self._cases.values() for ending in endings]
        results += [_mask_name(case, job.files[name]) for name, case in self._cases.items()]
        super().__init__(job, results)

    def add(self, names: Sequence[str | None], predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Resample scores to the geometry of their file, and write, draw and report them."""
        rows = [(row, name) for row, name in enumerate(names) if name is not None]
        voxels = max((math.prod(batch["original"][row].tolist()) for row, _ in rows), default=0)
        scores = max(1, 4 * len(self.spec.classes) * voxels)  # bytes of one volume's, in the geometry of its file
        self.add_files(
            ((name, partial(self._added, name, *prepared_scores(predictions, batch, row))) for row, name in rows),
            max(1, min(THREADS, AT_ONCE_BYTES // scores)),
        )

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """Return one line, with how much of every class was found."""
        return [as_line(row)]

    def write(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Write predictions.json, with the names of the classes that masks hold as numbers."""
        return super().write({**about, "classes": list(self.spec.classes)})

    def table_rows(self, row: Mapping[str, Any]) -> list[TableRow]:
        """Return one row per file: its mask, and millilitres (of a 2D image percent) and voxels of every class but the
        background."""
        units = (*(unit for unit in ("ml", "percent") if unit in row["found"][0]), "voxels")
        amounts = {f"{each['class']} {unit}": each[unit] for each in row["found"][1:] for unit in units}
        return [{"file": row["path"], "mask": row["mask"], **amounts}]

    def _added(self, name: str, prepared: np.ndarray, geometry: Geometry) -> dict[str, Any]:
        """Write the results of a volume; return its row. Raises BadSample if its file has changed."""
        path, case = self._files[name], self._cases[name]
        scores = to_original(prepared, geometry)
        mask, counts = mask_of(scores, self.spec.classes, self.options.largest)
        header = read_header(path, name, self.spec.channels)
        drawing = drawn_mask(case, path, self.spec, mask) if self.options.draws else None
        if header.shape[1:] != geometry.original:
            raise BadSample(name, f"{path} has changed since it was predicted; predict it again")
        row = self._row(name, header, mask, counts)
        row["mask"] = _mask_name(case, path)
        write = _write_image if is_image(path) else write_volume
        self.replace(row["mask"], lambda temporary: write(temporary, mask, header.affine))
        if self.options.probabilities:
            row["probabilities"] = f"{case}.npy"
            shares = probabilities(scores, geometry)
            self.replace(row["probabilities"], lambda temporary: np.save(temporary, shares, allow_pickle=False))
        if drawing is not None:
            row["picture"] = f"{case}.png"
            self.replace(row["picture"], lambda path: write_image(path, drawing, format="PNG", compress_level=4))
        return row

    def _row(self, name: str, header: Header, mask: np.ndarray, counts: Sequence[int]) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        for number, (class_name, count) in enumerate(zip(self.spec.classes, counts, strict=True)):
            found.append({"class": class_name, "id": number, "voxels": count})
            if is_image(self._files[name]):
                found[-1]["percent"] = round(100 * count / mask.size, 4)
            else:
                found[-1]["ml"] = round(millilitres(count, header.spacing), 6)
        shape, spacing = list(mask.shape), [round(mm, 6) for mm in header.spacing]
        return {"file": name, "path": str(self._files[name]), "shape": shape, "spacing": spacing, "found": found}


def scores_of_row(predictions: Mapping[str, Tensor], batch: Batch, row: int) -> tuple[np.ndarray, Geometry]:
    """Return the scores (classes, depth, height, width) of a volume in the geometry of its file, and that geometry."""
    prepared, geometry = prepared_scores(predictions, batch, row)
    return to_original(prepared, geometry), geometry


def prepared_scores(predictions: Mapping[str, Tensor], batch: Batch, row: int) -> tuple[np.ndarray, Geometry]:
    """Return the scores of a volume as the network saw it, and its geometry."""
    geometry = Geometry(*(_triple(batch[key][row]) for key in ("original", "start", "end", "extent")))
    depth, height, width = geometry.shape
    logits: np.ndarray = predictions["logits"][row, :, :depth, :height, :width].float().cpu().numpy()
    return logits, geometry


def mask_of(scores: np.ndarray, classes: Sequence[str], largest: Sequence[int]) -> tuple[np.ndarray, list[int]]:
    """Return the most probable class of every voxel, and how many voxels each class has; the classes in `largest` keep
    their largest connected component alone."""
    mask = scores.argmax(0).astype(np.uint8)
    if largest:
        mask = keep_largest(mask, largest)
    return mask, np.bincount(mask.reshape(-1), minlength=len(classes)).tolist()


def probabilities(scores: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Return the softmax over the classes (classes, depth, height, width); equal where nothing was predicted."""
    shares = scores - scores.max(0)
    np.exp(shares, out=shares)
    shares /= shares.sum(0)
    outside = np.ones(geometry.original, bool)
    outside[geometry.slices] = False
    shares[:, outside] = 1 / len(shares)
    return shares


def as_line(row: Mapping[str, Any]) -> str:
    """Format a row of predictions.json for the terminal."""
    found = [
        f"{each['class']} {each['ml']:.3f} ml" if "ml" in each else f"{each['class']} {each['percent']:.2f} %"
        for each in row["found"][1:]
    ]
    return "  ".join([row["file"], "x".join(map(str, row["shape"])), *found])


def compared_slices(case: str, image: Path, mask: Path, label: Path, spec: DataSpec) -> Image.Image:
    """Draw an image, or slices of a volume, with the outlines of its mask and of its label."""
    found, truth = read_label(mask, case)[0], read_label(label, case, len(spec.classes))[0]
    return drawn_mask(case, image, spec, found, truth)


def drawn_mask(
    case: str,
    given: Path | np.ndarray | Image.Image,
    spec: DataSpec,
    mask: np.ndarray,
    label: np.ndarray | None = None,
) -> Image.Image:
    """Draw the mask into its file, or image in memory; raise BadSample if that has another shape than when it was
    predicted."""
    scan = read_scan(given, case, spec.channels) if isinstance(given, Path) else scan_of(given, spec, case)
    if scan.voxels.shape[1:] != mask.shape:
        named = given if isinstance(given, Path) else case
        raise BadSample(case, f"{named} has changed since it was predicted; predict it again")
    look = Look(case, scan.voxels[0], scan.spacing, scan.affine, spec.classes, mask, label)
    if isinstance(given, Path) and is_image(given):
        return outlined_image(decode_rgb(read_bytes(given, case), case), look)
    if not is_flat(scan):
        return contact_sheet(look)
    planes = scan.voxels[:, 0]
    if len(planes) == 3:  # a colour image in memory
        return outlined_image(np.moveaxis(planes, 0, 2).astype(np.uint8), look)
    return outlined_image(np.asarray(grey_tile(planes[0], max(mask.shape))), look)


def _write_image(path: Path, mask: np.ndarray, affine: np.ndarray) -> None:
    """Write a mask of one slice as PNG: numbers of classes, shown in the colours of their outlines."""
    image = Image.fromarray(mask[0])
    image.putpalette([part for number in range(256) for part in (outline_colour(number) if number else (0, 0, 0))])
    write_image(path, image, format="PNG")


def _mask_name(case: str, path: Path) -> str:
    return f"{case}{MASK}" if is_image(path) else f"{case}.nii.gz"


def _cases_of(files: Mapping[str, Path], channels: int) -> dict[str, str]:
    """Return the case of each file. nnU-Net's CASE_0000.nii.gz is CASE; if there is one channel, where all files are
    named so: scan_0000 and scan_0001 are two cases."""
    is_first = channels == 1 and all(case_name(name).endswith(FIRST_CHANNEL) for name in files)
    by_case: dict[str, str] = {}
    for name, path in files.items():
        case = case_name(name)
        if is_first or len(channel_files(path, channels)) > 1:
            case = case.removesuffix(FIRST_CHANNEL)
        other = by_case.setdefault(case, name)
        if other != name:
            result = _mask_name(case, path)
            raise UsageError(f"{other} and {name} would both become {result}; predict them one after the other")
    return {name: case for case, name in by_case.items()}


def _triple(values: Tensor) -> Triple:
    first, second, third = values.tolist()
    return first, second, third
