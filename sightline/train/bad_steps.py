"""Answer a step whose loss or gradient is not finite: `--run.on-nan` stop, skip or rewind."""

from __future__ import annotations

from sightline.data.loading.order import TrainOrder
from sightline.errors import BadCheckpoint, NotFinite, first_of
from sightline.parts import Dataset
from sightline.train.saver import Saver
from sightline.train.session import Session
from sightline.train.state import TrainState


class BadSteps:
    """The rule of one run; the step itself has changed nothing but its count."""

    def __init__(self, session: Session, state: TrainState, saver: Saver, order: TrainOrder, dataset: Dataset):
        self.run = session.run
        self.state = state
        self.saver = saver
        self.order = order
        self.dataset = dataset
        self.log = session.log

    def rewound(self, bad_step: int) -> bool:
        """Log the step, then raise NotFinite, skip it, or rewind; return True if the state went back."""
        run, progress = self.run, self.state.progress
        _, indices = self.order.batch(bad_step)
        names = first_of([self.dataset.name(index) for index in indices.tolist()])
        progress.bad_steps += 1
        self.log.event("bad_step", step=bad_step, samples=[int(i) for i in indices])
        happened = f"loss or gradient not finite in step {bad_step} (samples {names})"
        if run.on_nan == "stop" or progress.bad_steps > run.max_bad_steps:
            raise NotFinite(
                f"{happened}; {progress.bad_steps} such step{'s' * (progress.bad_steps > 1)} so far. Checkpoints from "
                f"before are intact: resume with --run.on-nan skip, or with --run.override and a lower --optimizer.lr "
                f"or --train.clip 1; `sightline check` looks for NaN in the data"
            )
        if run.on_nan == "skip":
            self.log.warn(f"{happened}: skipped")
            return False
        bad_steps, avoid, base_lr = progress.bad_steps, sorted({*progress.avoid, bad_step}), progress.base_lr
        if not self.saver.rewind():
            raise BadCheckpoint(f"{happened} and there is no checkpoint to rewind to")
        progress.avoid, progress.bad_steps, progress.base_lr = avoid, bad_steps, base_lr
        self.log.warn(f"{happened}: back to step {progress.step}, leaving it out")
        return True
