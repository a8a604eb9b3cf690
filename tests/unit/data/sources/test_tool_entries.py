"""What one entry of an export says, and how a file of each tool begins, by the functions of the tools alone."""

import base64
import io
import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from sightline.data.formats import marked as m
from sightline.data.formats.marked import WrongEntry
from sightline.data.sources import cvat, labelme, labelstudio, metadata, via
from sightline.errors import BadData

TOOLS = {each.kind: each for each in (cvat.TOOL, labelme.TOOL, labelstudio.TOOL, metadata.TOOL, via.TOOL)}


@pytest.mark.parametrize(
    ("head", "kinds"),
    [
        (b"<annotations>\n<version>1.1", {"cvat"}),
        (b"<annotations\n><meta>", {"cvat"}),
        (b'<annotations/><image id="1"', {"cvat"}),
        (b'<annotations x="1"><track id="1"', {"cvat"}),
        (b"<version>1<annotations>", set()),
        (b"<annotation><image>", set()),
        (b"<annotations><images>", set()),
        (b' {"version": "5", "shapes" : [', {"labelme"}),
        (b'{"shapes":[], "imageData":""', {"labelme"}),
        (b'{"shapes":[], "fill_color" :""', {"labelme"}),
        (b'{"imagePath": "a.jpg"', {"labelme"}),
        (b'{"version": 3', set()),
        (b'{"shapes": [', set()),
        (b'[{"version": "5", "shapes": []', set()),
        (b'{"a.jpg": {"filename": "a.jpg", "regions": [', {"via"}),
        (b'\n{"a.jpg": {"filename": "a.jpg", "regions" : {', {"via"}),
        (b'{"a.jpg": {"filename": "a.jpg", "file_attributes": {', {"via"}),
        (b'{"a.jpg": {"filename": "a.jpg", "regions": 3', set()),
        (b'{"a.jpg": {"name": "a.jpg", "regions": [', set()),
        (b'{"_via_settings" : {', {"via"}),
        (b'{"_via_img_metadata":', {"via"}),
        (b'{"_via_attributes":', {"via"}),
        (b'{"project": {"data_format_version":"3.1.1"', {"via"}),
        (b'{"vid_list":["1"]', {"via"}),
        (b'{"fid_list":["1"]', {"via"}),
        (b'[{"_via_settings":{', set()),
        (b'[{"data": {"image": "a"}, "annotations": [', {"labelstudio"}),
        (b' [ {"completions" : [], "data" : {', {"labelstudio"}),
        (b'[{"data": {"image": "a"}, "predictions": [', set()),
        (b'[{"annotations": [], "id": 3', set()),
        (b'[{"data": {"image": "a"}, "total_annotations": 3', {"labelstudio"}),
        (b'[{"image": "a", "annotation_id": 3', {"labelstudio"}),
        (b'[{"image": "a", "lead_time": 3', set()),
        (b'[3, {"data": {}, "annotations": [', set()),
        (b'{"data": {}, "annotations": [', set()),
        (b'{"file_name": "a.jpg", "label": 3}\n{', {"metadata"}),
        (b'\n {"file_name" : "a.jpg"}', {"metadata"}),
        (b'{"name": "a"}\n{"file_name": "a.jpg"}', set()),
        (b"label,file_name\n3,a.jpg", {"metadata"}),
        (b'label,"file_name",x\r\n', {"metadata"}),
        (b"label,file_names\n", set()),
        (b"3,a.jpg\nlabel,file_name\n", set()),
    ],
)
def test_a_file_is_known_by_how_it_begins(head, kinds):
    assert {kind for kind, tool in TOOLS.items() if tool.is_export(head)} == kinds


def read(kind: str, value, file: str = "folder/f.json") -> m.Marked:
    found = TOOLS[kind].read(value, file)
    assert found is not None
    return found


def refused(kind: str, value, said: str) -> None:
    with pytest.raises(WrongEntry, match=said):
        TOOLS[kind].read(value, "f.json")


def corners_of(shape: m.Shape) -> list[list[float]]:
    (outline,) = shape.outline
    return np.round(np.asarray(outline).reshape(-1, 2), 6).tolist()


