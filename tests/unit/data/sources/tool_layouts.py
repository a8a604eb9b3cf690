"""One small data set, written as the exports of each tool for labelling, and as COCO's json for comparison.

Independent of the readers: plain json, XML by string, bits by string.
"""

import base64
import io
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image


class Entry(NamedTuple):
    """An image, its sides, and (class, corners) of its polygons; four corners of an upright box are a box."""

    file: str
    width: int
    height: int
    shapes: list[tuple[str, list[tuple[float, float]]]]
    tags: tuple[str, ...] = ()


def box(label: str, x: float, y: float, w: float, h: float) -> tuple[str, list[tuple[float, float]]]:
    return label, [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]


ENTRIES = [
    Entry("a.jpg", 40, 30, [box("cat", 4, 6, 10, 12), ("dog", [(20, 2), (36, 4), (30, 20.5)])], ("day",)),
    Entry("b.jpg", 30, 40, [box("dog", 0, 0, 30, 40), box("cat", 8, 8, 8, 8)], ("night",)),
    Entry("c.jpg", 50, 20, [], ("day",)),
    Entry("d.jpg", 24, 24, [("cat", [(2, 2), (20, 2), (20, 20), (11, 8), (2, 20)])], ("night",)),
]


def photos(folder: Path, entries: list[Entry] = ENTRIES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(entries):
        Image.new("RGB", (each.width, each.height), (40 * number, 90, 10)).save(folder / each.file)


def sides(corners: list[tuple[float, float]]) -> tuple[float, float, float, float]:
    low, high = np.min(corners, 0), np.max(corners, 0)
    return (*low.tolist(), *(high - low).tolist())


def is_box(corners: list[tuple[float, float]]) -> bool:
    x, y, w, h = sides(corners)
    return corners == box("", x, y, w, h)[1]


def coco(root: Path, entries: list[Entry] = ENTRIES) -> None:
    photos(root / "images", entries)
    classes = sorted({label for each in entries for label, _ in each.shapes})
    objects = [
        {
            "image_id": number,
            "category_id": classes.index(label) + 1,
            "bbox": sides(corners),
            "segmentation": [[float(n) for pair in corners for n in pair]],
        }
        for number, each in enumerate(entries, 1)
        for label, corners in each.shapes
    ]
    content = {
        "images": [
            {"id": n, "file_name": each.file, "width": each.width, "height": each.height}
            for n, each in enumerate(entries, 1)
        ],
        "annotations": [each | {"id": n} for n, each in enumerate(objects, 1)],
        "categories": [{"id": n, "name": name} for n, name in enumerate(classes, 1)],
    }
    (root / "train.json").write_text(json.dumps(content))


def labelme_of(each: Entry, shapes: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    drawn = [
        {"label": label, "points": [corners[0], corners[2]], "shape_type": "rectangle", "group_id": None, "flags": {}}
        if is_box(corners)
        else {"label": label, "points": corners, "shape_type": "polygon", "group_id": None, "flags": {}}
        for label, corners in each.shapes
    ]
    return {
        "version": "5.4.1",
        "flags": {tag: tag in each.tags for tag in ("day", "night")},
        "shapes": drawn if shapes is None else shapes,
        "imagePath": each.file,
        "imageData": base64.b64encode(b"not read" * 99).decode(),
        "imageHeight": each.height,
        "imageWidth": each.width,
    }


def labelme(root: Path, entries: list[Entry] = ENTRIES) -> None:
    photos(root, entries)
    for each in entries:
        (root / each.file).with_suffix(".json").write_text(json.dumps(labelme_of(each), indent=2))


def via_of(each: Entry) -> dict[str, Any]:
    def shape(corners: list[tuple[float, float]]) -> dict[str, Any]:
        if is_box(corners):
            return {"name": "rect", **dict(zip(("x", "y", "width", "height"), sides(corners), strict=True))}
        xs, ys = (list(axis) for axis in zip(*corners, strict=True))
        return {"name": "polygon", "all_points_x": xs, "all_points_y": ys}

    regions = [{"shape_attributes": shape(c), "region_attributes": {"name": label}} for label, c in each.shapes]
    return {"filename": each.file, "size": 7, "regions": regions, "file_attributes": {"time": each.tags[0]}}


def via(root: Path, entries: list[Entry] = ENTRIES) -> None:
    photos(root, entries)
    content = {f"{each.file}7": via_of(each) for each in entries}
    (root / "via_region_data.json").write_text(json.dumps(content))


def via_project(root: Path, entries: list[Entry] = ENTRIES) -> None:
    photos(root, entries)
    images = {f"{each.file}7": via_of(each) for each in entries}
    content = {"_via_settings": {"ui": {"a": [1]}}, "_via_img_metadata": images, "_via_attributes": {"region": {}}}
    (root / "via_project.json").write_text(json.dumps(content, indent=1))


def cvat_xml(entries: list[Entry], below: str = "") -> str:
    images = []
    for number, each in enumerate(entries):
        shapes = []
        for order, (label, corners) in enumerate(each.shapes):
            at = f'label="{label}" source="manual" occluded="0" z_order="{order}"'
            x, y, w, h = sides(corners)
            points = ";".join(f"{px:.2f},{py:.2f}" for px, py in corners)
            shapes.append(
                f'<box {at} xtl="{x:.2f}" ytl="{y:.2f}" xbr="{x + w:.2f}" ybr="{y + h:.2f}">'
                '<attribute name="old">no</attribute></box>'
                if is_box(corners)
                else f'<polygon {at} points="{points}"></polygon>'
            )
        shapes.reverse()  # z_order says which lies above
        shapes += [f'<tag label="{tag}" source="manual"></tag>' for tag in each.tags]
        size = f'width="{each.width}" height="{each.height}"'
        images.append(f'  <image id="{number}" name="{below}{each.file}" {size}>\n{"".join(shapes)}\n  </image>\n')
    meta = "<meta><task><id>3</id><labels><label><name>cat</name></label></labels></task></meta>"
    return (
        f'<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n<version>1.1</version>\n{meta}\n'
        + "".join(images)
        + "</annotations>\n"
    )


def cvat(root: Path, entries: list[Entry] = ENTRIES) -> None:
    photos(root / "images", entries)
    (root / "annotations.xml").write_text(cvat_xml(entries))


def cvat_zip(root: Path, entries: list[Entry] = ENTRIES) -> None:
    photos(root.with_name("unpacked"), entries)
    root.mkdir(parents=True)
    with zipfile.ZipFile(root / "task.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("annotations.xml", cvat_xml(entries, "sub/"))
        for each in entries:
            packed.write(root.with_name("unpacked") / each.file, f"images/sub/{each.file}")


def labelstudio_of(each: Entry) -> list[dict[str, Any]]:
    def share(corners: list[tuple[float, float]]) -> list[list[float]]:
        return [[100 * x / each.width, 100 * y / each.height] for x, y in corners]

    about = {"original_width": each.width, "original_height": each.height, "image_rotation": 0, "to_name": "image"}
    found = []
    for label, corners in each.shapes:
        if is_box(corners):
            (x, y), _, (right, bottom), _ = share(corners)
            value = {"x": x, "y": y, "width": right - x, "height": bottom - y, "rotation": 0}
            found.append({**about, "type": "rectanglelabels", "value": {**value, "rectanglelabels": [label]}})
        else:
            value = {"points": share(corners), "closed": True, "polygonlabels": [label]}
            found.append({**about, "type": "polygonlabels", "value": value})
    return [*found, {"type": "choices", "to_name": "image", "value": {"choices": list(each.tags)}}]


def labelstudio(root: Path, entries: list[Entry] = ENTRIES) -> None:
    photos(root / "images", entries)
    tasks = [
        {
            "id": number,
            "annotations": [
                {"id": 9, "was_cancelled": True, "result": [], "created_at": "2024-05-03"},
                {"id": 1, "was_cancelled": False, "result": [], "created_at": "2024-05-01"},
                {"id": 2, "was_cancelled": False, "result": labelstudio_of(each), "created_at": "2024-05-02"},
            ],
            "file_upload": f"0a1b2c3d-{each.file}",
            "predictions": [],
            "data": {"note": "a", "image": f"/data/upload/3/0a1b2c3d-{each.file}"},
        }
        for number, each in enumerate(entries)
    ]
    tasks.append({"id": 99, "annotations": [], "data": {"image": "/data/upload/3/z.jpg"}})  # not annotated yet
    (root / "project-3-at-2024.json").write_text(json.dumps(tasks))


LAYOUTS = {
    "labelme": labelme,
    "via": via,
    "via_project": via_project,
    "cvat": cvat,
    "cvat_zip": cvat_zip,
    "labelstudio": labelstudio,
}


def png(inside: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(inside.astype(np.uint8)).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def brush(inside: np.ndarray) -> list[int]:
    """The bytes of a Label Studio brush: runs of up to 8 values of 8 bits, in turns as one value or one by one."""
    values = np.repeat(inside.ravel().astype(np.uint8) * 255, 4).tolist()
    bits = f"{len(values):032b}{7:05b}" + f"{2:04b}" * 4  # lengths of 3 bits
    at, one_by_one = 0, False
    while at < len(values):
        end = at + 1
        while end < len(values) and end - at < 8 and (one_by_one or values[end] == values[at]):
            end += 1
        some = values[at:end] if one_by_one else values[at : at + 1]
        bits += ("0" if one_by_one else "1") + f"{at // 8 % 4:02b}" + f"{end - at - 1:03b}"
        bits += "".join(f"{value:08b}" for value in some)
        at, one_by_one = end, not one_by_one
    bits += "0" * (-len(bits) % 8)
    return [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]
