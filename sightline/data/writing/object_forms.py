"""Images with boxes, masks or labels in the forms that other programs read: COCO, YOLO, tar shards, parquet files.

`ObjectImages` writes one piece of a split and says what it wrote, as `LabelledImages` of forms.py does; `prepare
convert` writes through it. Images keep their bytes.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from sightline.data.decode import read_header
from sightline.data.formats.marked import is_background, run_lengths
from sightline.data.sources import IGNORED, BoxSource, Images, MaskSource, Source
from sightline.data.sources.layouts import IMAGES
from sightline.data.writing.forms import stored_name
from sightline.data.writing.pieces import Written, in_pieces
from sightline.errors import BadData, UsageError
from sightline.files.archive import BadArchive, clean_name
from sightline.files.plain_yaml import to_text
from sightline.files.whole import write_text, written_whole
from sightline.parts import Split

ObjectForm = Literal["coco", "yolo", "tar", "parquet"]
_PER_PIECE = 250  # images in folders
_ROWS = 100  # of a row group
_BESIDE = 8192  # bytes on disk beside an image, at most
_ENDINGS = {"JPEG": ".jpg", "PNG": ".png", "BMP": ".bmp", "WEBP": ".webp", "TIFF": ".tif"}


@dataclass(frozen=True)
class ObjectImages:
    """Everything that decides the files. Pickled to every process once."""

    out: Path
    form: ObjectForm
    sources: dict[Split, Images]
    shards: dict[Split, int]
    data_bytes: int
    _names: dict[str, list[str]] = field(default_factory=dict, compare=False)

    def decided(self) -> dict[str, Any]:
        shards = dict(self.shards) if self.form in ("tar", "parquet") else None
        inputs = {split: source.fingerprint for split, source in self.sources.items()}
        return {"form": self.form, "of": self._what(), "shards": shards, "inputs": inputs}

    def _what(self) -> str:
        source = self.sources["train"]
        return "boxes" if isinstance(source, BoxSource) else "masks" if isinstance(source, MaskSource) else "labels"

    def check(self) -> None:
        if self.form == "yolo" and self._what() != "boxes":
            raise UsageError("--form yolo is for boxes; choose coco, tar or parquet for masks")
        if self.form == "coco" and self._what() == "labels":
            raise UsageError("--form coco is for boxes and masks; choose folder, tar or parquet for labels")
        if self.form == "parquet":
            from sightline.data.sources.parquet import pyarrow_module

            pyarrow_module()
        for split in self.sources:
            self.names(split)

    def names(self, split: Split) -> list[str]:
        """Return the names of the images in the new form, each its own."""
        if split not in self._names:
            source = self.sources[split]
            found = [_file_of(source, index) for index in range(len(source))]
            stems = {os.path.splitext(name)[0].casefold() for name in found}
            if len(stems) < len(found):
                found = [f"{index:08d}-{name}" for index, name in enumerate(found)]
            self._names[split] = found
        return self._names[split]

    def pieces(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for split, source in self.sources.items():
            per_piece = self._per_piece(split)
            count = self.shards[split] if self.form == "parquet" else -(-len(source) // per_piece)
            found[split] = in_pieces(len(source), per_piece, count)
        return found

    def _per_piece(self, split: Split) -> int:
        if self.form in ("tar", "parquet"):
            return max(1, -(-len(self.sources[split]) // self.shards[split]))
        return _PER_PIECE

    def room(self) -> int:
        return self.data_bytes + _BESIDE * sum(map(len, self.sources.values()))

    def write(self, part: str, number: int) -> Written:
        """Write one piece."""
        split: Split = "train" if part == "train" else "val"
        first = number * self._per_piece(split)
        rows = range(first, min(first + self._per_piece(split), len(self.sources[split])))
        writers = {"coco": self._coco, "yolo": self._yolo, "tar": self._tar, "parquet": self._parquet}
        files, notes = writers[self.form](split, number, rows)
        return Written(files, notes)

    def finish(self, written: list[Written]) -> dict[str, int]:
        counts: dict[str, int] = {split: len(source) for split, source in self.sources.items()}
        if crowds := sum(piece.notes.get("crowds", 0) for piece in written):
            counts["crowds left out"] = crowds
        classes = self.classes
        if self.form == "coco":
            at, parts = 0, list[Path]()
            for split, some in self.pieces().items():
                parts += self._write_json(split, written[at : at + len(some)], counts)
                at += len(some)
            for part in parts:  # not before both are whole: a start that is killed here is resumed
                part.unlink(missing_ok=True)
            if parts:
                parts[0].parent.rmdir()
        elif self.form == "yolo":
            names = dict(enumerate(classes))
            write_text(self.out, "data.yaml", to_text({"train": "images/train", "val": "images/val", "names": names}))
        elif self.form == "tar":
            write_text(self.out, "classes.txt", "".join(f"{name}\n" for name in classes))
        return counts

    @property
    def classes(self) -> tuple[str, ...]:
        return self.sources["train"].classes

    # One image

    def _data(self, split: Split, row: int) -> bytes:
        source = self.sources[split]
        data = source.read(row).data if isinstance(source, Source) else source.image(row)  # type: ignore[attr-defined]
        if not isinstance(data, bytes):
            raise BadData(f"{source.name(row)} has no encoded image; only images on disk are converted")
        return data

    def _named(self, split: Split, row: int, data: bytes) -> str:
        name = self.names(split)[row]
        if os.path.splitext(name)[1].lower() in IMAGES:
            return name
        return name + _ENDINGS[read_header(data, name).format]

    def _mask(self, split: Split, row: int) -> np.ndarray:
        source = self.sources[split]
        assert isinstance(source, MaskSource)
        return source.mask(row)

    # Forms

    def _coco(self, split: Split, number: int, rows: range) -> tuple[list[tuple[str, int]], dict[str, Any]]:
        files: list[tuple[str, int]] = []
        images: list[dict[str, Any]] = []
        objects: list[dict[str, Any]] = []
        for row in rows:
            data = self._data(split, row)
            name = self._named(split, row, data)
            files.append(self._written(f"{split}/{name}", data))
            height, width, found = self._objects(split, row, name, data)
            images.append({"id": row + 1, "file_name": name, "height": height, "width": width})
            objects += [{"image_id": row + 1, **each} for each in found]
        path = f"annotations/.parts/{split}-{number:06d}.json"
        files.append(self._written(path, json.dumps({"images": images, "annotations": objects}).encode()))
        return files, {"objects": len(objects)}

    def _objects(self, split: Split, row: int, name: str, data: bytes) -> tuple[int, int, list[dict[str, Any]]]:
        """Return the sides of an image and its objects as COCO has them."""
        source = self.sources[split]
        if isinstance(source, BoxSource):
            found = source.objects(row)
            columns = (found.labels, found.boxes, found.area, found.crowd)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            return found.height, found.width, [
                {"category_id": label, "bbox": box, "area": area, "iscrowd": int(crowd)}
                for label, box, area, crowd in rows
            ]  # fmt: skip
        mask = self._mask(split, row)
        objects = []
        numbered = dict(enumerate(self._object_classes(), 1))
        for label, at in [(1, IGNORED), *((n, self.classes.index(each)) for n, each in numbered.items())]:
            inside = mask == at
            if not inside.any():
                continue
            ys, xs = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
            left, top, right, bottom = map(int, (xs[0], ys[0], xs[-1] + 1, ys[-1] + 1))
            outline = {"size": list(mask.shape), "counts": run_lengths(inside.T.ravel())}
            about = {"category_id": label, "bbox": [left, top, right - left, bottom - top], "segmentation": outline}
            objects.append(about | {"area": int(inside.sum()), "iscrowd": int(at == IGNORED)})
        return mask.shape[0], mask.shape[1], objects

    def _object_classes(self) -> tuple[str, ...]:
        """Return the classes that are objects: of masks all but the background."""
        if self._what() == "boxes":
            return self.classes
        return tuple(name for name in self.classes if not is_background(name)) or self.classes

    def _write_json(self, split: str, written: list[Written], counts: dict[str, int]) -> list[Path]:
        """Join the parts of a split, one at a time, unless an earlier start did; return them."""
        parts = [
            self.out / path
            for piece in written
            for path, _ in piece.files
            if path.startswith("annotations/.parts/")
        ]  # fmt: skip
        counts[f"{split} objects"] = sum(piece.notes["objects"] for piece in written)
        if not all(part.exists() for part in parts):  # they are removed when all is written
            return []
        categories = [{"id": n, "name": name} for n, name in enumerate(self._object_classes(), 1)]
        count = 0
        with written_whole(self.out, f"annotations/instances_{split}.json", durable=True) as out:
            for key in ("images", "annotations"):
                out.write(f'{"{" if key == "images" else ","}\n"{key}": ['.encode())
                comma = b"\n"
                for part in parts:
                    for entry in json.loads(part.read_bytes())[key]:
                        count += key == "annotations"
                        text = json.dumps(entry | {"id": count} if key == "annotations" else entry)
                        out.write(comma + text.encode())
                        comma = b",\n"
                out.write(b"\n]")
            out.write(f',\n"categories": {json.dumps(categories)}}}\n'.encode())
        return parts

    def _yolo(self, split: Split, number: int, rows: range) -> tuple[list[tuple[str, int]], dict[str, Any]]:
        source = self.sources[split]
        assert isinstance(source, BoxSource)
        files: list[tuple[str, int]] = []
        crowds = 0
        for row in rows:
            data = self._data(split, row)
            name = self._named(split, row, data)
            found = source.objects(row)
            sides = np.asarray((found.width, found.height, found.width, found.height), np.float64)
            boxes = np.concatenate([found.boxes[:, :2] + found.boxes[:, 2:] / 2, found.boxes[:, 2:]], 1) / sides
            kept = ~found.crowd & (found.boxes[:, 2:] > 0).all(1)
            crowds += int(found.crowd.sum())
            lines = [
                " ".join([str(label - 1), *(f"{share:.8f}" for share in box)]) + "\n"
                for label, box in zip(found.labels[kept].tolist(), boxes[kept].tolist(), strict=True)
            ]
            files.append(self._written(f"images/{split}/{name}", data))
            files.append(self._written(f"labels/{split}/{os.path.splitext(name)[0]}.txt", "".join(lines).encode()))
        return files, {"crowds": crowds}

    def _tar(self, split: Split, number: int, rows: range) -> tuple[list[tuple[str, int]], dict[str, Any]]:
        path = f"{split}/{split}-{number:06d}.tar"
        with written_whole(self.out, path, durable=True) as out:
            with tarfile.open(fileobj=out, mode="w") as tar:
                for row in rows:
                    data = self._data(split, row)
                    key, _, suffix = stored_name("tar", self._named(split, row, data)).rpartition(".")
                    members = {suffix: data, "json": json.dumps(self._said(split, row)).encode()}
                    if self._what() == "masks":
                        members["seg.png"] = _png(self._mask(split, row))
                    for ending, content in members.items():
                        # Time, user and group stay 0: equal input, equal bytes.
                        info = tarfile.TarInfo(f"{key}.{ending}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
            size = out.tell()
        return [(path, size)], {}

    def _said(self, split: Split, row: int) -> dict[str, Any]:
        """Return what the json of a sample says: its boxes, with the names of their classes."""
        source = self.sources[split]
        if not isinstance(source, BoxSource):
            return {}
        found = source.objects(row)
        names = [self.classes[label - 1] for label in found.labels.tolist()]
        boxes = {"bbox": found.boxes.tolist(), "category": names, "iscrowd": found.crowd.astype(int).tolist()}
        return {"width": found.width, "height": found.height, "objects": boxes}

    def _parquet(self, split: Split, number: int, rows: range) -> tuple[list[tuple[str, int]], dict[str, Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        named = "validation" if split == "val" else split
        path = f"data/{named}-{number:05d}-of-{self.shards[split]:05d}.parquet"
        schema = self._schema(pa)
        with written_whole(self.out, path, durable=True) as out:
            writer = pq.ParquetWriter(out, schema, compression="none", use_dictionary=False, write_statistics=False)
            for first in range(rows.start, max(rows.stop, rows.start + 1), _ROWS):
                made = [self._row(split, row) for row in rows[first - rows.start : first - rows.start + _ROWS]]
                columns = [pa.array([row[name] for row in made], schema.field(name).type) for name in schema.names]
                writer.write_table(pa.table(columns, schema=schema), row_group_size=_ROWS)
            writer.close()
            size = out.tell()
        return [(path, size)], {}

    def _row(self, split: Split, row: int) -> dict[str, Any]:
        data = self._data(split, row)
        found: dict[str, Any] = {"image": {"bytes": data, "path": self._named(split, row, data)}}
        source = self.sources[split]
        if isinstance(source, BoxSource):
            objects = source.objects(row)
            columns = (objects.boxes, objects.labels - 1, objects.crowd.astype(int))
            names = ("bbox", "category", "iscrowd")
            found["objects"] = {name: column.tolist() for name, column in zip(names, columns, strict=True)}
            found |= {"width": objects.width, "height": objects.height}
        elif isinstance(source, MaskSource):
            found["mask"] = {"bytes": _png(self._mask(split, row)), "path": None}
        elif isinstance(source, Source):
            label = source.read(row).label
            found["label"] = label if isinstance(label, int) else np.flatnonzero(label).tolist()
        return found

    def _schema(self, pa: Any) -> Any:
        """Return the columns, with what `datasets` says of them."""
        source = self.sources["train"]
        image = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        names = {"names": list(self.classes), "_type": "ClassLabel"}
        told: dict[str, Any] = {"image": {"_type": "Image"}}
        fields = [("image", image)]
        if isinstance(source, BoxSource):
            numbers = pa.list_(pa.int64())
            boxes = pa.struct({"bbox": pa.list_(pa.list_(pa.float64())), "category": numbers, "iscrowd": numbers})
            number = {"dtype": "int64", "_type": "Value"}
            box = {"feature": {"feature": {"dtype": "float64", "_type": "Value"}, "_type": "List"}, "_type": "List"}
            fields += [("objects", boxes), ("width", pa.int64()), ("height", pa.int64())]
            told["objects"] = {"bbox": box, "category": {"feature": names, "_type": "List"}}
            told["objects"]["iscrowd"] = {"feature": number, "_type": "List"}
            told |= {"width": number, "height": number}
        elif isinstance(source, MaskSource):
            fields.append(("mask", image))
            told["mask"] = {"_type": "Image"}
        else:
            several = bool(getattr(source, "is_multi_label", False))
            fields.append(("label", pa.list_(pa.int64()) if several else pa.int64()))
            told["label"] = {"feature": names, "_type": "List"} if several else names
        return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": told}})})

    def _written(self, path: str, data: bytes) -> tuple[str, int]:
        with written_whole(self.out, path) as out:
            out.write(data)
        return path, len(data)


def _png(mask: np.ndarray) -> bytes:
    packed = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8)).save(packed, "PNG")
    return packed.getvalue()


def _file_of(source: Images, index: int) -> str:
    """Return the last part of a sample's name, which may come from strangers."""
    name = source.name(index).rpartition("/")[2].rpartition(":")[2]
    try:
        return clean_name(name.lstrip("."), source.name(index))
    except BadArchive:
        return f"{index:08d}"


def bytes_of(source: Images) -> int:
    """Return the bytes that the images of a split take, about."""
    return sum(os.stat(file).st_size for file in dict.fromkeys(source.files) if os.path.exists(file))
