"""The results of `sightline predict` for images: predictions.json and .csv, a drawing for each, lines to read."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.data.decode import decode_rgb, read_header
from sightline.drawing.findings import draw
from sightline.errors import BadData, BadSample, UsageError
from sightline.files.image_bytes import read_bytes, write_image
from sightline.files.typed_json import read_json
from sightline.files.whole import write_whole
from sightline.inference.reporter import PredictJob, Reporter
from sightline.parts import Batch, DataSpec, Finding
from sightline.terminal import visible

if TYPE_CHECKING:
    from torch import Tensor

# findings(predictions, spec, top, threshold): for each image the best first; None leaves the choice to the task.
Findings = Callable[[Mapping[str, "Tensor"], DataSpec, int | None, float | None], list[list[Finding]]]
DOCUMENT = "predictions.json"
TABLE = "predictions.csv"
TableRow = dict[str, str | int | float]
FORMAT = 1
_MOST_BYTES = 2**30  # of an earlier call's results
THREADS = 8  # that decode, draw, compress and write the files of a batch
# Where a formula may begin: at the start of a cell, and after the mark by which some languages part cells of a CSV,
# whatever quotes say. Programs may drop blanks before it, and take wide signs for narrow ones.
_FORMULA = re.compile(r"(?:^|(?<=;))(?=\s*[-=+@\uff1d\uff0b\uff0d\uff20])")
# Full colour at every pixel: halved, thin red lines and small letters blur.
ENCODERS: dict[str, dict[str, Any]] = {
    ".jpg": {"format": "JPEG", "quality": 92, "subsampling": 0},
    ".jpeg": {"format": "JPEG", "quality": 92, "subsampling": 0},
    ".png": {"format": "PNG", "compress_level": 4},
    ".webp": {"format": "WEBP", "quality": 90},
    ".bmp": {"format": "BMP"},
}


class ResultFolder(Reporter):
    """The folder of results: what every reporter does alike."""

    columns: tuple[str, ...]  # of predictions.csv where it has no rows, which may have more
    is_main = True  # False on all ranks but one, which writes the table of all

    def __init__(self, job: PredictJob, results: Sequence[str]):
        self.folder = job.folder
        self.spec = job.spec
        self.options = job.options
        self.say = job.say
        self.unreadable: list[dict[str, str]] = []
        self._files = job.files
        self._rows: dict[str, dict[str, Any]] = {}
        self._protect_inputs(results)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be made: {error.strerror}; give another --out DIR") from error

    def note_unreadable(self, name: str, reason: str) -> None:
        """List an unreadable file and warn; the others are still predicted."""
        self.unreadable.append({"file": name, "path": str(self._files[name]), "reason": reason})
        self.say(f"warning: {name} cannot be read: {reason}")

    def write(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Write predictions.json, with the files in the order they were given, and predictions.csv; only rank 0."""
        rows = [self._rows[name] for name in self._files if name in self._rows]
        places = {name: place for place, name in enumerate(self._files)}
        unreadable = sorted(self.unreadable, key=lambda each: places[each["file"]])
        document = {"format": FORMAT, **about, "files": rows, "unreadable": unreadable}
        if not self.is_main:
            return document
        self._tell_of_others()
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        self.replace(DOCUMENT, lambda path: path.write_text(text, encoding="utf-8"))
        table = _as_csv(self.columns, [line for row in rows for line in self.table_rows(row)])
        self.replace(TABLE, lambda path: path.write_bytes(table))
        return document

    def found(self) -> dict[str, Any]:
        """Return what this rank has found, as JSON can hold it."""
        return {"rows": self._rows, "unreadable": self.unreadable}

    def take(self, found: Sequence[Mapping[str, Any]], is_main: bool) -> None:
        """Replace what was found by that of all ranks; raise BadData if a file is missing in it."""
        self.is_main = is_main
        self._rows = {name: row for each in found for name, row in each["rows"].items()}
        self.unreadable = [row for each in found for row in each["unreadable"]]
        if missing := sorted(set(self._files) - {*self._rows, *(row["file"] for row in self.unreadable)}):
            raise BadData(f"{len(missing)} of {len(self._files)} files were not predicted, e.g. {missing[0]}")

    def add_files(self, made: Iterable[tuple[str, Callable[[], dict[str, Any]]]], threads: int = THREADS) -> None:
        """Make the rows of some files on several threads, which write their results, and take them in order. What
        raises BadSample is listed as unreadable; the first other error is raised when all that was written is listed.
        Lines of rows that are ready are printed at once, in an eighth of the time.
        """
        failed: Exception | None = None
        lines: list[str] = []

        def say_lines() -> None:
            if lines:
                self.say("\n".join(lines))
                lines.clear()

        with ThreadPoolExecutor(threads, thread_name_prefix="sightline-results") as pool:
            rows = [(name, pool.submit(make)) for name, make in made]
            for name, row in rows:
                if not row.done():
                    say_lines()
                try:
                    self._rows[name] = row.result()
                except BadSample as bad:
                    say_lines()
                    self.note_unreadable(name, bad.reason)
                    continue
                except Exception as error:  # noqa: BLE001  # raised below
                    failed = failed or error
                    continue
                lines += self.lines(self._rows[name])
            say_lines()
        if failed:
            raise failed

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """Return the lines for the terminal of a file of predictions.json."""
        return [row["file"]]

    @abstractmethod
    def table_rows(self, row: Mapping[str, Any]) -> list[TableRow]:
        """Return the rows of predictions.csv for a file of predictions.json, columns by name."""

    def replace(self, name: str, write: Callable[[Path], object]) -> None:
        """Write a file of the folder, in place of an old one."""
        write_whole(self.folder / name, write)

    def _tell_of_others(self) -> None:
        """Warn of what an earlier call has left in the folder, which is not of these files."""
        try:
            earlier = {row["file"] for row in read_json(self.folder / DOCUMENT, _MOST_BYTES)["files"]}
        except (OSError, ValueError, KeyError, TypeError):  # none, or not one of ours
            return
        if others := len(earlier - self._rows.keys()):
            what = f"{others} other file{'s' * (others > 1)}"
            self.say(f"warning: {self.folder} also holds results of {what} of an earlier call; {DOCUMENT} omits them")

    def _protect_inputs(self, results: Sequence[str]) -> None:
        """Refuse results that would overwrite the files of the user."""
        inputs = {os.path.realpath(path) for path in self._files.values()}
        for result in results:
            if os.path.realpath(self.folder / result) in inputs:
                raise UsageError(f"--out {self.folder} would replace {self.folder / result}; give another folder")


