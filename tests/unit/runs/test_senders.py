"""What MLflow, Weights & Biases and Trackio are sent, and when. Stand-ins of the packages keep what a server would,
with the limits of MLflow's REST API: 100 parameters, 100 tags and 1,000 metrics a request, fixed parameters.
"""

import base64
import gc
import io
import json
import os
import re
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from sightline import __version__
from sightline.runs.loggers import RunStart
from sightline.runs.trackers import apart, mlflow, trackio, wandb
from sightline.runs.trackers.tracker import Tracker, as_name, scores_of_classes

NOW = 1_700_000_000.25  # of every call, in seconds


def sent(tracker: Tracker, *calls: list[Any]) -> list[str]:
    """Serve calls as the process of a tracker does; return what it says."""
    said: list[str] = []
    reader, writer = os.pipe()
    calls_of_training = apart.Calls(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        out.writelines(json.dumps([NOW, *call]) + "\n" for call in calls)
    assert calls_of_training.ended_within(60)
    apart.serve(tracker, calls_of_training, said.append)
    os.close(reader)
    return said


def start(folder: Path, fields: dict[str, Any], **origins: str) -> list[Any]:
    run = {"folder": str(folder), "fields": fields, "scores": ["top1"], "step": 0, "resumes": 0, "origins": origins}
    return ["start", run]


def jpeg(size: tuple[int, int] = (12, 9)) -> str:
    out = io.BytesIO()
    Pillow.new("RGB", size, (200, 30, 90)).save(out, "JPEG")
    return base64.b64encode(out.getvalue()).decode()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run; the environment is as it was afterwards, whatever a tracker sets."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("MLFLOW", "WANDB"))]:
        monkeypatch.delenv(name)
    (tmp_path / "pets").mkdir()
    yield tmp_path / "pets"
    os.environ.clear()
    os.environ.update(before)


# MLflow


class MlflowException(Exception):
    def __init__(self, text: str, code: str = "INTERNAL_ERROR"):
        super().__init__(text)
        self.error_code = code


class RestException(MlflowException):
    pass


class Server:
    """What an MLflow server keeps; `refuses` are errors that the next requests get."""

    def __init__(self) -> None:
        self.runs: dict[str, types.SimpleNamespace] = {}
        self.experiments: dict[str, str] = {"pets of all": "7"}
        self.requests: list[tuple[str, int]] = []
        self.refuses: list[Exception] = []

    def _ask(self, what: str, size: int = 1) -> None:
        if self.refuses:
            raise self.refuses.pop(0)
        self.requests.append((what, size))

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.experiments.get(name)
        return known and types.SimpleNamespace(experiment_id=known)

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = str(len(self.experiments) + 20)
        return self.experiments[name]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        self._ask("create")
        info = types.SimpleNamespace(
            run_id=f"id{len(self.runs)}", lifecycle_stage="active", experiment=experiment, name=run_name, status="NEW"
        )
        data = types.SimpleNamespace(params={}, tags=dict(tags), metrics=[], files={})
        self.runs[info.run_id] = types.SimpleNamespace(info=info, data=data)
        return self.runs[info.run_id]

    def get_run(self, key: str) -> Any:
        self._ask("get")
        if key not in self.runs:
            raise MlflowException(f"no run {key}", "RESOURCE_DOES_NOT_EXIST")
        return self.runs[key]

    def update_run(self, key: str, status: str) -> None:
        self.runs[key].info.status = status

    set_terminated = update_run

    def set_tag(self, key: str, name: str, value: str) -> None:
        assert len(value) <= 8000
        self.runs[key].data.tags[name] = value

    def log_batch(self, key: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        (what,) = [name for name, found in (("metrics", metrics), ("params", params), ("tags", tags)) if found]
        self._ask(what, len(metrics) + len(params) + len(tags))
        data = self.runs[key].data
        assert len(metrics) <= 1000 and len(params) <= 100 and len(tags) <= 100
        for name, value in params:
            assert len(value) <= 6000 and data.params.setdefault(name, value) == value, "parameters cannot change"
        data.tags.update(tags)
        data.metrics += metrics

    def log_artifacts(self, key: str, folder: str, place: str) -> None:
        for path in Path(folder).iterdir():
            self.runs[key].data.files[f"{place}/{path.name}"] = path.read_bytes()

    def log_artifact(self, key: str, path: str) -> None:
        self.runs[key].data.files[Path(path).name] = Path(path).read_bytes()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    kept = Server()
    package = types.ModuleType("mlflow")
    package.MlflowClient = lambda: kept  # type: ignore[attr-defined]
    package.exceptions = types.SimpleNamespace(  # type: ignore[attr-defined]
        MlflowException=MlflowException, RestException=RestException
    )
    entity = types.SimpleNamespace(
        Metric=lambda *values: values, Param=lambda *values: values, RunTag=lambda *values: values
    )
    package.entities = entity  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", package)
    return kept


def test_a_run_of_mlflow_has_settings_origins_points_drawings_and_its_end(run: Path, server: Server):
    fields = {**{f"field{i}": i for i in range(250)}, "optimizer.lr": 0.5, "long": "x" * 9000}
    (run / "drawings.json").write_text(json.dumps({"step": 5, "drawings": {"17": {"image/a": jpeg(), "bad": "a"}}}))
    (run / "report.html").write_text("<!doctype html>")
    said = sent(
        mlflow.tracker(print),
        start(run, fields, **{"optimizer.lr": "flag: --lr", "long": "y" * 9000}),
        ["scalars", "train", {"loss": 2.5}, 1],
        ["event", "epoch", {"epoch": 0.5}],
        ["event", "checkpoint", {"name": "ckpt-5", "epoch": True}],
        ["scalars", "evaluate", {"begin": 1.0}, 5],
        ["scalars", "evaluate", {"begin": 1.0, "top1": 0.25}, 5],
        ["page", str(run / "report.html")],
        ["close", 0, "finished"],
    )
    assert said == []
    ((key, kept),) = server.runs.items()
    assert json.loads((run / "trackers" / "mlflow.json").read_text()) == {"run": key}
    assert (kept.info.name, kept.info.status, kept.info.experiment) == ("pets", "FINISHED", "21")
    assert server.experiments["sightline"] == "21"
    assert kept.data.params == {name: str(value)[:5000] for name, value in fields.items()}
    assert kept.data.tags == {
        "mlflow.source.name": f"sightline {__version__}",
        "origin.optimizer.lr": "flag: --lr",
        "origin.long": "y" * 5000,
        "checkpoint": str(run / "checkpoints" / "ckpt-5"),
        "exit": "0: finished",
    }
    time = 1_700_000_000_250
    assert kept.data.metrics == [
        ("train/loss", 2.5, time, 1),
        ("evaluate/begin", 1.0, time, 5),
        ("evaluate/top1", 0.25, time, 5),
        ("epoch", 1.0, time, 5),
    ]
    assert kept.data.files == {
        "worst/step-000005/01 image_a of sample 17.jpg": base64.b64decode(jpeg()),
        "report.html": b"<!doctype html>",
    }
    assert [size for what, size in server.requests if what == "params"] == [100, 100, 52]
    assert [size for what, size in server.requests if what == "metrics"] == [4]  # nothing waited: one request


def test_a_later_start_continues_the_run_and_tells_what_changed(run: Path, server: Server):
    sent(mlflow.tracker(print), start(run, {"epochs": 2, "seed": 0}), ["close", 1, "error"])
    (key,) = server.runs
    assert (server.runs[key].info.status, server.runs[key].data.tags["exit"]) == ("FAILED", "1: error")
    requests = len(server.requests)
    sent(mlflow.tracker(print), start(run, {"epochs": 3, "seed": 0, "new": None}))
    assert list(server.runs) == [key] and server.runs[key].data.params == {"epochs": "2", "seed": "0", "new": "None"}
    assert server.runs[key].data.tags["changed.epochs"] == "3" and "changed.seed" not in server.runs[key].data.tags
    assert [what for what, _ in server.requests[requests:]] == ["get", "get", "params", "tags"]
    assert (server.runs[key].info.status, server.runs[key].data.tags["exit"]) == ("KILLED", "-1: killed")


@pytest.mark.parametrize(("code", "status"), [(0, "FINISHED"), (2, "FAILED"), (128, "FAILED"), (143, "KILLED")])
def test_the_exit_code_decides_the_status(run: Path, server: Server, code: int, status: str):
    sent(mlflow.tracker(print), start(run, {}), ["close", code, "z" * 9000])
    ((_, kept),) = server.runs.items()
    assert kept.info.status == status and kept.data.tags["exit"] == (f"{code}: " + "z" * 9000)[:5000]


def test_a_run_that_somebody_deleted_is_made_again(run: Path, server: Server):
    sent(mlflow.tracker(print), start(run, {}))
    server.runs["id0"].info.lifecycle_stage = "deleted"
    sent(mlflow.tracker(print), start(run, {}))
    server.runs = {"a": server.runs["id0"], "b": server.runs["id0"]}  # forgotten
    sent(mlflow.tracker(print), start(run, {}))
    assert list(server.runs) == ["a", "b", "id2"]
    assert json.loads((run / "trackers" / "mlflow.json").read_text()) == {"run": "id2"}


def test_an_error_at_the_start_ends_it_with_one_report(run: Path, server: Server):
    sent(mlflow.tracker(print), start(run, {}))
    server.refuses = [RestException("not you", "PERMISSION_DENIED")]
    said = sent(mlflow.tracker(print), start(run, {}), ["scalars", "train", {"loss": 1.0}, 1], ["close", 0, "finished"])
    assert said == ["RestException: not you"]
    assert server.runs["id0"].data.metrics == [] and server.runs["id0"].info.status == "KILLED"  # as it was before


def test_an_error_later_costs_what_it_was_about(run: Path, server: Server):
    tracker = mlflow.tracker(print)
    many = [["scalars", "train", {"loss": 1.0}, step] for step in range(1, 2502)]

    class Refusing(Server):
        def set_tag(self, key: str, name: str, value: str) -> None:
            raise RestException(f"no {name}", "PERMISSION_DENIED")

    server.__class__ = Refusing
    said = sent(tracker, start(run, {}), ["event", "checkpoint", {"name": "a"}], *many, ["close", 0, "finished"])
    assert said == ["RestException: no checkpoint"]  # one report, though there is another error
    sizes = [size for what, size in server.requests if what == "metrics"]
    assert sum(sizes) == 2501 and sizes[0] == 501  # sent as they come, more than 500 never wait


@pytest.mark.parametrize(
    ("error", "is_away"),
    [
        (ConnectionError("refused"), True),
        (ValueError("ours"), False),
        (MlflowException("API request to http://x failed with exception"), True),
        (MlflowException("API request to http://x failed with error code 404 != 200", "NOT_FOUND"), False),
        (MlflowException("it failed with error code 429", "REQUEST_LIMIT_EXCEEDED"), True),
        (RestException("later", "TEMPORARILY_UNAVAILABLE"), True),
        (RestException("never", "INVALID_PARAMETER_VALUE"), False),
    ],
)
def test_what_may_work_later(run: Path, server: Server, error: Exception, is_away: bool):
    assert mlflow.tracker(print).is_unreachable(error) is is_away


def test_a_server_that_is_away_is_asked_until_it_answers(run: Path, server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(apart, "FIRST_S", 0.001)
    tracker, said, waits = mlflow.tracker(print), [], []
    server.refuses = [ConnectionError("nobody")] * 9
    server.runs["id0"] = server.create_run.__func__(Server(), "1", "pets", {})  # type: ignore[attr-defined]

    class Patient(apart.Calls):
        """Calls of a training that goes on; notes how long a tracker waits."""

        def ended_within(self, seconds: float) -> bool:
            waits.append(seconds)
            return False

    reader, writer = os.pipe()
    tries = apart.Tries(tracker, Patient(reader), said.append)
    monkeypatch.setattr(apart, "LONGEST_S", 0.1)
    assert tries.has_done(lambda: server._ask("anything"))
    os.close(writer)
    assert said == ["ConnectionError: nobody"] and server.requests == [("anything", 1)]
    assert waits[::2] == [0] * 9
    assert waits[1::2] == pytest.approx([0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.1, 0.1])


def test_after_the_end_of_the_training_a_server_that_is_away_is_given_up(run: Path, server: Server, monkeypatch):
    monkeypatch.setattr(apart, "FIRST_S", 0.001)
    sent(mlflow.tracker(print), start(run, {}))
    server.refuses = [ConnectionError("nobody")] * 9
    said = sent(mlflow.tracker(print), start(run, {}), ["scalars", "train", {"loss": 1.0}, 1])
    assert said == ["ConnectionError: nobody"] and len(server.refuses) == 8
    assert server.runs["id0"].data.metrics == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "21"),
        ({"MLFLOW_EXPERIMENT_NAME": "pets of all"}, "7"),
        ({"MLFLOW_EXPERIMENT_NAME": ""}, "21"),
        ({"MLFLOW_EXPERIMENT_ID": "3", "MLFLOW_EXPERIMENT_NAME": "pets of all"}, "3"),
    ],
)
def test_the_experiment_is_that_of_the_environment(run: Path, server: Server, monkeypatch, environ, expected: str):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    sent(mlflow.tracker(print), start(run, {}))
    assert server.runs["id0"].info.experiment == expected


