"""Which runs may be averaged, and what the mean is of several labels per image."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from sightline import config, recipes
from sightline.errors import UsageError
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.inference.checkpoints import Trained
from sightline.inference.ensemble import Ensemble
from sightline.parts import DataSpec, ModelConfig

SPEC = DataSpec(("cat", "dog", "cow"), 3, (8, 8), (0.5,) * 3, (0.2,) * 3)
SLICES = DataSpec(("background", "Anterior", "Posterior"), 1, (56, 40), (), (), spacing=(1.0, 1.0))


def trained(recipe: str, spec: DataSpec, path: str = "runs/a", **changes) -> Trained:
    made = recipes.find(recipe).recipe()
    made = replace(made, **{part: replace(getattr(made, part), **fields) for part, fields in changes.items()})
    made = replace(made, task=made.task.for_data(spec))
    stored = {"progress": {"step": 3}}
    return Trained(Path(path), {}, stored, made, config.Run(), spec, World(), devices.select("cpu"))


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (trained("unet2d", SLICES), trained("resnet50", SPEC, "runs/b"), "task is Segmentation in the first and Class"),
        (
            trained("resnet50", SPEC),
            trained("resnet50", replace(SPEC, classes=("cat", "dog", "hen")), "runs/b"),
            "classes is cat, dog, cow in the first and cat, dog, hen in the second",
        ),
        (
            trained("unet2d", SLICES),
            trained("unet2d", replace(SLICES, spacing=(1.25, 1.0)), "runs/b"),
            "spacing is 1.0, 1.0 in the first and 1.25, 1.0",
        ),
        (
            trained("resnet50", SPEC),
            trained("resnet50", SPEC, "runs/b", data={"eval_resize": 300}),
            " in the first and ",  # the same spec, prepared in another way
        ),
        (trained("ssd_resnet34", SPEC), trained("ssd_resnet34", SPEC, "runs/b"), "find boxes, and only probabilities"),
    ],
)
def test_runs_that_do_not_fit_are_refused_by_name(one: Trained, other: Trained, message: str):
    with pytest.raises(UsageError, match="runs/a and runs/b ") as error:
        Ensemble.of([one, other], one.path)
    assert message in str(error.value)


@dataclass(frozen=True)
class Linear(ModelConfig):
    def build(self, spec: DataSpec) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, len(spec.classes)))


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_mean_of_probabilities_is_taken_also_where_they_are_extreme(multi_label: bool):
    spec = replace(SPEC, multi_label=multi_label)
    base = trained("demo_classification", spec)
    members = []
    for seed, scale in enumerate((1.0, 30.0)):
        torch.manual_seed(seed)
        network = Linear().build(spec)
        weights = {name: value.detach() * scale for name, value in network.state_dict().items()}
        recipe = replace(base.recipe, model=Linear(), train=replace(base.recipe.train, precision="fp32"))
        members.append(replace(base, recipe=recipe, tensors={"model": weights}))
    ensemble = Ensemble.of(members, members[0].path)
    model = ensemble.build().eval()
    pixels = torch.randint(0, 256, (5, 8, 8, 3), dtype=torch.uint8)
    bound = base.recipe.data.open_files({"a": pixels[0].numpy()}, spec).bind(base.device, 5)
    batch = {"image": pixels, "label": torch.zeros(5), "index": torch.arange(5), "valid": torch.ones(5, dtype=bool)}
    with torch.inference_mode():
        logits = ensemble.predict(ensemble.recipe.task, model, bound, batch)[0]["logits"]
        each = [
            one.predict(one.recipe.task, net, bound, batch)[0]["logits"]
            for one, net in zip(members, model, strict=True)
        ]
    shares = torch.sigmoid if multi_label else lambda scores: scores.softmax(1)
    expected = sum(shares(scores.double()) for scores in each) / 2
    torch.testing.assert_close(shares(logits.double()), expected, atol=1e-6, rtol=1e-5)
    assert ensemble.about()["model"] == "ensemble of 2 runs" and logits.isfinite().all()
