"""Results of `sightline predict` for volumes: masks in the geometry of their files, images of slices, millilitres."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sightline.data.formats.nifti import Header, read_header, read_label, read_scan, write_volume
from sightline.data.volumes.geometry import Geometry, Triple, to_original
from sightline.data.volumes.inputs import case_name
from sightline.errors import BadSample, UsageError
from sightline.parts import Batch, PredictJob
from sightline.report.predictions import ResultFolder, TableRow
from sightline.report.slices import Look, contact_sheet, millilitres

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor


class VolumePredictions(ResultFolder):
    """CASE.nii.gz, CASE.png and, where they are wanted, probabilities as CASE.npy."""

    columns = ("file", "mask")

    def __init__(self, job: PredictJob):
        options = job.options
        for flag, value in (("--top", options.top), ("--score-threshold", options.threshold)):
            if value is not None:
                raise UsageError(f"{flag} {value}: every voxel gets its most probable class; leave {flag} out")
        self._cases = _cases_of(job.files)
        endings = [".nii.gz", *[".npy"] * options.probabilities, *[".png"] * options.draws]
        results = [f"{case}{ending}" for case in self._cases.values() for ending in endings]
        super().__init__(job, results)

    def add(self, names: Sequence[str | None], predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Resample scores to the geometry of their file, and write, draw and report them."""
        for row, name in enumerate(names):
            if name is None:
                continue
            geometry = Geometry(*(_triple(batch[key][row]) for key in ("original", "start", "end", "extent")))
            depth, height, width = geometry.shape
            logits = predictions["logits"][row, :, :depth, :height, :width].float().cpu().numpy()
            self._add_volume(name, to_original(logits, geometry), geometry)

    def write(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Write predictions.json, with the names of the classes that masks hold as numbers."""
        return super().write({**about, "classes": list(self.spec.classes)})

    def table_rows(self, row: Mapping[str, Any]) -> list[TableRow]:
        """Return one row per file: its mask, and millilitres and voxels of every class but the background."""
        amounts = {f"{each['class']} {unit}": each[unit] for each in row["found"][1:] for unit in ("ml", "voxels")}
        return [{"file": row["file"], "mask": row["mask"], **amounts}]

    def _add_volume(self, name: str, scores: np.ndarray, geometry: Geometry) -> None:
        path, case = self._files[name], self._cases[name]
        try:
            header = read_header(path, name)
            image = read_scan(path, name).voxels[0] if self.options.draws else None
            if header.shape[1:] != geometry.original:
                raise BadSample(name, f"{path} has changed since it was predicted; predict it again")
        except BadSample as bad:
            self.note_unreadable(bad.name, bad.reason)
            return
        mask = scores.argmax(0).astype(np.uint8)
        row = self._row(name, header, mask)
        row["mask"] = f"{case}.nii.gz"
        self.replace(row["mask"], lambda temporary: write_volume(temporary, mask, header.affine))
        if self.options.probabilities:
            row["probabilities"] = f"{case}.npy"
            shares = probabilities(scores, geometry)
            self.replace(row["probabilities"], lambda temporary: np.save(temporary, shares, allow_pickle=False))
        if image is not None:
            row["picture"] = f"{case}.png"
            look = Look(case, image, header.spacing, header.affine, self.spec.classes, mask)
            drawing = contact_sheet(look)
            self.replace(row["picture"], lambda temporary: drawing.save(temporary, format="PNG", compress_level=4))
        self._rows[name] = row
        self.say(as_line(row))

    def _row(self, name: str, header: Header, mask: np.ndarray) -> dict[str, Any]:
        counts = np.bincount(mask.reshape(-1), minlength=len(self.spec.classes)).tolist()
        found = [
            {"class": class_name, "id": number, "voxels": count, "ml": round(millilitres(count, header.spacing), 6)}
            for number, (class_name, count) in enumerate(zip(self.spec.classes, counts, strict=True))
        ]
        shape, spacing = list(mask.shape), [round(mm, 6) for mm in header.spacing]
        return {"file": name, "path": str(self._files[name]), "shape": shape, "spacing": spacing, "found": found}


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
    sides = "x".join(map(str, row["shape"]))
    return "  ".join([row["file"], sides, *(f"{each['class']} {each['ml']:.3f} ml" for each in row["found"][1:])])


def compared_slices(case: str, image: Path, mask: Path, label: Path, classes: tuple[str, ...]) -> Image.Image:
    """Draw slices of a volume with the outlines of its mask and of its label."""
    scan = read_scan(image, case)
    found, truth = read_label(mask, case)[0], read_label(label, case)[0]
    return contact_sheet(Look(case, scan.voxels[0], scan.spacing, scan.affine, classes, found, truth))


def _cases_of(files: Mapping[str, Path]) -> dict[str, str]:
    by_case: dict[str, str] = {}
    for name in files:
        other = by_case.setdefault(case_name(name), name)
        if other != name:
            result = f"{case_name(name)}.nii.gz"
            raise UsageError(f"{other} and {name} would both become {result}; predict them one after the other")
    return {name: case for case, name in by_case.items()}


def _triple(values: Tensor) -> Triple:
    first, second, third = values.tolist()
    return first, second, third
