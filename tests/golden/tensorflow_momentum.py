"""Writes tensorflow_momentum.json: weights after steps of Keras' SGD and of TensorFlow 1's momentum.

Run by hand where both are installed (written with TensorFlow 2.21 and Keras 3.15, on a CPU); tests only read the file.
"""

import json
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

STEPS = 8
DECAY = 0.03
SHAPES = ((3, 2), (4,))


def weights_after(rule: str, momentum: float, nesterov: bool, start, pulls, rates) -> list[list[list[float]]]:
    """The weights after each step; a pull is the gradient of the loss without its regulariser."""
    weights = [tf.Variable(w) for w in start]
    decay = DECAY if rule == "keras decoupled" else None
    optimizer = keras.optimizers.SGD(rates[0], momentum, nesterov, weight_decay=decay)
    if rule == "tf1":
        optimizer = tf.compat.v1.train.MomentumOptimizer(lambda: rate, momentum, use_nesterov=nesterov)
    regulariser = keras.regularizers.L2(DECAY)
    seen = []
    for rate, pull in zip(rates, pulls, strict=True):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(w * p) for w, p in zip(weights, pull, strict=True)])
            if rule == "keras l2":
                loss += tf.add_n([regulariser(w) for w in weights])
        gradients = tape.gradient(loss, weights)
        if rule != "tf1":
            optimizer.learning_rate = rate
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        seen.append([w.numpy().ravel().tolist() for w in weights])
    return seen


def main() -> None:
    random = np.random.default_rng(0)
    start = [random.normal(size=s).astype(np.float32) for s in SHAPES]
    pulls = [[random.normal(size=s).astype(np.float32) for s in SHAPES] for _ in range(STEPS)]
    rates = [0.1 * (1 + step % 3) for step in range(STEPS)]
    cases = [
        {
            "rule": rule,
            "momentum": momentum,
            "nesterov": nesterov,
            "weights": weights_after(rule, momentum, nesterov, start, pulls, rates),
        }
        for rule in ("keras", "keras l2", "keras decoupled", "tf1")
        for momentum, nesterov in ((0.9, False), (0.9, True), (0.0, False))
    ]
    found = {
        "decay": DECAY,
        "rates": rates,
        "shapes": SHAPES,
        "start": [w.ravel().tolist() for w in start],
        "pulls": [[p.ravel().tolist() for p in pull] for pull in pulls],
        "cases": cases,
    }
    Path(__file__).with_suffix(".json").write_text(rounded(json.dumps(found, default=list)))


def rounded(text: str) -> str:
    """Nine digits hold a float32."""
    return json.dumps(json.loads(text, parse_float=lambda number: float(f"{float(number):.9g}"))) + "\n"


if __name__ == "__main__":
    main()