def png(values: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


# LabelMe


def labelme_of(*shapes, **other) -> dict:
    return {"imagePath": "a.png", "imageHeight": 20, "imageWidth": 24, "shapes": list(shapes)} | other


def test_labelmes_image():
    found = read("labelme", labelme_of())
    assert (found.name, found.height, found.width, found.shapes, found.labels, found.holds_image) == (
        "a.png", 20, 24, [], [], False,
    )  # fmt: skip
    assert read("labelme", labelme_of(imageData=1)).holds_image
    for name in (None, 3, " "):
        assert read("labelme", labelme_of(imagePath=name)).name == "f.jpg"
    assert read("labelme", {"shapes": [], "imageHeight": "x"}).height == 0
    flags = {"day": True, "night": False, "rain": 1, "fog": "true", " wet  road": True}
    assert read("labelme", labelme_of(flags=flags)).labels == ["day", "wet road"]
    assert read("labelme", labelme_of(flags=["day"])).labels == []
    for value in ([], {"shapes": {}}, {"imagePath": "a"}):
        refused("labelme", value, "expected an object with `shapes`")
    refused("labelme", labelme_of([1]), r"shapes\[0\] is \[1\], expected an object")
    refused("labelme", labelme_of(flags={"": True}), "a flag is '', expected the name of a class")


@pytest.mark.parametrize(
    ("kind", "points", "expected"),
    [
        (None, [[1, 1], [5, 1], [5, 4]], (1, 1, 4, 3)),
        ("polygon", [[1, 1], [5, 1], [5, 4]], (1, 1, 4, 3)),
        ("polygon", [[1, 1], [5, 1]], None),
        ("rectangle", [[5, 4], [1, 2]], (1, 2, 4, 2)),
        ("rectangle", [[1, 2], [5, 2], [5, 4], [1, 4]], (1, 2, 4, 2)),
        ("rectangle", [[1, 2]], None),
        ("rectangle", [[1, 2], [5, 2], [5, 4]], None),
        ("circle", [[10, 9], [13, 5]], (5, 4, 10, 10)),
        ("circle", [[10, 9], [13, 5], [1, 1]], None),
        ("circle", [[10, 9], [10, 9]], None),
        ("linestrip", [[1, 1], [5, 1], [5, 4]], None),
        ("point", [[1, 1]], None),
        ("oriented_rectangle", [[1, 1], [5, 1]], None),
    ],
)
def test_labelmes_shapes(kind, points, expected):
    found = read("labelme", labelme_of({"label": " a ", "points": points, "shape_type": kind}))
    assert [(each.label, each.box) for each in found.shapes] == [("a", expected)] * (expected is not None)
    assert found.notes == ({} if expected else {m.WITHOUT_AREA: 1})


def test_labelmes_turned_boxes_are_counted():
    shape = {"label": "a", "points": [[1, 1], [5, 1], [5, 4]]}
    kinds = ("oriented_rectangle", "rotation", "rotated_rectangle")
    found = read("labelme", labelme_of(*(shape | {"shape_type": kind} for kind in kinds)))
    assert [corners_of(each) for each in found.shapes] == [shape["points"]] * 3 and found.notes == {m.ROTATED: 3}


def test_labelmes_masks():
    inside = np.zeros((3, 4), np.uint8)
    inside[1, 1:3] = (1, 200)
    shape = {"label": "a", "shape_type": "mask", "points": [[5.6, 4.4], [9, 7]], "mask": png(inside)}
    (found,) = read("labelme", labelme_of(shape)).shapes
    assert found.box == (7, 5, 2, 1) and found.area == 2 and found.outline["size"] == [20, 24]
    (found,) = read("labelme", labelme_of(shape | {"points": [[9, 7], [5, 3]]})).shapes
    assert found.box == (6, 4, 2, 1)
    refused("labelme", labelme_of(shape | {"points": [[5, 4]]}), "is not a grey image with two corners")
    colour = np.zeros((3, 4, 3), np.uint8)
    refused("labelme", labelme_of(shape | {"mask": png(colour)}), r"mask of shapes\[0\] is not a grey image")
    refused("labelme", labelme_of(shape | {"mask": None}), r"mask of shapes\[0\] is not an image")
    refused("labelme", labelme_of(shape | {"mask": "e"}), r"mask of shapes\[0\] is not base64")


def test_labelmes_file_is_bounded_beside_its_image(monkeypatch):
    monkeypatch.setattr(labelme, "MOST_BYTES", 40)
    monkeypatch.setattr(labelme, "_MOST_FILE", 60)
    value = b'{"shapes": [], "imageData": "%b"}'
    plain = len(value % b"1")
    assert labelme.TOOL.value(value % (b"x" * (61 - plain))) == {"shapes": [], "imageData": "1"}
    with pytest.raises(ValueError, match="more than the 60 bytes allowed"):
        labelme.TOOL.value(value % (b"x" * (62 - plain)))
    assert labelme.TOOL.value(b'"' + b"x" * 38 + b'"') == "x" * 38
    with pytest.raises(ValueError, match="more than the 40 bytes allowed beside its image"):
        labelme.TOOL.value(b'"' + b"x" * 39 + b'"')


# VIA


def via_of(shape=None, attributes=None, **other) -> dict:
    region = {
        "shape_attributes": shape or {},
        "region_attributes": {"class": "a"} if attributes is None else attributes,
    }
    return {"filename": "a.png", "regions": [region], "file_attributes": {}} | other


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"name": "rect", "x": 1, "y": 2, "width": 3, "height": 4}, (1, 2, 3, 4)),
        ({"name": "circle", "cx": 10, "cy": 12, "r": 5}, (5, 7, 10, 10)),
        ({"name": "ellipse", "cx": 10, "cy": 12, "rx": 5, "ry": 3}, (5, 9, 10, 6)),
        ({"name": "ellipse", "cx": 10, "cy": 12, "rx": 5, "ry": 3, "theta": np.pi / 2}, (7, 7, 6, 10)),
        ({"name": "polygon", "all_points_x": [1, 4, 4], "all_points_y": [2, 2, 7]}, (1, 2, 3, 5)),
        ({"name": "polygon", "all_points_x": [1, 4], "all_points_y": [2, 2]}, None),
        ({"name": "polyline", "all_points_x": [1, 4, 4, 1], "all_points_y": [2, 2, 7, 2]}, (1, 2, 3, 5)),
        ({"name": "polyline", "all_points_x": [1, 4, 4], "all_points_y": [2, 2, 7]}, None),
        ({"name": "polyline", "all_points_x": [1, 4, 1], "all_points_y": [2, 2, 2]}, None),
        ({"name": "polyline", "all_points_x": [1, 4, 4, 1], "all_points_y": [2, 2, 7, 3]}, None),
        ({"name": "polyline", "all_points_x": [], "all_points_y": []}, None),
        ({"name": "point", "cx": 1, "cy": 2}, None),
    ],
)
def test_vias_shapes(shape, expected):
    found = read("via", via_of(shape))
    assert found.name == "a.png" and len(found.shapes) == (expected is not None)
    for each in found.shapes:
        assert each.label == "a"
        np.testing.assert_allclose(each.box, expected)
    assert found.notes == ({} if expected else {m.WITHOUT_AREA: 1})


