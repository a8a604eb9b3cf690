"""Archives, lists, recipes, checkpoints and weights, damaged in thousands of ways: each is read or refused, never more.

Formats that carry checksums are also damaged inside of them: content behind a correct checksum is not safer.
"""

import contextlib
import copy
import functools
import gzip
import hashlib
import io
import json
import math
import os
import random
import runpy
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save
from torch import nn

from sightline import config
from sightline.config import Run
from sightline.data.check.box_files import read_files, read_json
from sightline.data.check.images import Report
from sightline.data.formats import records
from sightline.data.loading.static import StaticDataset
from sightline.data.prepare import imagenet
from sightline.data.sources import (
    BoxSource,
    MaskSource,
    SourceOptions,
    index_files,
    open_boxes,
    open_masks,
    open_source,
    table,
    tar,
    tfrecord,
)
from sightline.data.volumes import layouts
from sightline.data.volumes import plan as plans
from sightline.engine import checkpoint
from sightline.engine.checkpoint import Checkpoints
from sightline.engine.model import build_model
from sightline.errors import BadCheckpoint, BadData, BadSample
from sightline.files import archive, download
from sightline.hardware.devices import Device
from sightline.hardware.world import World
from sightline.inference import checkpoints
from sightline.models import tf_weights
from sightline.models.tf_checkpoint import TensorBundle
from sightline.models.weight_files import load_weights
from sightline.recipe import store
from sightline.recipe.settings import Settings
from sightline.runs import attempts

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "golden"
CKPT = GOLDEN / "checkpoint_format1" / "run" / "checkpoints" / "ckpt-00000006"
TINY = str(GOLDEN / "checkpoint_format1" / "tiny.py")
fuzz = runpy.run_path(str(Path(__file__).with_name("mutate.py")))["fuzz"]

JSON_TOKENS = (
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b"null",
    b"true",
    b"-1",
    b"NaN",
    b'""',
    b"[[]]",
    b"{}",
    b"1e999",
    b"\\ud800",
)
FEW, MANY = 10, 3000
MOST_MB = 256


@dataclass(frozen=True)
class Format:
    """Good files, words that mean something in them, and what reads one; `place` is a folder of its own."""

    seeds: Callable[[], Sequence[bytes]]
    reader: Callable[[Path, bytes], object]
    tokens: tuple[bytes, ...] = ()
    is_good: bool = True  # else a whole one is refused, too
    by_value: bool = False  # JSON that stays JSON: values and keys in it change


HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    1e308,
    math.nan,
    -math.inf,
    [],
    {},
    [[]],
    {"a": 1},
)
HOSTILE += (
    "",
    "x" * 300,
    "../x",
    "/etc/passwd",
    "\ud800",
    "a\0b",
    "--run.out=x",
    [1] * 5,
    "7",
    [{}],
    [None],
    1.5,
    "fp32",
)


def with_other_values(seed: bytes, data: bytes) -> bytes:
    """JSON with one to three of its values or keys changed; `data` decides which."""
    draw, tree = random.Random(data), json.loads(seed)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            break
        container, key = draw.choice(places)
        if isinstance(container, dict) and draw.random() < 0.2:
            value = container.pop(key)
            if draw.random() < 0.5:
                container[draw.choice(("", "x", "__class__", "step"))] = value
        else:
            container[key] = copy.deepcopy(draw.choice(HOSTILE))
    return json.dumps(tree).encode()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


# Archives.


def tar_seeds() -> list[bytes]:
    made = []
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as packed:
            for name, data in (("ä" * 60 + "/a.jpg", b"x" * 700), ("b/b.jpg", b"y"), ("b/b.json", b'{"class": "b"}')):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                info.mtime = 1.5
                packed.addfile(info, io.BytesIO(data))
        made.append(out.getvalue()[:8192])
    return made


def with_checksums(data: bytes) -> bytes:
    """A tar whose headers fit their checksums, so that what they say is looked at."""
    blocks = bytearray(data)
    for at in range(0, len(blocks) - 511, 512):
        if blocks[at + 257 : at + 262] == b"ustar":
            blocks[at + 148 : at + 156] = b" " * 8
            blocks[at + 148 : at + 156] = b"%06o\0 " % sum(blocks[at : at + 512])
    return bytes(blocks)


def read_tar(place: Path, data: bytes) -> None:
    (place / "train").mkdir(exist_ok=True)
    (place / "train" / "0.tar").write_bytes(data)
    with contextlib.suppress(BadData):
        extract(place, data)
    source = tar.open_source(str(place), "train")
    for index in range(len(source)):
        source.read(index)


def extract(place: Path, data: bytes) -> None:
    path = place / "packed"
    path.write_bytes(data)
    try:
        archive.extract(path, place / "out")
    finally:
        shutil.rmtree(place / "out", ignore_errors=True)


