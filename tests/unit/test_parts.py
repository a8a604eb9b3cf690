"""What a part of one's own need not have: a command that wants it says what is missing."""

import dataclasses
import inspect
import typing
from typing import Any

import pytest
import torch

from sightline import api
from sightline.errors import UsageError
from sightline.export.by_task import outputs_of
from sightline.inference.by_task import reporter, results
from sightline.parts import DataConfig, Dataset, DataSpec, LoadedWeights, Metric, ModelConfig, PredictOptions, Task
from sightline.report.by_task import Tiles, seen, tiles

SPEC = DataSpec(("a", "b"), 3, (4, 4), (0.0,) * 3, (1.0,) * 3)


class Own:
    """Has nothing of what it need not have."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda own: DataConfig.open_files(own, {}, SPEC), "Own cannot open single files, so there is no `predict`"),
        (lambda own: DataConfig.labelled_files(own, None), "Own has no label files .* leave out --labels"),
        (lambda own: DataConfig.served(own, SPEC), "Own does not say how to feed .* no `export`"),
        (lambda own: DataConfig.synthetic(own, SPEC, 8), "Own has no synthetic data; give --data.path DIR"),
        (lambda own: DataConfig.check_samples(own, True, 1, print), "Own has no check of its own; train with it"),
        (lambda own: seen(own, {}, SPEC), "Own has no `seen`, so its samples cannot be drawn"),
        (lambda own: results(own, [], {}, {}, SPEC, PredictOptions()), "no `api.predict` for it yet"),
        (lambda own: reporter(own, None), "Own has no reporter, so there is no `predict` for it yet"),
    ],
)
def test_what_a_part_does_not_have_is_refused_by_its_name(call: Any, message: str):
    with pytest.raises(UsageError, match=message):
        call(Own())


def test_what_a_part_does_not_say_changes_nothing():
    own, files = Own(), {"a.jpg": "a.jpg"}
    for same in (DataConfig.in_run(own, "x"), DataConfig.whole(own, ()), DataConfig.for_ranks(own, 4)):
        assert same is own
    assert DataConfig.on_host(own) is Dataset.on_host(own) is Task.showing(own, PredictOptions()) is own
    assert DataConfig.following(own, own, ()) == {} and DataConfig.first_files(own, files, SPEC) is files
    assert DataConfig.declared_per_item(own, 8) == Dataset.samples_per_item(own, 8) == 1
    assert Dataset.prefers_host(own, None, 4, False) == (False, "")
    assert Metric.names(own) == ()
    assert tiles(own, {}, dict, SPEC, 3) == Tiles([{}] * 3, {})
    image = torch.ones(1, 3, 2, 2)
    outputs = outputs_of(own)
    assert outputs.names == ("logits",) and not outputs.decodes
    [answer] = outputs.compute(lambda x: x + 1, image)
    assert torch.equal(answer, image + 1)


@pytest.mark.parametrize("name", ["predict", "write_predictions"])
def test_functions_predict_as_the_command_does_unless_told_otherwise(name: str):
    """Also in what a type checker reads of them, which leaves the values to the function."""
    function = getattr(api, name)
    options = {field.name: field.default for field in dataclasses.fields(PredictOptions)} | {"trust": False}
    options |= {"postprocess": True, "which": "best", "recipe_file": "", "flags": ()}
    for each in (function, *typing.get_overloads(function)):
        defaults = {
            key: parameter.default
            for key, parameter in inspect.signature(each).parameters.items()
            if parameter.default is not parameter.empty and key not in ("out",)
        }
        assert len(defaults) >= 7
        assert defaults == {key: options[key] if each is function else ... for key in defaults}


def test_a_network_of_ones_own_that_says_nothing_starts_at_random_for_any_size():
    model = torch.nn.Linear(2, 2)
    assert ModelConfig.load_weights(Own(), model) == LoadedWeights("", ())
    assert ModelConfig.head_prefixes(Own(), model) == () and ModelConfig.data_fields(Own()) == {}
    assert ModelConfig.takes_any_size(Own()) and ModelConfig.refuse_unknown(Own()) is None
    own = Own()
    own.load_weights = lambda given: LoadedWeights("half of them") if given is model else None
    assert ModelConfig.start_from(own, model) == "half of them"
