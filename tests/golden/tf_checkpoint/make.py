"""Made the files beside it, with TensorFlow 2.21 and tf_keras (CPU): `python make.py` in this folder. Documentation.

trunk: the ResNet-34 trunk of the TensorFlow SSD with 2 channels instead of 64, written by the Saver, its layers named
by TensorFlow itself. trunk.json: what TensorFlow computes with it. object: written by tf.train.Checkpoint, with every
type. shards: two data files. parts: a variable in two slices, as a partitioner leaves it.
"""

import json
import os
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
WIDTH = 2
v1 = tf.compat.v1


def norm(x):
    return v1.layers.batch_normalization(x, momentum=0.9, epsilon=1e-5, training=False)


def conv(x, channels, kernel, stride):
    return v1.layers.conv2d(x, channels, kernel, stride, padding="SAME", use_bias=False)


def block(x, channels, stride, project):
    shortcut = norm(conv(x, channels, 1, stride)) if project else x
    x = tf.nn.relu(norm(conv(x, channels, 3, stride)))
    return tf.nn.relu(norm(conv(x, channels, 3, 1)) + shortcut)


def trunk(x):
    x = tf.pad(x, [[0, 0], [3, 3], [3, 3], [0, 0]])
    x = tf.nn.relu(norm(v1.layers.conv2d(x, WIDTH, 7, 2, padding="VALID", use_bias=False)))
    x = tf.nn.max_pool2d(x, 3, 2, "SAME")
    for group, (blocks, stride) in enumerate(((3, 1), (4, 2), (6, 1))):
        for number in range(blocks):
            first = number == 0
            x = block(x, WIDTH * 2**group, stride if first else 1, first and group > 0)
    return x


def picture(size):
    """The same numbers in NumPy and in torch: (1, size, size, 3)."""
    return np.sin(np.arange(size * size * 3) * 0.37).astype(np.float32).reshape(1, size, size, 3)


def save_trunk():
    with tf.Graph().as_default(), v1.Session() as session:
        pixels = v1.placeholder(tf.float32, (1, None, None, 3))
        features = trunk(pixels)
        v1.train.get_or_create_global_step()
        logits = v1.layers.dense(tf.reduce_mean(features, (1, 2)), 3)  # as the checkpoint of a classifier has one
        assert logits is not None
        random = np.random.default_rng(0)
        session.run(v1.global_variables_initializer())
        for variable in v1.global_variables():
            if "gamma" in variable.name or "variance" in variable.name:
                variable.load(random.uniform(0.5, 1.5, variable.shape).astype(np.float32), session)
            elif "beta" in variable.name or "mean" in variable.name:
                variable.load(random.normal(0, 0.1, variable.shape).astype(np.float32), session)
        found = {str(size): session.run(features, {pixels: picture(size)}) for size in (32, 44)}
        v1.train.Saver().save(session, str(HERE / "trunk"), write_meta_graph=False, write_state=False)
        sums = {v.op.name: float(session.run(v).astype(np.float64).sum()) for v in v1.global_variables()}
    shapes = {size: list(values.shape) for size, values in found.items()}
    flat = {size: [round(float(v), 6) for v in values.ravel()] for size, values in found.items()}
    (HERE / "trunk.json").write_text(json.dumps({"shapes": shapes, "features": flat, "sums": sums}) + "\n")


def save_object():
    kinds = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)
    values = {kind.name: tf.Variable(tf.cast([[1, -2], [3, 4], [-5, 6]], kind)) for kind in kinds}
    root = tf.train.Checkpoint(**values, scalar=tf.Variable(2.5), text=tf.Variable("text"), empty=tf.Variable([]))
    root.write(str(HERE / "object"))


def save_shards():
    names = []
    for shard, values in enumerate(({"a": [1.0, 2.0], "c": [5.0]}, {"b": [3.0, 4.0]})):
        name = tf.raw_ops.ShardedFilename(basename=str(HERE / "shards_part"), shard=shard, num_shards=2)
        tensors = [tf.constant(value) for value in values.values()]
        tf.raw_ops.SaveV2(prefix=name, tensor_names=list(values), shape_and_slices=[""] * len(values), tensors=tensors)
        names.append(name)
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=names, destination_prefix=str(HERE / "shards"))


def save_parts():
    tensors = [tf.constant([[1.0, 2.0]]), tf.constant([[3.0, 4.0], [5.0, 6.0]]), tf.constant([7.0])]
    slices = ["3 2 0,1:-", "3 2 1,2:-", ""]
    tf.raw_ops.SaveV2(
        prefix=str(HERE / "parts"), tensor_names=["split", "split", "whole"], shape_and_slices=slices, tensors=tensors
    )


if __name__ == "__main__":
    save_trunk()
    save_object()
    save_shards()
    save_parts()
