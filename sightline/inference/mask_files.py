"""Results of `sightline predict` for images with masks: a mask as the files of the training had them, a drawing, and
how much of each class was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from sightline.data.inputs import as_channels, decode_given
from sightline.data.volumes.components import keep_largest
from sightline.data.volumes.files import MASK, case_name
from sightline.drawing.slices import Look, grey_tile, outlined_image
from sightline.errors import BadSample, UsageError
from sightline.files.image_bytes import read_bytes, write_image
from sightline.inference.predictions import ResultFolder, TableRow
from sightline.inference.reporter import PredictJob
from sightline.parts import Batch, DataSpec

if TYPE_CHECKING:
    from torch import Tensor


_SHOWN = 5  # classes of an image on the screen; files have all


class MaskPredictions(ResultFolder):
    """NAME_mask.png with the numbers or colours of the files that were trained on, the drawing NAME.png and, where they
    are wanted, probabilities as NAME.npy."""

    columns = ("file", "mask")

    def __init__(self, job: PredictJob):
        options = job.options
        for flag, value in (("--top", options.top), ("--score-threshold", options.threshold)):
            if value is not None:
                raise UsageError(f"{flag} {value}: every pixel gets its most probable class; leave {flag} out")
        self._names = _names_of(job.files)
        endings = [MASK, *[".npy"] * options.probabilities, *[".png"] * options.draws]
        super().__init__(job, [f"{name}{ending}" for name in self._names.values() for ending in endings])

    def add(self, names: Sequence[str | None], predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Write, draw and report the mask of each file."""
        made = []
        for row, name in enumerate(names):
            if name is None:
                continue
            height, width = batch["extent"][row].tolist()
            mask = predictions["classes"][row, :height, :width].cpu().numpy()
            shares = shares_of(predictions, row, height, width) if self.options.probabilities else None
            made.append((name, partial(self._added, name, mask, shares)))
        self.add_files(made)

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """Return one line, with the shares of the largest classes."""
        most = sorted(row["found"], key=lambda each: each["pixels"], reverse=True)[:_SHOWN]
        shown = [f"{each['class']} {each['percent']:.2f} %" for each in row["found"] if each in most]
        return ["  ".join([row["file"], f"{row['width']}x{row['height']}", *shown])]

    def write(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Write predictions.json, with the classes and what masks call them."""
        return super().write({**about, "classes": list(self.spec.classes), "values": values_of(self.spec)})

    def table_rows(self, row: Mapping[str, Any]) -> list[TableRow]:
        """Return one row per file: its mask, and percent and pixels of every class."""
        amounts = {f"{each['class']} {unit}": each[unit] for each in row["found"] for unit in ("percent", "pixels")}
        return [{"file": row["path"], "mask": row["mask"], **amounts}]

    def _added(self, name: str, mask: np.ndarray, shares: np.ndarray | None) -> dict[str, Any]:
        """Write the results of an image; return its row. Raises BadSample if its file has changed."""
        path, stem = self._files[name], self._names[name]
        if self.options.largest:
            mask = keep_largest(mask[None], self.options.largest)[0]
        drawing = drawn_in_image(stem, path, self.spec, mask) if self.options.draws else None
        height, width = mask.shape
        row: dict[str, Any] = {"file": name, "path": str(path), "width": width, "height": height}
        row["mask"] = f"{stem}{MASK}"
        stored = as_stored(mask, self.spec)
        self.replace(row["mask"], lambda path: write_image(path, stored, format="PNG"))
        if shares is not None:
            row["probabilities"] = f"{stem}.npy"
            self.replace(row["probabilities"], lambda temporary: np.save(temporary, shares, allow_pickle=False))
        if drawing is not None:
            row["picture"] = f"{stem}.png"
            self.replace(row["picture"], lambda path: write_image(path, drawing, format="PNG", compress_level=4))
        counts = np.bincount(mask.reshape(-1), minlength=len(self.spec.classes)).tolist()
        row["found"] = [
            {"class": each, "id": value, "pixels": count, "percent": round(100 * count / mask.size, 4)}
            for each, value, count in zip(self.spec.classes, values_of(self.spec), counts, strict=True)
        ]
        return row


def drawn_in_image(name: str, given: Path | np.ndarray | Image.Image, spec: DataSpec, mask: np.ndarray) -> Image.Image:
    """Draw a mask (height, width) into its file, or image in memory; raise BadSample if that has another size."""
    form = (name, spec.channels, spec.bits)
    pixels = decode_given(read_bytes(given, name), *form) if isinstance(given, Path) else as_channels(given, *form)
    if pixels.shape[:2] != mask.shape:
        raise BadSample(name, f"{given if isinstance(given, Path) else name} has changed; predict it again")
    if spec.bits > 8:  # of which it may use a few only
        shown = np.asarray(grey_tile(pixels[..., 0], max(mask.shape)))
    else:
        shown = pixels[..., :3] if spec.channels >= 3 else pixels[..., :1].repeat(3, 2)
    return outlined_image(shown, Look(name, mask[None], (1, 1, 1), np.eye(4), spec.classes, mask[None]))


def values_of(spec: DataSpec) -> list[int | str]:
    """Return what masks call the classes: numbers, or colours such as #ff0000."""
    values = spec.class_ids or tuple(range(len(spec.classes)))
    return [f"#{value:06x}" for value in values] if spec.coloured else list(values)


def as_stored(mask: np.ndarray, spec: DataSpec) -> Image.Image:
    """Return a mask (height, width) of numbers of classes as the files of the training have it: in their colours, or
    with their numbers as grey levels, which every program reads alike."""
    values = np.array(spec.class_ids or range(len(spec.classes)))
    if spec.coloured:
        return Image.fromarray(np.stack([values >> 16, values >> 8 & 255, values & 255], 1).astype(np.uint8)[mask])
    return Image.fromarray(values.astype(np.uint8 if values.max() < 256 else np.uint16)[mask])


def shares_of(predictions: Mapping[str, Tensor], row: int, height: int, width: int) -> np.ndarray:
    """Return the softmax over the classes of one image, (classes, height, width) float32."""
    shares: np.ndarray = predictions["logits"][row, :, :height, :width].float().softmax(0).cpu().numpy()
    return shares


def _names_of(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the beginning of the names of each file's results."""
    by_stem: dict[str, str] = {}
    for name in files:
        stem = case_name(name)
        if (other := by_stem.setdefault(stem, name)) != name:
            raise UsageError(f"{other} and {name} would both become {stem}{MASK}; predict them one after the other")
    return {name: stem for stem, name in by_stem.items()}
