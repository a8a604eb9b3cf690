"""Weights of a checkpoint fit the network in name, shape and type, or are refused before one of them is copied."""

import pytest
import torch
from torch import nn

from sightline.errors import BadCheckpoint
from sightline.inference.checkpoints import load_weights


def test_weights_fit_or_are_refused():
    tensors = {name: tensor + 1 for name, tensor in nn.Linear(3, 2).state_dict().items()}
    for stems in ({"model": tensors}, {"model": {}, "ema": tensors}):
        model = nn.Linear(3, 2)
        load_weights(model, stems)
        assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())
    model = nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for wrong, said in (
        ({"weight": tensors["weight"]}, "ema does not fit this model: bias on one side only"),
        (
            tensors | {"bias": tensors["bias"].half()},
            r"ema/bias has shape \(2,\) of torch.float16, this model has \(2,\)",
        ),
        (tensors | {"bias": torch.zeros(3)}, r"ema/bias has shape \(3,\) of torch.float32, this model has \(2,\)"),
    ):
        with pytest.raises(BadCheckpoint, match=said):
            load_weights(model, {"ema": wrong})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
