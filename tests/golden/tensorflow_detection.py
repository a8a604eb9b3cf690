"""Writes tensorflow_detection.json: TensorFlow's own crops and colours of small pictures. Not run by the tests.

python tests/golden/tensorflow_detection.py     # anywhere with TensorFlow 2; written with 2.21 on a CPU
"""

import json
from pathlib import Path

import numpy as np
import tensorflow as tf

# Height and width, box (top, left, bottom, right), side of the result.
CROPS = [
    ((6, 9), (0.0, 0.0, 1.0, 1.0), 5),
    ((6, 9), (0.1, 0.25, 0.8, 0.9), 4),
    ((13, 7), (0.31, 0.02, 0.64, 0.98), 9),
    ((5, 5), (0.2, 0.2, 0.7, 0.6), 1),
    ((1, 3), (0.0, 0.1, 1.0, 0.5), 3),
]
LARGE, LARGE_BOX, LARGE_SIZE, POINTS = (427, 640), (0.1234, 0.2345, 0.789, 0.9123), 300, 40
# Brightness added, factors of contrast and saturation, turn of the hue.
JITTERS = [(0.0, 1.0, 1.0, 0.0), (0.125, 1.5, 1.5, 0.05), (-0.125, 0.5, 0.5, -0.05), (0.1, 1.37, 0.61, 0.031)]
JITTERS += [(-0.12, 1.46, 1.44, -0.049), (0.06, 0.55, 1.29, 0.017)]


def picture(height: int, width: int) -> np.ndarray:
    y, x, channel = np.mgrid[:height, :width, :3]
    return ((37 * y + 101 * x + 59 * channel + 7 * x * y) % 256).astype(np.uint8)


def crop(pixels: np.ndarray, box: tuple[float, ...], size: int) -> np.ndarray:
    image = tf.cast(pixels, tf.float32)[None]
    return tf.image.crop_and_resize(image, [box], [0], [size, size]).numpy()[0]


def jitter(pixels: np.ndarray, brightness: float, contrast: float, saturation: float, hue: float) -> np.ndarray:
    image = tf.cast(pixels, tf.float32) / 255.0
    image = tf.image.adjust_brightness(image, brightness)
    image = tf.image.adjust_contrast(image, contrast)
    image = tf.image.adjust_saturation(image, saturation)
    return tf.image.adjust_hue(image, hue).numpy()


def main() -> None:
    large = crop(picture(*LARGE), LARGE_BOX, LARGE_SIZE)
    points = np.random.default_rng(0).integers(0, LARGE_SIZE, (POINTS, 2)).tolist()
    # Grey, black, white and pure colours in the corner: no hue, no saturation, ties between channels.
    colours = picture(6, 8)
    colours[0, :7] = [(0, 0, 0), (255, 255, 255), (90, 90, 90), (255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 200, 10)]
    found = {
        "tensorflow": tf.__version__,
        "crops": [
            {"from": sides, "box": box, "size": size, "pixels": crop(picture(*sides), box, size).round(4).tolist()}
            for sides, box, size in CROPS
        ],
        "large": {
            "from": LARGE,
            "box": LARGE_BOX,
            "size": LARGE_SIZE,
            "points": [[y, x, *large[y, x].round(4).tolist()] for y, x in points],
        },
        "colours": colours.tolist(),
        "jitters": [{"numbers": each, "pixels": jitter(colours, *each).round(5).tolist()} for each in JITTERS],
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(found, default=float).replace("}, ", "},\n") + "\n")


if __name__ == "__main__":
    main()