def zip_seeds() -> list[bytes]:
    made = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as packed:
            packed.writestr("a/ä.txt", b"some text " * 30)
            packed.writestr("b", b"")
            with packed.open("c", "w", force_zip64=True) as file:
                file.write(b"third")
        made.append(out.getvalue())
    return made


# Records.


def record_seeds() -> list[bytes]:
    return [path.read_bytes() for path in sorted((GOLDEN / "tfrecord" / "img_train").iterdir())]


def example_seeds() -> list[bytes]:
    data = (GOLDEN / "tfrecord" / "odd").read_bytes()
    payloads = [data[at + 12 : at + 12 + length] for at, length in records.scan_frames(data, "odd")]
    label = records.encode_example({"image/class/label": 1, "image/encoded": b"xyz"})
    return [label + payload for payload in payloads]  # messages behind each other are one


def read_records(place: Path, data: bytes) -> None:
    (place / "train").mkdir(exist_ok=True)
    (place / "train" / "train-00000-of-00001").write_bytes(data)
    source = tfrecord.open_source(str(place), "train")
    for index in range(len(source)):
        source.read(index)


def read_example(place: Path, data: bytes) -> None:
    with contextlib.suppress(BadData):
        records.parse_example(data)
    read_records(place, records.frame(data))


# Lists and notes.


def coco_seeds() -> list[bytes]:
    images = [{"id": n, "file_name": f"{n}.jpg", "height": 9, "width": 8} for n in (1, 2)]
    objects = [
        {"id": n, "image_id": n, "category_id": 3, "bbox": [0, 1.5, 2, 3], "area": 6.5, "iscrowd": 0} for n in (1, 2)
    ]
    content = {"info": {"a": [1]}, "images": images, "annotations": objects, "categories": [{"id": 3, "name": "c"}]}
    return [json.dumps(content).encode(), json.dumps(content, indent=1).encode()]


def read_coco(place: Path, data: bytes) -> None:
    for folder in ("annotations", "train2017"):
        (place / folder).mkdir(exist_ok=True)
    for name in ("1.jpg", "2.jpg"):
        (place / "train2017" / name).touch()
    file = place / "annotations" / "instances_train2017.json"
    file.write_bytes(data)
    read_json(file, "train", Report())
    open_boxes("auto", str(place), "train")


def outlined_seeds() -> list[bytes]:
    content = json.loads(coco_seeds()[0])
    first, second = content["annotations"]
    first["segmentation"] = [[0, 0, 5, 0.5, 5, 6], [1, 1, 2, 2, 3, 1]]
    second |= {"segmentation": {"size": [9, 8], "counts": [3, 9, 60]}, "iscrowd": 1}
    third = {**first, "id": 3, "image_id": 2, "segmentation": {"size": [9, 8], "counts": "39l1"}}
    return [json.dumps(content | {"annotations": [first, second, third]}).encode()]


def read_outlines(place: Path, data: bytes) -> None:
    photos(place / "train2017")
    (place / "annotations").mkdir(exist_ok=True)
    (place / "annotations" / "instances_train.json").write_bytes(data)
    read_masks(place, "coco")


def read_polygons(place: Path, data: bytes) -> None:
    photos(place / "images")
    (place / "labels").mkdir(exist_ok=True)
    for name in ("1.txt", "2.txt"):
        (place / "labels" / name).write_bytes(data)
    read_masks(place, "yolo")


def read_class_table(place: Path, data: bytes) -> None:
    photos(place / "images")
    (place / "masks").mkdir(exist_ok=True)
    for name in ("1.png", "2.png"):
        Image.frombytes("L", (8, 9), bytes(range(3)) * 24).save(place / "masks" / name)
    for name in ("_classes.csv", "labelmap.txt"):
        (place / name).write_bytes(data)
        read_masks(place, "masks")
        (place / name).unlink()


def read_masks(place: Path, kind: str) -> None:
    for split in ("train", "val"):
        source = open_masks(kind, str(place), split)
        for index in range(len(source)):
            found = source.mask(index)
            assert all(number == 255 or number < len(source.classes) for number in found.ravel().tolist())


