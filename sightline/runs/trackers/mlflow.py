"""MLflow: a run on the server of MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sightline import __version__
from sightline.runs.loggers import RunStart
from sightline.runs.trackers.tracker import PROJECT, Image, Tracker, settings_of

BATCH = 100  # parameters, and tags, that one request may hold; of points it is 1000
LONGEST = 5000  # letters of a value; newer servers take 6000 and 8000


def tracker(say: Callable[[str], None]) -> MLflow:
    """Return the tracker. Its client waits for minutes by default; ours tries again by itself."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        os.environ.setdefault(name, value)
    return MLflow()


class MLflow(Tracker):
    """One MLflow run for a run folder, through all of its starts."""

    name = "mlflow"

    def __init__(self) -> None:
        super().__init__()
        import mlflow

        self._mlflow: Any = mlflow
        self._client: Any = mlflow.MlflowClient()
        self._id = ""
        self._points: list[Any] = []

    @property
    def waiting(self) -> int:
        """How many points were collected."""
        return len(self._points)

    def is_unreachable(self, error: Exception) -> bool:
        """Whether there was no answer, or one of a server that is not well."""
        if not isinstance(error, self._mlflow.exceptions.MlflowException):
            return isinstance(error, OSError)  # as errors of requests are, e.g. of an artifact
        of_server = isinstance(error, self._mlflow.exceptions.RestException) or " failed with error code " in str(error)
        return not of_server or error.error_code in ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")

    def open(self, run: RunStart) -> None:
        """Continue the run that is kept, unless somebody deleted it, or create one."""
        fields, origins = settings_of(run)
        values = {name: str(value)[:LONGEST] for name, value in fields.items()}
        self._id = self.kept_id() if self._is_there(self.kept_id()) else self._created(run)
        self._client.update_run(self._id, status="RUNNING")
        known = self._client.get_run(self._id).data.params
        self._log_batch("params", {name: value for name, value in values.items() if name not in known})
        tags = {f"origin.{name}": said[:LONGEST] for name, said in origins.items()}
        # Parameters of MLflow cannot change; those of a later start may.
        changed = {name: value for name, value in values.items() if known.get(name, value) != value}
        self._log_batch("tags", tags | {f"changed.{name}": value for name, value in changed.items()})

    def points(self, values: Mapping[str, float], step: int) -> None:
        """Collect points; one request takes a thousand."""
        metric, time = self._mlflow.entities.Metric, int(self.now * 1000)
        self._points += [metric(name, value, time, step) for name, value in values.items()]

    def flush(self) -> None:
        """Send the points."""
        while self._points:
            self._client.log_batch(self._id, metrics=self._points[:1000])
            del self._points[:1000]

    def note(self, name: str, text: str) -> None:
        """Set a tag."""
        self._client.set_tag(self._id, name, text)

    def images(self, images: list[Image], step: int) -> None:
        """Upload the drawings as artifacts."""
        with tempfile.TemporaryDirectory() as folder:
            for image in images:
                (Path(folder) / f"{image.name}.jpg").write_bytes(image.data)
            self._client.log_artifacts(self._id, folder, f"worst/step-{step:06d}")

    def page(self, path: str) -> None:
        """Upload the page, which MLflow shows among the artifacts."""
        self._client.log_artifact(self._id, path)

    def finish(self) -> None:
        """Set how the run ended; a training that was killed has said nothing."""
        code, reason = self.ended or (-1, "killed")
        self._client.set_tag(self._id, "exit", f"{code}: {reason}"[:LONGEST])
        status = "FINISHED" if code == 0 else "KILLED" if self.ended is None or code > 128 else "FAILED"
        self._client.set_terminated(self._id, status)

    def _is_there(self, kept: str) -> bool:
        if not kept:
            return False
        try:
            return bool(self._client.get_run(kept).info.lifecycle_stage == "active")
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _created(self, run: RunStart) -> str:
        tags = {"mlflow.source.name": f"sightline {__version__}"}
        made = self._client.create_run(self._experiment(), run_name=run.folder.name, tags=tags)
        self.keep_id(made.info.run_id)
        return str(made.info.run_id)

    def _experiment(self) -> str:
        if named := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return named
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _log_batch(self, kind: str, values: Mapping[str, str]) -> None:
        entity = {"params": self._mlflow.entities.Param, "tags": self._mlflow.entities.RunTag}[kind]
        made = [entity(name, value) for name, value in values.items()]
        for start in range(0, len(made), BATCH):
            self._client.log_batch(self._id, **{kind: made[start : start + BATCH]})
