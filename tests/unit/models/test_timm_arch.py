"""Networks of timm by name: their heads, their images, and what is said where one is unknown or timm is missing."""

import sys
from pathlib import Path

import pytest
import torch

from sightline import api, config
from sightline.errors import UsageError
from sightline.models.arch import ArchConfig
from sightline.parts import DataSpec
from sightline.recipe import store

SPEC = DataSpec(("a", "b", "c"), 3, (64, 64), (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("name", "head"), [("test_resnet", "fc."), ("test_vit", "head."), ("test_byobnet", "head.fc.")]
)
def test_it_is_timms_network_for_these_classes_and_this_size(name: str, head: str):
    import timm

    model = ArchConfig(f"timm:{name}").build(SPEC)
    assert type(model) is type(timm.create_model(name)) and model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    prefixes = ArchConfig(f"timm:{name}").head_prefixes(model)
    assert prefixes == (head,)
    named = {key for key, _ in model.named_parameters() if key.startswith(prefixes)}
    classifier = {id(parameter) for parameter in model.get_classifier().parameters()}
    assert classifier == {id(dict(model.named_parameters())[key]) for key in named}


def test_both_heads_of_a_distilled_network_are_named():
    assert ArchConfig("timm:deit_tiny_distilled_patch16_224").head_prefixes(torch.nn.Identity()) == (
        "head.",
        "head_dist.",
    )


def test_its_own_mean_std_and_size_hold_unless_others_are_typed(tmp_path: Path):
    import timm

    theirs = timm.data.resolve_data_config(model=timm.create_model("test_vit"))
    data = config.load("finetune_classification", ["--model.arch", "timm:test_vit"])[0].data
    assert (data.mean, data.std, data.interpolation) == (theirs["mean"], theirs["std"], theirs["interpolation"])
    assert (3, data.size, data.size) == theirs["input_size"] == (3, data.eval_size, data.eval_size) == (3, 160, 160)
    assert data.eval_resize == int(160 / theirs["crop_pct"])
    flags = ["--model.arch=timm:test_vit", "--data.size=64", "--data.mean", "0.1", "0.2", "0.3"]
    found = config.named("resnet50", flags)
    recipe, run = found.recipe, found.run
    assert not found.lines  # no size follows the one that was typed
    assert (recipe.data.size, recipe.data.mean, recipe.data.eval_size) == (64, (0.1, 0.2, 0.3), 160)
    file = tmp_path / "config.yaml"
    file.write_text(store.dump(recipe, run))
    assert config.load("resnet50", [], file)[0] == recipe


def test_other_networks_leave_the_data_as_the_recipe_has_them():
    assert config.load("resnet50", ["--model.arch", "resnet18"])[0].data == config.load("resnet50")[0].data


def test_an_unknown_name_is_refused_with_near_ones():
    with pytest.raises(UsageError, match=r"'timm:resnet5O' is unknown to timm .*did you mean timm:resnet50"):
        ArchConfig("timm:resnet5O").refuse_unknown()
    with pytest.raises(UsageError, match=r"'timm:test_vit.no_tag' is unknown to timm .*did you mean timm:test_vit,"):
        ArchConfig("timm:test_vit.no_tag").data_fields()
    assert ArchConfig("timm:test_vit.r160_in1k").data_fields()["size"] == 160


def test_without_timm_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"'timm:resnet50' needs timm, .* install it with `pip install timm`"):
        ArchConfig("timm:resnet50").build(SPEC)


def test_it_trains_and_is_evaluated(tmp_path: Path):
    flags = """--model.arch timm:test_vit --data.path synthetic:classes=3,samples=8,size=40 --data.size 32
        --data.eval-size 32 --data.eval-resize 32 --train.global-batch 4 --train.min-epoch-steps 1 --train.epochs 2
        --train.precision fp32 --run.device cpu --run.workers 0 --run.report off --run.progress off""".split()
    scores = api.train(*api.load("finetune_classification", [*flags, f"--run.out={tmp_path}"]))
    again = api.evaluate(str(tmp_path), ["--run.device=cpu", "--run.workers=0", "--run.progress=off"], which="latest")
    assert again.values == scores.values