def photos(folder: Path) -> None:
    """Write two images, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("1.jpg", "2.jpg"):
        if not (folder / name).exists():
            Image.new("RGB", (8, 9)).save(folder / name)


@functools.cache
def tool_layouts() -> dict[str, Any]:
    return runpy.run_path(str(TESTS / "unit" / "data" / "sources" / "tool_layouts.py"))


def tool_seeds(kind: str) -> list[bytes]:
    """The export of two images of 8 x 9, with a box, a polygon, a mask where the tool has them, and a label."""
    made = tool_layouts()
    entries = [
        made["Entry"](name, 8, 9, [made["box"]("a", 1, 1, 4, 5), ("b", [(0, 0), (7, 1.5), (3, 8)])], ("day",))
        for name in ("1.jpg", "2.jpg")
    ]
    inside = np.eye(9, 8, dtype=bool)
    if kind == "labelme":
        mask = {"label": "a", "shape_type": "mask", "points": [[0, 0], [7, 8]], "mask": made["png"](inside)}
        shapes = made["labelme_of"](entries[0])["shapes"]
        circle = {"label": "b", "shape_type": "circle", "points": [[4, 4], [4, 6]]}
        return [json.dumps(made["labelme_of"](entries[0], [*shapes, circle, mask])).encode()]
    if kind == "via":
        images = {each.file: made["via_of"](each) for each in entries}
        return [json.dumps(images).encode(), json.dumps({"_via_settings": {}, "_via_img_metadata": images}).encode()]
    if kind == "cvat":
        mask = '<mask label="a" rle="2, 5, 3" left="1" top="2" width="2" height="5"></mask>'
        return [made["cvat_xml"](entries).replace("<box", mask + "<box", 1).encode()]
    tasks = []
    for each in entries:
        brush = {"format": "rle", "rle": made["brush"](inside), "brushlabels": ["a"]}
        about = {"type": "brushlabels", "original_width": 8, "original_height": 9, "value": brush}
        result = [*made["labelstudio_of"](each), about]
        tasks.append({"id": 1, "data": {"image": each.file}, "annotations": [{"result": result, "created_at": "1"}]})
    return [json.dumps(tasks).encode()]


def read_tool(kind: str, name: str, place: Path, data: bytes) -> None:
    photos(place)
    (place / name).write_bytes(data)
    options = SourceOptions(split="all", skips_missing=True)
    for opens in (open_boxes, open_masks, open_source):
        if opens is open_masks and kind == "metadata":  # its masks are files, fuzzed as such
            continue
        source = opens(kind, str(place), "val", options)
        for index in range(len(source)):
            with contextlib.suppress(BadSample):
                _all_of(source, index)


def _all_of(source: Any, index: int) -> None:
    if isinstance(source, BoxSource):
        found = source.objects(index)
        assert np.isfinite(found.boxes).all() and found.labels.max(initial=0) <= len(source.classes)
    elif isinstance(source, MaskSource):
        mask = source.mask(index)
        assert mask.shape == source.size(index) and (mask[mask != 255] < len(source.classes)).all()
    else:
        source.read(index)


def of_tool(kind: str, name: str, tokens: Sequence[bytes]) -> Format:
    return Format(functools.partial(tool_seeds, kind), functools.partial(read_tool, kind, name), tuple(tokens))


def metadata_seeds() -> list[bytes]:
    rows = [
        {"file_name": name, "label": label, "objects": {"bbox": [[1, 1, 4, 5.5]], "category": ["a"]}, "width": 8}
        for name, label in (("1.jpg", "x"), ("2.jpg", 3))
    ]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    return [lines[0], b"".join(lines)]


def columns_seeds(is_parquet: bool) -> list[bytes]:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    packed = io.BytesIO()
    Image.frombytes("L", (8, 9), bytes(range(2)) * 36).save(packed, "PNG")
    table = pa.table(
        {
            "image": [{"bytes": packed.getvalue(), "path": name} for name in ("1.jpg", "2.jpg")],
            "label": ["a", "b"],
            "objects": [{"bbox": [[1, 1, 4, 5.5]], "category": ["a"]}] * 2,
            "mask": [{"bytes": packed.getvalue(), "path": None}] * 2,
        }
    )
    made = io.BytesIO()
    if is_parquet:
        pq.write_table(table, made, compression="snappy")
    else:
        with pa.ipc.new_stream(made, table.schema) as stream:
            stream.write_table(table)
    return [made.getvalue()]


def tar_object_seeds() -> list[bytes]:
    packed, out = io.BytesIO(), io.BytesIO()
    Image.frombytes("L", (8, 9), bytes(range(2)) * 36).save(packed, "PNG")
    said = json.dumps({"objects": {"bbox": [[1, 1, 4, 5.5]], "category": ["a"]}}).encode()
    with tarfile.open(fileobj=out, mode="w") as made:
        for key in "ab":
            for ending, data in (("png", packed.getvalue()), ("json", said), ("seg.png", packed.getvalue())):
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(data)
                made.addfile(info, io.BytesIO(data))
    return [out.getvalue()[:8192]]


def read_tar_objects(place: Path, data: bytes) -> None:
    (place / "train").mkdir(exist_ok=True)
    (place / "train" / "0.tar").write_bytes(with_checksums(data))
    options = SourceOptions(split="all", skips_missing=True)
    for opens in (open_boxes, open_masks):
        source = opens("tar_objects", str(place), "val", options)
        for index in range(len(source)):
            with contextlib.suppress(BadSample):
                _all_of(source, index)


def read_columns(name: str, place: Path, data: bytes) -> None:
    (place / name).write_bytes(data)
    options = SourceOptions(split="all", skips_missing=True)
    for opens in (open_boxes, open_masks, open_source):
        source = opens("parquet", str(place / name), "val", options)
        for index in range(len(source)):
            with contextlib.suppress(BadSample):
                _all_of(source, index)


def read_yolo_labels(place: Path, data: bytes) -> None:
    photos(place / "images")
    (place / "labels").mkdir(exist_ok=True)
    (place / "labels" / "1.txt").write_bytes(data)
    (place / "labels" / "2.txt").write_bytes(b"0 0.5 0.5 0.5 0.5")
    read_files(str(place), "yolo", Report())
    open_boxes("yolo", str(place), "train")


def read_yolo_yaml(place: Path, data: bytes) -> None:
    photos(place / "images" / "train")
    (place / "labels" / "train").mkdir(parents=True, exist_ok=True)
    (place / "labels" / "train" / "1.txt").write_bytes(b"0 0.5 0.5 0.5 0.5")
    (place / "data.yaml").write_bytes(data)
    with contextlib.suppress(BadData, config.UsageError):
        open_boxes("auto", str(place), "train")
    open_boxes("yolo", str(place / "data.yaml"), "train")


XML = b"""<?xml version="1.0"?><annotation><filename>1.jpg</filename><size><width>8</width><height>9</height></size>
<object><name>a</name><difficult>0</difficult><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>5</xmax><ymax>6</ymax></bndbox>
</object></annotation>"""


def read_xml(place: Path, data: bytes) -> None:
    photos(place)
    (place / "1.xml").write_bytes(data)
    (place / "2.xml").write_bytes(XML)
    read_files(str(place), "voc", Report())
    open_boxes("voc", str(place), "val")


def yaml_seeds() -> list[bytes]:
    texts = [
        store.dump(*config.load("demo_classification")),
        "train: {epochs: 3, fp32_ops: [fc, 'a.*']}\nrun: {keep: 2}",
    ]
    return [text.encode() for text in texts]


@functools.cache
def demo() -> Any:
    return config.load("demo_classification")[0]


def read_yaml(place: Path, data: bytes) -> None:
    path = place / "config.yaml"
    path.write_bytes(data)
    with contextlib.suppress(config.UsageError):
        config.recipe_named_in(path)
    store.put_file(Settings(demo(), Run()), path)


def plan_seeds() -> list[bytes]:
    case = plans.Case("a", (8, 9, 9), (9, 9, 9), (0, 0, 0), (8, 9, 9), (8, 9, 9), (1.0, 1.0, 1.5), "a_x.npy", "a_y.npy")
    spec = plans.spec_of("03", 3)
    plan = plans.VolumePlan("03", "Liver", 3, "training", spec, (case,), "Task03_Liver")
    return [json.dumps(plan.to_json(), indent=1).encode()]


def read_plan(place: Path, data: bytes) -> None:
    (place / "plan.json").write_bytes(data)
    plans.read_plan(place)


def raw_seeds() -> list[bytes]:
    content = {"name": "Own", "modality": {"0": "CT"}, "labels": {"0": "background", "1": "a"}, "test": ["./x.nii.gz"]}
    content["training"] = [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}]
    nnunet = {
        "channel_names": {"0": "CT"},
        "labels": {"background": 0, "a": 1},
        "numTraining": 1,
        "file_ending": ".nii",
    }
    return [json.dumps(content).encode(), json.dumps(nnunet).encode()]


def read_raw(place: Path, data: bytes) -> None:
    for name in ("imagesTr/a_0000.nii", "labelsTr/a.nii"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).touch()
    (place / "dataset.json").write_bytes(data)
    layouts.read_raw(place)


def table_seeds() -> list[bytes]:
    columns = b"".join(b"%d.jpg,%d,%d,%s\n" % (n, n % 2, n % 3 == 0, b"train" if n < 5 else b"val") for n in range(7))
    return [
        b"file,label\na.jpg,x\nb.jpg,x\nc.jpg,y;x\n",
        b"\xef\xbb\xbfimage;a;b;split\n" + columns.replace(b",", b";"),
        b"Id,Kind,x,y\n" + b"".join(b"%s,\"['x', 'y']\",1,1\n" % name for name in (b"a", b"b", b"c", b"1", b"2")),
    ]


def read_table(place: Path, data: bytes) -> None:
    (place / "labels.csv").write_bytes(data)
    for name in ("a", "b", "c", *"0123456"):
        (place / f"{name}.jpg").touch()  # a table of which no file exists is refused as a whole
    for split in ("train", "val"):
        source = table.open_source(str(place), split)
        assert all(source.name(index) for index in range(len(source)))


def read_labels(place: Path, data: bytes) -> None:
    (place / "labels.txt").write_bytes(data)
    with contextlib.suppress(BadData):
        imagenet._read_labels(place / "labels.txt")
    (place / "classes.txt").write_bytes(data)
    tar._read_classes(place, [SimpleNamespace(path=place / "0.tar")])


def read_record(place: Path, data: bytes) -> None:
    """Read the record of an interrupted download."""
    target = place / "file"
    (place / "file.part").write_bytes(b"begun")
    (place / "file.part.json").write_bytes(data)
    with (place / "file.part").open("r+b") as part:
        expected, ignore = download.Expected(100, "0" * 64), lambda *_: None
        download._Transfer("https://a.b/c", target, part, expected, ignore, download.DEFAULT_PATIENCE, ignore)


def record_json() -> list[bytes]:
    return [json.dumps({"url": "https://a.b/c", "size": 100, "sha256": "0" * 64, "validator": '"x"'}).encode()]


def read_exit(place: Path, data: bytes) -> None:
    (place / "exit.json").write_bytes(data)
    with contextlib.suppress(BadData):
        attempts.Attempt("id", "id", 1, 2).obey(place)
    (place / "evaluation.json").write_bytes(data)
    sorted(checkpoints._rows(place / "evaluation.json"), key=lambda row: row["step"])


def exit_seeds() -> list[bytes]:
    row = {"checkpoint": "ckpt-00000001", "step": 1, "values": {"top1": 0.5, "loss": None}}
    mark = {"code": 3, "reason": "bad", "run_id": "id", "restarts": 0, "ranks": 2}
    return [json.dumps({**mark, "checkpoints": [row, {**row, "step": 2}]}).encode()]


def read_pointer(place: Path, data: bytes) -> None:
    folder = place / "checkpoints"
    (folder / "ckpt-00000006").mkdir(parents=True, exist_ok=True)
    (folder / "latest").write_bytes(data)
    assert checkpoint.find(place, "latest") == folder / "ckpt-00000006"


# Indexes: the body behind the checksum.


def index_seeds() -> list[bytes]:
    place = Path(os.environ["XDG_CACHE_HOME"]) / "seed"
    shutil.rmtree(place, ignore_errors=True)
    (place / "train").mkdir(parents=True)
    _indexed(place)
    return [(place / ".sightline-index-tar-train").read_bytes()[len(index_files._MAGIC) + 32 :]]


def _indexed(place: Path) -> None:
    (place / "train" / "0.tar").write_bytes(tar_seeds()[0])
    os.utime(place / "train" / "0.tar", ns=(10**18, 10**18))
    tar.open_source(str(place), "train")


def read_index(place: Path, data: bytes) -> None:
    if not (place / "train").is_dir():
        (place / "train").mkdir()
        _indexed(place)
    index = place / ".sightline-index-tar-train"
    index.write_bytes(index_files._MAGIC + hashlib.sha256(data).digest() + data)
    source = tar.open_source(str(place), "train")
    for number in range(len(source)):
        with contextlib.suppress(BadData):
            source.read(number)


def masks_index_seeds() -> list[bytes]:
    place = Path(os.environ["XDG_CACHE_HOME"]) / "masks"
    shutil.rmtree(place, ignore_errors=True)
    _with_masks(place)
    return [(place / "masks" / ".sightline-index-masks-images").read_bytes()[len(index_files._MAGIC) + 32 :]]


def _with_masks(place: Path) -> None:
    photos(place / "images")
    (place / "masks").mkdir(exist_ok=True)
    for name in ("1.png", "2.png"):
        Image.frombytes("L", (8, 9), bytes((0, 7, 255)) * 24).save(place / "masks" / name)
    for path in [*(place / "masks").iterdir(), *(place / "images").iterdir()]:
        os.utime(path, ns=(10**18, 10**18))
    open_masks("masks", str(place), "train")


def read_masks_index(place: Path, data: bytes) -> None:
    if not (place / "masks").is_dir():
        _with_masks(place)
    index = place / "masks" / ".sightline-index-masks-images"
    index.write_bytes(index_files._MAGIC + hashlib.sha256(data).digest() + data)
    read_masks(place, "masks")


# Checkpoints: with a manifest that fits.


def written(place: Path, name: str, data: bytes, step: int = 6) -> Path:
    """The checkpoint that is kept, with one file of it replaced."""
    path = place / "checkpoints" / f"ckpt-{step:08d}"
    shutil.rmtree(path, ignore_errors=True)  # a file that is still mapped must not change
    shutil.copytree(CKPT, path)
    (path / name).write_bytes(data)
    if name != checkpoint.MANIFEST:
        manifest = json.loads((path / checkpoint.MANIFEST).read_text())
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    return path


@functools.cache
def cpu() -> Device:
    return Device("cpu")


def read_checkpoint(name: str, place: Path, data: bytes) -> None:
    """As `evaluate`, `predict` and `average` do."""
    path = written(place, name, data)
    tensors, stored = checkpoint.read(path)
    recipe, run, spec = checkpoints.recipe_of(path, stored, TINY, [])
    checkpoints.Trained(path, tensors, stored, recipe, run, spec, World(), cpu()).build()


@functools.cache
def network() -> nn.Module:
    recipe = config.load(TINY)[0]
    return build_model(recipe, Run(), checkpoint_spec(), cpu()).model


def checkpoint_spec() -> Any:
    return checkpoints.DataSpec.from_json(json.loads((CKPT / "state.json").read_text())["spec"])


def resume_from(name: str, place: Path, data: bytes) -> None:
    """As `train` does: whatever happened to the newest one, there is one to resume from."""
    folder = place / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(CKPT, folder / "ckpt-00000005")
    written(place, name, data)

    def check(tensors: Any, stored: Any) -> None:
        checkpoint.check_fit("model", network().state_dict(), tensors["model"])

    try:
        found = Checkpoints(folder, 2, lambda _: None).newest(check)
    except checkpoint.NotDamaged:
        raise
    except BadCheckpoint as error:
        raise AssertionError(f"no way back: {error}") from error
    assert found is not None


def of_checkpoint(name: str, reader: Callable[[str, Path, bytes], object]) -> Format:
    tokens = JSON_TOKENS if name.endswith(".json") else (*JSON_TOKENS, b"F64", b"BF16", b"I32", b"shape", b"[0,0]")
    return Format(lambda: [(CKPT / name).read_bytes()], functools.partial(reader, name), tokens)


# Weights to start from.


class Small(nn.Module):
    """The network of the Keras files that are kept."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.ModuleDict({"bn1": nn.BatchNorm2d(4), "bn2": nn.BatchNorm2d(6)})
        block["conv1"] = nn.Conv2d(4, 6, 1, bias=False)
        block["conv2"] = nn.Conv2d(6, 6, 3, groups=2, bias=False)
        self.conv1, self.layer1 = nn.Conv2d(3, 4, 3), nn.ModuleList([block])
        self.bn_out, self.fc = nn.BatchNorm2d(6), nn.Linear(6, 5)