def test_vias_wrong_entries():
    for value in ([], {"filename": "a"}, {"regions": []}):
        refused("via", value, "expected an image with `filename` and `regions`")
    for name in (3, " "):
        refused("via", via_of(filename=name), f"filename is {name!r}, expected a name")
    refused("via", via_of(regions=3), "regions is 3, expected a list")
    for region in (3, {"shape_attributes": []}):
        refused("via", via_of(regions=[region]), r"regions\[0\] is .*, expected one with `shape_attributes`")
    shape = {"name": "polygon", "all_points_x": [1, 4, 5], "all_points_y": [2, 2]}
    refused("via", via_of(shape), r"regions\[0\] has 3 x and 2 y, expected as many")
    refused("via", via_of({"name": "rect", "x": 1}), r"y of regions\[0\] is None, expected a finite number")
    first = {"0": via_of({"name": "rect", "x": 1, "y": 2, "width": 3, "height": 4})["regions"][0]}
    assert len(read("via", via_of(regions=first)).shapes) == 1  # VIA 1


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        *[({"colour": "red", each.upper() + " ": "b"}, "b") for each in via._CLASS],
        ({"label": "b", "name": "c", "class": ""}, "b"),
        ({"kind": "b"}, "b"),
        ({"kind": 7}, "7"),
        ({"kind": "b", "x": None, "y": {}, "z": False, "w": ""}, "b"),
        ({"kind": {"b": True, "c": False}}, "b"),
        ({"kind": {"b": False}}, "object"),
        ({"kind": {"b": 1}}, "object"),
        ({}, "object"),
        ([], "object"),
    ],
)
def test_vias_attribute_that_says_the_class(attributes, expected):
    shape = {"name": "rect", "x": 1, "y": 2, "width": 3, "height": 4}
    assert [each.label for each in read("via", via_of(shape, attributes)).shapes] == [expected]


def test_vias_labels_of_images():
    assert read("via", via_of(file_attributes={"a": {"day": True, "x": False, "wet": True}})).labels == ["day", "wet"]
    assert read("via", via_of(file_attributes={"caption": "x", "url": "y"})).labels == []
    refused("via", via_of(attributes={"a": "x", "b": "y"}), r"regions\[0\] has the attributes 'a', 'b', of which none "
            "is called class, label, name, type, category; rename")  # fmt: skip


# CVAT


def cvat_of(shapes: str = "", about: str = "") -> bytes:
    return f'<image name="a.png" width="24" height="20" {about}>{shapes}</image>'.encode()


def cvat_read(shapes: str = "", about: str = "") -> m.Marked:
    return read("cvat", cvat.TOOL.value(cvat_of(shapes, about)))


def cvat_refused(shapes: str, said: str) -> None:
    refused("cvat", cvat.TOOL.value(cvat_of(shapes)), said)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ('<box xtl="1" ytl="2" xbr="4" ybr="7"', [[1, 2], [4, 2], [4, 7], [1, 7]]),
        ('<box xtl="1" ytl="2" xbr="5" ybr="4" rotation="90"', [[4, 1], [4, 5], [2, 5], [2, 1]]),
        ('<polygon points="1,2;4,2;;4,7; "', [[1, 2], [4, 2], [4, 7]]),
        ('<polygon points="1,2;4,2"', None),
        *[(f'<{each} points="1,2;4,2;4,7"', None) for each in ("polyline", "points", "cuboid", "skeleton")],
    ],
)
def test_cvats_shapes(shape, expected):
    found = cvat_read(f'{shape} label="a"/>')
    assert [corners_of(each) for each in found.shapes] == [expected] * (expected is not None)
    assert found.notes == ({m.ROTATED: 1} if "rot" in shape else {} if expected else {m.WITHOUT_AREA: 1})


