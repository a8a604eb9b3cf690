"""Makes the files in keras/ beside this one, with Keras itself. Documentation: the tests do not run it.

    python tests/unit/models/keras_fixtures.py    # with tensorflow, keras 3, tf_keras (Keras 2) and h5py

Weights are not stored: `values` computes them from a name, here to fill Keras's models and in the tests to fill a file
of the same layout. Stored are the names and shapes that Keras gives its arrays, and the logits it then computes.
"""

import gzip
import json
import zlib
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).with_name("keras")
APPLICATIONS = ("ResNet50", "ResNet101", "ResNet152", "ResNet50V2", "ResNet101V2", "ResNet152V2")
IMAGES = (2, 72, 64, 3)  # both even and odd sizes appear on the way down: 72, 36, 18, 9, 5
CLASSES = 7


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers for the array `layer/kind`, each from its index: the same here and in the tests."""
    x = np.arange(np.prod(shape), dtype=np.uint32) + np.uint32(zlib.crc32(name.encode()))
    for factor, shift in ((2654435761, 15), (2246822519, 13), (3266489917, 16)):
        x = x * np.uint32(factor)
        x ^= x >> np.uint32(shift)
    uniform = (x.astype(np.float32) / np.float32(2**32)).reshape(shape)
    kind = name.rpartition("/")[2]
    if kind == "kernel":  # keeps the size of what passes through about the same
        return (uniform - np.float32(0.5)) * np.float32(2 * np.sqrt(3 / np.prod(shape[:-1])))
    low, high = {
        "bias": (-0.2, 0.2),
        "gamma": (0.5, 1.2),
        "beta": (-0.3, 0.3),
        "moving_mean": (-0.3, 0.3),
        "moving_variance": (0.5, 1.5),
        "pixels": (-1.0, 1.0),
    }[kind]
    return np.float32(low) + uniform * np.float32(high - low)


def fill(model) -> list[tuple[str, tuple[int, ...]]]:
    """Set every array of a Keras model to its values; return the names and shapes."""
    arrays = []
    for layer in model.layers:
        names = [f"{layer.name}/{w.name.rpartition('/')[2].removesuffix(':0')}" for w in layer.weights]
        shapes = [tuple(w.shape) for w in layer.weights]
        layer.set_weights([values(name, shape) for name, shape in zip(names, shapes, strict=True)])
        arrays += zip(names, shapes, strict=True)
    return arrays


def applications() -> None:
    import keras

    found = {}
    for name in APPLICATIONS:
        model = getattr(keras.applications, name)(
            weights=None, classes=CLASSES, input_shape=IMAGES[1:], classifier_activation=None
        )
        arrays = fill(model)
        logits = np.asarray(model(values("input/pixels", IMAGES), training=False))
        print(name, logits[0])
        found[name] = {"arrays": arrays, "logits": logits.tolist()}
    text = json.dumps({"keras": keras.__version__, "models": found})
    (FOLDER / "applications.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def small(keras, path: Path) -> None:
    """A few layers under the names of ResNet50V2, with a 3x3 in groups; written to `path`, logits beside it."""
    layers = keras.layers
    images = layers.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, name="conv1_conv")(images)
    x = layers.BatchNormalization(epsilon=1.001e-5, name="conv2_block1_preact_bn")(x)
    x = layers.Conv2D(6, 1, use_bias=False, name="conv2_block1_1_conv")(x)
    x = layers.BatchNormalization(epsilon=1.001e-5, name="conv2_block1_1_bn")(x)
    x = layers.Conv2D(6, 3, groups=2, use_bias=False, name="conv2_block1_2_conv")(x)
    x = layers.BatchNormalization(epsilon=1.001e-5, name="post_bn")(x)
    x = layers.Dense(5, name="predictions")(layers.GlobalAveragePooling2D(name="avg_pool")(x))
    model = keras.Model(images, x)
    model.compile("adam", "mse")  # the optimizer's arrays stand in the file too
    model.train_on_batch(np.zeros((2, 8, 8, 3)), np.zeros((2, 5)))
    fill(model)
    model.save_weights(str(path))
    logits = np.asarray(model(values("input/pixels", (2, 8, 8, 3)), training=False))
    path.with_suffix(".json").write_text(json.dumps({"keras": keras.__version__, "logits": logits.tolist()}) + "\n")


if __name__ == "__main__":
    import keras
    import tf_keras

    FOLDER.mkdir(exist_ok=True)
    small(tf_keras, FOLDER / "keras2.h5")
    small(keras, FOLDER / "keras3.weights.h5")
    applications()