def pth_seeds(is_zip: bool) -> list[bytes]:
    made = []
    for content in (Small().state_dict(), {"epoch": 3, "state_dict": Small().state_dict()}):
        out = io.BytesIO()
        torch.save(content, out, _use_new_zipfile_serialization=is_zip)
        made.append(out.getvalue())
    return made


def read_small(suffix: str, place: Path, data: bytes) -> None:
    path, model = place / f"w{suffix}", Small()
    path.unlink(missing_ok=True)  # it may still be mapped
    path.write_bytes(data)
    load_weights(model, path, head="fc.")


def start_from_run(name: str, place: Path, data: bytes) -> None:
    """As `--model.weights RUN` does."""
    written(place, name, data)
    load_weights(network(), place, head="")


def graph_seeds() -> list[bytes]:
    return [TensorBundle(GOLDEN / "tf_checkpoint" / "keras.index").read_text(tf_weights.GRAPH)]


def read_graph(place: Path, data: bytes) -> None:
    """As of a Keras model, its checksums redone."""
    list(tf_weights.ObjectGraph(place / "a.index", data).variables())


def tf_writer() -> dict[str, Any]:
    return runpy.run_path(str(TESTS / "unit" / "models" / "test_tf_checkpoint.py"))


def read_bundle(place: Path, data: bytes) -> None:
    (place / "a.index").write_bytes(data)
    shutil.copyfile(GOLDEN / "tf_checkpoint" / "object.data-00000-of-00001", place / "a.data-00000-of-00001")
    bundle = TensorBundle(place / "a.index")
    for name in bundle.entries:
        with contextlib.suppress(BadCheckpoint):
            bundle.read(name)