def test_cvats_ellipses():
    (found,) = cvat_read('<ellipse label="a" cx="12" cy="10" rx="8" ry="4"/>').shapes
    np.testing.assert_allclose(found.box, (4, 6, 16, 8))
    (found,) = cvat_read('<ellipse label="a" cx="12" cy="10" rx="8" ry="4" rotation="90"/>').shapes
    np.testing.assert_allclose(found.box, (8, 2, 8, 16))


def test_cvats_image_and_the_order_of_its_shapes():
    boxes = "".join(
        f'<box label="{name}" xtl="1" ytl="2" xbr="4" ybr="7"{order}/>'
        for name, order in (("a", ' z_order="1"'), ("b", ""), ("c", ' z_order="-1"'), ("d", ' z_order="0"'))
    )
    found = cvat_read(boxes + '<tag label="day"/><tag label=" wet  road"/><other/>', 'subset=" Train "')
    assert [each.label for each in found.shapes] == ["c", "b", "d", "a"] and found.labels == ["day", "wet road"]
    assert (found.name, found.height, found.width, found.subset) == ("a.png", 20, 24, "Train")
    assert cvat_read("", 'subset="Default"').subset == "" and not cvat_read().notes
    refused("cvat", cvat.TOOL.value(b"<image/>"), "an <image> without a name")
    for data in (b"", b"<image>", b"<a/>", b"</annotations>", b"<image"):
        with pytest.raises(ValueError):  # noqa: PT011  # the caller says that the file has changed
            cvat.TOOL.value(data)
    box = '<box label="{}" xtl="1" ytl="{}" xbr="4" ybr="7" z_order="{}"/>'
    cvat_refused(box.format("", 1, 1), "^label of a.png: <box> number 1 is '', expected the name")
    cvat_refused("<other/>" + box.format("a", "x", 1), "^ytl of a.png: <box> number 2 is 'x', expected a finite number")
    cvat_refused(box.format("a", 1, "x"), "^z_order of a.png: <box> number 1 is 'x'")
    cvat_refused('<tag label=""/>', "^label of a.png: <tag> number 1 is ''")
    cvat_refused('<polygon label="a" points="1,2;3"/>', r"^points of a.png: <polygon> number 1 is \['3'\], expected 2")
    cvat_refused('<box label="a" rotation="x"/>', "^rotation of a.png: <box> number 1 is 'x'")


def cvat_mask(rle: str, left: object = 3, top: object = 5, wide: object = 4, tall: object = 2) -> str:
    return f'<mask label="a" rle="{rle}" left="{left}" top="{top}" width="{wide}" height="{tall}"/>'


def test_cvats_masks():
    for rle in ("1, 2, 5", "1,2", "1,2,,5,"):
        (found,) = cvat_read(cvat_mask(rle)).shapes
        assert found.box == (4, 5, 2, 1) and found.area == 2
    (found,) = cvat_read(cvat_mask("0,8")).shapes
    assert found.box == (3, 5, 4, 2)
    assert cvat_read(cvat_mask("8")).notes == {m.WITHOUT_AREA: 1}
    (found,) = cvat_read(cvat_mask("0,480", 0, 0, 24, 20)).shapes
    assert found.area == 480
    about = "a.png: <mask> number 1"
    for mask, said in (
        (cvat_mask("0,9"), f"rle of {about} has 9 pixels, expected at most 8"),
        (cvat_mask("2,-1,3"), f"rle of {about} has 4 pixels, expected at most 8"),
        (cvat_mask("x"), f"rle of {about} is 'x', expected a finite number"),
        (cvat_mask("1", wide=0), f"{about} is 0x2 in an image of 24x20"),
        (cvat_mask("1", tall=0), f"{about} is 4x0 in an image of 24x20"),
        (cvat_mask("1", wide=1.5), f"{about} is 0x2 in an image of 24x20"),
        (cvat_mask("1", wide=13, tall=37), f"{about} is 13x37 in an image of 24x20"),
        (cvat_mask("1", left="x"), f"left of {about} is 'x'"),
    ):
        cvat_refused(mask, said)
    allowed = cvat_mask("", wide=1024, tall=1024)
    cvat_refused(allowed * 1024, "a.png: <mask> number 1 is 1024x1024 in an image of 24x20")
    cvat_refused(
        allowed * 1024 + cvat_mask("1", wide=2, tall=2),
        "a.png: its masks have 1073741828 pixels together, 1073741824 are allowed",
    )
    unknown = cvat.TOOL.value(f'<image name="a.png">{cvat_mask("0,1", 0, 0, 1, 1)}</image>'.encode())
    refused("cvat", unknown, "a mask in an image of 0x0")


def entries(text: str, size: int = 7) -> list:
    data = text.encode()
    return list(cvat._Reading("f.xml").images(data[at : at + size] for at in range(0, len(data), size)))


