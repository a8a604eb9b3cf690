"""sightline.api as a script or a notebook uses it: three ways to set a field, errors, torch, signals, loggers."""

import itertools
import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from sightline import api, cli
from sightline.errors import BadCheckpoint, BadSample, Interrupted, UsageError
from sightline.recipe import flags, suggest
from sightline.runs.log import RunLog
from sightline.runs.screen import RunSize

NAME = "demo_classification"
DATA = "synthetic:classes=10,samples=24,size=24"
# Three steps of a small network.
SMALL = {"model.width": 4, "data.size": 24, "data.eval_resize": 24, "data.eval_size": 24, "train.precision": "fp32"}
SMALL |= {"run.progress": "off", "run.log_every_steps": 1}


def train(out: Path, epochs: int = 1, flags: Mapping[str, Any] = {}, **more: Any) -> api.TrainResult:
    given = {"data": DATA, "batch_size": 8, "workers": 0, "device": "cpu", **more}
    return api.train(NAME, epochs=epochs, out=out, flags={**SMALL, **flags}, **given)


def events(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def weights(folder: Path) -> dict[str, bytes]:
    latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    return {path.name: path.read_bytes() for path in sorted(latest.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> api.TrainResult:
    """Three epochs with averaged weights; for reading only."""
    return train(tmp_path_factory.mktemp("trained") / "run", epochs=3, flags={"train.ema": 0.5})


# Fields


def test_keywords_a_dict_and_flags_mean_the_same(tmp_path: Path):
    short = {"data": DATA, "epochs": 3, "batch_size": 8, "lr": 0.05, "device": "cpu", "workers": 0}
    more = {**SMALL, "train.deterministic": True, "data.augment": False, "data.crop_scale": (0.5, 1.0), "run.keep": 3}
    flags = """--data DATA --epochs 3 --batch-size 8 --lr 0.05 --device cpu --workers 0 --model.width 4 --data.size 24
        --data.eval-resize 24 --data.eval-size 24 --train.precision fp32 --run.progress off --run.log-every-steps 1
        --train.deterministic --data.augment off --data.crop-scale 0.5 1.0 --run.keep 3"""
    listed = [DATA if word == "DATA" else word for word in flags.split()]
    (tmp_path / "stop.yaml").write_text(f"recipe: {NAME}\ntrain: {{max_steps: 1}}\n")
    recipe, run = api.load(NAME, {**more, **short})
    results = [
        api.train(NAME, out=tmp_path / "0", flags={**more, "train.max_steps": 1}, weights=None, **short),
        api.train(NAME, flags={**more, **short, "train.max_steps": 1, "out": str(tmp_path / "1")}),
        api.train(NAME, flags=[*listed, "--train.max-steps", "1", "--out", str(tmp_path / "2")]),
        api.train(tmp_path / "stop.yaml", out=str(tmp_path / "3"), flags=listed),
        api.train(recipe, run, out=tmp_path / "4", flags={"train.max_steps": 1}),
    ]
    written = [yaml.safe_load((tmp_path / str(number) / "config.yaml").read_text()) for number in range(5)]
    assert [each["run"].pop("out") for each in written] == [str(tmp_path / str(number)) for number in range(5)]
    for each in written:
        del each["origins"]  # which say how each value was given
    assert all(each == written[0] for each in written)
    assert (written[0]["optimizer"]["lr"], written[0]["train"]["epochs"], written[0]["data"]["augment"]) == (
        0.05,
        3,
        "off",
    )
    assert all(each == results[0] for each in results), "folders are not compared"


def test_a_result_says_where_it_is_what_was_best_and_why_it_ended(trained: api.TrainResult):
    scores = [event["top1"] for event in events(trained.folder, "evaluate")]
    assert len(scores) == 3 and trained.values["top1"] == scores[-1]
    assert (trained.best_score, trained.ended) == (max(scores), "3 epochs are done")
    assert trained.best_step == 3 * (1 + scores.index(max(scores)))
    assert "tables" not in repr(trained) and len(repr(trained)) < 400, "a notebook shows it"


def test_a_run_without_progress_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    train(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_finished_run_returns_the_same_and_more_epochs_continue_it(tmp_path: Path):
    first = train(tmp_path)
    again = train(tmp_path)
    assert (again.values, again.best_step, again.ended) == (first.values, first.best_step, first.ended)
    assert again.tables.keys() == first.tables.keys() and again.tables["classes"] == first.tables["classes"]
    assert train(tmp_path, epochs=2).ended == "2 epochs are done"
    assert [event["step"] for event in events(tmp_path, "start")] == [0, 3]


def test_the_keywords_are_the_short_flags_of_the_command_line():
    assert {f"--{name.replace('_', '-')}" for name in flags.ShortFields.__annotations__} == set(suggest.ALIASES)


# Errors


def test_an_error_that_names_a_flag_notes_how_python_sets_the_field(tmp_path: Path, capsys):
    with pytest.raises(UsageError, match="--data.path 'nowhere' does not exist") as raised:
        api.train(NAME, data="nowhere")
    note = 'In Python, --data.path VALUE is flags={"data.path": VALUE}, or data.path of a Recipe or Run'
    assert raised.value.__notes__ == [note]
    assert cli.main(["train", NAME, "--data.path", "nowhere"]) == 2
    assert "In Python" not in capsys.readouterr().err
    with pytest.raises(UsageError, match="did you mean 'demo_classification'") as raised:
        api.train("demo_clasification")
    assert not hasattr(raised.value, "__notes__"), "it names no flag"
    for name in ("cat--dog.jpg", "cat--data.jpg"):
        with pytest.raises(BadCheckpoint, match=name) as raised:
            api.evaluate(tmp_path / name)
        assert not hasattr(raised.value, "__notes__"), "it names no flag, but a file"


def test_the_note_about_a_field_comes_after_others(tmp_path: Path):
    for split, name in itertools.product(("train", "val"), "ab"):
        (tmp_path / "bad" / split / name).mkdir(parents=True)
        (tmp_path / "bad" / split / name / "1.jpg").write_bytes(b"broken")
    flags = {"data.path": tmp_path / "bad", "run.out": tmp_path / "run", "run.workers": 0, "run.device": "cpu"}
    with pytest.raises(BadSample, match="--data.on-bad-sample skip") as raised:
        api.train(NAME, flags={**flags, "run.progress": "off"})
    loading, field = raised.value.__notes__
    assert loading.startswith("while loading sample") and 'flags={"data.on_bad_sample": VALUE}' in field


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda run: api.train("demo_clasification"), UsageError, "did you mean 'demo_classification'"),
        (lambda run: api.train(NAME, lrr=1), UsageError, "unknown field 'lrr'; the short names are data, epochs"),
        (lambda run: api.train(NAME, flags={"optimizer.lrr": 1}), UsageError, "did you mean 'optimizer.lr'"),
        (lambda run: api.train(NAME, data="nowhere"), UsageError, "--data.path 'nowhere' does not exist"),
        (lambda run: api.train(NAME, data=DATA, lr="fast"), UsageError, "lr is 'fast', expected a number"),
        (lambda run: api.train(NAME, flags="--lr 0.1"), UsageError, "give a list, e.g. ['--lr', '0.1'], or a dict"),
        (lambda run: api.train("unet2d", flags={"data.fold": "all"}), UsageError, "call api.train_folds(*api.load("),
        (lambda run: api.train(NAME, api.Run()), UsageError, "a Run belongs to a Recipe object"),
        (lambda run: api.train("nix.yaml"), UsageError, "nix.yaml does not exist"),
        (lambda run: api.load(NAME, ["--train.epochs", "many"]), UsageError, "--train.epochs"),
        (lambda run: api.load(NAME, ["--help"]), UsageError, "for the command line"),
        (lambda run: api.evaluate(run, {"run.workers": "few"}), UsageError, "run.workers is 'few'"),
        (lambda run: api.model("nowhere"), BadCheckpoint, "nowhere does not exist"),
        (lambda run: api.predict(run, "nix.jpg"), UsageError, "nix.jpg does not exist"),
        (lambda run: api.predict(run, [3]), UsageError, "inputs[0] is a int; give paths, PIL images or NumPy arrays"),
        (lambda run: api.predict(run, 3), UsageError, "inputs[0] is a int; give paths, PIL images or NumPy arrays"),
        (lambda run: api.predict(run, np.zeros((8, 8, 3), "u1"), "seen"), UsageError, "give files and a run folder"),
        (lambda run: api.predict(api.model(run), "a.jpg", "seen"), UsageError, "give files and a run folder"),
        (lambda run: api.predict(run, np.zeros((8, 8, 3))), UsageError, "inputs[0] is an array of shape (8, 8, 3) and"),
        (lambda run: api.predict(run, np.zeros((8, 8, 3), np.uint8), top=0), UsageError, "--top 0 must be at least 1"),
    ],
)
def test_errors_are_exceptions_that_say_what_to_do(
    trained: api.TrainResult,
    call: Any,
    error: type,
    message: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        call(str(trained.folder))
    assert message in str(raised.value) and "\u2502" not in str(raised.value)
    assert capfd.readouterr().err == "" and list(tmp_path.iterdir()) == []


# torch, signals and threads


def torch_settings() -> list[object]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return [
        *(cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32, torch.get_num_threads()),
        *(torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.is_grad_enabled()),
        torch.get_rng_state().tolist(),
    ]


def test_a_call_leaves_torch_and_signal_handlers_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(7)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
    before = torch_settings()
    train(tmp_path, flags={"train.deterministic": True, "run.threads": 3, "train.max_steps": 1})
    api.predict(tmp_path, np.zeros((24, 24, 3), np.uint8), flags={"run.threads": 2})
    assert torch_settings() == before
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
    assert (signal.set_wakeup_fd(-1), [each.name for each in threading.enumerate() if "stop" in each.name]) == (-1, [])


def test_a_thread_may_train(tmp_path: Path):
    results: list[api.TrainResult] = []
    thread = threading.Thread(target=lambda: results.append(train(tmp_path)))
    thread.start()
    thread.join()
    assert [result.ended for result in results] == ["1 epoch is done"]


class Interrupts(api.Logger):
    """Ctrl-C, so many times, while step 2 is logged."""

    def __init__(self, times: int):
        self.times = times

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        if (group, step) == ("train", 2):
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
                signal.sigpending()  # Python runs the handler before its next line


def test_ctrl_c_saves_and_the_same_call_resumes(tmp_path: Path):
    with pytest.raises(Interrupted, match="stopped by Ctrl-C; saved at step 2; the same command resumes from there"):
        train(tmp_path / "stopped", loggers=[Interrupts(1)])
    train(tmp_path / "stopped")
    train(tmp_path / "whole")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_a_second_ctrl_c_is_an_exception_and_not_the_end_of_the_process(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt, match="second Ctrl-C"):
        train(tmp_path, loggers=[Interrupts(2)])
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == 130
    assert train(tmp_path).ended == "1 epoch is done", "the folder is not locked any more"


# Loggers


class Everything(api.Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.starts: list[api.RunStart] = []
        self.events: list[tuple[str, dict]] = []
        self.points: list[tuple[str, float, int]] = []
        self.ends: list[tuple[int, str]] = []

    def start(self, run: api.RunStart) -> None:
        self.starts.append(run)

    def event(self, name: str, values: Mapping[str, Any]) -> None:
        self.events.append((name, dict(values)))

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self.points += [(f"{group}/{name}", value, step) for name, value in values.items()]

    def close(self, code: int, reason: str) -> None:
        self.ends.append((code, reason))


def test_a_logger_gets_what_the_log_has_and_counts_resumes(tmp_path: Path):
    seen = Everything()
    train(tmp_path, flags={"train.max_steps": 2}, loggers=[seen])
    train(tmp_path, loggers=[seen])
    written = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()][1:]
    for line in written:
        line.pop("time")
    assert [{"event": name, **values} for name, values in seen.events] == written
    assert [(run.folder, run.step, run.resumes) for run in seen.starts] == [(tmp_path, 0, 0), (tmp_path, 2, 1)]
    assert seen.starts[0].fields["train.max_steps"] == 2 and seen.starts[0].fields["model.width"] == 4
    assert seen.starts[0].scores == ("top1", "top5", "balanced_accuracy", "macro_f1", "loss", "samples")
    losses = [("train/loss", line["loss"], line["step"]) for line in written if line["event"] == "train"]
    assert [point for point in seen.points if point[0] == "train/loss"] == losses and len(losses) == 3
    assert seen.ends == [(0, "finished"), (0, "finished")]


def test_a_logger_that_fails_is_reported_once_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    class Broken(Everything):
        def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
            raise ConnectionError("no route to the tracker")

    broken, sound = Broken(), Everything()
    assert train(tmp_path, flags={"run.progress": "plain"}, loggers=[broken, sound]).ended == "1 epoch is done"
    said = "warning: Broken.scalars() failed: ConnectionError: no route to the tracker; the run continues"
    assert capsys.readouterr().out.count(said) == 1
    logged = [f"warning: {values['text']}" for name, values in sound.events if name == "warning"]
    assert [text.startswith(said) for text in logged].count(True) == 1
    assert broken.events == sound.events and broken.ends == [(0, "finished")] and len(sound.points) > 9


def test_only_the_first_rank_has_loggers(tmp_path: Path):
    for rank in (0, 1):
        seen, log = Everything(), RunLog(tmp_path, rank=rank)
        log.add_logger(seen)
        log.started({"train.epochs": 3}, ["top1"], 0, steps=9)
        log.training(0, 1, RunSize(3, 9, 3), {"loss": 2.0, "images_per_s": 1.0})
        log.close(0, "finished")
        assert (len(seen.starts), len(seen.points), len(seen.ends)) == ((1, 2, 1) if rank == 0 else (0, 0, 0))


def test_a_refused_start_reaches_no_logger_and_leaves_no_folder(tmp_path: Path):
    seen = Everything()
    with pytest.raises(UsageError, match="plateau_on=val_loss|accumulation"):
        train(tmp_path / "run", flags={"train.accumulation": 3}, loggers=[seen])
    assert (seen.starts, seen.events, seen.ends) == ([], [], []) and not (tmp_path / "run").exists()


# A network as a module


def test_a_model_has_the_weights_that_evaluation_uses(trained: api.TrainResult):
    model = api.model(trained.folder, device="cpu")
    best = trained.folder / "checkpoints" / (trained.folder / "checkpoints" / "best").read_text().strip()
    assert best.name == f"ckpt-{trained.best_step:08d}" and (best / "ema.safetensors").is_file()
    stored, ours = load_file(best / "ema.safetensors"), model.network.state_dict()
    assert set(stored) == set(ours) and all(torch.equal(tensor, ours[name]) for name, tensor in stored.items())
    assert isinstance(model, torch.nn.Module) and not model.training and len(model.classes) == 10


def test_a_model_can_be_fine_tuned_and_predicts_with_what_it_learnt(trained: api.TrainResult):
    model = api.model(trained.folder, device="cpu").train()
    image = np.random.default_rng(0).integers(0, 255, (30, 30, 3), np.uint8)
    before = api.predict(model, image)[0]
    assert isinstance(before, api.Classification) and model.training and model.network.training
    batch = torch.stack([model.preprocess(image)] * 4)
    torch.nn.functional.cross_entropy(model.eval()(batch), torch.full((4,), 3)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad.sign()
    (after,) = api.predict(model, [image])
    assert isinstance(after, api.Classification)
    assert after.probabilities[model.classes[3]] > before.probabilities[model.classes[3]]