def read_entry(place: Path, data: bytes) -> None:
    """A table whose checksums fit, with this as the entry of its one tensor."""
    made = writer()
    read_bundle(place, made["table"](made["block"]([made["HEADER"], (b"a", data)])))


@functools.cache
def writer() -> dict[str, Any]:
    return tf_writer()


def keras_seeds() -> list[bytes]:
    return [(TESTS / "unit" / "models" / "keras" / name).read_bytes() for name in ("keras2.h5", "keras3.weights.h5")]


def static_seeds() -> list[bytes]:
    spec = checkpoint_spec().to_json()
    return [json.dumps({"format": 1, "spec": spec, "batch": 2, "batches": 1, "seed": 0}).encode()]


def read_static(place: Path, data: bytes) -> None:
    if not (place / "batch-000000.safetensors").exists():
        (place / "batch-000000.safetensors").write_bytes(save({"image": torch.zeros(2, 4, 4, 3)}))
    (place / "batches.json").write_bytes(data)
    StaticDataset(place)


FORMATS = {
    "tar": Format(tar_seeds, read_tar, (b"ustar\0", b"path=", b"size=", b"20 path=a\n")),
    "tar, checksums redone": Format(
        tar_seeds, lambda p, d: read_tar(p, with_checksums(d)), (b"x", b"L", b"g", b"S", b"2")
    ),
    "tar.gz": Format(lambda: [gzip.compress(each, mtime=0) for each in tar_seeds()], read_tar, is_good=False),
    "zip": Format(zip_seeds, extract, (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")),
    "TFRecord": Format(record_seeds, read_records),
    "tf.train.Example": Format(example_seeds, read_example, (b"\x0a", b"\x12", b"\x1a", b"\xff\xff\xff\xff\x0f")),
    "COCO json": Format(coco_seeds, read_coco, JSON_TOKENS),
    "COCO outlines": Format(outlined_seeds, read_outlines, (*JSON_TOKENS, b'"segmentation"', b"1e9", b"P1", b"0o")),
    "YOLO polygons": Format(
        lambda: [b"0 0.5 0.5 0.25 0.125 0.9 0.9\n2 0.1 0.2 0.5 0.25 0.3 0.75\n"],
        read_polygons,
        (b"nan", b"-", b"e308", b"e8", b"\n"),
    ),
    "class tables": Format(
        lambda: [
            b"Pixel Value, Class\n0, sky\n1, tree\n2, road\n",
            b"name,r,g,b\nsky,0,0,0\ntree,1,1,1\nroad,2,2,2\n",
            b"# label:color_rgb:parts:actions\nsky:0,0,0::\ntree:1,1,1::\nroad:2,2,2::\n",
        ],
        read_class_table,
        (b",", b";", b"\n", b'"x', b"\r", b":", b"256", b"-1", b"\0", b"\xff"),
    ),
    "YOLO labels": Format(
        lambda: [b"0 0.5 0.5 0.25 0.125\n2 0.1 0.2 0.5 0.25 0.3 0.75\n"],
        read_yolo_labels,
        (b"nan", b"-", b"e308", b"\n"),
    ),
    "YOLO data.yaml": Format(
        lambda: [b"path: .\ntrain: images/train\nval: images/train\nnc: 2\nnames: [a, b]\n"],
        read_yolo_yaml,
        (b"&a ", b"*a", b"{", b"[", b"!!python/name:os ", b": ", b"../", b"/", b"null", b"~"),
    ),
    "VOC xml": Format(
        lambda: [XML], read_xml, (b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b"&b;", b"<object>", b"</", b"<![CDATA[", b"nan")
    ),
    "LabelMe json": of_tool("labelme", "1.json", (*JSON_TOKENS, b'"mask"', b'"circle"', b"1e300", b"../")),
    "VIA json": of_tool("via", "via.json", (*JSON_TOKENS, b'"circle"', b'"ellipse"', b'"rect"', b"1e300", b"../")),
    "Label Studio json": of_tool(
        "labelstudio", "export.json", (*JSON_TOKENS, b'"brushlabels"', b'"rle"', b"1e300", b"../", b'"rotation":9,')
    ),
    "CVAT xml": of_tool(
        "cvat",
        "annotations.xml",
        (
            b"<!DOCTYPE a [<!ENTITY b 'c'>]>",
            b"&b;",
            b"<image>",
            b"</",
            b"<mask ",
            b"<track>",
            b"nan",
            b"1e300",
            b"<tag ",
        ),
    ),
    "Hugging Face metadata": Format(
        metadata_seeds,
        functools.partial(read_tool, "metadata", "metadata.jsonl"),
        (*JSON_TOKENS, b'"file_name"', b"\n", b"\r"),
    ),
    "parquet": Format(functools.partial(columns_seeds, True), functools.partial(read_columns, "a.parquet"), (b"PAR1",)),
    "Arrow": Format(
        functools.partial(columns_seeds, False), functools.partial(read_columns, "a.arrow"), (b"\xff" * 4,)
    ),
    "tar with boxes and masks": Format(tar_object_seeds, read_tar_objects, (b"x", b"L", b"{", b"null", b"1e999", b"]")),
    "YAML config": Format(
        yaml_seeds, read_yaml, (b"&a ", b"*a", b"<<: ", b"- ", b"{", b"[", b"!!int ", b": ", b"--run.out=x")
    ),
    "plan.json": Format(plan_seeds, read_plan, JSON_TOKENS),
    "dataset.json": Format(raw_seeds, read_raw, (*JSON_TOKENS, b"../", b"/")),
    "label files": Format(lambda: [b"n01440764\nn01443537\nn01484850\n"], read_labels, (b"\n", b" ", b"\xc3", b"\0")),
    "label tables": Format(
        table_seeds, read_table, (b",", b";", b"\n", b'"x', b"\r", b"|", b"../", b"\0", b"\xff", b"file", b"['", b"\\'")
    ),
    "download record": Format(record_json, read_record, JSON_TOKENS),
    "exit.json, evaluation.json": Format(exit_seeds, read_exit, JSON_TOKENS),
    "latest": Format(lambda: [b"ckpt-00000006\n"], read_pointer, (b"../", b"/etc/", b"\0", b"\xff")),
    "index cache": Format(index_seeds, read_index, (*JSON_TOKENS, b"|u1", b"<i8", b"<u4", b"../")),
    "index of masks": Format(masks_index_seeds, read_masks_index, (*JSON_TOKENS, b"<i8", b"\xff" * 7, b"../")),
    "checkpoint: manifest.json": of_checkpoint("manifest.json", read_checkpoint),
    "checkpoint: state.json": of_checkpoint("state.json", read_checkpoint),
    "checkpoint: model.safetensors": of_checkpoint("model.safetensors", read_checkpoint),
    "checkpoint: ema.safetensors": of_checkpoint("ema.safetensors", read_checkpoint),
    "resume: manifest.json": of_checkpoint("manifest.json", resume_from),
    "resume: state.json": of_checkpoint("state.json", resume_from),
    "resume: model.safetensors": of_checkpoint("model.safetensors", resume_from),
    "weights .safetensors": Format(
        lambda: [save(Small().state_dict())], functools.partial(read_small, ".safetensors"), (b"F64", b"I32", b"[0,0]")
    ),
    "weights .pth": Format(
        lambda: pth_seeds(True), functools.partial(read_small, ".pth"), (b"PK\x01\x02", b"data.pkl")
    ),
    "weights .pth of torch 1.5": Format(
        lambda: pth_seeds(False), functools.partial(read_small, ".pth"), (b"]", b"\x94")
    ),
    "weights .h5": Format(keras_seeds, functools.partial(read_small, ".h5"), (b"GCOL", b"TREE", b"SNOD", b"HEAP")),
    "TensorFlow checkpoint": Format(lambda: [(GOLDEN / "tf_checkpoint" / "object.index").read_bytes()], read_bundle),
    "TensorFlow checkpoint, checksums redone": Format(
        lambda: [tf_writer()["entry"](), tf_writer()["entry"]((3, 2), 24)], read_entry
    ),
    "TensorFlow checkpoint, object graph": Format(graph_seeds, read_graph),
    "weights of a run: manifest.json": of_checkpoint("manifest.json", start_from_run),
    "weights of a run: ema.safetensors": of_checkpoint("ema.safetensors", start_from_run),
    "static batches": Format(static_seeds, read_static, JSON_TOKENS),
}


FORMATS |= {
    f"{name}, values": replace(each, tokens=(), by_value=True)
    for name, each in FORMATS.items()
    if JSON_TOKENS[0] in each.tokens and "safetensors" not in name and "index" not in name
}


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def outcome_of(name: str, place: Path, mutations: int) -> Any:
    chosen = FORMATS[name]
    seeds = list(chosen.seeds())
    for number, seed in enumerate(seeds):
        whole = place / f"whole-{number}"
        whole.mkdir()
        with contextlib.nullcontext() if chosen.is_good else pytest.raises(BadData):
            chosen.reader(whole, seed)
    damaged = place / "damaged"
    damaged.mkdir()
    reader = functools.partial(chosen.reader, damaged)
    if chosen.by_value:
        seed = seeds[0]
        reader, seeds = (lambda data: chosen.reader(damaged, with_other_values(seed, data))), [bytes(99)]
    return fuzz(reader, seeds, mutations, tokens=chosen.tokens, memory_mb=MOST_MB)


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, name: str):
    outcome = outcome_of(name, tmp_path, FEW)
    assert not outcome.foreign, str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_thousands_of_damaged_files_are_read_or_refused(tmp_path: Path, name: str):
    outcome = outcome_of(name, tmp_path, MANY)
    print(f"{name}: {outcome.accepted} accepted, {outcome.refused} refused, {len(outcome.foreign)} foreign")
    assert not outcome.foreign, str(outcome)
