"""Made the files beside it, with TensorFlow (2.x, CPU): `python make.py` in this folder. Kept as documentation.

img_train, img_val: tiny JPEGs with the features that ImageNet's scripts write, labels from 1. odd: Examples of other
shapes; odd.json says what TensorFlow itself reads out of them.
"""

import json
from pathlib import Path

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
SYNSETS = ("n01440764", "n01443537", "n01484850")


def feature(value):
    if isinstance(value, list) and value and isinstance(value[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def example(features):
    return tf.train.Example(features=tf.train.Features(feature={k: feature(v) for k, v in features.items()}))


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    return tf.io.encode_jpeg(pixels, quality=60, chroma_downsampling=False).numpy()


def imagenet(label, number, seed):
    return {
        "image/height": 6,
        "image/width": 9,
        "image/channels": 3,
        "image/colorspace": b"RGB",
        "image/format": b"JPEG",
        "image/class/label": label,
        "image/class/synset": SYNSETS[label - 1].encode(),
        "image/filename": f"{SYNSETS[label - 1]}_{number}.JPEG".encode(),
        "image/encoded": picture(seed),
    }


def field(number, body):
    assert len(body) < 128
    return bytes([number << 3 | 2, len(body)]) + body


def entry(key, value):
    return field(1, field(1, key) + field(2, value))


def write(path, payloads):
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for payload in payloads:
            writer.write(payload)


def as_json(payload):
    found = {}
    for key, value in tf.train.Example.FromString(payload).features.feature.items():
        kind = value.WhichOneof("kind")
        values = list(getattr(value, kind).value) if kind else []
        found[key] = [v.hex() for v in values] if kind == "bytes_list" else values
    return found


def main():
    rows = [(3, 7, 0), (1, 20, 1), (2, 5, 2), (1, 3, 3)]  # (label, number of the picture, seed), as if shuffled
    whole = [example(imagenet(*row)).SerializeToString() for row in rows]
    write(HERE / "img_train" / "img_train-00000-of-00002", whole[:3])
    write(HERE / "img_train" / "img_train-00001-of-00002", whole[3:])
    write(HERE / "img_val" / "img_val-00000-of-00001", [example(imagenet(2, 1, 9)).SerializeToString()])
    boxes = {f"image/object/bbox/{side}": [0.25, 0.5, 1.0] for side in ("xmin", "ymin", "xmax", "ymax")}
    text = {"image/class/text": "Rutilus rutilus, \u00e4\u6f22".encode(), "image/object/bbox/label": [1, 1, 1]}
    odd = [
        example({**imagenet(1, 3, 3), **boxes, **text}),
        example({"many": [0, 1, 127, 128, 300, -1, 2**63 - 1, -(2**63)], "floats": [1.5, -0.0, 3.4e38, 1e-45]}),
        example({"bytes": [b"", b"\x00\xff", b"x" * 200]}),
        tf.train.Example(),
    ]
    empty = tf.train.Example()
    empty.features.feature["no kind"].SetInParent()
    empty.features.feature["no ints"].int64_list.SetInParent()
    empty.features.feature["no floats"].float_list.SetInParent()
    empty.features.feature["no bytes"].bytes_list.SetInParent()
    payloads = [each.SerializeToString(deterministic=True) for each in [*odd, empty]]
    # What other writers may do and TensorFlow reads: numbers one by one, an unknown field, a name or a kind twice.
    unpacked = field(3, b"\x08\x05" + b"\x08\xac\x02" + field(1, b"\x07\x08") + b"\x10\x01")
    floats = field(2, b"\x0d\x00\x00\x80\x3f" + field(1, b"\x00\x00\x00\x3f" * 2))
    one, two, five = (field(3, field(1, number)) for number in (b"\x01", b"\x02", b"\x05"))
    x, y = (field(1, field(1, letter)) for letter in (b"x", b"y"))
    payloads.append(field(1, entry(b"ints", unpacked) + entry(b"floats", floats)) + field(9, b"unknown") + b"\x78\x01")
    payloads.append(field(1, entry(b"k", one)) + field(1, entry(b"k", two)))
    payloads.append(field(1, entry(b"k", one + x + y)))
    payloads.append(field(1, field(1, field(2, five) + field(1, b"value first"))))
    write(HERE / "odd", payloads)
    (HERE / "odd.json").write_text(json.dumps([as_json(payload) for payload in payloads], indent=1) + "\n")


if __name__ == "__main__":
    main()
