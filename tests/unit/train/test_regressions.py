"""Mistakes that were made once: each of these failed before it was mended."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny

from sightline import api, config
from sightline.engine import checkpoint
from sightline.errors import UsageError
from sightline.recipe import store

TINY = [*tiny(4), "--data.path=synthetic:classes=4,samples=32,size=24", "--train.epochs=1"]


def train(folder: Path, *flags: str):
    return api.train(*api.load("demo_classification", [*TINY, f"--run.out={folder}", *flags]))


def weights(folder: Path, file: str) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.find(folder, "latest") / f"{file}.safetensors")


def test_the_average_starts_from_given_weights_too(tmp_path):
    train(tmp_path / "donor")
    given = checkpoint.find(tmp_path / "donor", "latest") / "model.safetensors"
    train(tmp_path / "run", f"--model.weights={given}", "--train.ema=0.999", "--optimizer.lr=0")
    start, average = load_file(given), weights(tmp_path / "run", "ema")
    for name in (name for name, _ in start.items() if name.endswith("weight")):
        assert torch.allclose(start[name], average[name], atol=1e-6), name


def test_another_batch_is_refused_also_with_override(tmp_path):
    """The position in a run is counted in its steps."""
    train(tmp_path / "run")
    with pytest.raises(UsageError, match="train.global_batch: 8 -> 16"):
        train(tmp_path / "run", "--train.global-batch=16", "--run.override")


def test_a_first_step_that_is_left_out_does_not_stop_a_restart(tmp_path):
    train(tmp_path / "run", "--run.checkpoint-every-steps=2", "--run.keep=9")
    path = tmp_path / "run" / "checkpoints" / "ckpt-00000002"
    tensors, state = checkpoint.read(path)
    state["progress"]["avoid"] = [2]
    checkpoint.write(tmp_path / "other" / "checkpoints" / "ckpt-00000002", tensors, state)
    train(tmp_path / "other", "--run.log-every-steps=1")
    assert checkpoint.find(tmp_path / "other", "latest").name == "ckpt-00000004"


def test_only_files_of_the_manifest_are_read(tmp_path):
    train(tmp_path / "run")
    path = checkpoint.find(tmp_path / "run", "latest")
    save_file({"intruder": torch.zeros(1)}, path / "ema.safetensors")
    tensors, _ = checkpoint.read(path)
    assert sorted(tensors) == ["model", "optimizer"]


def test_a_checkpoint_cannot_say_where_an_evaluation_is_written(tmp_path):
    train(tmp_path / "run")
    _, state = checkpoint.read(checkpoint.find(tmp_path / "run", "latest"))
    recipe, run = config.of_stored({**state["recipe"], "run": {"out": str(tmp_path / "victim")}}).build()
    assert run == config.Run() and recipe.name == "demo_classification"


def test_a_config_file_cannot_name_code_to_run(tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (tmp_path / "c.yaml").write_text(f"recipe: {tmp_path / 'evil.py'}\n")
    with pytest.raises(UsageError, match="give its path: sightline train PATH/TO/evil.py"):
        config.recipe_named_in(tmp_path / "c.yaml")
    assert not marker.exists()


def test_another_kind_needs_no_flag_for_the_fields_of_the_old_one():
    recipe, _ = config.load("demo_classification", ["--optimizer.kind", "adamw"])
    assert recipe.optimizer.kind == "adamw" and not recipe.optimizer.nesterov
    # Its recipe has its own decays for norms and biases, which lars does not read.
    recipe, _ = config.load("demo_classification", ["--optimizer.kind=lars"])
    assert (recipe.optimizer.kind, recipe.optimizer.nesterov, recipe.optimizer.norm_weight_decay) == ("lars", False, -1)
    recipe, _ = config.load("demo_classification", ["--optimizer.kind=sgd_keras"])
    assert (recipe.optimizer.nesterov, recipe.optimizer.norm_weight_decay) == (True, 0.0)  # which it does read
    recipe, _ = config.load("resnet50", ["--schedule.kind=polynomial"])
    assert (recipe.schedule.kind, recipe.schedule.table_rates) == ("polynomial", ())
    recipe, _ = config.load("resnet50", ["--schedule.kind=cosine"])
    assert recipe.schedule.table_epochs == () and recipe.schedule.kind == "cosine"


def test_a_kind_given_as_a_flag_also_wins_over_the_fields_of_a_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(store.dump(*config.load("resnet50", ["--optimizer.nesterov"])))
    recipe, _ = config.load("resnet50", ["--optimizer.kind=adamw", "--schedule.kind", "constant"], path)
    assert (recipe.optimizer.kind, recipe.optimizer.nesterov) == ("adamw", False)
    assert (recipe.schedule.kind, recipe.schedule.table_rates) == ("constant", ())
    lars = ["--optimizer.kind=lars", "--optimizer.eta=0.002", "--schedule.kind=polynomial", "--schedule.power=1"]
    path.write_text(store.dump(*config.load("resnet50", lars)))
    recipe, _ = config.load("resnet50", ["--optimizer.kind=sgd", "--schedule.kind=cosine"], path)
    assert (recipe.optimizer.kind, recipe.optimizer.eta) == ("sgd", 0.001)
    assert (recipe.schedule.kind, recipe.schedule.power) == ("cosine", 2.0)


def test_a_sample_that_was_unreadable_once_does_not_end_a_later_evaluation(tmp_path, shapes, monkeypatch):
    from sightline.data.sources.folder import FolderSource
    from sightline.errors import BadSample

    real, failed = FolderSource.read, []

    def read(self, index):
        if self.root.name == "val" and not failed:
            failed.append(index)
            raise BadSample(self.name(index), "not now")
        return real(self, index)

    monkeypatch.setattr(FolderSource, "read", read)
    flags = [f"--data.path={shapes}", "--data.classes=10", "--data.on-bad-sample=skip", "--train.epochs=2"]
    flags += ["--data.cache=off", "--data.fingerprint=names"]  # which would read samples before the loader does
    train(tmp_path / "run", *flags)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    counted = [(line["samples"], line.get("skipped", 0)) for line in log if line["event"] == "evaluate"]
    assert counted == [(39, 1), (40, 0)]