def test_mlflows_client_does_not_wait_unless_it_was_told_to(run: Path, server: Server, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    mlflow.tracker(print)
    names = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_DISABLE_TELEMETRY")
    assert [os.environ[name] for name in names] == ["0", "77", "true"]


def test_the_oldest_of_too_many_calls_are_left_out():
    reader, writer = os.pipe()
    calls = apart.Calls(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        out.writelines(f"[{number}]\n" for number in range(10_003))
        out.write("[1")  # the training was killed here
    assert calls.ended_within(60) and not calls.is_empty
    assert list(calls) == [[number] for number in range(3, 10_003)]
    assert calls.is_empty
    os.close(reader)


# Weights & Biases


class CommError(Exception):
    pass


class Wandb(types.ModuleType):
    """The package, which notes what it is told; `is_away`: no server answers."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.told: list[Any] = []
        self.is_away = False
        self.errors = types.SimpleNamespace(CommError=CommError)
        self.Settings = dict
        self.config = types.SimpleNamespace(update=lambda *values, **more: self.told.append(("config", *values, more)))
        self.summary: dict[str, str] = {}

    def init(self, **told: Any) -> Any:
        self.told.append(("init", told))
        if self.is_away and told["mode"] != "offline":
            raise CommError("nobody answers")
        return self

    def teardown(self) -> None:
        self.told.append("teardown")

    def define_metric(self, name: str, step_metric: str) -> None:
        self.told.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.told.append(values)

    def Image(self, image: Pillow.Image, caption: str) -> Any:
        return image.size, caption

    def Html(self, path: str, inject: bool) -> Any:
        return path, inject

    def finish(self, exit_code: int) -> None:
        self.told.append(exit_code)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    made = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_a_run_of_wandb_has_settings_points_drawings_and_its_end(run: Path, package: Wandb):
    drawn = {"3": {"image": jpeg((12, 9))}, "8": {"image": jpeg((5, 6)), "truth": jpeg((7, 8))}}
    (run / "drawings.json").write_text(json.dumps({"step": 4, "drawings": drawn}))
    sent(
        wandb.tracker(print),
        start(run, {"lr": 0.5}, lr="flag: --lr"),
        ["scalars", "evaluate", {"top1": 0.5}, 4],
        ["event", "checkpoint", {"name": "ckpt-4", "epoch": 2}],
        ["scalars", "evaluate", {"top1": 0.75}, 6],
        ["page", "report.html"],
        ["close", 3, "stopped"],
    )
    (_, first), *told = package.told
    key = json.loads((run / "trackers" / "wandb.json").read_text())["run"]
    settings = {"console": "off", "silent": True, "disable_git": True, "x_disable_meta": True}
    times = {"init_timeout": wandb.ANSWERS_S, "finish_timeout": wandb.LEAVES_S}
    assert first == {
        "project": "sightline", "name": "pets", "id": key, "resume": "allow", "dir": str(run), "mode": None,
        "settings": settings | times,
    }  # fmt: skip
    assert told == [
        ("config", {"lr": 0.5, "origins": {"lr": "flag: --lr"}}, {"allow_val_change": True}),
        ("*", "step"),
        {"evaluate/top1": 0.5, "step": 4},
        {
            "worst": [
                ((12, 9), "01 image of sample 3"),
                ((5, 6), "02 image of sample 8"),
                ((7, 8), "02 truth of sample 8"),
            ],
            "step": 4,
        },
        {"evaluate/top1": 0.75, "epoch": 2.0, "step": 6},  # the drawings are those of before
        {"report": ("report.html", False)},
        3,
    ]  # fmt: skip
    assert package.summary == {"checkpoint": str(run / "checkpoints" / "ckpt-4"), "exit": "3: stopped"}
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


def test_wandb_is_told_what_its_environment_names_and_the_same_run_again(run: Path, package: Wandb, monkeypatch):
    sent(wandb.tracker(print), start(run, {}))
    for name, value in {"PROJECT": "zoo", "NAME": "mine", "DIR": "/elsewhere", "MODE": "shared"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    sent(wandb.tracker(print), start(run, {}))
    first, second = (told[1] for told in package.told if isinstance(told, tuple) and told[0] == "init")
    assert second["id"] == first["id"]
    assert [second[name] for name in ("project", "name", "dir", "mode")] == ["zoo", "mine", "/elsewhere", "shared"]
    assert package.told[-1] == -1 and package.summary["exit"] == "-1: killed"


def test_wandb_keeps_files_where_no_server_answers(run: Path, package: Wandb):
    package.is_away = True
    said: list[str] = []
    assert sent(wandb.tracker(said.append), start(run, {}), ["close", 0, "finished"]) == []
    assert said == ["nobody answers; its files are kept, send them with `wandb sync`"]
    (_, first), teardown, (_, second), *_ = package.told
    assert (first["mode"], teardown, second["mode"], second["id"]) == (None, "teardown", "offline", first["id"])


# What they share


class Noted(Tracker):
    """A tracker that keeps what it is told."""

    name = "noted"

    def __init__(self, folder: Path):
        super().__init__()
        self.told: list[Any] = []
        self.run = RunStart(folder, {}, (), 0, 0)

    def open(self, run: RunStart) -> None: ...
    def points(self, values: Any, step: int) -> None: ...
    def note(self, name: str, text: str) -> None: ...
    def page(self, path: str) -> None: ...
    def finish(self) -> None: ...
    def images(self, images: list[Any], step: int) -> None:
        self.told.append((step, [each.name for each in images]))


def test_drawings_are_shown_once_and_again_when_they_are_new(tmp_path: Path):
    tracker = Noted(tmp_path)
    for step in (-1, 3, 3, 8):
        (tmp_path / "drawings.json").write_text(json.dumps({"step": step, "drawings": {"1": {"image": jpeg()}}}))
        tracker.scalars("evaluate", {"top1": 1.0}, step)
        tracker.scalars("train", {"loss": 1.0}, step)
    (tmp_path / "drawings.json").write_text("[]")
    tracker.close(0, "finished")
    assert tracker.told == [(3, ["01 image of sample 1"]), (8, ["01 image of sample 1"])]


def test_only_names_that_a_tracker_can_have_given_are_taken_back(tmp_path: Path):
    tracker = Noted(tmp_path)
    assert tracker.kept_id() == ""
    for name, expected in (("a.b-c_9", True), ("x" * 128, True), ("x" * 129, False), ("a/b", False), (7, False)):
        (tmp_path / "trackers").mkdir(exist_ok=True)
        (tmp_path / "trackers" / "noted.json").write_text(json.dumps({"run": name}))
        assert tracker.kept_id() == (name if expected else "")


def test_names_and_scores_of_classes_are_as_every_tracker_takes_them(tmp_path: Path):
    names = {"a/b:c": "a_b_c", " .x. ": "x", "": "_", "y" * 101: "y" * 100, 5: "5", "é-1": "é-1"}
    assert {value: as_name(value) for value in names} == names
    rows = [{"class": f"c{i}", "top1": i / 2, "recall/50": None, "map": float("nan")} for i in range(101)]
    (tmp_path / "scores.json").write_text(json.dumps({"tables": {"classes": rows}}))
    assert scores_of_classes(tmp_path) == {f"classes/c{i}/top1": i / 2 for i in range(100)}


# Trackio


class Trackio(types.ModuleType):
    """The package, which notes what it is told."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.told: list[Any] = []

    def init(self, **told: Any) -> Any:
        self.told.append(told)
        warnings.warn("trackio cannot reach its server", UserWarning, stacklevel=2)
        warnings.warn("another of Trackio", UserWarning, stacklevel=2)
        warnings.warn("of a package below", UserWarning, stacklevel=2)
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.told.append((values, step))

    def finish(self) -> None:
        self.told.append("finish")

    def Markdown(self, text: str) -> Any:
        return "markdown", text

    def Image(self, image: Pillow.Image, caption: str) -> Any:
        return image.size, caption

    def Html(self, path: str, inject: bool) -> Any:
        return path, inject


@pytest.fixture
def local(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trackio]:
    made = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", made)
    for name in [name for name in os.environ if name.startswith(("TRACKIO", "HF_HUB"))]:
        monkeypatch.delenv(name)
    with warnings.catch_warnings():
        yield made


def test_a_run_of_trackio_has_settings_points_drawings_and_its_end(run: Path, local: Trackio):
    (run / "drawings.json").write_text(json.dumps({"step": 4, "drawings": {"3": {"image": jpeg((12, 9))}}}))
    said: list[str] = []
    sent(
        trackio.tracker(said.append),
        start(run, {"lr": 0.5}, lr="flag: --lr"),
        ["scalars", "evaluate", {"top1": 0.5}, 4],
        ["event", "checkpoint", {"name": "ckpt-4", "epoch": 2}],
        ["page", "report.html"],
        ["close", 3, "stopped"],
    )
    assert said == ["trackio cannot reach its server"]
    name = json.loads((run / "trackers" / "trackio.json").read_text())["run"]
    assert re.fullmatch("pets-[0-9a-f]{6}", name)
    first, *told = local.told
    config = {"lr": 0.5, "origin.lr": "flag: --lr"}
    assert first == {"project": "sightline", "name": name, "resume": "allow", "config": config, "embed": False}
    assert told == [
        ({"evaluate/top1": 0.5}, 4),
        ({"worst/01": ((12, 9), "01 image of sample 3")}, 4),
        ({"checkpoint": ("markdown", f"`{run / 'checkpoints' / 'ckpt-4'}`")}, 4),
        ({"report": ("report.html", False)}, 4),
        ({"exit": ("markdown", "3: stopped")}, 4),
        "finish",
    ]
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_trackio_goes_on_with_the_same_run_of_the_project_that_its_environment_names(
    run: Path, local: Trackio, monkeypatch
):
    sent(trackio.tracker(print), start(run, {}))
    monkeypatch.setenv("TRACKIO_PROJECT", "zoo")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
    sent(trackio.tracker(print), start(run, {}))
    first, second = (told for told in local.told if isinstance(told, dict))
    assert (first["project"], second["project"], first["name"]) == ("sightline", "zoo", second["name"])
    assert local.told[-2] == ({"exit": ("markdown", "-1: killed")}, 0) and os.environ["HF_HUB_DISABLE_TELEMETRY"] == "0"


@pytest.mark.parametrize("fails", ["", "at the start", "later"])
def test_the_process_of_a_tracker_says_problems_and_its_end_and_nothing_else(
    run: Path, monkeypatch: pytest.MonkeyPatch, fails: str
):
    """In this process, with pipes in the place of its standard input and output."""
    done: list[Any] = []
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "x" * 34)
    before = set(threading.enumerate())
    told, tell = os.pipe()
    hear, heard = os.pipe()

    class Printing(Noted):
        def points(self, values: Any, step: int) -> None:
            os.write(1, b"a line of the package\n")
            if fails:
                raise ValueError(f"token {'x' * 34} " + "no\n  room " * 100)

    def tracker(say: Any) -> Tracker:
        if fails == "at the start":
            raise ImportError("not   here")
        return Printing(run)

    module = types.SimpleNamespace(tracker=tracker)
    monkeypatch.setattr(apart.importlib, "import_module", {"sightline.runs.trackers.mine": module}.__getitem__)
    monkeypatch.setattr(apart.signal, "signal", lambda *given: done.append(given))
    monkeypatch.setattr(apart.os, "_exit", done.append)
    monkeypatch.setattr(apart.sys, "stdin", types.SimpleNamespace(fileno=lambda: told))
    kept, dup = os.dup(1), os.dup
    monkeypatch.setattr(apart.os, "dup", lambda descriptor: dup(heard))
    with os.fdopen(tell, "w") as out:
        calls = [start(run, {}), ["scalars", "train", {"loss": 1.0}, 1], ["close", 0, "finished"]]
        out.writelines(json.dumps([NOW, *call]) + "\n" for call in calls)
    try:
        apart.main("mine")
    finally:
        os.dup2(kept, 1)
        for thread in set(threading.enumerate()) - before:  # that reads to the end
            thread.join()
        for descriptor in (kept, told, heard):
            os.close(descriptor)
    signals = [(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert done == [*signals, 0]
    gc.collect()  # closes what it wrote to
    with os.fdopen(hear) as lines:
        *problems, end = lines.read().splitlines()
    assert end == "done" and len(problems) == bool(fails)
    if fails == "at the start":
        assert json.loads(problems[0]) == "ImportError: not here"
    elif fails:
        said = json.loads(problems[0])
        assert said.startswith("ValueError: token ") and "x" * 34 not in said and " no room no room" in said
        assert len(said) <= 300
