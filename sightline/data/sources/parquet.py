"""Hugging Face's datasets: parquet files with the bytes of images (data/train-00000-of-00002.parquet), and the folders
of Arrow files that `save_to_disk` writes; labels, boxes and masks from columns. Needs pyarrow: the extra `parquet`.

Of a parquet file the row group of an image is read, of which few are kept; Arrow files are mapped."""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sightline.data.decode import MAX_BYTES
from sightline.data.formats.marked import MOST_NAME, Shape
from sightline.data.sources import DEFAULT_OPTIONS, Sample, Source, SourceOptions, index_files, packed
from sightline.data.sources.coco import is_of_test, split_of
from sightline.data.sources.layouts import no_test_split, subfolders, validating
from sightline.data.sources.metadata import CATEGORIES, boxes_of
from sightline.data.sources.packed import PackedBoxes, PackedMasks, What
from sightline.data.sources.shards import Shard
from sightline.errors import BadData, BadSample, UsageError, first_of
from sightline.files.typed_json import read_json
from sightline.parts import Split

KIND = "parquet"
_ENDINGS = (".parquet", ".arrow")
_SAVED, _STATE = "dataset_dict.json", "state.json"
_IMAGES = ("image", "img", "picture", "pixel_values", "jpg", "png")  # names of columns, the preferred first
_LABELS = ("label", "labels", "fine_label", "class", "category", "target")
_OBJECTS = ("objects", "annotations", "object")
_MASKS = ("mask", "annotation", "segmentation_mask", "segmentation", "label", "labels", "gt", "semantic_mask")
_SCANNED = 2**14  # rows at once
_AT_ONCE = 2**26  # bytes at once that a column may take where each of its rows is as large as all are when packed
_LEAST_ROW = 4  # bytes of a file for each of its rows, at least
_MOST_PATH = 2**12  # bytes
_KEPT_BYTES = 2**26  # of row groups, in each process
_MOST_GROUP = 2**29  # bytes of one row group, unpacked
_MOST_JSON = 2**24
_FILE, _IN_FILE = b"ARROW1", 8  # how Arrow's file format begins; a stream of Arrow's follows there
_OTHERS = ("images", "labels", "annotations", "masks", "jpegimages")
_FOLDERS = ("", "data", "default")  # below the path, or below a split's folder


def detect(path: str) -> bool:
    """Return whether PATH is a parquet or Arrow file, or holds some where `datasets` puts them."""
    try:
        return bool(_files(path))
    except BadData:
        return False


