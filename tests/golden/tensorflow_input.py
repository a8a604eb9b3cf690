"""Writes tensorflow_input.json: what TensorFlow itself makes of pictures and sizes. Not run by the tests.

python tests/golden/tensorflow_input.py     # anywhere with TensorFlow 2; written with 2.21 on a CPU
"""

import json
from pathlib import Path

import numpy as np
import tensorflow as tf

RESIZES = [((4, 4), (2, 2)), ((3, 3), (5, 5)), ((7, 5), (4, 9)), ((13, 17), (8, 8)), ((5, 3), (1, 1)), ((1, 1), (3, 2))]
LARGE, LARGE_TO, POINTS = (375, 500), (224, 224), 60
SIDES = [
    (375, 500),
    (500, 333),
    (224, 224),
    (41, 60),
    (47, 47),
    (61, 1000),
    (3000, 2371),
    (1, 9),
    (341, 512),
    (512, 341),
]
SIDES += [(side, side + 77) for side in range(300, 400, 3)]
CROPS = [(375, 500), (500, 333), (60, 300), (40, 600)]
DRAWS = 10_000
EVALUATION = (41, 60, 32, 28)  # height, width, shorter side, square; 41 becomes 31, and half of 3 is cut off


def picture(height: int, width: int) -> np.ndarray:
    y, x, channel = np.mgrid[:height, :width, :3]
    return ((37 * y + 101 * x + 59 * channel + 7 * x * y) % 256).astype(np.uint8)


def resized(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return tf.compat.v1.image.resize_bilinear(pixels[None], size).numpy()[0]


def sides(height: int, width: int, short: int) -> list[int]:
    height, width = tf.cast(height, tf.float32), tf.cast(width, tf.float32)
    factor = tf.cast(short, tf.float32) / tf.minimum(height, width)
    return [int(tf.cast(height * factor, tf.int32)), int(tf.cast(width * factor, tf.int32))]


def crops(height: int, width: int) -> dict[str, list[int]]:
    """Counts of `DRAWS` crops: height and width in 5-pixel bins, area and corner in 50ths of what they can be."""
    whole = tf.constant([[[0.0, 0.0, 1.0, 1.0]]])

    @tf.function
    def draw(number: tf.Tensor) -> tf.Tensor:
        corner, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            (height, width, 3),
            whole,
            seed=tf.stack([number, 17]),
            min_object_covered=0.1,
            aspect_ratio_range=(0.75, 1.33),
            area_range=(0.05, 1.0),
            max_attempts=100,
            use_image_if_no_bounding_boxes=True,
        )
        return tf.concat([corner[:2], size[:2]], 0)

    drawn = np.stack([draw(number).numpy() for number in tf.range(DRAWS)])
    top, left, tall, wide = drawn.T

    def count(values: np.ndarray, last: float, bins: int) -> list[int]:
        return np.histogram(values, bins=bins, range=(0, last))[0].tolist()

    return {
        "height": np.bincount(tall // 5, minlength=height // 5 + 1).tolist(),
        "width": np.bincount(wide // 5, minlength=width // 5 + 1).tolist(),
        "area": count(tall * wide / (height * width), 1, 50),
        "top": count(top / np.maximum(height - tall, 1), 1, 50),
        "left": count(left / np.maximum(width - wide, 1), 1, 50),
    }


def evaluated(height: int, width: int, short: int, size: int) -> list:
    tall, wide = sides(height, width, short)
    whole = resized(picture(height, width), (tall, wide))
    top, left = (tall - size) // 2, (wide - size) // 2
    return whole[top : top + size, left : left + size][[0, -1]].round(4).tolist()


def main() -> None:
    large = resized(picture(*LARGE), LARGE_TO)
    points = np.random.default_rng(0).integers(0, 224, (POINTS, 2)).tolist()
    found = {
        "tensorflow": tf.__version__,
        "resizes": [{"from": a, "to": b, "pixels": resized(picture(*a), b).round(5).tolist()} for a, b in RESIZES],
        "large": {"from": LARGE, "to": LARGE_TO, "points": [[y, x, *large[y, x].round(4).tolist()] for y, x in points]},
        "sides": [[h, w, *sides(h, w, 256)] for h, w in SIDES],
        "crops": [{"size": size, "draws": DRAWS, **crops(*size)} for size in CROPS],
        "evaluation": {"geometry": EVALUATION, "first_and_last_row": evaluated(*EVALUATION)},
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(found, default=float).replace("}, ", "},\n") + "\n")


if __name__ == "__main__":
    main()
