"""Made the files beside it, with TensorFlow 2.21 and tf_keras (CPU): `python make.py` in this folder. Documentation.
`python make.py networks` made keras, estimator, resnext and ssd alone: whole networks of 2 channels instead of 64, as
the scripts build and save them, with what TensorFlow computes in networks.json.

trunk: the ResNet-34 trunk of the TensorFlow SSD with 2 channels instead of 64, written by the Saver, its layers named
by TensorFlow itself. trunk.json: what TensorFlow computes with it. object: written by tf.train.Checkpoint, with every
type. shards: two data files. parts: a variable in two slices, as a partitioner leaves it.
"""

import json
import os
import sys
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


def network(name, build, size, every=1):
    """Save a graph as the Saver of an estimator does, momenta included; return its outputs, or some, for the image."""
    with tf.Graph().as_default(), v1.Session() as session:
        pixels = v1.placeholder(tf.float32, (1, size, size, 3))
        outputs = build(pixels)
        step = v1.train.get_or_create_global_step()
        loss = tf.add_n([tf.reduce_mean(output) for output in outputs])
        train = v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss, step)
        session.run(v1.global_variables_initializer())
        randomise(v1.global_variables(), lambda variable, values: variable.load(values, session))
        assert train is not None
        found = [values[:, ::every] for values in session.run(outputs, {pixels: picture(size)})]
        v1.train.Saver().save(session, str(HERE / name), write_meta_graph=False, write_state=False)
    return [{"shape": list(values.shape), "values": [round(float(v), 6) for v in values.ravel()]} for values in found]


def randomise(variables, load):
    random = np.random.default_rng(1)
    for variable in variables:
        if "Momentum" in variable.name or "momentum" in variable.name:
            continue
        if "gamma" in variable.name or "variance" in variable.name:
            load(variable, random.uniform(0.5, 1.5, variable.shape).astype(np.float32))
        elif "beta" in variable.name or "mean" in variable.name or "bias" in variable.name:
            load(variable, random.normal(0, 0.1, variable.shape).astype(np.float32))


def resnext_block(x, channels, stride, project):
    """The estimator's: the grouped convolution is a variable without a layer."""
    shortcut = norm(conv(x, 4 * channels, 1, stride)) if project else x
    x = tf.nn.relu(norm(conv(x, channels, 1, 1)))
    kernel = tf.Variable(v1.variance_scaling_initializer()(shape=[3, 3, channels // 2, channels]), trainable=True)
    x = tf.nn.relu(norm(tf.nn.conv2d(x, kernel, [1, stride, stride, 1], "SAME")))
    return tf.nn.relu(norm(conv(x, 4 * channels, 1, 1)) + shortcut)


def pre_activated_block(x, channels, stride, project):
    active = tf.nn.relu(norm(x))
    shortcut = conv(active, channels, 1, stride) if project else x
    x = conv(active, channels, 3, stride)
    return conv(tf.nn.relu(norm(x)), channels, 3, 1) + shortcut


def estimator(x, one_block, blocks, has_v2_ends):
    with v1.variable_scope("resnet_model"):
        x = conv(x, WIDTH, 7, 2)
        x = x if has_v2_ends else tf.nn.relu(norm(x))
        x = v1.layers.max_pooling2d(x, 3, 2, padding="SAME")
        for group, count in enumerate(blocks):
            for number in range(count):
                x = one_block(x, WIDTH * 2**group, 2 if group and not number else 1, number == 0)
        x = tf.nn.relu(norm(x)) if has_v2_ends else x
        return [v1.layers.dense(tf.reduce_mean(x, (1, 2)), 5)]


def ssd(pixels):
    with v1.variable_scope("resnet34", reuse=v1.AUTO_REUSE):
        x = trunk(pixels)
    features = [x]
    with v1.variable_scope("ssd", reuse=v1.AUTO_REUSE):
        for number, (inner, out, stride, padding) in enumerate(
            ((4, 8, 2, "same"), (4, 8, 2, "same"), (2, 4, 2, "same"), (2, 4, 1, "valid"), (2, 4, 1, "valid")), 7
        ):
            relu = {"activation": tf.nn.relu}
            x = v1.layers.conv2d(x, inner * WIDTH, 1, padding="same", name=f"block{number}-conv1x1", **relu)
            x = v1.layers.conv2d(x, out * WIDTH, 3, stride, padding, name=f"block{number}-conv3x3", **relu)
            features.append(x)
        outputs = []
        for scope, name, channels in (("class_net", "class", 4), ("box_net", "box", 4)):  # 3 classes and background
            found = []
            with v1.variable_scope(scope, reuse=v1.AUTO_REUSE):
                for level, (x, anchors) in enumerate(zip(features, (4, 6, 6, 6, 4, 4), strict=True), 3):
                    y = v1.layers.conv2d(x, channels * anchors, 3, padding="same", name=f"{name}-{level}")
                    found.append(tf.reshape(y, (1, -1, channels)))
            outputs.append(tf.concat(found, axis=1))
    return outputs


def keras_resnet():
    """The Keras script's ResNet-50, its names and paddings."""
    layers = tf.keras.layers

    def unit(x, channels, kernel, name, stride=1, active=True, **padding):
        x = layers.Conv2D(channels, kernel, stride, use_bias=False, name=f"res{name}", **padding)(x)
        x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"bn{name}")(x)
        return layers.Activation("relu")(x) if active else x

    given = layers.Input((64, 64, 3))
    x = layers.ZeroPadding2D(3)(given)
    x = layers.Conv2D(WIDTH, 7, 2, use_bias=False, name="conv1")(x)
    x = layers.Activation("relu")(layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name="bn_conv1")(x))
    x = layers.MaxPooling2D(3, 2, "same")(x)
    for stage, blocks in enumerate((3, 4, 6, 3), 2):
        for number in range(blocks):
            name, channels = f"{stage}{'abcdef'[number]}_branch", WIDTH * 2 ** (stage - 2)
            stride = 2 if stage > 2 and number == 0 else 1
            y = unit(x, channels, 1, f"{name}2a")
            y = unit(y, channels, 3, f"{name}2b", stride, padding="same")
            y = unit(y, 4 * channels, 1, f"{name}2c", active=False)
            x = unit(x, 4 * channels, 1, f"{name}1", stride, active=False) if number == 0 else x
            x = layers.Activation("relu")(layers.add([y, x]))
    x = layers.Dense(5, name="fc1000")(layers.GlobalAveragePooling2D()(x))
    return tf.keras.Model(given, x, name="resnet50")


def save_keras():
    model = keras_resnet()
    optimizer = tf.keras.optimizers.legacy.SGD(0.1, momentum=0.9)
    optimizer.apply_gradients([(tf.zeros_like(v), v) for v in model.trainable_variables])
    randomise(model.variables, lambda variable, values: variable.assign(values))
    found = model(picture(64), training=False).numpy()
    tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(HERE / "keras"))
    return [{"shape": list(found.shape), "values": [round(float(v), 6) for v in found.ravel()]}]


def save_networks():
    found = {
        "keras": save_keras(),
        "estimator": network("estimator", lambda x: estimator(x, pre_activated_block, (2, 2, 2, 2), True), 64),
        "resnext": network("resnext", lambda x: estimator(x, resnext_block, (3, 4, 6, 3), False), 64),
        "ssd": network("ssd", ssd, 300, every=97),
    }
    (HERE / "networks.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["networks"]:
        save_trunk()
        save_object()
        save_shards()
        save_parts()
    save_networks()