def open_source(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> ParquetLabels:
    """Read the labels of a split, a number or several for each image."""
    files = _files(path)
    here = options.once((KIND, path, split), partial(_rows, path, files, split))
    train = here if split == "train" else options.once((KIND, path, "train"), partial(_rows, path, files, "train"))
    found = here or train
    if split == "test" and here is None:
        raise no_test_split(KIND)
    if found is None:
        raise BadData(f"{path} has no {split} split; found: {', '.join(files)}")
    return _labelled(found, train or found, "val" not in files, path, split, options)


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> PackedBoxes:
    """Read the boxes of a split."""
    return packed.boxes_of_split(_of_split(path, options, "objects"), path, split, options, KIND)


def open_masks(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> PackedMasks:
    """Read the masks of a split."""
    return packed.masks_of_split(_of_split(path, options, "mask"), path, split, options, KIND)


def _of_split(path: str, options: SourceOptions, needs: str) -> packed.OfSplit:
    files = _files(path)

    def of_split(split: str) -> Rows | None:
        found: Rows | None = options.once((KIND, path, split), partial(_rows, path, files, split))
        if found is not None and not getattr(found.columns, needs):
            what = "boxes (objects with bbox and category)" if needs == "objects" else "masks"
            raise BadData(f"{found.where()}: no column of {what}; found the columns {', '.join(found.columns.all)}")
        return found

    return of_split


# Where files lie


def _files(path: str) -> dict[str, list[Path]]:
    """Return the files of each split, in their order."""
    root = Path(path)
    if os.path.isfile(root):
        return {"train": [root]} if root.suffix.lower() in _ENDINGS else {}
    if not os.path.isdir(root):
        return {}
    if (root / _STATE).is_file():
        return {"train": _saved(root)}
    found: dict[str, list[Path]] = {}
    for name in subfolders(root):
        split = "test" if is_of_test(name) else split_of(name)
        if split and (root / name / _STATE).is_file():
            found.setdefault(split, _saved(root / name))
    if found:
        return _with_train(found)
    for below in _FOLDERS:
        files = [] if not below and _has_images(root) else _listed(root / below)
        for file in files:
            split = "test" if is_of_test(file.name) else split_of(file.name)
            found.setdefault(split or "train", []).append(file)
        if found:
            return _with_train(found)
    for name in subfolders(root):
        split = "test" if is_of_test(name) else split_of(name)
        if split and (files := [file for below in _FOLDERS[:2] for file in _listed(root / name / below)]):
            found.setdefault(split, files)
    return _with_train(found)


def _has_images(root: Path) -> bool:
    """Return whether a folder has other folders of data, beside which a parquet file says something else of them."""
    return any(name.lower() in _OTHERS for name in subfolders(root))


def _with_train(found: dict[str, list[Path]]) -> dict[str, list[Path]]:
    """Return splits of which a test split validates where there is no other."""
    if "val" not in found and "test" in found and "train" in found:
        return {**found, "val": found["test"]}
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        names = sorted(each for each in os.listdir(folder) if each.lower().endswith(".parquet") and each[0] != ".")
    except OSError:
        return []
    return [folder / name for name in names if os.path.isfile(folder / name)]


def _saved(folder: Path) -> list[Path]:
    """Return the Arrow files that `save_to_disk` lists."""
    try:
        listed = read_json(folder / _STATE, _MOST_JSON)["_data_files"]
        names = [each["filename"] for each in listed]
        if not names or not all(
            isinstance(each, str) and Path(each).name == each and each[:1] != "." for each in names
        ):
            raise ValueError("no files, or one elsewhere")
        if len(set(names)) < len(names):
            raise ValueError("a file is listed twice")
        if missing := [each for each in names if not os.path.isfile(folder / each)]:
            raise ValueError(f"{missing[0][:255]} is no file beside it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadData(f"{folder / _STATE} cannot be read: {error}; save the data with save_to_disk again") from error
    return [folder / each for each in names]


# What is in them


def pyarrow_module() -> Any:
    """Return pyarrow; UsageError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            "parquet and Arrow files need pyarrow, which is not installed: pip install 'sightline[parquet]'"
        ) from error
    return pyarrow


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn the errors of pyarrow into BadData."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, IndexError, TypeError, UnicodeDecodeError) as error:
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise BadData(f"{what} cannot be read: {text}; fetch or write it again") from error


@dataclass(frozen=True)
class Columns:
    """The columns of a split; "" where there is none."""

    all: tuple[str, ...]
    image: str = ""
    has_paths: bool = True  # beside the bytes
    labels: tuple[str, ...] = ()
    objects: str = ""
    mask: str = ""
    features: Mapping[str, Any] | None = None  # what `datasets` says of them

    @classmethod
    def of(cls, schema: Any, where: str) -> Columns:
        pa = pyarrow_module()
        kinds = {field.name: field.type for field in schema}
        features = _features(schema.metadata or {})
        holding = [name for name, kind in kinds.items() if _holds_bytes(pa, kind)]
        told = [name for name in kinds if isinstance(of := features.get(name), dict) and of.get("_type") == "Image"]
        images = told or holding
        image = next((name for name in _IMAGES if name in images), images[0] if images else "")
        if image not in holding:
            raise BadData(
                f"{where} has no column of images (bytes): {', '.join(kinds)}; where images are files beside a table, "
                "give a .csv or metadata.jsonl"
            )
        others = [name for name in holding if name != image]
        mask = next((name for name in _MASKS if name in others), others[0] if len(others) == 1 else "")
        plain = [name for name, kind in kinds.items() if _is_label(pa, kind)]
        declared = [name for name in plain if _names_of(features.get(name))]
        labels = [name for name in _LABELS if name in plain]
        labels = declared if len(declared) == 1 and not labels else labels
        objects = next((name for name in _OBJECTS if name in kinds and pa.types.is_nested(kinds[name])), "")
        kind = kinds[image]
        fields = [kind.field(at) for at in range(kind.num_fields)] if pa.types.is_struct(kind) else []
        has_paths = any(each.name == "path" and pa.types.is_string(each.type) for each in fields)
        return cls(tuple(kinds), image, has_paths, tuple(labels), objects, mask, features)


def _holds_bytes(pa: Any, kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return any(
            kind.field(at).name == "bytes" and _is_binary(pa, kind.field(at).type) for at in range(kind.num_fields)
        )
    return _is_binary(pa, kind)


def _is_binary(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_label(pa: Any, kind: Any) -> bool:
    inner = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind
    return bool(pa.types.is_integer(inner) or pa.types.is_string(inner) or pa.types.is_large_string(inner))


def _features(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return what `datasets` says of the columns."""
    text = metadata.get(b"huggingface", b"{}")
    try:
        found = json.loads(text[:_MOST_JSON]).get("info", {}).get("features", {})
    except (ValueError, AttributeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _names_of(feature: Any) -> tuple[str, ...]:
    """Return the names of the classes that a column numbers, also of one within it."""
    for _ in range(8):
        if not isinstance(feature, dict):
            return ()
        names = feature.get("names")
        if isinstance(names, list) and names and all(isinstance(each, str) and each for each in names):
            return tuple(each[:MOST_NAME] for each in names) if len(set(names)) == len(names) else ()
        feature = feature.get("feature")
    return ()


class Rows(packed.Packed):
    """The rows of some files; `groups` are row groups, or record batches."""

    kind, title = KIND, "Hugging Face's parquet"

    def __init__(self, root: Path, split: str, shards: Sequence[Shard], columns: Columns, groups: np.ndarray):
        self.root, self.split, self.shards, self.columns = root, split, tuple(shards), columns
        self.groups = groups  # (n, 3): shard, number in it, rows
        self.ends = np.cumsum(groups[:, 2])
        self.reader = Reader(self.shards)
        if all(shard.path.suffix.lower() == ".arrow" for shard in shards):
            self.title = "Hugging Face's save_to_disk"
        feature = (columns.features or {}).get(columns.objects)
        self.classes = _category_names(feature)
        self.names = self._paths() or self._numbers()

    def scan(self, name: str) -> Iterator[tuple[int, Any]]:
        """Yield (shard, array) of all parts of a column, in their order; none is kept."""
        for shard in range(len(self.shards)):
            with _reading(str(self.shards[shard].path)):
                for found in self.reader.scan(shard, name):
                    yield shard, found

    def _paths(self) -> index_files.Names | None:
        """Return the names of the images' files; None if not all are known, or two are equal."""
        if not self.columns.has_paths:
            return None
        blob, ends, keys = bytearray(), array("q"), array("q")
        import pyarrow.compute as pc

        for _, found in self.scan(f"{self.columns.image}.path"):
            if found.null_count or (pc.max(pc.binary_length(found)).as_py() or 0) > _MOST_PATH:
                return None
            for path in found.to_pylist():
                name = os.fsencode(os.path.basename(path.replace("\\", "/"))[:255])
                blob += name
                ends.append(len(blob))
                keys.append(hash(name))
        starts_empty = not len(ends) or bool((np.diff(np.asarray(ends), prepend=0) == 0).any())
        is_known = len(ends) == int(self.ends[-1]) and not starts_empty
        if not is_known or len(np.unique(np.asarray(keys))) < len(keys):
            return None
        return index_files.Names(bytes(blob), np.asarray(ends, np.int64))

    def _numbers(self) -> index_files.Names:
        """Return names of file and row."""
        return index_files.Names.of(
            [
                os.fsencode(f"{self.shards[shard].name}:{first + row}")
                for (shard, _, count), first in zip(self.groups.tolist(), self._firsts(), strict=True)
                for row in range(count)
            ]
        )

    def _firsts(self) -> list[int]:
        """Return the first row of each group in its file."""
        found, at, before = [], 0, -1
        for shard, _, count in self.groups.tolist():
            at = 0 if shard != before else at
            found.append(at)
            at, before = at + count, shard
        return found

    def value(self, row: int, name: str) -> Any:
        """Return what a row has in a column. Raises BadData."""
        group, at = self._place(row)
        with _reading(f"{self.where()}: {self.names[row]}"):
            return self.column(group, name)[at].as_py()

    def column(self, group: int, name: str) -> Any:
        """Return a column of a group, as an array of pyarrow; `a.b` is a field of a struct."""
        shard, number, count = self.groups[group].tolist()
        return self.reader.column(shard, number, name, count)

    def _place(self, row: int) -> tuple[int, int]:
        group = int(np.searchsorted(self.ends, row, "right"))
        return group, row - int(self.ends[group] - self.groups[group, 2])

    def read(self, row: int, what: What) -> bytes:
        name = self.columns.image if what == "image" else self.columns.mask
        try:
            value = self.value(row, name)
        except BadData as error:
            raise BadSample(self.names[row], str(error)) from error
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            path = value.get("path") if isinstance(value, dict) else None
            raise BadSample(
                self.names[row],
                f"no bytes in column {name}{f', only the path {path}' if path else ''}; write the data with "
                "save_to_disk or push_to_hub, which store the images",
            )
        if len(data) > MAX_BYTES:
            raise BadSample(self.names[row], f"{len(data)} bytes, more than the {MAX_BYTES} allowed")
        return data

    def shapes(self, row: int) -> Iterable[Shape | None]:
        value = self.value(row, self.columns.objects)
        return boxes_of(packed.named(value, self.classes), self.names[row])


def _category_names(feature: Any) -> tuple[str, ...]:
    for _ in range(4):
        if not isinstance(feature, dict):
            return ()
        for key in CATEGORIES:
            if names := _names_of(feature.get(key)):
                return names
        feature = feature.get("feature")
    return ()


def _within(batch: Any, name: str) -> Any:
    """Return a column of a record batch, or of `a.b` the field b of the struct a."""
    first, *fields = [name] if name in batch.schema.names else name.split(".")
    found = batch.column(first)
    found.validate(full=True)  # offsets that lead out of their buffers would be followed
    for each in fields:
        found = found.field(each)
    return found


def _batches(file: Any, groups: Sequence[int], name: str) -> Iterator[Any]:
    """Yield a column of some row groups, or a field of it, in parts that fit into memory: values that are equal are
    stored once, so that few bytes may stand for many."""
    about = file.metadata
    paths = [about.schema.column(at).path for at in range(about.num_columns)]
    ours = [at for at, path in enumerate(paths) if path == name or path.startswith(f"{name}.")]
    sizes = (sum(about.row_group(each).column(at).total_uncompressed_size for at in ours) for each in groups)
    rows = min(_SCANNED, max(1, _AT_ONCE // max(1, max(sizes, default=1))))
    yield from file.iter_batches(rows, row_groups=[*groups], columns=[name], use_threads=False)


def _is_compressed(message: Any) -> bool:
    """Return whether a message of Arrow's has compressed buffers, which would be unpacked to any size: by field 3 of
    the table RecordBatch in the FlatBuffers that describe it."""
    data = message.metadata.to_pybytes()

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    def field(table: int, place: int) -> int:
        """Return where a field of a table is, 0 if it has none."""
        layout = table - int.from_bytes(data[table : table + 4], "little", signed=True)
        offset = number(layout + 4 + 2 * place, 2) if 4 + 2 * place < number(layout, 2) else 0
        return table + offset if offset else 0

    def table(at: int) -> int:
        return at + number(at, 4)

    header = table(field(table(0), 2))
    batch = table(field(header, 1)) if message.type == "dictionary" else header
    return message.type != "schema" and field(batch, 3) > 0


class Reader:
    """Open files and the groups that were read last. Nothing travels to another process: each opens its own."""

    def __init__(self, shards: tuple[Shard, ...]):
        self._shards = shards
        self._files: dict[int, Any] = {}
        self._kept: OrderedDict[tuple[int, int, str], Any] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[Reader], tuple[tuple[Shard, ...]]]:
        return Reader, (self._shards,)

    def column(self, shard: int, number: int, name: str, count: int) -> Any:
        """Return a column of a group; BadData if it cannot be read, or has another number of rows."""
        with self._lock:
            if self._pid != os.getpid():  # forked
                self._files, self._kept, self._bytes, self._pid = {}, OrderedDict(), 0, os.getpid()
            key = (shard, number, name)
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            path = self._shards[shard].path
            with _reading(str(path)):
                found = self._read(shard, number, name)
            if len(found) != count:
                raise BadData(f"{path} has {len(found)} rows in group {number}, expected {count}; fetch it again")
            self._kept[key] = found
            self._bytes += found.nbytes
            while self._bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
            return found

    def scan(self, shard: int, name: str) -> Iterator[Any]:
        """Yield all parts of a column of a file."""
        file = self.open(shard)
        if isinstance(file, list):
            yield from (self._read(shard, number, name) for number in range(len(file)))
            return
        for batch in _batches(file, range(file.num_row_groups), name):
            yield _within(batch, name)

    def close(self) -> None:
        """Close all files, whose lists of row groups take memory; the next read opens its own again."""
        self._files.clear()
        self._kept.clear()
        self._bytes = 0
        pyarrow_module().default_memory_pool().release_unused()

    def _read(self, shard: int, number: int, name: str) -> Any:
        file = self.open(shard)
        if isinstance(file, list):
            return _within(file[number], name)
        batches, size = [], 0
        for batch in _batches(file, [number], name):
            batches.append(batch)
            size += batch.nbytes
            if size > _MOST_GROUP:
                raise ValueError(f"row group {number} takes more than the {_MOST_GROUP >> 20} MiB allowed, unpacked")
        whole = pyarrow_module().Table.from_batches(batches).combine_chunks().to_batches()
        return _within(whole[0], name)

    def open(self, shard: int) -> Any:
        """Return a file: a ParquetFile, or the record batches of a mapped Arrow file."""
        if shard not in self._files:
            path = self._shards[shard].path
            pa = pyarrow_module()
            if path.suffix.lower() == ".arrow":
                mapped = pa.memory_map(str(path))
                begin = _IN_FILE if mapped.read(len(_FILE)) == _FILE else 0
                mapped.seek(begin)
                for message in pa.ipc.MessageReader.open_stream(mapped):
                    if _is_compressed(message):
                        raise ValueError("its buffers are compressed; save the data with save_to_disk, which does not")
                mapped.seek(begin)
                batches = list(pa.ipc.open_stream(mapped))
                if begin and pa.ipc.open_file(mapped).num_record_batches != len(batches):  # open_file needs the end
                    raise ValueError("the list of batches at its end has not those of the file")
                self._files[shard] = batches
            else:
                self._files[shard] = pa.parquet.ParquetFile(path, memory_map=False, pre_buffer=False)
        return self._files[shard]


def _rows(path: str, files: Mapping[str, list[Path]], split: str) -> Rows | None:
    """Return the rows of a split; None if it has no files."""
    if split not in files:
        return None
    pyarrow_module()
    given = Path(path)
    root = given if given.is_dir() else given.parent
    shards = [Shard.at(root, file) for file in files[split]]
    reader = Reader(tuple(shards))
    columns: Columns | None = None
    groups: list[tuple[int, int, int]] = []
    progress = index_files.ScanProgress(str(root), len(shards), "files")
    for number, shard in enumerate(shards):
        progress(number)
        before = len(groups)
        with _reading(str(shard.path)):
            file = reader.open(number)
            schema = (file[0].schema if file else None) if isinstance(file, list) else file.schema_arrow
            if schema is None:
                continue
            found = Columns.of(schema, str(shard.path))
            columns = columns or found
            if found.all != columns.all:
                raise BadData(f"{shard.path} has other columns than {shards[0].path}; write them alike")
            if isinstance(file, list):
                groups += [(number, at, batch.num_rows) for at, batch in enumerate(file) if batch.num_rows]
            else:
                groups += _groups_of(file, number, shard)
        count = sum(rows for _, _, rows in groups[before:])
        if count * _LEAST_ROW > shard.size:
            raise BadData(f"{shard.path} claims {count} rows in {shard.size} bytes, too few for images; write it again")
    if columns is None or not groups:
        raise BadData(f"{first_of([str(shard.path) for shard in shards])} have no rows; write them again")
    reader.close()
    return Rows(root, split, shards, columns, np.asarray(groups, np.int64).reshape(-1, 3))


def _groups_of(file: Any, number: int, shard: Shard) -> Iterator[tuple[int, int, int]]:
    for group in range(file.metadata.num_row_groups):
        found = file.metadata.row_group(group)
        if found.total_byte_size > _MOST_GROUP:  # of one column pyarrow ends the process where the file is damaged
            raise BadData(
                f"{shard.path}: row group {group} has {found.total_byte_size >> 20} MiB, at most {_MOST_GROUP >> 20} "
                "are allowed; write it with smaller ones: Dataset.to_parquet(..., batch_size=100)"
            )
        if found.num_rows:
            yield number, group, found.num_rows


# Labels


class ParquetLabels(Source):
    """Images of parquet files with labels, by class and name."""

    def __init__(self, rows: Rows, order: np.ndarray, labels: np.ndarray, ends: np.ndarray, classes: tuple[str, ...],
                 is_multi_label: bool):  # fmt: skip
        self.rows, self._order, self.labels, self._ends = rows, order, labels, ends
        self.classes, self.is_multi_label = classes, is_multi_label
        sizes = [(shard.name, shard.size) for shard in rows.shards]
        digests = (order.tobytes(), labels.tobytes(), ends.tobytes())
        self.fingerprint = index_files.digest(KIND, 1, classes, is_multi_label, sizes, *digests)
        self.files = [shard.path for shard in rows.shards]
        self.notes = (f"from {rows.title}",)

    def __len__(self) -> int:
        return len(self._order)

    def name(self, index: int) -> str:
        return self.rows.names[int(self._order[index])]

    def read(self, index: int) -> Sample:
        data = self.rows.read(int(self._order[index]), "image")
        chosen = self.labels[self._ends[index - 1] if index else 0 : self._ends[index]]
        if not self.is_multi_label:
            return Sample(data, int(chosen[0]))
        label = np.zeros(len(self.classes), np.uint8)
        label[chosen] = 1
        return Sample(data, label)


def _labelled(
    rows: Rows, train: Rows, is_drawn: bool, path: str, split: Split, options: SourceOptions
) -> ParquetLabels:
    column = _label_column(train, options)
    names, values, ends = _values(rows, column)
    train_names, _, train_ends = _values(train, column) if rows is not train else (names, values, ends)
    declared = _names_of((train.columns.features or {}).get(column))
    classes = declared or _sorted(train_names)
    place = {each: number for number, each in enumerate(classes)} | {str(n): n for n in range(len(declared))}
    if unknown := [each for each in names if each not in place]:
        raise BadData(f"{rows.where()}: column {column} has labels that train lacks: {first_of(unknown)}")
    is_multi_label = bool((np.diff(train_ends, prepend=0) != 1).any())
    labels = np.asarray([place[each] for each in names], np.int32)[values]
    counts = np.diff(ends, prepend=0)
    if not is_multi_label and (counts != 1).any():
        bad = int(np.flatnonzero(counts != 1)[0])
        raise BadData(f"{rows.where()}: {rows.names[bad]} has {counts[bad]} labels, each training image has one")
    chosen, held_out = np.arange(len(rows)), None
    if is_drawn and split != "test":
        groups = np.zeros(len(rows), np.int32) if is_multi_label else labels
        validates = validating(rows.names.each(), groups, options, split)
        held_out = rows.names.take(np.flatnonzero(validates))
        chosen = np.flatnonzero(validates == (split == "val"))
    if not is_multi_label:
        chosen = chosen[np.argsort(labels[chosen], kind="stable")]
    new_ends = np.cumsum(counts[chosen], dtype=np.int64)
    at = np.arange(int(counts[chosen].sum())) + np.repeat(ends[chosen] - new_ends, counts[chosen])
    rows.reader.close()
    train.reader.close()
    source = ParquetLabels(rows, chosen, labels[at], new_ends, classes, is_multi_label)
    source.held_out = held_out
    return source


def _label_column(rows: Rows, options: SourceOptions) -> str:
    columns = rows.columns
    if options.label_column:
        if options.label_column not in columns.all:
            raise BadData(f"{rows.where()}: no column is called {options.label_column}; found {', '.join(columns.all)}")
        return options.label_column
    if not columns.labels:
        raise BadData(
            f"{rows.where()}: no column of labels: found {', '.join(columns.all)}; name it with --data.label-column"
        )
    return columns.labels[0]


def _values(rows: Rows, column: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the different labels as texts, the place in them of each label, and where those of each row end."""
    pa = pyarrow_module()
    places: dict[str, int] = {}
    values: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for shard, found in rows.scan(column):
        if pa.types.is_list(found.type) or pa.types.is_large_list(found.type):
            counts.append(np.asarray(pa.compute.list_value_length(found).fill_null(0), np.int64))
            found = found.flatten()
        else:
            counts.append(np.ones(len(found), np.int64))
        if found.null_count:
            raise BadData(f"{rows.shards[shard].path}: column {column} is empty in some rows; leave these out")
        coded = found.cast(pa.string()).dictionary_encode()
        mine = [places.setdefault(each, len(places)) for each in coded.dictionary.to_pylist()]
        values.append(np.asarray(mine, np.int32)[np.asarray(coded.indices, np.int64)])
    total = np.concatenate([np.zeros(0, np.int32), *values])
    return [*places], total, np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]), dtype=np.int64)


def _sorted(names: Sequence[str]) -> tuple[str, ...]:
    are_numbers = all(name.isdecimal() and len(name) < 18 for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if are_numbers else 0, name)))