def test_cvats_images_are_found_again_by_their_bytes():
    text = '<?xml version="1.0"?>\n<annotations><meta><image name="no"/></meta>'
    images = ['<image name="a"><box label="x"><attribute name="y">z</attribute></box></image>', '<image name="ö"/>',
              "<image name='c'>\n</image>"]  # fmt: skip
    text += " ".join(images) + "<after/></annotations>"
    for size in (1, 7, 1000):
        found = entries(text, size)
        assert [each.values["name"] for _, _, each in found] == ["a", "ö", "c"]
        spans = [text.encode()[start:stop].decode() for start, stop, _ in found]
        assert spans[0::2] == images[0::2] and spans[1].startswith(images[1])
        again = [cvat.TOOL.value(text.encode()[start:stop]) for start, stop, _ in found]
        assert again == [each for _, _, each in found]
    assert [[each.tag for each in found.inside] for _, _, found in entries(text)] == [["box"], [], []]
    for wrong, said in (
        ("<a><image/></a>", "f.xml holds <a>, expected <annotations> as CVAT has it"),
        ("<annotations><track/></annotations>", "CVAT video export"),
        ("<annotations>", "f.xml is not a whole XML file: .*; export it again"),
        ("<annotations></annotations><", "not a whole XML file"),
        ('<?xml version="1.0" encoding="nope"?><annotations/>', "not a whole XML file"),
        ("<!DOCTYPE a><annotations/>", "declares a document type"),
    ):
        with pytest.raises(BadData, match=said):
            entries(wrong)
    assert entries("<annotations><meta><track/></meta></annotations>") == []


def test_cvats_images_are_bounded(monkeypatch):
    monkeypatch.setattr(cvat, "_MOST_ELEMENTS", 2)
    assert len(entries("<annotations><image><a><b/></a><c/></image><image><a/><b/></image></annotations>")) == 2
    with pytest.raises(BadData, match=r"f.xml: \{'name': 'x'\} has more than 2 objects"):
        entries('<annotations><image name="x"><a/><b/><c/></image></annotations>')
    monkeypatch.setattr(cvat, "MOST_BYTES", 30)
    assert len(entries(f"<annotations><image>{'x' * 15}</image></annotations>", 1)) == 1
    with pytest.raises(BadData, match="f.xml: an image at byte 13 takes more than 30 bytes"):
        entries(f"<annotations><image>{'<a/>' * 2}{'x' * 40}</image></annotations>", 1)


# Label Studio


def studio_of(*results, **other) -> dict:
    about = {"original_width": 200, "original_height": 50}
    listed = [about | each if isinstance(each, dict) else each for each in results]
    return {"data": {"image": "a.png"}, "annotations": [{"result": listed}]} | other


def region(kind: str, labels=("a",), **value) -> dict:
    return {"type": kind, "value": value | {kind: list(labels)}}


def studio_shapes(*results) -> list[m.Shape]:
    return read("labelstudio", studio_of(*results)).shapes


def test_label_studios_shapes_are_percent_of_the_image():
    place = {"x": 10, "y": 20, "width": 5, "height": 40}
    (found,) = studio_shapes(region("rectanglelabels", **place))
    assert found == m.rectangle("a", 20, 10, 30, 30)
    (found,) = studio_shapes(region("rectanglelabels", **place, rotation=90))
    assert corners_of(found) == [[20, 10], [20, 20], [0, 20], [0, 10]]
    (found,) = studio_shapes(region("ellipselabels", x=50, y=40, radiusX=10, radiusY=20))
    np.testing.assert_allclose(found.box, (80, 10, 40, 20))
    (found,) = studio_shapes(region("ellipselabels", x=50, y=40, radiusX=10, radiusY=20, rotation=90))
    np.testing.assert_allclose(found.box, (90, 0, 20, 40))
    (found,) = studio_shapes(region("polygonlabels", points=[[10, 20], [20, 20], [20, 41]]))
    assert corners_of(found) == [[20, 10], [40, 10], [40, 20.5]]
    third = region("rectanglelabels", x=100 / 3, y=0, width=100 / 7, height=1)
    assert studio_shapes(third)[0].outline[0][::2] == [66.666667, 95.238096, 95.238096, 66.666667]
    assert studio_shapes(region("keypointlabels", x=1, y=2, width=3)) == []


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ({"x": 1, "y": 2, "width": 3, "height": 4}, 4),
        ({"points": [[1, 2], [3, 4], [5, 2]]}, 3),
        ({"x": 1, "y": 2, "radiusX": 3, "radiusY": 4}, 64),
        ({"x": 1, "y": 2}, 0),
    ],
)
def test_label_studios_labels_of_any_region(value, count):
    for kind in ({"type": "labels"}, {}):
        found = read("labelstudio", studio_of(kind | {"value": value | {"labels": ["a"]}}))
        assert [len(corners_of(each)) for each in found.shapes] == [count] * bool(count)
        assert found.notes == ({} if count else {m.WITHOUT_AREA: 1})