class Predictions(ResultFolder):
    """Findings of images. An image keeps its name, and its format where that is one we write; else it is a PNG."""

    columns = ("file", "class", "id", "score")

    def __init__(self, findings: Findings, job: PredictJob):
        if job.options.probabilities:
            raise UsageError("--save-probabilities is for volumes; predictions.json holds the scores of images")
        self.findings = findings
        self._drawings = _drawing_names(job.files)
        super().__init__(job, list(self._drawings.values()) if job.options.draws else [])

    def table_rows(self, row: Mapping[str, Any]) -> list[TableRow]:
        """Return one row per finding; a file in which nothing was found has none."""
        rows = []
        for found in row["found"]:
            box = zip(("x", "y", "width", "height"), found.get("box", ()), strict=False)
            rows.append({"file": row["path"], **{key: found[key] for key in ("class", "id", "score")}, **dict(box)})
        return rows

    def add(self, names: Sequence[str | None], predictions: Mapping[str, Tensor], batch: Batch) -> None:
        """Draw, print and store the findings of each file."""
        found = self.findings(predictions, self.spec, self.options.top, self.options.threshold)
        given: list[Any] = [None] * len(names)
        if not self.options.draws and "height" in batch:  # the loader has read the files already
            given = list(zip(batch["height"].tolist(), batch["width"].tolist(), strict=True))
        rows = zip(names, found, given, strict=True)
        self.add_files((name, partial(self._row, name, *row)) for name, *row in rows if name is not None)

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """Return a line of classes, or a line for each box."""
        return as_lines(row)

    def _row(self, name: str, findings: Sequence[Finding], sides: tuple[int, int] | None) -> dict[str, Any]:
        """Draw the findings of a file; return its row. Reads the file again without `sides`, and raises BadSample if it
        has changed, or is damaged where the network did not look."""
        data = b"" if sides else read_bytes(self._files[name], name)
        height, width = sides or read_header(data, name).shape[:2]
        pixels = decode_rgb(data, name) if self.options.draws else None
        row: dict[str, Any] = {"file": name, "path": str(self._files[name]), "width": width, "height": height}
        row["found"] = [_as_json(finding, width, height) for finding in findings]
        if pixels is not None:
            row["picture"] = self._drawings[name]
            drawing, encoder = draw(pixels, findings), ENCODERS[Path(self._drawings[name]).suffix.lower()]
            self.replace(self._drawings[name], lambda path: write_image(path, drawing, **encoder))
        return row


def _as_csv(columns: Sequence[str], rows: Sequence[TableRow]) -> bytes:
    """Return the table as UTF-8; a name that is not text has its odd bytes written out."""
    text = io.StringIO()
    found = dict.fromkeys(name for row in rows for name in row)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_for_a_spreadsheet, found or columns))  # masks name columns by their classes
    writer.writerows([_for_a_spreadsheet(row.get(name, "")) for name in found] for row in rows)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _for_a_spreadsheet(cell: str | int | float) -> str | int | float:
    r"""Return a cell that is shown as it is: control characters are written out as \x1b, and text that would be a
    formula begins with '. predictions.json has the names themselves."""
    if not isinstance(cell, str):
        return cell
    return _FORMULA.sub("'", visible(cell).replace("\t", "\\x09").replace("\n", "\\x0a"))


def as_lines(row: Mapping[str, Any]) -> list[str]:
    """Format a row of predictions.json for the terminal: one line of classes, or a line for each box."""
    found = row["found"]
    if not found:
        return [f"{row['file']}  nothing found"]
    if "box" not in found[0]:
        return ["  ".join([row["file"], *(f"{each['class']} {each['score']:.4f}" for each in found)])]
    lines = [f"{row['file']}  {row['width']}x{row['height']}  {len(found)} found"]
    for each in found:
        x, y, width, height = each["box"]
        corners = f"({x:.0f}, {y:.0f}) ({x + width:.0f}, {y + height:.0f})"
        lines.append(f"  {each['score']:.3f} ({each['id']}) {each['class']}  {corners}")
    return lines


def _as_json(finding: Finding, width: int, height: int) -> dict[str, Any]:
    values: dict[str, Any] = {"class": finding.name, "id": finding.class_id, "score": finding.score}
    if finding.box is not None:
        left, top, right, bottom = finding.box
        edges = (left * width, top * height, (right - left) * width, (bottom - top) * height)
        values["box"] = [round(edge, 2) for edge in edges]  # x, y, width, height in pixels of the file
    return values


def _drawing_names(files: Mapping[str, Path]) -> dict[str, str]:
    names = {name: name if Path(name).suffix.lower() in ENCODERS else f"{name}.png" for name in files}
    if len(set(names.values())) < len(names):  # "x" beside "x.png"
        names = {name: f"{name}.png" for name in files}
    return names