def test_label_studios_newest_annotation_counts():
    def done(label: str, at: str, **other) -> dict:
        return {"result": studio_of({"type": "choices", "value": {"choices": [label]}})["annotations"][0]["result"],
                "created_at": at} | other  # fmt: skip

    three = [done("a", "2024-01"), done("b", "2024-03"), done("c", "2024-02")]
    four = [*three, done("d", "2024-04", was_cancelled=True), done("e", "2024-05", skipped=True), 3]
    for key in ("annotations", "completions"):
        assert read("labelstudio", {"data": {"image": "a.png"}, key: four}).labels == ["b"]
    for nothing in ([], None, [four[3]], [3]):
        assert labelstudio.TOOL.read({"data": {"image": "a.png"}, "annotations": nothing}, "f") is None
    for value, said in (
        ([], "expected a task with `data`"),
        ({"data": []}, "expected a task with `data`"),
        ({"data": {}, "annotations": 3}, "annotations is 3, expected a list"),
        ({"data": {}, "annotations": [{"result": {}}]}, r"result is \{\}, expected a list"),
        (studio_of(3), r"result\[0\] is 3, expected one with `value`"),
        (studio_of({"type": "relation"}, {"value": 3}), r"result\[1\] is .*, expected one with `value`"),
    ):
        refused("labelstudio", value, said)


@pytest.mark.parametrize(
    ("data", "upload", "expected"),
    [
        ({"note": "n", "image": "b.PNG"}, None, "b.PNG"),
        ({"image": "https://x.org/f/a%20b.jpg?size=3"}, None, "/f/a b.jpg"),
        ({"image": "/data/upload/3/a%20b.jpg"}, None, "/data/upload/3/a b.jpg"),
        ({"image": "/data/local-files/?d=f/a%20b.jpg"}, None, "f/a b.jpg"),
        ({"image": "100%25/a.jpg"}, None, "100%25/a.jpg"),
        ({"image": "http://[x/a.jpg"}, None, "http://[x/a.jpg"),
        ({"image": "a", "n": 3}, "b.jpg", "b.jpg"),
        ({"image": "a"}, None, "a"),
        ({"image": "a"}, "b.txt", "a"),
    ],
)
def test_label_studios_image(data, upload, expected):
    assert read("labelstudio", studio_of(data=data, file_upload=upload)).name == expected


def test_label_studios_image_without_a_name():
    for data in ({"a": "x", "b": "y"}, {"a": 3}):
        refused("labelstudio", studio_of(data=data), r"data is .*, expected the name of an image \(.*\.png.*\)")


def test_label_studios_choices_and_regions_without_a_label():
    choice = {"type": "choices", "value": {"choices": ["day", "wet"]}}
    assert read("labelstudio", studio_of(choice, {"value": {"choices": ["b"]}})).labels == ["day", "wet", "b"]
    for value in ({"x": 1}, {"y": 1}, {"points": []}, {"rle": []}, {"radiusX": 1}, {"width": 1}):
        of_region = {"type": "choices", "value": {"choices": ["b"], **value}}
        assert read("labelstudio", studio_of(of_region)).labels == []
    assert read("labelstudio", studio_of(choice | {"type": "other"})).labels == []
    refused("labelstudio", studio_of({"value": {"choices": "b"}}), r"result\[0\] has the labels 'b', expected a list")
    refused("labelstudio", studio_of({"value": {"choices": [""]}}), r"choices of result\[0\] is '', expected the name")
    place = {"x": 10, "y": 20, "width": 5, "height": 40}
    without = [{"id": number, "type": kind, "value": place} for number, kind in enumerate(("rectangle", "brush"))]
    without.append(region("rectanglelabels", [], **place))
    found = read("labelstudio", studio_of(*without, {"type": "textarea", "value": {"text": "x"}}, {"value": {}}))
    assert found.notes == {"regions without a label left out": 3} and found.shapes == []
    both = [{"id": 1, "type": "rectangle", "value": place},
            {"id": "1", "type": "labels", "value": place | {"labels": ["a"]}}]  # fmt: skip
    found = read("labelstudio", studio_of(*both))
    assert len(found.shapes) == 1 and not found.notes
    found = read("labelstudio", studio_of(region("rectanglelabels", ["b", "a"], **place)))
    assert [each.label for each in found.shapes] == ["b"]
    assert found.notes == {"regions with several labels, of which the first counts": 1}


def test_label_studios_sides_of_the_image():
    place = {"x": 10, "y": 20, "width": 5, "height": 40, "rectanglelabels": ["a"]}
    one = {"type": "rectanglelabels", "value": place}

    def task(*results) -> dict:
        return {"data": {"image": "a.png"}, "annotations": [{"result": list(results)}]}

    sides = {"original_width": 200, "original_height": 50}
    found = read("labelstudio", task(one, {"type": "relation"} | sides, one | {"original_width": 9}))
    assert (found.height, found.width) == (50, 200) and [each.box[0] for each in found.shapes] == [20, 20]
    refused("labelstudio", task(one), r"result\[0\] has no original_width and original_height")
    refused("labelstudio", task(one | {"original_width": 9}), "has no original_width")
    other = one | {"original_width": 201, "original_height": 50}
    refused("labelstudio", task(one | sides, other), r"result\[1\] belongs to an image of 201x50, others to another")


def bits(*pairs: tuple[int, int]) -> bytes:
    text = "".join(f"{value:0{count}b}" for value, count in pairs)
    return int(text + "0" * (-len(text) % 8), 2).to_bytes(-(-len(text) // 8), "big")


HEAD = ((7, 5), (1, 4), (2, 4), (3, 4), (15, 4))  # values of 8 bits; lengths of 2, 3, 4 and 16


def test_label_studios_brush_is_decoded_bit_by_bit():
    runs = (
        ((1, 1), (0, 2), (3, 2), (200, 8)),
        ((0, 1), (1, 2), (1, 3), (5, 8), (6, 8)),
        ((1, 1), (3, 2), (0, 16), (9, 8)),
    )
    data = bits((7, 32), *HEAD, *(pair for run in runs for pair in run))
    assert labelstudio.decoded(data, 7).tolist() == [200] * 4 + [5, 6, 9]
    small = bits((3, 32), (1, 5), *HEAD[1:], (1, 1), (0, 2), (2, 2), (3, 2))
    assert labelstudio.decoded(small, 3).tolist() == [3, 3, 3]
    assert labelstudio.decoded(bits((0, 32), *HEAD), 0).tolist() == []
    for wrong, said in (
        (data[:-2], "a brush that is cut off"),
        (bits((8, 32), *HEAD), "a brush of 8 values of 8 bits, expected 7 of 8"),
        (bits((7, 32), (8, 5), *HEAD[1:]), "a brush of 7 values of 9 bits, expected 7 of 8"),
        (bits((7, 32), *HEAD, (1, 1), (2, 2), (7, 4), (1, 8)), "a brush of more than 7 values"),
    ):
        with pytest.raises(WrongEntry, match=said):
            labelstudio.decoded(wrong, 7)


def test_label_studios_brush_covers_where_its_alpha_is_not_0(monkeypatch):
    def brushed(rle, **other) -> dict:
        return region("brushlabels", rle=rle, format="rle") | other

    about = {"original_width": 3, "original_height": 2}
    runs = ((0, 1), (3, 2), (23, 16), *((value, 8) for value in [9, 9, 9, 0, 0, 0, 0, 1, *[0] * 15, 255]))
    rle = list(bits((24, 32), *HEAD, *runs))
    (found,) = studio_shapes(brushed(rle, **about))
    assert found.area == 2 and found.box == (1, 0, 2, 2) and found.outline["size"] == [2, 3]
    monkeypatch.setattr(labelstudio, "MAX_PIXELS", 6)
    assert studio_shapes(brushed(rle, **about)) == [found]
    monkeypatch.setattr(labelstudio, "MAX_PIXELS", 5)
    refused("labelstudio", studio_of(brushed(rle, **about)), "belongs to an image of 3x2, 5 pixels are allowed")
    monkeypatch.undo()
    for wrong in (None, [256], [-1], [1.5], [True]):
        refused("labelstudio", studio_of(brushed(wrong, **about)), r"rle of result\[0\] is .*, expected bytes")
    other = region("brushlabels", rle=rle, format="png")
    refused("labelstudio", studio_of(other | about), r"format of result\[0\] is 'png', expected rle")
    refused("labelstudio", studio_of(brushed([0, 255], **about)), "cut off")


# Metadata of Hugging Face


def test_metadatas_labels():
    found = read("metadata", {"file_name": "a.png", "height": 20, "width": "24", "label": "x", "class": "y"})
    assert (found.name, found.height, found.width, found.labels) == ("a.png", 20, 24, ["x"])
    for value, expected in (
        ({"label": None, "labels": ["a", 2]}, ["a", "2"]),
        ({"class": 3}, ["3"]),
        ({"category": 2.5}, ["2.5"]),
        ({"label": ""}, []),
        ({"label": [], "class": "x"}, []),
        ({}, []),
    ):
        assert read("metadata", {"file_name": "a.png"} | value).labels == expected
    chosen = metadata.Metadata("kind")
    found = chosen.read({"file_name": "a.png", "kind": 1, "label": "x"}, "f")
    assert found is not None and found.labels == ["1"]
    found = chosen.read({"file_name": "a.png", "kind": None, "label": "x"}, "f")
    assert found is not None and found.labels == ["x"]
    with pytest.raises(WrongEntry, match="no column is called kind, as --data.label-column says"):
        chosen.read({"file_name": "a.png", "label": "x"}, "f")
    for value in ([], {}, {"file_name": 3}, {"file_name": " "}):
        refused("metadata", value, "expected an object with the name of an image as file_name")
    refused("metadata", {"file_name": "a.png", "label": True}, "label of a.png is True, expected the name of a class")


BOXES = [[1, 2, 3, 4], [5, 6, 0, 0]]


@pytest.mark.parametrize(
    "objects",
    [
        {"bbox": BOXES, "category": ["a", 7]},
        {"bboxes": BOXES, "categories": ["a", "7"]},
        *[{"boxes": BOXES, key: ["a", 7]} for key in metadata.CATEGORIES],
        {"bbox": BOXES, "boxes": 3, "category": ["a", 7], "label": 3},
        [{"bbox": BOXES[0], "label": "a"}, {"label": 7, "bbox": BOXES[1]}],
        json.dumps({"bbox": BOXES, "category": ["a", 7]}),
    ],
)
def test_metadatas_boxes(objects):
    found = list(metadata.boxes_of(objects, "a.png"))
    assert found == [m.rectangle("a", 1, 2, 4, 6), m.rectangle("7", 5, 6, 5, 6)]
    assert read("metadata", {"file_name": "a.png", "objects": objects}).shapes == found


def test_metadatas_crowds():
    objects = {"bbox": BOXES, "category": ["a", "b"]}
    for key, crowds in (("iscrowd", [1, 0]), ("is_crowd", [True, None]), ("iscrowd", [1.0, False])):
        assert [each and each.is_crowd for each in metadata.boxes_of(objects | {key: crowds}, "a")] == [True, False]
    for unsaid in (objects, objects | {"iscrowd": None}):  # a column of parquet may have no value in a row
        assert [each and each.is_crowd for each in metadata.boxes_of(unsaid, "a")] == [False, False]
    for crowds in ([1], [0, 2], [0, "1"], 1):
        with pytest.raises(WrongEntry, match=r"iscrowd of a is .*, expected 0 or 1 for each bbox"):
            list(metadata.boxes_of(objects | {"iscrowd": crowds}, "a"))


def test_metadatas_wrong_boxes():
    for nothing in (None, "", " ", [], {}):
        assert list(metadata.boxes_of(nothing, "a")) == []
    for objects, said in (
        ("{", "objects of a is not JSON"),
        (3, "objects of a is 3, expected bbox and category"),
        ([3], r"objects of a is \[3\], expected a list of objects"),
        ({"bbox": BOXES}, "expected as many bbox as category"),
        ({"category": ["a"]}, "expected as many bbox as category"),
        ({"bbox": BOXES, "category": ["a"]}, "expected as many bbox as category"),
        ({"bbox": BOXES, "category": "ab"}, "expected as many bbox as category"),
        ({"bbox": [[1, 2, 3]], "category": ["a"]}, r"bbox of a is \[1, 2, 3\], expected 4 numbers"),
        ({"bbox": [[1, 2, -1, 3]], "category": ["a"]}, r"bbox of a is \[1, 2, -1, 3\], expected x, y, width, height"),
        ({"bbox": [[1, 2, 1, -3]], "category": ["a"]}, "expected x, y, width, height in pixels"),
        ({"bbox": BOXES, "category": ["a", None]}, "category of a is None, expected the name of a class"),
    ):
        with pytest.raises(WrongEntry, match=said):
            list(metadata.boxes_of(objects, "a"))


def test_metadatas_tables(tmp_path, monkeypatch):
    file = tmp_path / "metadata.csv"
    file.write_bytes('\ufefffile_name,label,objects\r\na.png,"x\ny",\r\n\r\nb.png\r\n'.encode())
    rows = [{"file_name": "a.png", "label": "x\ny", "objects": ""}, {"file_name": "b.png", "label": "", "objects": ""}]
    assert [value for _, _, value in metadata.TOOL.entries(file)] == rows
    file.write_text("file_name,label\na.png,b\nc.png,b,c\n")
    with pytest.raises(BadData, match="metadata.csv line 3 has 3 cells, expected 2"):
        list(metadata.TOOL.entries(file))
    file.write_text("file_name,label\na.png," + "x" * 200_000)
    with pytest.raises(BadData, match="metadata.csv line 2 cannot be read"):
        list(metadata.TOOL.entries(file))
    lines = file.with_suffix(".jsonl")
    lines.write_text('{"file_name": "a"}\n\n  \n{"file_name": "bb"}')
    found = list(metadata.TOOL.entries(lines))
    assert found == [(0, 19, {"file_name": "a"}), (23, 42, {"file_name": "bb"})]
    monkeypatch.setattr(metadata, "MOST_BYTES", 19)
    assert list(metadata.TOOL.entries(lines)) == found
    monkeypatch.setattr(metadata, "MOST_BYTES", 18)
    with pytest.raises(BadData, match=r"metadata.jsonl: the line at byte 0 has more than the 18 bytes allowed"):
        list(metadata.TOOL.entries(lines))


def test_metadatas_masks(tmp_path):
    file = tmp_path / "metadata.jsonl"
    for column in metadata._MASKS:
        file.write_text(json.dumps({"file_name": "a.jpg", column: "m/A.PNG", "x": "y"}) + "\n")
        assert metadata.has_masks(file) and metadata.masks_of(file) == {"a.jpg": "m/A.PNG"}
    assert Counter(metadata._MASKS)["mask"] == 1 and metadata.mask_column(["x"]) == ""
    for value in ({"file_name": "a.jpg", "mask": 3}, {"file_name": "a.jpg", "mask": ""}, {"file_name": "a.jpg"}):
        file.write_text(json.dumps(value))
        assert not metadata.has_masks(file)
        with pytest.raises(
            BadData, match=r"metadata.jsonl: a.jpg has no mask; expected its file in one of mask_file_n"
        ):
            metadata.masks_of(file)
    for text in ("[1]", '{"mask": "a.png"}'):
        file.write_text(text)
        with pytest.raises(BadData, match="expected an object with the name of an image as file_name"):
            metadata.masks_of(file)
    for text in ("", "{", '{"file_name": "a.jpg", "mask": "a.txt"}'):
        file.write_text(text)
        assert not metadata.has_masks(file)
